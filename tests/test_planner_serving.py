"""Serving: what cards hold and answer, by hand."""

import pytest

from dlojz_tp.planner import CARDS, H100, MODELS, Cluster, serving

CLUSTER = Cluster(H100, latency=0)


def test_one_card_by_hand():
    model = MODELS["llama3-8b"]
    got = serving(model, CLUSTER)
    row = 32 * 8192 * 2 * 8 * 128 * 2
    assert (got.weights, got.row) == (2 * model.n_parameters, row)
    assert got.rows == int((0.9 * H100.memory - got.weights) // row)
    assert got.decode[1] == pytest.approx(0.85 * H100.bandwidth / (got.weights + row))  # bound by memory
    flops = 2 * model.active_parameters + 32 * model.scores(causal=True)
    assert got.prefill == pytest.approx(CLUSTER.speed() / flops)  # bound by products
    assert list(got.decode) == [1, 16, got.rows] and 5 * got.decode[1] < got.decode[16] < 16 * got.decode[1]


def test_tensor_ranks_share_weights_and_caches_as_far_as_there_are_heads():
    model = MODELS["llama3-70b"]
    two, eight = serving(model, CLUSTER, 2), serving(model, CLUSTER, 8)
    assert (two.weights, two.row) == (4 * eight.weights, 4 * eight.row)
    assert 2 * two.decode[1] < eight.decode[1] < 4 * two.decode[1]  # sums cost


def test_a_row_of_a_mixture_reads_its_own_experts_only():
    mixture = serving(MODELS["mixtral-8x7b"], CLUSTER, 2)
    read = 2 * MODELS["mixtral-8x7b"].active_parameters / 2 + mixture.row
    assert mixture.decode[1] == pytest.approx(0.85 * H100.bandwidth / read, rel=0.1)


def test_a_latent_attention_caches_little():
    deepseek = serving(MODELS["deepseek-v3"], Cluster(CARDS["H200"]), 8, number_bytes=1)
    assert deepseek.row == 61 * 4096 * 576


@pytest.mark.parametrize(
    "cards, words", [(1, "do not fit on 1 H100"), (3, "3 cards must divide 64"), (16, "a node has 8")]
)
def test_what_does_not_fit(cards, words):
    with pytest.raises(ValueError, match=words):
        serving(MODELS["llama3-70b"], CLUSTER, cards)
