"""Look at orders of ranks: called for every rank, read, simulated; the planner's own are out of reach meanwhile."""

from numbers import Integral

from dlojz_tp import planner
from dlojz_tp.checking import Wrong
from dlojz_tp.checking.borrowed import out_of_reach
from dlojz_tp.probes.schedules import pipeline_schedules

HINTS = {
    "planner-called": "{name} already contains such a schedule. Here, write it yourself.",
    "not-a-list": "Return a list of actions: tuples of a kind, the number of the micro-batch{third}.",
    "not-a-step": "This cannot be a training step: {problem}.",
    "deadlock": "Ranks would wait for each other forever: {problem}.",
}


def own_orders(ready):
    """Inside, the planner's `ready` and PyTorch's schedules refuse to be called by an answer; it may build on others."""
    return out_of_reach(lambda name: Wrong("planner-called", name=name), *pipeline_schedules(ready), copies=True)


def simulated(orders, costs, where: str, third: str = "", **more) -> planner.Simulation:
    """`planner.simulate`, with a hint where the orders cannot be carried out."""
    for order in orders:
        if order is None:
            raise Wrong("nothing-returned")
        if not isinstance(order, list | tuple) or not all(isinstance(action, list | tuple) for action in order):
            raise Wrong("not-a-list", got=order, where=where, third=third)
    plain = [
        [tuple(int(one) if isinstance(one, Integral) else one for one in action) for action in order]
        for order in orders
    ]
    try:
        return planner.simulate(plain, costs, **more)
    except planner.Deadlock as error:
        raise Wrong("deadlock", where=where, problem=_short(str(error).removeprefix("deadlock: "))) from error
    except planner.ScheduleError as error:
        raise Wrong("not-a-step", where=where, problem=_short(str(error))) from error


def _short(text: str) -> str:
    parts = text.split("; ")
    return "; ".join(parts[:3]) + ("; …" if len(parts) > 3 else "")
