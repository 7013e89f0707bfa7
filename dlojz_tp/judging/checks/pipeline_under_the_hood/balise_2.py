"""Balise 2: activations and gradients between neighbours."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, judged, within
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import Place, on_ranks, stage_look, stage_mistake
from dlojz_tp.judging.checks.pipeline_under_the_hood.sends import TAGS, Sends, in_lanes, tags_that_differ
from dlojz_tp.judging.probes.gpus import NO_BACKEND
from dlojz_tp.judging.probes.ranks import hung
from dlojz_tp.judging.probes.traffic import Traffic, volume
from dlojz_tp.measure import LiveBytes

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
CASES = {
    "plain": ((4, 3), F32), "double": ((4, 3), F64), "half": ((4, 3), BF16), "fp16": ((4, 3), torch.float16), "tokens": ((4, 3), I64), "row": ((5,), F32),
    "three": ((2, 3, 4), F64), "six": ((1, 2, 1, 3, 2, 2), F32), "turned": ((3, 5), F32), "turned back": ((3, 5), F64),
    "large": ((256, 512), F32),
}  # fmt: skip
KNOWN = (
    ("only Tensors of floating point", "integers-no-gradient"),
    ("Only Tensors of floating point", "integers-no-gradient"),
)


def balise_2(send_activation, receive_activation, send_gradient, receive_gradient):
    """Tensors of many shapes and dtypes along a chain of ranks, and their gradients back."""
    answers = (send_activation, receive_activation, send_gradient, receive_gradient)
    claims = (
        "along 2, 3 and 4 ranks and back, each kind in its lane, in order whatever the tags: shapes, dtypes, a transposed tensor",
        "tags handed on; no more bytes than needed, no needless copy, nothing kept",
    )
    yield claims[0]
    worlds = _run(answers)
    for claim, looks in zip(claims, (RIGHT, CHEAP), strict=True):
        for size, ranks in worlds.items():
            for rank, case, got in ((rank, *pair) for rank, found in enumerate(ranks) for pair in found.items()):
                at = _at(rank, size, case)
                here = [replace(look, claim=claim) for look in looks if look.see in got]
                yield from judged(here, lambda got=got: got, at=at, where=at.where) if here else ()
    yield "neighbours that send to each other at the same moment, each with a GPU"
    in_lanes(_both_ways, answers, known=((hung, "send-waits"), (NO_BACKEND, "message-not-on-gpu")))


def _run(answers):
    """All cases; where they fail, find out which property was the reason."""
    try:
        return on_ranks(_chain, answers, list(CASES), sizes=(2, 3, 4), known=KNOWN)
    except (launch.RankError, Wrong) as error:
        known = isinstance(error, Wrong) and error.slug not in ("ranks-hang", "sizes-differ")
        if known:
            raise
        if not _passes(answers, ["plain"]):
            if _passes(answers, ["plain"], tags=True):
                raise Wrong("order-not-kept") from None
            raise
        message = error.fields.get("error", "") if isinstance(error, Wrong) else error.summary
        for cases, slug in (
            (["double", "half", "fp16"], "dtype-not-sent"),
            (["row", "six"], "shape-not-sent"),
            (["turned"], "not-contiguous"),
            (["turned back"], "gradient-not-contiguous"),
        ):
            if not _passes(answers, cases):
                raise Wrong(slug, error=message, got=message) from None
        raise


def _passes(answers, cases, tags=False):
    try:
        on_ranks(_chain, answers, cases, tags, sizes=(2,), timeout=3)
    except (launch.RankError, Wrong):
        return False
    return True


def given(case, rank):
    """What a rank sends."""
    shape, dtype = CASES[case]
    generator = torch.Generator().manual_seed(10 * rank + len(case))
    if dtype == I64:
        return torch.randint(50_000, shape, generator=generator)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.t() if case.startswith("turned") else x


def _started(send, *args):
    """What a send returned, and a look at its works; one that was waited for inside cannot be waited for again: gloo would
    wait for ever."""
    sends = Sends()
    with sends.watched(send):
        works = send(*args)
    if not all(sends.open.values()) and isinstance(works, list | tuple):
        raise Wrong("send-waits")
    return works, sends


def _works(works, sends):
    """Wait for what a send returned."""
    if not isinstance(works, list | tuple) or not all(hasattr(work, "wait") for work in works) or not works:
        raise Wrong("no-works", kind="one work alone" if hasattr(works, "wait") else f"{works!r:.60}")
    for work in works:
        work.wait()
    if any(sends.open.values()):
        raise Wrong("work-dropped", n=len(sends.open), got=sum(work is None for work in sends.open.values()))


def _received(receive, *args):
    """What a receive returned, once it is there."""
    sends = Sends()
    with sends.watched(receive):
        got = receive(*args)
    if any(sends.receiving.values()):
        raise Wrong("receive-not-waited", name=getattr(receive, "__name__", "the receive"))
    return got


def _chain(answers, cases, tags=False):
    """On a rank: send to the next one, receive from the one before; then the gradients, the other way."""
    Sends.tags = tags
    send_activation, receive_activation, send_gradient, receive_gradient = answers
    rank = dist.get_rank()
    place = Place(rank, dist.get_world_size())  # neighbours whose numbers do not follow each other
    before, behind = place.before, place.behind
    found = {}
    for tag, case in enumerate(cases):
        got = found[case] = {"sent": 0, "returned": 0, "peaks": {}}

        def making(name, call, *args, got=got):
            with LiveBytes() as live:
                made = call(*args)
            got["peaks"][name] = live.peak
            return made

        works = output = received = None
        if behind is not None:
            leaf = given(case, rank).to(launch.device())
            output = leaf.requires_grad_() * 1 if leaf.is_floating_point() else leaf
            with Traffic() as log:
                works = making("send_activation", _started, send_activation, output, behind, tag)
            got |= {"sent": volume(log.events)} | ({"graph": output.requires_grad} if leaf.is_floating_point() else {})
        if before is not None:
            received = making("receive_activation", _received, receive_activation, before, tag)
            _can_learn(received)
            got |= {"values": received.detach().cpu(), "dtype": received.dtype}
        if behind is not None:
            _works(*works)
        works = None
        if received is not None and received.is_floating_point():
            gradient = _gradient(case, rank).to(launch.device())
            received.grad = gradient.t().contiguous().t() if case == "turned back" else gradient
            with Traffic() as log:
                works = making("send_gradient", _started, send_gradient, received, before, tag)
            got["returned"] = volume(log.events)
            if works[0] is None:
                _works(*works)
        if output is not None and output.is_floating_point():
            back = making("receive_gradient", _received, receive_gradient, output, behind, tag)
            got |= {"gradient": back.detach().cpu(), "gradient asks": back.requires_grad}
        if works is not None:
            _works(*works)
        works = back = None
        if case == "large":
            got["kept"] = _kept(output, received)
        output = received = leaf = gradient = None
        dist.barrier()
        if case == "large":
            gc.collect()
            got["kept"] = [what for what, reference in got["kept"] if not reference.expired()]
    found[cases[0]]["tags"] = tags_that_differ()
    return found


def _can_learn(received):
    """The next stage needs a gradient: without it, the ranks would wait for each other here."""
    if not isinstance(received, torch.Tensor):
        raise Wrong("values-lost", expected="a tensor", got=received)
    if received.is_floating_point():
        if not received.requires_grad:
            raise Wrong("no-gradient-asked")
        if not received.is_leaf:
            raise Wrong("not-a-leaf")


def _kept(output, received):
    return [(what, StorageWeakRef(x.untyped_storage())) for what, x in (("output", output), ("gradient", getattr(received, "grad", None)))
            if x is not None]  # fmt: skip


def _gradient(case, rank):
    shape, dtype = CASES[case]
    generator = torch.Generator().manual_seed(1000 + rank + len(case))
    gradient = torch.randn(shape[::-1] if case.startswith("turned") else shape, generator=generator)
    return gradient.to(dtype)


def _at(rank, size, case):
    """A rank's place in a chain, and what travels there."""
    place, (form, dtype) = Place(rank, size), CASES[case]
    exact = torch.Size(form).numel() * dtype.itemsize
    where = f"rank {rank} of {size}, {dtype} of shape {form}".replace("torch.", "")
    return SimpleNamespace(rank=rank, case=case, before=place.before, behind=place.behind, exact=exact, where=where)


def _other_gradient(got, at):
    due = _gradient(at.case, at.behind)
    if close(got, due, 1e-6):
        return None
    slug = "activation-sent-back" if close(got, given(at.case, at.rank), 1e-6) else "wrong-gradient-came"
    return slug, {"expected": due, "got": got}


def _arrived(dtype, _):
    return {"error": f"{dtype} arrived"}


def _copied(peaks, at) -> dict:
    """Fields: the first function that made more than it needs of a large message; {} if none did."""
    most = {name: at.exact * (1.5 if name.startswith("receive") else 0.5) for name in peaks}
    large = ({"name": name, "peak": peak, "held": at.exact} for name, peak in peaks.items() if peak > most[name])
    return next(large, {}) if at.case == "large" else {}


RIGHT = [
    Look("", "values", lambda at: given(at.case, at.before).contiguous(), "values-lost", holds=within(1e-6)),
    Look("", "dtype", lambda at: CASES[at.case][1], "dtype-not-sent", fields=_arrived),
    Look("", "graph", True, "output-cut"),
    stage_mistake("gradient", _other_gradient),
    Look("", "gradient asks", False, "gradient-asks"),
]
CHEAP = [
    TAGS,
    stage_look("sent", lambda sent, at: sent <= at.exact + 256, "header-large", "got"),
    stage_look("returned", lambda sent, at: sent <= at.exact, "gradient-header", "got"),
    stage_look("peaks", lambda peaks, at: not _copied(peaks, at), "needless-copy", _copied),
    Look("", "kept", [], "kept", fields=lambda kept, _: {"what": kept[0]}),
]


def _both_ways(gpu, answers):
    send_activation, receive_activation, send_gradient, receive_gradient = answers
    x = torch.ones(2, 3, device=launch.device())
    if dist.get_rank() == 0:
        works = send_activation(x, 1, 1)
        receive_gradient(x, 1, 2)
    else:
        received = x.requires_grad_()
        received.grad = torch.ones_like(x)
        works = send_gradient(received, 0, 2)
        receive_activation(0, 1)
    for work in works:
        work.wait()
    return gpu.messages
