"""Balise 5: the seconds of a stage, of the gradients' way, of a step, against messages and products counted one by one."""

from dataclasses import replace
from math import gcd

from dlojz_tp import planner
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.hybrid_parallelism.tables import (
    alone,
    form,
    number,
    numbers,
    out_of_planner,
    said,
    table,
    table_value,
)
from dlojz_tp.planner import GPT, Cluster, Layout

MODEL, SMALL = GPT(4096, 32, 32), GPT(1024, 16, 16, sequence=1024, vocabulary=30000, fused_attention=False)
# on the second, the bytes take longer than the products
CLUSTERS = (
    Cluster(planner.H100, products=0.5, traffic=7.0, links=1),
    Cluster(planner.A100, node=4, latency=2e-4, traffic=12.0, products=0.658, links=1),
)
MESH = Cluster(planner.CARDS["MI300X"], products=0.4, traffic=6.36, links=1)
PARTS = "compute", "tensor", "bubble", "pipeline", "data"
RULES = {  # what goes wrong there alone is about that: the looks before it have held
    "tensor ranks": {"computing": "tensor-undivided", "sums": "sums-miscounted"},
    "recomputed": {"computing": "again-not-computed", "sums": "sums-miscounted"},
    "sums beside products": {"sums": "hidden-wrong"},
    "step": {"compute": "head-once", "tensor": "tensor-once", "bubble": "bubble-wrong", "pipeline": "messages-wrong", "data": "data-given"},
}  # fmt: skip
STAGES = {  # layouts of which one micro-batch on one stage is timed
    "one rank, and stages": [Layout(overlap=False), Layout(1, 4, micro_batch=3, overlap=False), Layout(1, 2, micro_batches=5)],
    "tensor ranks": [Layout(t, p, overlap=False, sequence_parallel=cut) for t, p, cut in ((2, 1, False), (4, 4, True), (4, 1, False))],
    "recomputed": [Layout(t, 2, 1, b, recomputation="full", overlap=False) for t, b in ((1, 1), (2, 3), (4, 1))],
    "sums beside products": [Layout(t, 2, 1, b, 6, recomputation=kind) for t in (1, 4) for b in (1, 4) for kind in ("none", "full")]
    + [Layout(8, 2, 1, 64, 6)],  # MODEL: a sum takes longer than one of the two products beside it, not than the other
}  # fmt: skip
WAYS = {  # layouts whose gradients travel
    "in a node": [
        Layout(1, 1, 4, 2, 3, overlap=False),
        Layout(4, 2, 1, overlap=False),
        Layout(2, 1, 2, zero=1, overlap=False),
    ],
    "between nodes": [
        Layout(t, p, d, zero=zero, overlap=False)
        for t, p, d in ((1, 1, 16), (2, 3, 12), (2, 1, 6), (4, 1, 6))
        for zero in (0, 1)
    ],
    "beside backward": [Layout(t, 1, d) for t, d in ((1, 4), (4, 16), (1, 1), (2, 24))],
}
STEPS = {
    "plain": [Layout(overlap=False), Layout(2, 1, 2, 2, 3, overlap=False), Layout(1, 1, 4, overlap=False)],
    "pipelines": [
        Layout(1, 2, 1, 2, 5, overlap=False), Layout(1, 4, 1, 1, 3), Layout(1, 2, 1, 1, 4, "interleaved", 2, overlap=False),
        Layout(1, 4, 1, 1, 8, "interleaved", 2),
    ],
    "over nodes": [
        Layout(2, 4, 6, 2, 7), Layout(4, 8, 2, 1, 16, "interleaved", 2, zero=1, recomputation="full"),
        Layout(2, 2, 24, 1, 4, zero=1, overlap=False, sequence_parallel=True),
    ],
}  # fmt: skip


def _ring(size, n, link):
    """Seconds of n - 1 messages of an n-th each: a reduce-scatter, or an all-gather."""
    return sum(link.latency + size / n / link.bandwidth for _ in range(n - 1))


def due_stage(model, layout, cluster):
    s, b, h, t = model.sequence, layout.micro_batch, model.width, layout.tensor
    seconds = lambda *product: 2 * s * b * product[0] * product[1] / t / (cluster.products * cluster.peak)  # noqa: E731
    forward = [seconds(h, 3 * h), seconds(h, h), seconds(h, 4 * h), seconds(4 * h, h), seconds(s, h), seconds(s, h)]
    passes = ["forward", "backward", "backward"] + ["forward"] * (layout.recomputation == "full")
    held = planner.layer_bytes(model, replace(layout, recomputation="none"))
    if model.fused_attention is False:
        held = planner.layer_activation_bytes(
            s, b, h, model.heads, tensor_parallel=t, sequence_parallel=layout.sequence_parallel
        )
    compute = len(passes) * (sum(forward) + cluster.traffic * held / cluster.card.bandwidth / 3)
    one = 2 * _ring(2 * s * b * h, t, cluster.inside(t))
    waits = [one, one] * (passes.count("forward"))
    for product in (forward[0], forward[2]):
        waits.append(max(0.0, one - product) if layout.overlap else one)
    layers = model.layers / layout.pipeline
    return [layers * compute, layers * sum(waits)]


def due_way(n, layout, cluster, beside):
    near = gcd(layout.data, cluster.node // layout.tensor)
    seconds = 0.0
    for width in (4, 2 if layout.zero else 4):
        seconds += _ring(width * n, near, cluster.inside(near))
        seconds += _ring(width * n / near, layout.data // near, cluster.between)
    return max(0.0, seconds - beside) if layout.overlap else seconds


def due_step(model, layout, cluster):
    p, m, t = layout.pipeline, layout.micro_batches, layout.tensor
    compute, tensor = due_stage(model, layout, cluster)
    tokens = model.sequence * layout.micro_batch
    head = 3 * (2 * tokens * model.width * model.vocabulary / t) / (cluster.products * cluster.peak)
    link = cluster.between if layout.ranks > cluster.node else cluster.inside(2)
    sent = (2 * (p - 1) + 2 * m * layout.chunks * (not layout.overlap)) * (p > 1)
    n = planner.stage_parameters(model, layout, 0)[0]
    return [m * (compute + head), m * tensor, (p - 1) * (compute + tensor) / layout.chunks,
            sent * (link.latency + 2 * tokens * model.width / t / link.bandwidth), due_way(n, layout, cluster, compute * 2 / 3)]  # fmt: skip


def cases(layouts):
    """(model, layout, cluster) for all that go together."""
    of = [(model, layout, cluster) for layout in layouts for model, cluster in zip((MODEL, SMALL), CLUSTERS)]
    return of + [(MODEL, layouts[-1], MESH)]


def ways(layouts):
    """(parameters, layout, cluster, seconds beside: less than the way takes, or more)."""
    found = []
    for model, layout, cluster in cases(layouts):
        n, part = (1.1e8, 0.4) if model is MODEL else (1e7, 3.0)
        found.append((n, layout, cluster, 1e-3 + part * due_way(n, replace(layout, overlap=False), cluster, 0.0)))
    return found


def observe(stage_time, data_time, step_time):
    for name, layouts in STAGES.items():
        with _own_work():
            got = [stage_time(*case) for case in cases(layouts)]
        yield {f"{name}, form": form(got, "two numbers", numbers(2))}
        yield {name: table(got)}
    for name, layouts in WAYS.items():
        with _own_work():
            got = [data_time(*case) for case in ways(layouts)]
        yield {f"{name}, form": form(got, "a number", number)}
        yield {name: table([one] for one in got)}
    for name, layouts in STEPS.items():
        with _own_work():
            got = [step_time(*case) for case in cases(layouts)]
        yield {f"{name}, form": form(got, "five", lambda one: isinstance(one, dict) and set(one) == set(PARTS))}
        yield {name: table([one[part] for part in PARTS] for one in got)}


def _own_work():
    return out_of_planner(planner.step_time, planner.GPT.flops, planner.steps._data, planner.layer_time)


def _looks():
    for name, layouts in STAGES.items():
        due = table(due_stage(*case) for case in cases(layouts))
        yield Look(f"a stage: {name}", f"{name}, form", "two numbers", "stage-time-form")
        yield _value(
            name,
            due,
            due.sum(1, keepdim=True),
            alone(("computing", "sums"), RULES.get(name, {}), "wrong-stage"),
            cases(layouts),
            ("computing", "tensor ranks"),
        )
    for name, layouts in WAYS.items():
        due = table([due_way(*case)] for case in ways(layouts))
        whole = table([due_way(n, replace(layout, overlap=False), *rest)] for n, layout, *rest in ways(layouts)) + 1e-6
        yield Look(f"gradients: {name}", f"{name}, form", "a number", "data-time-form")
        yield _value(
            name, due, whole, "data-hiding" if name == "beside backward" else "wrong-data", ways(layouts), ("seconds",)
        )
    for name, layouts in STEPS.items():
        due = table(due_step(*case) for case in cases(layouts))
        yield Look(f"a step: {name}", f"{name}, form", "five", "step-form")
        yield _value(
            name,
            due,
            due.sum(0, keepdim=True) / len(due) + 1e-6,
            alone(PARTS, RULES["step"], "wrong-step"),
            cases(layouts),
            PARTS,
        )


def _value(name, due, whole, hint, of, columns):
    words = [f"{said(case[1])}; {case[2].card.name}, nodes of {case[2].node}" for case in of]
    return table_value(name, due, whole, hint, words, columns, "{:.4g} s")


LOOKS = list(_looks())


def balise_5(stage_time, data_time, step_time):
    yield from judged(LOOKS, observe, stage_time, data_time, step_time)
