"""Memory of a rank, time of a step and the search over layouts: against published runs, simulations and themselves."""

import dataclasses
import math
import re
import time

import pytest

from dlojz_tp import planner
from dlojz_tp.planner import GPT, Cluster, Layout, rank_memory, search, step_time
from dlojz_tp.planner.layout_search import KEPT_FREE, LARGEST_MICRO_BATCH, WORTH
from dlojz_tp.planner.steps import JITTER, LAUNCHES

GPT3 = GPT(12288, 96, 96)
TINY = GPT(512, 8, 8, sequence=128, vocabulary=64)

IDEAL = Cluster(planner.H100, links=1)
TINY_HEAD = 6 * 128 * 512 * 64 / IDEAL.speed()  # seconds of its head for a sequence


def test_parameters_of_gpt2():
    assert GPT(768, 12, 12, sequence=1024, vocabulary=50257).n_parameters == 124_439_808  # as its checkpoint has


# memory


@pytest.mark.parametrize("t, p, d", [(1, 1, 4), (4, 1, 2), (2, 4, 2), (8, 2, 1), (1, 8, 16)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_of_all_ranks_add_up(t, p, d, zero):
    """What only one rank needs is there once; what each needs, a known number of times."""
    layout = Layout(t, p, d, 1, 8, zero=zero)
    held = [rank_memory(TINY, layout, stage) for stage in range(p) for _ in range(t * d)]
    norms = TINY.layers * 6 * TINY.width + (TINY.sequence + 2) * TINY.width  # with biases and positions: on each rank
    head = TINY.vocabulary * TINY.width * (p > 1)  # the last stage's copy of the embedding
    n = TINY.n_parameters + (t - 1) * norms + head
    copies = [d if zero < first else 1 for first in (3, 2, 1)]
    wanted = [n * size * copy for size, copy in zip((2, 4, 12), copies)]
    got = [sum(getattr(one, name) for one in held) for name in ("parameters", "gradients", "optimizer")]
    assert got == pytest.approx(wanted)


@pytest.mark.parametrize(
    "schedule, v", [("GPipe", 1), ("1F1B", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3)]
)
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 4), (3, 12)])
def test_in_flight_and_bubble_are_those_of_the_simulation(schedule, v, p, m):
    orders = {
        "GPipe": planner.gpipe, "1F1B": planner.one_f_one_b, "zero-bubble": planner.zero_bubble_h1,
        "interleaved": lambda p, m: planner.interleaved_1f1b(p, m, v),
    }[schedule](p, m)  # fmt: skip
    layers = p * v
    model = GPT(512, layers, 8, sequence=8, vocabulary=1)
    layout = Layout(1, p, 1, 1, m, schedule, v)
    fast = dataclasses.replace(planner.H100, link=1e30, network=1e30)
    got = step_time(model, layout, Cluster(fast, latency=0, traffic=0))
    layer = got.compute / m / layers * p
    found = planner.simulate(orders, {"F": layer / 3, "B": layer * 2 / 3, "I": layer / 3, "W": layer / 3})
    assert [layout.in_flight(stage) for stage in range(p)] == found.in_flight
    assert got.compute + got.bubble == pytest.approx(found.seconds, rel=0.02)


def test_memory_by_hand():
    """GPT-3 on 8 x 8 x 2 ranks: states of an eighth of an eighth, eight micro-batches of twelve layers in flight."""
    layout = Layout(8, 8, 2, 1, 64, zero=1, sequence_parallel=True)
    held = rank_memory(GPT3, layout)
    n, layer, root = planner.stage_parameters(GPT3, layout, 0)
    assert n == 12 * layer + root and 12 * layer == pytest.approx(12 * 12 * 12288**2 / 8, rel=0.001)
    assert (held.parameters, held.gradients, held.optimizer) == (2 * n, 4 * n, 6 * n)
    unit = 2048 * 12288 / 8
    assert held.activations == pytest.approx(8 * 12 * 34 * unit + 8 * unit)
    full = rank_memory(GPT3, dataclasses.replace(layout, recomputation="full"))
    assert full.activations == pytest.approx(8 * 12 * 2 * unit + 34 * unit + 8 * unit)


def test_the_last_stage_holds_the_logits():
    layout = Layout(2, 4, 1, 1, 8)
    first, last = rank_memory(GPT3, layout, 0), rank_memory(GPT3, layout, 3)
    logits = 4 * 2048 * (12288 + 51200 / 2)
    a_micro_batch = 24 * planner.layer_bytes(GPT3, layout)
    assert last.activations == pytest.approx(a_micro_batch + logits)
    assert first.activations == pytest.approx(4 * a_micro_batch + 4 * 2048 * 12288)


def test_fsdp_holds_what_it_gathers():
    _, layer, root = planner.stage_parameters(TINY, Layout(1, 1, 4), 0)

    def gathered(**options):
        return rank_memory(TINY, Layout(1, 1, 4, zero=3, **options)).gathered

    assert gathered() == 4 * layer + 2 * (2 * layer + root)
    assert gathered(prefetch=False, root_stays=False, float32_gradients=False) == 2 * layer + 2 * max(layer, root)
    assert rank_memory(TINY, Layout(zero=3)).gathered == 0  # nobody to gather from


# time


def test_each_option_costs_what_it_should():
    cluster = Cluster(planner.H100)
    layout = Layout(8, 8, 16, 1, 64, "interleaved", 2, 1)

    def seconds(**change):
        return step_time(GPT3, dataclasses.replace(layout, **change), cluster)

    usual = seconds()
    for change in ({"overlap": False}, {"hierarchical": False}, {"recomputation": "full"}, {"zero": 2}):
        assert seconds(**change).total >= usual.total
    assert seconds(float32_gradients=False).data < usual.data or usual.data < 0.01 * usual.total
    three = {"zero": 3, "pipeline": 1, "schedule": "1F1B", "chunks": 1, "data": 128, "micro_batches": 8}
    assert seconds(**three, prefetch=False).data > seconds(**three).data
    assert seconds(**three, overlap=False).data > seconds(**three).data
    assert seconds(**three, overlap=False, root_stays=False).data > seconds(**three, overlap=False).data
    small = step_time(GPT3, Layout(8, 8, 16, 1, 64, "interleaved", 2, 1, overlap=False), cluster)
    large = step_time(GPT3, Layout(16, 8, 8, 1, 128, "interleaved", 2, 1, overlap=False), cluster)
    assert large.tensor > 2 * small.tensor  # the sum leaves the node


def test_data_parallel_communication_by_hand():
    """Sixteen ranks in two nodes, nothing hidden: what a ring sends inside, then an eighth of it between."""
    cluster = Cluster(planner.H100, latency=0, links=1)
    n, _, root = planner.stage_parameters(TINY, Layout(), 0)

    def ring(size):
        return 7 / 8 * size / 450e9 + 1 / 2 * size / 8 / 50e9

    def data(**options):
        return step_time(TINY, Layout(1, 1, 16, 1, 3, overlap=False, **options), cluster).data

    assert data(zero=0) == pytest.approx(2 * ring(4 * n))
    assert data(zero=1) == pytest.approx(ring(4 * n) + ring(2 * n))
    assert data(zero=1, float32_gradients=False) == pytest.approx(2 * ring(2 * n))
    assert data(zero=2) == pytest.approx(3 * ring(4 * n) + ring(2 * n))
    assert data(zero=3) == pytest.approx(3 * (ring(4 * n) + ring(2 * n) + ring(2 * (n - root))))
    assert data(zero=3, root_stays=False) == pytest.approx(3 * (ring(4 * n) + 2 * ring(2 * n)))
    assert data(zero=0, hierarchical=False) == pytest.approx(2 * 15 / 16 * 4 * n / 50e9)
    assert step_time(TINY, Layout(1, 2, 1, 1, 4), cluster).data == 0


def test_tensor_communication_by_hand():
    """Four sums a layer and micro-batch, two in forward; a forward that is done again sums again."""
    cluster = Cluster(planner.H100, latency=0, links=1)
    one = 2 * 3 / 4 * 2 * 128 * 512 / 450e9  # an all-reduce of a sequence's activations over 4 ranks
    plain = Layout(4, 1, 1, 1, 3, overlap=False)
    assert step_time(TINY, plain, cluster).tensor == pytest.approx(3 * 8 * 4 * one)
    again = dataclasses.replace(plain, recomputation="full")
    assert step_time(TINY, again, cluster).tensor == pytest.approx(3 * 8 * 6 * one)


def test_messages_of_a_pipeline_by_hand():
    """Two a chunk and micro-batch, and the way there and back; what is shorter than a chunk's forward is hidden, except
    for what a message costs to start."""
    layout = Layout(1, 4, 4, 1, 8, "interleaved", 2, overlap=False)
    message, starts = 5e-6 + 2 * 128 * 512 / 50e9, 2 * 8 * 2 * LAUNCHES
    assert step_time(TINY, layout, IDEAL).pipeline == pytest.approx((2 * 8 * 2 + 2 * 3) * message + starts)
    hiding = dataclasses.replace(layout, overlap=True)
    slow = dataclasses.replace(IDEAL, products=1e-3)
    assert step_time(TINY, hiding, slow).pipeline == pytest.approx(2 * 3 * message + starts)
    parts = step_time(TINY, hiding, IDEAL)
    layer = planner.layer_time(TINY, hiding, IDEAL)
    forward = (2 * layer.total + TINY_HEAD) / 3  # of the last stage, the slowest
    assert message > forward / 2
    assert parts.pipeline == pytest.approx(2 * 8 * 2 * (message - forward / 2) + 2 * 3 * message + starts)


def test_stages_differ_by_a_layer_at_the_ends():
    """BLOOM's and Llama 3's stages, and what the fullest stage costs."""
    assert planner.stage_layers(70, 12) == (5, *[6] * 10, 5)
    assert planner.stage_layers(126, 16) == (7, *[8] * 14, 7)
    assert planner.stage_layers(126, 16, 4) == planner.stage_layers(126, 16)
    assert [sum(planner.stage_layers(61, p, v)) for p, v in ((16, 1), (2, 8), (4, 4))] == [61] * 3
    even, uneven = (
        step_time(dataclasses.replace(TINY, layers=n, vocabulary=1), Layout(1, 4, 1, 1, 64), IDEAL).compute
        for n in (8, 7)
    )
    assert uneven == pytest.approx(even, rel=0.01)
    with pytest.raises(ValueError, match="12 x 1 stages are too many for 8 layers"):
        planner.stage_layers(8, 12)


def test_more_nodes_wait_for_the_slowest():
    """Each doubling costs a share of the step; a node alone waits for nobody."""
    for zero in (1, 3):
        times = [step_time(TINY, Layout(data=n, zero=zero), IDEAL) for n in (8, 16, 512)]
        shares = [one.jitter / (one.total - one.jitter) for one in times]
        assert shares == pytest.approx([0, JITTER[zero], 6 * JITTER[zero]])


def test_hsdp_gathers_in_a_node_and_sums_between_nodes():
    n, _, root = planner.stage_parameters(TINY, Layout(), 0)
    still = dataclasses.replace(IDEAL, latency=0)
    layout = Layout(data=32, zero=3, shard=8, overlap=False, float32_gradients=False)
    inside = 7 / 8 * 2 / 450e9
    got = step_time(TINY, layout, still).data
    assert got == pytest.approx(inside * (3 * n - root) + 2 * 3 / 4 * 2 * n / 8 / 50e9)
    held, whole = (rank_memory(TINY, dataclasses.replace(layout, shard=s)).optimizer for s in (8, 0))
    assert held == 4 * whole


def test_what_is_recomputed_is_kept_no_more_and_computed_twice():
    model = planner.MODELS["llama3-8b"]
    layouts = {
        kind: Layout(recomputation=kind) for kind in ("none", "norm", "norm+activation", "ffn", "products", "full")
    }
    kept = {kind: planner.layer_bytes(model, layout) / 8192 for kind, layout in layouts.items()}
    h, f = 4096, 14336
    whole = 8 * h + 2 * (2 * h + 2 * 1024) + 6 * f
    assert kept["none"] == whole and kept["full"] == 2 * h
    assert kept["norm"] == whole - 4 * h and kept["norm+activation"] == whole - 4 * h - 2 * f
    assert kept["ffn"] == whole - 6 * f
    moved = {kind: planner.layer_time(model, layout, IDEAL).elementwise for kind, layout in layouts.items()}
    assert moved["none"] < moved["norm"] < moved["norm+activation"] < moved["full"]
    times = {kind: planner.layer_time(model, layout, IDEAL).compute for kind, layout in layouts.items()}
    assert times["none"] == times["norm"] == times["norm+activation"] < times["products"] < times["ffn"] < times["full"]


def test_the_memory_of_a_mixture_by_hand():
    model = planner.MODELS["mixtral-8x7b"]
    layout = Layout(2, 4, 8, 1, 8, zero=1, expert=8, sequence_parallel=True)
    h, f = 4096, 14336
    dense = (2 * h * h + 2 * h * 1024) / 2 + 2 * h + 8 * h  # matrices of attention, norms, router
    experts = 8 * 3 * h * f / 8
    n, layer, root = planner.stage_parameters(model, layout, 0)
    assert (layer, root) == (dense + experts, 32000 * h / 2)
    held = rank_memory(model, layout, 0)
    assert held.parameters == 2 * n
    assert held.optimizer == pytest.approx(
        12 * ((8 * dense + root) / 8 + 8 * experts / 2)
    )  # two ranks have the same ones


def test_the_update_goes_once_through_the_memory():
    n = planner.stage_parameters(TINY, Layout(1, 1, 4), 0)[0]
    seconds = [step_time(TINY, Layout(1, 1, 4, zero=zero), Cluster(planner.H100)).update for zero in (0, 1, 3)]
    assert seconds == pytest.approx([2 * 16 * n / share / 3350e9 for share in (1, 4, 4)])


def test_a_mesh_is_slow_for_few():
    cluster = Cluster(planner.CARDS["MI300X"], links=1)
    assert [cluster.inside(n).bandwidth for n in (2, 4, 8)] == pytest.approx([64e9, 3 * 64e9, 7 * 64e9])
    assert IDEAL.inside(2).bandwidth == 450e9


# the search

REQUESTS = [(GPT3, 1024, 1024, {}), (GPT(4096, 32, 32), 64, 64, {}), (GPT(4096, 32, 32), 24, 96, {"zero": 3})]


@pytest.mark.parametrize("model, gpus, batch, only", REQUESTS)
@pytest.mark.parametrize("field", ["memory", "bandwidth", "link", "network", "bfloat16"])
def test_a_better_card_is_never_slower(model, gpus, batch, only, field):
    before = float("inf")
    for factor in (0.5, 1, 2, 8):
        card = dataclasses.replace(planner.H100, **{field: getattr(planner.H100, field) * factor})
        try:
            best = search(model, Cluster(card), gpus, batch, only=only)[0].time.total
        except planner.NoLayout:
            assert field == "memory"
            best = float("inf")
        assert best <= before
        before = best


@pytest.mark.parametrize("field", ["bandwidth", "link", "network", "bfloat16"])
def test_a_better_card_makes_no_layout_slower(field):
    """Also where everything is badly balanced: what hides behind computing may hide there only once."""
    slow = dataclasses.replace(planner.H100, link=20e9, network=0.2e9)
    fast = dataclasses.replace(slow, **{field: 1.5 * getattr(slow, field)})
    model = GPT(4096, 32, 32)
    for only in ({"zero": 3}, {"zero": 2}, {"zero": 1}, {"schedule": "zero-bubble"}, {"prefetch": False}):
        for plan in search(model, Cluster(slow), 64, 64, only=only):
            before = plan.time.total
            assert step_time(model, plan.layout, Cluster(fast)).total <= before * (1 + 1e-9), plan.layout


@pytest.mark.parametrize("model, gpus, batch, only", REQUESTS)
def test_what_is_found_divides_fits_and_is_ranked(model, gpus, batch, only):
    plans = search(model, Cluster(planner.H100), gpus, batch, only=only)
    assert len({plan.layout for plan in plans}) == len(plans)
    seconds = [plan.time.total * (1 + WORTH) ** math.log2(plan.layout.chunks) for plan in plans]
    assert seconds == sorted(seconds)
    for plan in plans:
        x = plan.layout
        assert x.ranks == gpus and x.batch == batch and x.micro_batch <= LARGEST_MICRO_BATCH
        assert plan.memory.total <= (1 - KEPT_FREE) * 81559 * 2**20 and 0 < plan.mfu < 1
        assert all(getattr(x, name) == value for name, value in only.items())
        assert plan.memory.total == max(rank_memory(model, x, stage).total for stage in range(x.pipeline))


def test_the_search_over_3072_cards_takes_less_than_two_seconds():
    begin = time.process_time()
    found = search(GPT(25600, 128, 160), Cluster(planner.A100), 3072, 3072)
    assert time.process_time() - begin < 2
    assert found[0].layout.tensor == 8 and found[0].layout.pipeline > 8


def test_no_group_is_torn_and_none_is_told_twice():
    found = search(GPT(1536, 24, 12), Cluster(planner.H100), 24, 24)
    assert {plan.layout.tensor for plan in found} == {1, 2, 4}  # 3, 6: some of them would lie in two nodes
    assert {plan.layout.zero for plan in found if plan.layout.data == 1} == {0}
    in_one = search(GPT(1536, 24, 12), Cluster(planner.H100), 6, 6)
    assert {plan.layout.tensor for plan in in_one} == {1, 2, 3, 6}


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "interleaved", "zero-bubble"])
def test_only_one_schedule(schedule):
    found = search(GPT(4096, 32, 32), Cluster(planner.H100), 16, 64, only={"schedule": schedule})
    assert {plan.layout.schedule for plan in found} == {schedule}


@pytest.mark.parametrize(
    "gpus, batch, only, words",
    [
        (8, 8, {}, "would fit on 64 GPUs"),
        (64, 64, {"zero": 0, "tensor": 1}, "without --only zero=0 --only tensor=1"),
        (1024, 1024, {"tensor": 5}, "no layout divides with --only tensor=5"),
        (1021, 512, {}, "need a batch that is a multiple of 1021"),
    ],
)
def test_the_impossible_says_what_would_have_to_change(gpus, batch, only, words):
    with pytest.raises(planner.NoLayout, match=words) as error:
        search(GPT3, Cluster(planner.H100), gpus, batch, only=only)
    assert "\n" not in str(error.value)


def test_the_remedy_is_one():
    model = GPT(16384, 80, 128)
    with pytest.raises(planner.NoLayout) as error:
        search(model, Cluster(planner.H100), 32, 64)
    gpus = int(re.search(r"on (\d+) GPUs", str(error.value))[1])
    card = re.search(r"on cards of \d+ GB \((\w+)\)", str(error.value))[1]
    assert search(model, Cluster(planner.H100), gpus, 64)
    assert search(model, Cluster(planner.CARDS[card]), 32, 64)


@pytest.mark.parametrize(
    "name, card, gpus, batch, only",
    [
        ("llama3-405b", "H100", 16384, 2048, {"tensor": 8, "pipeline": 16, "data": 128, "chunks": 4}),
        ("bloom-176b", "A100", 384, 2048, {"tensor": 4, "pipeline": 12, "micro_batch": 2, "recomputation": "full"}),
        ("deepseek-v3", "H800", 2048, 15360,
         {"pipeline": 16, "expert": 64, "precision": "float8", "recomputation": "norm+latent+activation"}),
    ],
)  # fmt: skip
def test_the_best_known_runs_fit_as_they_were_run(name, card, gpus, batch, only):
    found = search(planner.MODELS[name], Cluster(planner.CARDS[card]), gpus, batch, only=only)
    assert found and all(plan.layout.ranks == gpus for plan in found)


def test_a_number_of_gpus_that_nothing_divides_is_named():
    with pytest.raises(planner.NoLayout, match="need a batch that is a multiple of 1021"):
        search(GPT3, Cluster(planner.H100), 1021, 512)


@pytest.mark.parametrize(
    "wrong",
    [{"zero": 4}, {"schedule": "2F2B"}, {"chunks": 2}, {"schedule": "interleaved"}, {"tensor": 0},
     {"schedule": "interleaved", "chunks": 2, "pipeline": 4, "micro_batches": 6}],
)  # fmt: skip
def test_layouts_that_are_none(wrong):
    with pytest.raises(ValueError, match="is one of|1 or more|interleaved"):
        Layout(**wrong)


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="must divide a hidden size"):
        GPT(100, 4, 3)
    with pytest.raises(ValueError, match="too many for 8 layers"):
        rank_memory(TINY, Layout(1, 12))
    with pytest.raises(ValueError, match="5 ranks must divide 8 heads"):
        rank_memory(TINY, Layout(5))
    with pytest.raises(ValueError, match="a cluster has"):
        Cluster(planner.H100, products=2)
