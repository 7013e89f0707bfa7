"""Balise 6: any valid schedule, on real ranks."""

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch, planner
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.pipeline_under_the_hood.common import (
    WIDTHS,
    Place,
    bounds,
    firsts,
    loss_function,
    on_ranks,
    right_step,
    run_step,
)
from dlojz_tp.checks.pipeline_under_the_hood.sends import in_lanes
from dlojz_tp.checks.pipeline_under_the_hood.steps import case, right_rows
from dlojz_tp.checks.pipeline_under_the_hood.timing import judged, on_the_clock
from dlojz_tp.probes.gpus import left_on_cpu
from dlojz_tp.probes.ranks import hung

HINTS = {
    "not-two": "Return a pair: the loss and the list of events. You returned {kind}.",
    "other-order": "Stage {stage} did {got}, but the list says {expected}. Only the list says what is done, and "
    "when. Look up what you keep of a micro-batch by its number k.",
    "events-wrong": "The events don't tell what was done: {error}.",
    "waits-for-send": "A message was never received, or never sent: {error}. In 1F1B two neighbours send to each "
    "other at the same moment; a rank that waits for its send at once waits forever. And each "
    "forward's activation is answered by one gradient, from the next stage.",
    "in-order-only": "This is right when the micro-batches come as 0, 1, 2, … and wrong when the list names them "
    "in another order: {error}. Look up a micro-batch's rows, its targets and what you keep of it "
    "by its number k.",
    "messages-ignored": "When `messages` is given, send and receive activations with its two functions: send, "
    "receive = messages or (send_activation, receive_activation).",
}


def balise_6(run_schedule):
    """GPipe, 1F1B and odd orders on 1 to 4 stages; events; memory; the order of messages."""
    yield "GPipe and 1F1B on 1, 2, 3 and 4 stages: loss and every gradient, even and uneven micro-batches"
    cases = [({n: getattr(planner, name)(n, 4) for n in (1, 2, 3, 4)}, rows) for name, rows in _USUAL]
    try:
        found = on_ranks(_steps, run_schedule, cases, known=_BLOCKED)
    except launch.RankError as error:  # does it run where the batch divides?
        on_ranks(_steps, run_schedule, cases[:1], known=_BLOCKED, sizes=(1, 2))
        raise Wrong("uneven-fails", error=error.summary, got=error.summary, rows=9, cut="3, 2, 2, 2") from None
    for number, (orders, rows) in enumerate(cases):
        worlds = case(found, number)
        _followed(worlds, orders, rows)
        right_rows(worlds, rows, 4)
        right_step(worlds, rows, 4, even=rows % 4 == 0)
    yield (
        "micro-batches in the order 2, 0, 3, 1 forward and 0, 3, 2, 1 back, with other functions for sending "
        "and receiving"
    )
    odd = {3: [_odd(stage, 3) for stage in range(3)]}
    more = {"sizes": (3,), "known": ((hung, "in-order-only"),)}
    try:
        found = on_ranks(_steps, run_schedule, [(odd, 12)], True, **more)
    except (launch.RankError, Wrong):  # does it run with its own functions, and mixes them with the others?
        on_ranks(_steps, run_schedule, [(odd, 12)], **more)
        raise Wrong("messages-ignored", where="3 stages") from None
    worlds = case(found, 0)
    try:
        _followed(worlds, odd, 12)
        right_step(worlds, 12, 4)
    except Wrong as wrong:
        slugs = ("wrong-gradients", "gradient-of-another", "wrong-loss", "other-order")
        raise (Wrong("in-order-only", error="wrong values") if wrong.slug in slugs else wrong) from None
    for stage, got in enumerate(worlds[3]):
        if got["messages"] != 4 * ((stage > 0) + (stage < 2)):
            raise Wrong("messages-ignored", where=f"stage {stage} of 3")
    ranks = on_ranks(on_the_clock, run_schedule, sizes=(2,), known=_BLOCKED)[2]
    yield "events: one per action, with only the computing in it; activations freed in their backward"
    judged(ranks)
    yield "1F1B on two stages, each with a GPU"
    in_lanes(_in_lanes, run_schedule, known=left_on_cpu("step-not-on-gpu"))


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
        width = WIDTHS[bounds(place.n_stages)[place.stage][0]]
        received = torch.empty(3, width, dtype=torch.float64, device=launch.device())
        dist.recv(received, peer, launch.lane("activations"), tag=tag)
        return received.requires_grad_()

    return send, receive


def _steps(run_schedule, cases, with_messages=False):
    return [_step(run_schedule, orders, rows, 4, with_messages) for orders, rows in cases]


def _step(run_schedule, orders, rows, pieces, with_messages):
    events, used = [], []

    def step(stage, place, x, targets):
        order, more = list(orders[place.n_stages][place.stage]), {}
        if with_messages:
            more["messages"] = _messages(used, place)
        found = run_schedule(order, stage, place, x, targets, loss_function, pieces, **more)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Wrong("not-two", kind="None" if found is None else type(found).__name__)
        events.append(found[1])
        return found[0]

    return run_step(run_schedule, step, rows) | {"events": events[0], "messages": len(used)}


def _followed(worlds, orders, rows):
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            where, order = f"stage {rank} of {size}", orders[size][rank]
            kinds = [kind for kind, _, _ in got["seen"]]
            numbers = firsts(rank, size, rows, 4)
            for (kind, k), (_, _, first) in zip(order, got["seen"], strict=False):
                found = next((j for j, number in enumerate(numbers) if close(first, number, 1e-6)), k)
                if found != k and len(kinds) == len(order):
                    raise Wrong("other-order", stage=rank, expected=f"{kind} {k}", got=f"{kind} {found}", where=where)
            if kinds != [kind for kind, _ in order]:
                raise Wrong(
                    "other-order", stage=rank, got=" ".join(kinds), expected=" ".join(k for k, _ in order), where=where
                )
            try:
                told = [(who, kind, k, stage) for who, kind, k, stage, _, _ in got["events"]]
                forward = all(begin <= end for *_, begin, end in got["events"])
            except (TypeError, ValueError):
                error = "each is (rank, kind, k, stage, begin, end)"
                raise Wrong("events-wrong", error=error, got=got["events"], where=where) from None
            expected = [(got["rank"], kind, k, rank) for kind, k in order]
            if told != expected:
                pairs = zip(told, expected, strict=False)
                error = f"there are {len(told)} of them for {len(order)} actions"
                error = next((f"(rank, kind, k, stage) is {a} where it was {b}" for a, b in pairs if a != b), error)
                raise Wrong("events-wrong", error=error, expected=expected, got=told, where=where)
            if not forward:
                raise Wrong("events-wrong", error="one ends before it begins", where=where)


def _in_lanes(gpu, run_schedule):
    """1F1B on two ranks: the messages of this one."""
    rank = dist.get_rank()
    stage, x = nn.Linear(8, 8).to(launch.device()), torch.ones(4, 8, device=launch.device())
    run_schedule(planner.one_f_one_b(2, 2)[rank], stage, Place(rank, 2), x, x, loss_function, 2)
    return gpu.messages
