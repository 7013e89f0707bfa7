"""Balise 4: the parameters and the bytes of a rank, for any layout, against lists of what it holds."""

from math import prod

import torch

from dlojz_tp import planner
from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.checks.hybrid_parallelism.tables import (
    alone,
    form,
    numbers,
    out_of_planner,
    said,
    table,
    table_value,
)
from dlojz_tp.planner import Layout

RULES = {"gathered": "gathered-wrong"}
AGAIN = {  # what goes wrong there alone is about that
    "ZeRO 0 to 3": {"parameters gradients optimizer": "zero-exact"}, "recomputation": {"activations": "again-wrong"},
    "micro-batches in flight": {"activations": "in-flight"},
}  # fmt: skip
MODELS = planner.GPT(64, 12, 8, sequence=24, vocabulary=160), planner.GPT(96, 8, 6, sequence=40, vocabulary=97)
WIDTHS = (
    {"parameter": 2, "gradient": 4, "optimizer": 12, "whole": 10, "cut": 24, "input": 2, "logit": 4},
    {"parameter": 4, "gradient": 5, "optimizer": 8, "whole": 21, "cut": 46, "input": 3, "logit": 7},
)
PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations")
GRIDS = {  # (tensor, pipeline, data)
    "one rank": [(1, 1, 1)],
    "tensor ranks": [(2, 1, 1), (8, 1, 3)],
    "stages": [(1, 2, 1), (1, 4, 2), (2, 3, 2), (2, 12, 1)],
}
LAYOUTS = {
    "one rank": [Layout(), Layout(micro_batch=3), Layout(micro_batch=2, micro_batches=5)],
    "ZeRO 0 to 3": [Layout(data=d, zero=zero) for d in (1, 3) for zero in range(4)],
    "micro-batches in flight": [
        Layout(1, p, 1, b, m, schedule=schedule)
        for schedule in ("GPipe", "1F1B") for p, b, m in ((2, 1, 8), (4, 2, 3), (4, 1, 6), (1, 2, 4))
    ],
    "sequence parallel or not": [Layout(t, 2, 1, 2, 4, sequence_parallel=cut) for t in (2, 1) for cut in (False, True)],
    "recomputation": [
        Layout(t, p, 1, 2, 4, recomputation="full", sequence_parallel=cut)
        for t, p, cut in ((1, 1, False), (1, 4, False), (2, 2, False), (2, 2, True))
    ],
    "all of it": [
        Layout(2, 4, 3, 2, 7, "GPipe", zero=3, recomputation="full", sequence_parallel=True),
        Layout(2, 2, 5, 3, 6, "1F1B", zero=2, sequence_parallel=True), Layout(1, 4, 2, 1, 5, zero=1),
    ],
}  # fmt: skip


def shapes(model, layout, stage):
    """[shapes of a layer's parameters on a rank], [shapes of what is beside the layers]."""
    h, t = model.width, layout.tensor
    layer = [(h,)] * 4 + [
        (3 * h / t, h),
        (3 * h / t,),
        (h, h / t),
        (h,),
        (4 * h / t, h),
        (4 * h / t,),
        (h, 4 * h / t),
        (h,),
    ]
    ends = [(model.vocabulary / t, h)] * (stage in (0, layout.pipeline - 1))
    return layer, ends + [(model.sequence, h)] * (stage == 0) + [(h,)] * 2 * (stage == layout.pipeline - 1)


def _elements(some):
    return sum(map(prod, some))


def due_parameters(model, layout, stage):
    layer, ends = (_elements(one) for one in shapes(model, layout, stage))
    return [model.layers / layout.pipeline * layer + ends, layer]


def due_bytes(model, layout, stage, widths):
    """Counted thing by thing: the states, then each micro-batch and each layer that keeps something."""
    n, layer = due_parameters(model, layout, stage)
    share = {name: layout.data if layout.zero >= first else 1 for name, first in
             (("parameter", 3), ("gradient", 2), ("optimizer", 1))}  # fmt: skip
    states = [n * widths[name] / share[name] for name in share]
    gathered = sum(layer * widths[name] for name, first in (("gradient", 2), ("parameter", 3))
                   if layout.zero >= first and layout.data > 1)  # fmt: skip
    tokens = model.sequence * layout.micro_batch
    outside = tokens / (layout.tensor if layout.sequence_parallel else 1) * model.width
    inside = tokens * model.width / layout.tensor
    one = outside * widths["whole"] + inside * widths["cut"]
    again = layout.recomputation == "full"
    flying = range(layout.micro_batches)
    if layout.schedule == "1F1B":
        flying = flying[: layout.pipeline - stage]
    layers = range(model.layers // layout.pipeline)
    activations = sum(outside * widths["input"] if again else one for _ in flying for _ in layers)
    activations += one * again
    if stage == layout.pipeline - 1:
        activations += tokens * model.vocabulary / layout.tensor * widths["logit"]
    return [*states, gathered, activations]


def cases(name):
    """(model, layout, stage, widths) of a group of layouts."""
    return [(MODELS[k % 2], layout, stage, WIDTHS[k // 2 % 2]) for k, layout in enumerate(LAYOUTS[name])
            for stage in sorted({0, layout.pipeline // 2, layout.pipeline - 1})]  # fmt: skip


def grid_cases(name):
    return [(model, Layout(*grid), stage) for model in MODELS for grid in GRIDS[name]
            if not model.layers % grid[1] and not model.heads % grid[0] for stage in range(grid[1])]  # fmt: skip


def observe(stage_parameters, rank_memory):
    for name in GRIDS:
        with _own_work():
            got = [stage_parameters(*case) for case in grid_cases(name)]
        yield {f"{name}, form": form(got, "two numbers", numbers(2))}
        yield {f"{name}, counted": table(got)}
    for name in LAYOUTS:
        with _own_work():
            of = [(*case, dict(widths)) for *case, widths in cases(name)]
            got = [rank_memory(*case) for case in of]
        yield {f"{name}, keys": form(got, "five", lambda one: isinstance(one, dict) and set(one) == set(PARTS))}
        yield {f"{name}, kept": [case[-1] for case in of] == [case[-1] for case in cases(name)]}
        yield {f"{name}, bytes": table([one[part] for part in PARTS] for one in got)}


def _own_work():
    return out_of_planner(
        planner.stage_parameters, planner.rank_memory, planner.layer_bytes, planner.layer_activation_bytes,
        planner.state_bytes, Layout.in_flight,
    )  # fmt: skip


def _looks():
    for name in GRIDS:
        of, columns = grid_cases(name), ("of the rank", "of a layer")
        due = table(due_parameters(*case) for case in of)
        yield Look(f"parameters: {name}", f"{name}, form", "two numbers", "stage-form")
        yield table_value(
            f"{name}, counted", due, due, _layer if name == "tensor ranks" else "wrong-parameters", _words(of), columns
        )
    for name in LAYOUTS:
        due = table(due_bytes(*case) for case in cases(name))
        yield Look(f"bytes: {name}", f"{name}, keys", "five", "memory-form")
        yield Look("", f"{name}, kept", True, "widths-changed", fields=silent)
        yield table_value(
            f"{name}, bytes",
            due,
            due.sum(1, keepdim=True),
            alone(PARTS, RULES | AGAIN.get(name, {}), "wrong-memory"),
            _words(cases(name)),
            PARTS,
        )


def _layer(seen, due):
    return "wrong-parameters" if torch.allclose(seen[:, 1], due[:, 1]) else "layer-cut-wrong"


def _words(of):
    return [f"{said(layout)}; stage {stage}, width {model.width}" for model, layout, stage, *_ in of]


LOOKS = list(_looks())


def balise_4(stage_parameters, rank_memory):
    yield from judged(LOOKS, observe, stage_parameters, rank_memory)
