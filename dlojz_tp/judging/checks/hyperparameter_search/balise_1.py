"""Balise 1: what is drawn from a space, and the grid in it; axes of every kind, children of children."""

import math
from collections import Counter

import numpy as np
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dlojz_tp.judging.checking.looks import Look, Value, judged, same, silent

AXES = {
    "kind": CategoricalDistribution(("a", "b", "c")),
    "rate": FloatDistribution(1e-3, 10.0, log=True),
    "share": FloatDistribution(-1.0, 3.0),
    "few": IntDistribution(1, 4, log=True),
    "steps": IntDistribution(2, 6),
    "depth": IntDistribution(1, 3),
    "gate": CategoricalDistribution(("open", "shut")),
    "gap": FloatDistribution(0.0, 1.0),
}
ONLY_IF = {"depth": {"kind": "a"}, "gate": {"kind": "b"}, "gap": {"gate": "open"}}
GRID_AXES = {name: axis for name, axis in AXES.items() if name != "share"}
COUNTS = {"rate": 3, "few": 4, "steps": 2, "depth": 4, "gap": 3}
LAID = {"rate": [1e-3, 0.1, 10.0], "few": [1, 2, 3, 4], "steps": [2, 6],
        "depth": [1, 2, 3], "gap": [0.0, 0.5, 1.0]}  # fmt: skip
SIZE = 3 * 4 * 2 * (3 + (3 + 1) + 1)
DRAWS = 8000
NAMES = [*AXES][:5]
SHAPES = {("a", None): {*NAMES, "depth"}, ("b", "open"): {*NAMES, "gate", "gap"}, ("b", "shut"): {*NAMES, "gate"},
          ("c", None): {*NAMES}}  # fmt: skip
SHARED = [name for name in AXES if name != "gap"]  # it comes too seldom to count
LEVELS = [0.05, 0.25, 0.5, 0.75, 0.95]


def _names(configs, axes):
    """What is wrong with the names of the first configuration that has wrong ones: (hint, name); ("", "") if none."""
    for config in configs:
        kind, gate = config.get("kind"), config.get("gate")
        due = SHAPES.get((kind, gate if kind == "b" else None), {*NAMES}) & axes.keys()
        for hint, names in (("inactive-value", config.keys() - due), ("value-missing", due - config.keys())):
            if names:
                return hint, min(names)
    return "", ""


def _kinds(configs):
    """Types that a value of its axis must not have: {name: type}."""
    due = {CategoricalDistribution: str, FloatDistribution: float, IntDistribution: int}
    values = ((name, value) for config in configs for name, value in config.items())
    return {name: type(value).__name__ for name, value in values if not isinstance(value, due[type(AXES[name])])}


def _outside(configs):
    for config in configs:
        for name, value in config.items():
            axis = AXES[name]
            inside = value in axis.choices if name in ("kind", "gate") else axis.low <= value <= axis.high
            if not inside:
                return name, value
    return "", ""


def _every(axis):
    """What shares are taken of: each value, or levels of quantiles."""
    if isinstance(axis, FloatDistribution):
        return LEVELS
    return axis.choices if isinstance(axis, CategoricalDistribution) else range(axis.low, axis.high + 1)


def _shares(configs):
    """Of each axis: how often each of few values came, or quantiles as places from 0 (low) to 1 (high)."""
    found = []
    for name in SHARED:
        axis = AXES[name]
        values = [config[name] for config in configs if name in config]
        if isinstance(axis, FloatDistribution):
            low, high = (math.log(axis.low), math.log(axis.high)) if axis.log else (axis.low, axis.high)
            values = np.log(values) if axis.log else np.array(values)
            found += np.quantile((values - low) / (high - low), LEVELS).tolist()
        else:
            count = Counter(values)
            found += [count[value] / max(len(values), 1) for value in _every(axis)]
    return torch.tensor(found)


def _due_shares():
    """The truth, and how far a right design may be from it: for log integers there are several."""
    due = {
        "kind": [1 / 3] * 3,
        "few": [0.48, 0.24, 0.16, 0.12],
        "steps": [0.2] * 5,
        "depth": [1 / 3] * 3,
        "gate": [0.5] * 2,
    }
    slack = {"few": 0.08, "depth": 0.07, "gate": 0.07}  # the last two come less often
    numbers = [(value, slack.get(name, 0.04)) for name in SHARED for value in due.get(name, LEVELS)]
    return torch.tensor(numbers).T


DUE, SLACK = _due_shares()


def observe(draw, grid):
    rng = np.random.default_rng(3)
    drawn = [draw(AXES, ONLY_IF, rng) for _ in range(DRAWS)]
    yield {"form": None if None in drawn else sorted({type(one).__name__ for one in drawn})}
    yield {"names": _names(drawn, AXES)}
    yield {"kinds": _kinds(drawn), "outside": _outside(drawn), "varied": len(set(map(str, drawn))) > 1}
    yield {"shares": _shares(drawn)}
    again = [[draw(AXES, ONLY_IF, rng) for _ in range(5)] for rng in map(np.random.default_rng, (3, 3))]
    yield {"again": again[0] == again[1] == drawn[:5]}
    laid = grid(GRID_AXES, ONLY_IF, dict(COUNTS))
    yield {"grid form": sorted({type(one).__name__ for one in laid}) if isinstance(laid, list) else type(laid).__name__}
    objects = len(set(map(id, laid)))
    yield {"shared": len(laid) - objects if objects < SIZE else 0}
    yield {"grid names": _names(laid, GRID_AXES)}
    values = {name: sorted({round(float(config[name]), 9) for config in laid if name in config}) for name in COUNTS}
    rows = [[value, *([math.log10(value)] if AXES[name].log and value > 0 else [0.0])] for name in COUNTS
            for value in (values[name] + [-9.0] * 8)[:8]]  # fmt: skip
    yield {"grid values": torch.tensor(rows)}
    yield {"grid kinds": _kinds(laid)}
    different = {tuple(sorted((name, str(value)) for name, value in config.items())) for config in laid}
    yield {"twice": len(laid) - len(different), "size": len(different)}
    fine = grid({"fine": FloatDistribution(2e-5, 2e-1, log=True)}, {}, {"fine": 4})
    part = grid({"part": FloatDistribution(0.25, 1.0)}, {}, {"part": 3})
    yield {"fine": {"part": sorted(one["part"] for one in part), "fine": sorted(1e5 * one["fine"] for one in fine)}}
    # 1, 1.5, 2.3, 3.5, 5.3 and 8 before they are rounded: two become one
    yield {"whole": sorted(one["width"] for one in grid({"width": IntDistribution(1, 8, log=True)}, {}, {"width": 6}))}


def _rows():
    due = []
    for name in COUNTS:
        for value in (LAID[name] + [-9.0] * 8)[:8]:
            due.append([value, math.log10(value) if AXES[name].log and value > 0 else 0.0])
    return torch.tensor(due)


def _first(seen, due):
    return {
        "name": next(iter(seen)),
        "kind": next(iter(seen.values())),
        "got": next(iter(seen.values())),
        "expected": "int",
    }


def _fields_of_shares(seen, due):
    """In words, the first axis on which values come otherwise than due."""
    parts = [one.split([len(_every(AXES[name])) for name in SHARED]) for one in (seen, due, SLACK)]
    axis = next(
        _said(name, came, wanted)
        for name, came, wanted, most in zip(SHARED, *parts)
        if not ((came - wanted).abs() <= most).all()
    )
    return {"axis": axis, "expected": "", "got": "", "where": f"{DRAWS} draws"}


def _said(name, seen, due):
    axis = AXES[name]
    if not isinstance(axis, FloatDistribution):
        came, wanted = (", ".join(f"{100 * share:.0f}" for share in shares) for shares in (seen, due))
        return (
            f"On {name!r}, the values {_listed(_every(axis))} came up in {came} % of the draws; about {wanted} % "
            "are expected."
        )
    ends = (lambda place: axis.low * (axis.high / axis.low) ** place) if axis.log else (lambda place: axis.low + (axis.high - axis.low) * place)  # fmt: skip
    came, wanted = (_listed([round(ends(float(place)), 4) for place in places[::2]]) for places in (seen, due))
    return f"On {name!r}, 5, 50 and 95 % of the draws are below {came}; about {wanted} are expected."


def _listed(values):
    return ", ".join(one if isinstance(one, str) else f"{one:.4g}" for one in values)


def _laid(name, seen, due):
    """A look's fields: the values of an axis on the grid."""
    return {"name": name, "values": _listed(seen), "due": _listed(due), "expected": "", "got": ""}


def _fields_of_rows(seen, due):
    k = int((~seen.isclose(due)).any(1).nonzero()[0]) // 8
    return _laid(
        [*COUNTS][k], *([one for one in rows[8 * k : 8 * k + 8, 0].tolist() if one > -9] for rows in (seen, due))
    )


def _fields_of_parts(seen, due):
    name = next(name for name in due if not same(seen[name], due[name]))
    scale = 1e5 if name == "fine" else 1.0
    return _laid(name, *([one / scale for one in rows[name]] for rows in (seen, due)))


def _named(seen, due):
    return {"name": seen[1], "expected": "", "got": ""}


FINE = {"part": [0.25, 0.625, 1.0], "fine": [2 * 10 ** (4 * k / 3) for k in range(4)]}
LOOKS = [
    Look("a drawn configuration: the active axes, each within its range", "form", ["dict"], "draw-form"),
    Look("", "names", ("", ""), lambda seen, _: seen[0], fields=_named),
    Look("", "kinds", {}, "not-an-int", fields=_first),
    Look("", "outside", ("", ""), "outside", fields=lambda seen, _: {"name": seen[0], "got": seen[1], "expected": ""}),
    Look("", "varied", True, "one-draw"),
    Value(f"uniform on the scale of each axis, in {DRAWS} draws", "shares", DUE, "draw-shares",
          holds=lambda seen, due: bool(((seen - due).abs() <= SLACK).all()), fields=_fields_of_shares),
    Look("", "again", True, "own-chance", fields=silent),
    Look("a grid: the values of each axis, both ends included", "grid form", ["dict"], "grid-form"),
    Look("", "shared", 0, "same-dict", fields="n"),
    Look("", "grid names", ("", ""), lambda seen, _: seen[0], fields=_named),
    Value("", "grid values", _rows(), "grid-values", fields=_fields_of_rows),
    Look("", "grid kinds", {}, "not-an-int", fields=_first),
    Look("every combination once", "twice", 0, "twice", fields="n"),
    Look("", "size", SIZE, "combinations", fields=lambda seen, due: {"n": seen, "of": due}),
    Value("small values, and an axis that doesn't begin at 0", "fine", FINE, "grid-values", fields=_fields_of_parts),
    Look("whole numbers: rounded, and none twice", "whole", [1, 2, 3, 5, 8], "whole-values"),
]  # fmt: skip


def balise_1(draw, grid):
    yield from judged(LOOKS, observe, draw, grid)
