"""Balise 6: any valid schedule, on real ranks."""

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch, planner
from dlojz_tp.judging.checking import Wrong, close, edge
from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checks.pipeline_under_the_hood import common, timing
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import itself, looked, right_step, stage_look, stages
from dlojz_tp.judging.checks.pipeline_under_the_hood.sends import in_lanes
from dlojz_tp.judging.checks.pipeline_under_the_hood.steps import case, in_any_order, last_look, right_cut
from dlojz_tp.judging.probes.gpus import left_on_cpu
from dlojz_tp.judging.probes.ranks import hung

USUAL, ODD = (
    "GPipe and 1F1B on 1, 2, 3 and 4 stages: loss and every gradient, even and uneven micro-batches",
    "micro-batches in the order 2, 0, 3, 1 forward and 0, 3, 2, 1 back, with other functions for sending and receiving",
)


def balise_6(run_schedule):
    """GPipe, 1F1B and odd orders on 1 to 4 stages; events; memory; the order of messages."""
    yield USUAL
    cases = [({n: getattr(planner, name)(n, 4) for n in (1, 2, 3, 4)}, rows) for name, rows in _USUAL]
    try:
        found = in_any_order(observe, run_schedule, cases, known=_BLOCKED)
    except launch.RankError as error:  # does it run where the batch divides?
        cases = cases[:1]
        found = common.on_ranks(observe, run_schedule, cases, known=_BLOCKED, sizes=(1, 2))
        edge("uneven-fails", error=error.summary, got=error.summary, rows=9, cut="3, 2, 2, 2")
    for number, (_, rows) in enumerate(cases):
        yield from looked(USUAL, FOLLOWED, stages(case(found, number), rows, 4))
        yield from right_cut(USUAL, case(found, number), rows, 4)
    yield ODD
    with last_look():
        yield from _odd_order(run_schedule)
    ranks = common.on_ranks(timing.on_the_clock, run_schedule, sizes=(2,), known=_BLOCKED)[2]
    yield from judged(timing.LOOKS, lambda: ranks)
    yield "1F1B on two stages, each with a GPU"
    with last_look():
        in_lanes(_in_lanes, run_schedule, known=left_on_cpu("step-not-on-gpu"))


def _odd_order(run_schedule):
    odd = {3: [_odd(stage, 3) for stage in range(3)]}
    more = {"sizes": (3,), "known": ((hung, "in-order-only"),)}
    try:
        found = common.on_ranks(observe, run_schedule, [(odd, 12)], True, **more)
    except (launch.RankError, Wrong):  # does it run with its own functions, and mixes them with the others?
        common.on_ranks(observe, run_schedule, [(odd, 12)], **more)
        raise Wrong("messages-ignored", where="3 stages") from None
    try:
        yield from looked(ODD, FOLLOWED, stages(case(found, 0), 12, 4))
        yield from right_step(ODD, case(found, 0), 12, 4)
    except Wrong as wrong:
        slugs = ("wrong-gradients", "gradient-of-another", "wrong-loss", "other-order")
        raise (Wrong("in-order-only", error="wrong values") if wrong.slug in slugs else wrong) from None
    yield from looked(ODD, [MESSAGES], stages(case(found, 0), 12, 4))


_USUAL = (("gpipe", 12), ("one_f_one_b", 9))  # 9 rows in 4: chunk makes 3 of them, split 5


def _blocked(error) -> bool:
    """A sign: ranks that all hang in a send. Where some wait in a receive, or for one that is through, no send is to blame.

    A wait() whose line cannot be read counts as running.
    """
    if not hung(error) or error.waits.get(error.rank) is None:
        return hung(error)
    in_sends = (
        stand.waits_in == "wait" and not stand.frame.name.startswith("receive") for stand in error.stands.values()
    )
    return not error.returned and all(in_sends)


_BLOCKED = ((_blocked, "waits-for-send"),)


def _odd(stage, n_stages):
    """As 1F1B with one forward more ahead, but that the micro-batches come in an order of their own, on all stages alike."""
    forwards, backwards, ahead = (
        [("F", k) for k in (2, 0, 3, 1)],
        [("B", k) for k in (0, 3, 2, 1)],
        n_stages - stage + 1,
    )
    pairs = [action for pair in zip(backwards, forwards[ahead:], strict=False) for action in pair]
    return forwards[:ahead] + pairs + backwards[len(pairs) // 2 :]


def _messages(used, place):
    """Two functions that send and receive activations of three rows, values alone; `used` gets an entry for each call."""

    def send(output, peer, tag=0):
        used.append("send")
        return [dist.isend(output.detach().contiguous(), peer, launch.lane("activations"), tag=tag)]

    def receive(peer, tag=0):
        used.append("receive")
        width = common.WIDTHS[common.bounds(place.n_stages)[place.stage][0]]
        received = torch.empty(3, width, dtype=torch.float64, device=launch.device())
        dist.recv(received, peer, launch.lane("activations"), tag=tag)
        return received.requires_grad_()

    return send, receive


def observe(run_schedule, cases, with_messages=False):
    """On a rank: a step of each case, with the list that it was given, its events, and how often it used the messages."""
    return [_step(run_schedule, orders, rows, 4, with_messages) for orders, rows in cases]


def _step(run_schedule, orders, rows, pieces, with_messages):
    events, used = [], []

    def step(stage, place, x, targets):
        order, more = list(orders[place.n_stages][place.stage]), {}
        if with_messages:
            more["messages"] = _messages(used, place)
        found = run_schedule(order, stage, place, x, targets, common.loss_function, pieces, **more)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Wrong("not-two", kind="None" if found is None else type(found).__name__)
        events.append(found[1])
        return found[0]

    got = common.run_step(run_schedule, step, rows)
    order = orders[dist.get_world_size()][got["stage"]]
    return got | {"order": order, "events": events[0], "messages": len(used)}


def _other_order(got, at) -> dict:
    """Fields: what a stage did, as what it ran on tells, and what the list says; {} where they agree."""
    numbers, kinds, order = common.firsts(at), [kind for kind, _, _ in got["seen"]], got["order"]
    for (kind, k), (_, _, first) in zip(order, got["seen"]) if len(kinds) == len(order) else []:
        found = next((j for j, number in enumerate(numbers) if close(first, number, 1e-6)), k)
        if found != k:
            return {"expected": f"{kind} {k}", "got": f"{kind} {found}"}
    due = [kind for kind, _ in order]
    return {} if kinds == due else {"got": " ".join(kinds), "expected": " ".join(due)}


def _wrong_events(got) -> str:
    """What the events don't tell as it was done, in words."""
    try:
        told = [(who, kind, k, stage) for who, kind, k, stage, _, _ in got["events"]]
        forward = all(begin <= end for *_, begin, end in got["events"])
    except (TypeError, ValueError):
        return "each is (rank, kind, k, stage, begin, end)"
    due = [(got["rank"], kind, k, got["stage"]) for kind, k in got["order"]]
    if told != due:
        other = (f"(rank, kind, k, stage) is {a} where it was {b}" for a, b in zip(told, due) if a != b)
        return next(other, f"there are {len(told)} of them for {len(due)} actions")
    return "" if forward else "one ends before it begins"


def _events(got, _):
    return {"error": _wrong_events(got), "got": got["events"]}


FOLLOWED = [
    stage_look(itself, lambda got, at: not _other_order(got, at), "other-order", _other_order),
    stage_look(itself, lambda got, _: not _wrong_events(got), "events-wrong", _events),
]
MESSAGES = stage_look("messages", lambda n, at: n == 4 * ((at.stage > 0) + (not at.last)), "messages-ignored")


def _in_lanes(gpu, run_schedule):
    """1F1B on two ranks: the messages of this one."""
    rank = dist.get_rank()
    stage, x = nn.Linear(8, 8).to(launch.device()), torch.ones(4, 8, device=launch.device())
    run_schedule(planner.one_f_one_b(2, 2)[rank], stage, common.Place(rank, 2), x, x, common.loss_function, 2)
    return gpu.messages
