"""Balise 2: activations and gradients between neighbours."""

import gc

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.pipeline_under_the_hood.common import Place, on_ranks
from dlojz_tp.checks.pipeline_under_the_hood.sends import Sends, in_lanes, right_tags, tags_that_differ
from dlojz_tp.measure import LiveBytes
from dlojz_tp.probes.gpus import NO_BACKEND
from dlojz_tp.probes.ranks import hung
from dlojz_tp.probes.traffic import Traffic, volume

HINTS = {
    "no-works": "send_activation and send_gradient return the list of sends that they started, each with a wait(), "
    "as dist.isend returns them. You returned {kind}. The caller joins these lists.",
    "work-dropped": "{n} sends were started, but only {got} of them can be waited for. Return the works of all of "
    "them, including the header's. A message whose work is dropped may be lost.",
    "receive-not-waited": "{name} returned before the message had arrived: dist.irecv only starts the receive. "
    "Call wait() on what it returns, or use dist.recv.",
    "no-gradient-asked": "The received tensor doesn't require a gradient, so nothing could be sent back. Call "
    "requires_grad_() on it, after it has arrived.",
    "not-a-leaf": "The received tensor isn't a leaf, so its .grad stays empty: ask for the gradient last, on the "
    "buffer itself.",
    "integers-no-gradient": "Integers, such as token numbers, can't have a gradient: {error}. Ask for one only "
    "when the dtype is a floating-point one.",
    "dtype-not-sent": "It fails for dtypes other than float32 ({error}). The receiver must learn the dtype and "
    "make its buffer with it.",
    "shape-not-sent": "It fails for shapes other than (4, 3) ({error}). Send the number of dimensions and all "
    "sizes; 1 to 6 dimensions are possible.",
    "not-contiguous": "A transposed tensor can't be sent as it is, nor received into a buffer like it: {error}. "
    "contiguous() gives a tensor that can be sent; torch.contiguous_format gives a buffer that "
    "can receive.",
    "gradient-not-contiguous": "The gradient of the received tensor may be a transposed view: {error}. Call "
    "contiguous() here too.",
    "values-lost": "What arrives isn't what was sent.",
    "activation-sent-back": "You sent the activation itself back. Its gradient is in received.grad.",
    "wrong-gradient-came": "The gradient that arrived isn't the gradient of the received tensor.",
    "output-cut": "After sending, the output has lost its graph: detach() makes a new tensor, detach_() cuts this one.",
    "gradient-asks": "The received gradient requires a gradient itself. It must be a plain buffer.",
    "needless-copy": "{name} made {peak} bytes of new tensors for a contiguous message of {held} bytes. Sending "
    "needs none, because detach() and contiguous() copy nothing then; receiving needs only its "
    "buffer.",
    "kept": "The {what} is still in memory after it was sent and dropped: something keeps it alive.",
    "gradient-header": "A gradient of {exact} bytes was sent as {got} bytes. It has the shape and dtype of the "
    "activation, which the receiver knows: send nothing else.",
    "header-large": "{got} bytes were sent for an activation of {exact} bytes. The header is a few whole numbers, and the values "
    "travel as they are.",
    "send-waits": "Two neighbours send to each other at the same moment, one an activation, the other a gradient, "
    "and both wait forever. Here you may only start sends: dist.send, or a wait() inside, blocks "
    "until the other side receives.",
    "order-not-kept": "It works only where tags tell messages apart, but NCCL ignores tags. In each lane, what is "
    "sent first is received first: shape and dtype before the values, from the peer that is "
    "named, in the lane in which they were sent.",
    "message-not-on-gpu": "On GPUs, a message is in the CPU's memory, and NCCL can't send from there: {error}. "
    "Whatever you send must be on the activation's device, including the header; whatever "
    "you receive, on launch.device().",
}
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
    yield "along 2, 3 and 4 ranks and back, each kind in its lane, in order whatever the tags: shapes, dtypes, a transposed tensor"
    worlds = _run(answers)
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            for case, got in found.items():
                _right(
                    case,
                    got,
                    f"rank {rank} of {size}, {CASES[case][1]} of shape {CASES[case][0]}".replace("torch.", ""),
                )
    yield "tags handed on; no more bytes than needed, no needless copy, nothing kept"
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            for case, got in found.items():
                _cheap(
                    case,
                    got,
                    f"rank {rank} of {size}, {CASES[case][1]} of shape {CASES[case][0]}".replace("torch.", ""),
                )
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
            got |= {"sent": volume(log.events), "graph": output.requires_grad}
        if before is not None:
            received = making("receive_activation", _received, receive_activation, before, tag)
            _can_learn(received)
            truth = given(case, before)
            got |= {
                "values": received.detach().cpu() if isinstance(received, torch.Tensor) else received,
                "truth": truth.contiguous(),
            }  # fmt: skip
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
            got |= {
                "gradient": back.detach().cpu(),
                "gradient asks": back.requires_grad,
                "gradient truth": _gradient(case, behind),
            }
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


def _right(case, got, where):
    floating = CASES[case][1].is_floating_point
    if "values" in got:
        if not close(got["values"], got["truth"], 1e-6):
            raise Wrong("values-lost", expected=got["truth"], got=got["values"], where=where)
        if got["values"].dtype != got["truth"].dtype:
            raise Wrong("dtype-not-sent", error=f"{got['values'].dtype} arrived", where=where)
    if floating and "graph" in got and not got["graph"]:
        raise Wrong("output-cut", where=where)
    if "gradient" in got:
        if not close(got["gradient"], got["gradient truth"], 1e-6):
            own = given(case, int(where.split()[1]))
            slug = "activation-sent-back" if close(got["gradient"], own, 1e-6) else "wrong-gradient-came"
            raise Wrong(slug, expected=got["gradient truth"], got=got["gradient"], where=where)
        if got["gradient asks"]:
            raise Wrong("gradient-asks", where=where)


def _cheap(case, got, where):
    shape, dtype = CASES[case]
    exact = torch.Size(shape).numel() * dtype.itemsize
    right_tags(got.get("tags"), where.split(",")[0])
    if got["sent"] > exact + 256:
        raise Wrong("header-large", got=got["sent"], exact=exact, where=where)
    if got["returned"] > exact:
        raise Wrong("gradient-header", got=got["returned"], exact=exact, where=where)
    if case == "large":
        for name, peak in got["peaks"].items():
            if peak > exact * (1.5 if name.startswith("receive") else 0.5):
                raise Wrong("needless-copy", name=name, held=exact, peak=peak, where=where)
        if got["kept"]:
            raise Wrong("kept", what=got["kept"][0], where=where)


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
