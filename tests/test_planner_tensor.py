"""A layer cut over ranks: operations and volumes against published figures, times by hand."""

import dataclasses

import pytest

from dlojz_tp.planner import CARDS, GPT, H100, Cluster, Layout, layer_time

MODEL = GPT(8192, 1, 64, 2048)
CLUSTER = Cluster(H100, latency=0, products=0.4, links=1, traffic=0)
SUM = 2 * 2048 * 8192  # bytes of an all-reduce


def layer(t, overlap="none", cluster=CLUSTER):
    return layer_time(MODEL, Layout(t, tensor_overlap=overlap), cluster)


def test_operations_of_gpt3():
    """Narayanan et al. 2021, §5.1: 300 billion tokens on 1,024 A100 at 140 TFLOP/s, with recomputation: 34 days."""
    model = GPT(12288, 96, 96)
    days = 300e9 / 2048 * model.flops(1, forwards=2) / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, abs=1)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_volume_inside_a_node(t):
    """Narayanan et al. 2021, §3.2: 8 b·s·d (t−1)/t elements a layer and rank."""
    slow = dataclasses.replace(CLUSTER, card=dataclasses.replace(H100, link=1e9, network=1e8))
    assert layer(t, cluster=slow).tensor == pytest.approx(2 * 8 * 2048 * 8192 * (t - 1) / t / 1e9)


def test_beyond_the_node():
    by_hand = 2 * 7 / 8 * SUM / 450e9 + 2 * (1 / 2) * SUM / 8 / 50e9
    assert layer(16).tensor == pytest.approx(4 * by_hand)
    spread = layer(8, cluster=dataclasses.replace(CLUSTER, node=1))
    assert spread.tensor == pytest.approx(9 * layer(8).tensor)  # a link nine times slower


def test_the_share_grows_with_the_ranks():
    shares = [layer(2**k).waiting for k in range(7)]
    assert shares[0] == 0 and shares == sorted(shares) and shares[-1] < 1


def test_backward_all_reduces_hide_behind_weight_gradients():
    """Megatron-LM: at t = 8 in a node both are longer than the all-reduce beside them; at 64 neither is."""
    assert layer(8, "weight gradients").tensor == pytest.approx(layer(8).tensor / 2)
    products = 2 * 2048 * 8192 * (3 * 8192 + 4 * 8192) / 64 / CLUSTER.speed()  # of query, key, value; of the first ffn
    assert layer(64, "weight gradients").tensor == pytest.approx(layer(64).tensor - products)


def test_gathers_and_scatters_hide_behind_products():
    """Each of the 8 halves beside its product, in t pieces of which t − 1 travel while others are computed."""
    half = layer(8).tensor / 8
    products = [2 * 2048 * 8192 * n * 8192 / 8 / CLUSTER.speed() for n in (3, 1, 4, 4)]
    by_hand = sum(2 * 7 * min(half / 7, product / 8) for product in products)
    assert layer(8, "products").tensor == pytest.approx(layer(8).tensor - by_hand)
    assert layer(1, "products").total == layer(1).total
    endless = dataclasses.replace(CLUSTER, products=1e-6)  # computing takes for ever: all is hidden
    assert layer(64, "products", endless).tensor == pytest.approx(0, abs=1e-12)


def test_experts_send_tokens_once_to_each_rank_and_once_to_each_node():
    model = GPT(1024, 2, 8, 4096, gated=True, ffn=2048, experts=64, top_k=8, expert_ffn=512)
    near, far = Layout(data=8, expert=8), Layout(data=64, expert=64)
    one = 4096 * 1024 * 2  # bytes of all tokens
    ranks, nodes = (lambda n: n * (1 - (1 - 1 / n) ** 8)), 8 * (1 - (7 / 8) ** 8)
    inside = 7 / 8 * one * ranks(8) / 450e9
    assert layer_time(model, near, CLUSTER).expert == pytest.approx(2 * 2 * inside)
    assert layer_time(model, far, CLUSTER).expert == pytest.approx(2 * 2 * 56 / 64 * one * nodes / 50e9)
    assert layer_time(model, dataclasses.replace(near, expert=1), CLUSTER).expert == 0
    hidden = dataclasses.replace(near, experts_overlap=True)
    assert layer_time(model, hidden, CLUSTER).expert < layer_time(model, near, CLUSTER).expert


def test_a_context_sends_keys_and_values():
    """Forward once, backward with gradients; scores hide them once they take longer."""
    model = GPT(4096, 2, 32, 65536, gated=True, kv_heads=8)
    layout = Layout(context=8, overlap=False)
    kv = 7 / 8 * 2 * 65536 * 8 * 2 * 128 / 450e9
    assert layer_time(model, layout, CLUSTER).context == pytest.approx(3 * kv)
    assert layer_time(model, dataclasses.replace(layout, overlap=True), CLUSTER).context == 0
    alone = layer_time(model, Layout(), CLUSTER)
    assert layer_time(model, layout, CLUSTER).compute == pytest.approx(alone.compute / 8)


def test_causal_scores_cost_half_and_grow_with_the_square():
    plain, fused = (layer_time(dataclasses.replace(MODEL, fused_attention=f), Layout(), CLUSTER) for f in (False, True))
    scores = 4 * 2048**2 * 8192
    linear = 24 * 2048 * 8192**2
    assert plain.compute == pytest.approx(3 * (linear + scores) / CLUSTER.speed())
    by_kernel = 3.5 * scores / 2 / CLUSTER.scores()
    assert fused.compute == pytest.approx(3 * linear / CLUSTER.speed() + by_kernel)


def test_float8_and_float4_compute_faster_where_there_are_such_tensor_cores():
    blackwell = dataclasses.replace(CLUSTER, card=CARDS["B200"])
    times = [layer_time(MODEL, Layout(precision=p), blackwell).compute for p in ("bfloat16", "float8", "float4")]
    assert times == sorted(times, reverse=True)
    with pytest.raises(ValueError, match="H100 has no Tensor Cores for float4"):
        layer_time(MODEL, Layout(precision="float4"), CLUSTER)
