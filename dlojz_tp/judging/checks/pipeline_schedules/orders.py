"""Look at orders of ranks: called for every rank, read, simulated; the planner's own are out of reach meanwhile."""

import operator
from numbers import Integral

from dlojz_tp import planner
from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.borrowed import out_of_reach
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.probes.schedules import pipeline_schedules
from dlojz_tp.judging.probes.shared_looks import recognised

HINTS = {
    "planner-called": "{name} already contains such a schedule. Here, write it yourself.",
    "not-a-list": "Return a list of actions: tuples of a kind, the number of the micro-batch{third}.",
    "not-a-step": "This cannot be a training step: {problem}.",
    "deadlock": "Ranks would wait for each other forever: {problem}.",
}


def own_orders(ready, order, n_ranks: int, *more) -> list:
    """order(rank, n_ranks, *more) of all ranks; the planner's `ready` and PyTorch's schedules refuse to be called."""
    refused = pipeline_schedules(ready)
    with out_of_reach(lambda name: Wrong("planner-called", name=name), *refused, copies=True):
        return [order(rank, n_ranks, *more) for rank in range(n_ranks)]


def simulated(orders: list, n_micro_batches: int, costs: list[dict], third: str = "") -> dict:
    """The orders of all ranks on the clock, once with each of the costs.

    "fault": the hint for what cannot be carried out, and its fields, or None. "idle": seconds of a rank by costs.
    "kept": micro-batches at once by rank.
    """
    if any(order is None for order in orders):
        return {"fault": ("nothing-returned", {})}
    for order in orders:
        if not isinstance(order, list | tuple) or not all(isinstance(action, list | tuple) for action in order):
            return {"fault": ("not-a-list", {"got": order, "third": third})}
    plain = [
        [tuple(int(one) if isinstance(one, Integral) else one for one in action) for action in order]
        for order in orders
    ]
    try:
        steps = [planner.simulate(plain, cost) for cost in costs]
    except planner.Deadlock as error:
        return {"fault": ("deadlock", {"problem": _short(str(error).removeprefix("deadlock: "))})}
    except planner.ScheduleError as error:
        return {"fault": ("not-a-step", {"problem": _short(str(error))})}
    number = 1 + max((action[1] for order in orders for action in order), default=-1)
    if number != n_micro_batches:
        problem = f"there are {n_micro_batches} micro-batches, but the orders do {number}"
        return {"fault": ("not-a-step", {"problem": problem})}
    return {"fault": None, "idle": [step.seconds - step.busy[0] for step in steps], "kept": steps[0].in_flight}


def _short(text: str) -> str:
    parts = text.split("; ")
    return "; ".join(parts[:3]) + ("; …" if len(parts) > 3 else "")


def fault_look(claim: str, rename=lambda slug: slug) -> Look:
    """A look at the "fault", that of rank 0 where ranks have run: None, or a hint and its fields."""

    def renamed(found):
        fault = (found[0] if isinstance(found, list) else found)["fault"]
        return fault and (rename(fault[0]), fault[1])

    return recognised(claim, renamed)


def idle_look(number: int, due: float, hint, key: str = "idle", unit: float = 1.0) -> Look:
    """A look at the idle seconds with the costs of this number; it holds where nothing ran. unit: of the fields."""

    def seconds(found):
        return found.get(key) and found[key][number]

    def fields(idle, due):
        return {"found": idle / unit, "wanted": due / unit} | silent(idle, due)

    return Look("", seconds, due, hint, holds=lambda idle, due: idle is None or idle <= due + 1e-6, fields=fields)


def kept_look(claim: str, key: str, due, hint, bad=operator.gt) -> Look:
    """A look at how many micro-batches each rank keeps at once: none more (or by `bad`, fewer) than is due to it.

    hint: a slug, or a function of what the first such rank keeps that returns one. It holds where nothing ran.
    """

    def see(found):
        return [rank[key] for rank in found] if isinstance(found, list) else found.get(key, [])

    def first(seen, due):
        return next((rank for rank, pair in enumerate(zip(seen, due)) if bad(*pair)), None)

    def fields(seen, due):
        rank = first(seen, due)
        about = {"rank": rank, "size": len(seen), "found": seen[rank], "most": due[rank]}
        return about | {"expected": f"at most {due[rank]}", "got": seen[rank]}

    slug = (lambda seen, due: hint(seen[first(seen, due)])) if callable(hint) else hint
    return Look(claim, see, due, slug, holds=lambda seen, due: first(seen, due) is None, fields=fields)
