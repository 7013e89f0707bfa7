"""Balise 2: validation over ranks, exact where the data set does not divide."""

import contextlib
import itertools
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.ranks import on_ranks
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.judging.probes.withheld import Withheld

SIZES = (23, 8, 2)  # uneven everywhere, even, and fewer samples than ranks
BATCH = 3  # samples of a rank's batch
EVEN = 8  # here the network is in eval mode before, and stays there


class Items(Dataset):
    """`n` items (x, label); remembers which were asked for."""

    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.x = torch.randn(n, 4, generator=generator)
        self.y = torch.arange(n) % 3
        self.asked = []

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        self.asked.append(int(index))
        return self.x[index], self.y[index]


class Network(nn.Module):
    """A linear classifier with dropout; remembers (training, gradients recorded, samples) of each call."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.drop, self.calls = nn.Dropout(0.5), []

    def forward(self, x):
        self.calls.append((self.training or self.drop.training, torch.is_grad_enabled(), len(x)))
        return self.drop(x) @ self.weight


def observe(evaluate, sizes=SIZES):
    """On a rank, for each data set: what came back, and what was done for it."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as if each had a node of its own
    found = {}
    for n in sizes:
        data, model = Items(n), Network().train(n != EVEN)
        with Withheld() as running, Traffic() as traffic:
            answer = evaluate(model, data, BATCH)
        running.left()
        words = {True: "training", False: "eval"}
        found[n] = {
            "answer": answer, "asked": data.asked, "read": len(data.asked), "sent": traffic.volume(),
            "messages": (len(traffic.names()), -(-len(data.asked) // BATCH)),  # and the number of batches
            "trained": any(training for training, *_ in model.calls), "recorded": any(call[1] for call in model.calls),
            "largest": max((samples for *_, samples in model.calls), default=0),
            "changed": [(f"Its submodule {name}" if name else "The network", words[n != EVEN], words[module.training])
                        for name, module in model.named_modules() if module.training != (n != EVEN)],
        }  # fmt: skip
    return found


def _on_gpu(_, evaluate):
    evaluate(Network().to(launch.device()), Items(EVEN), BATCH)


def _truth(n, numbers=None):
    data, model = Items(n), Network().double().eval()
    numbers = range(n) if numbers is None else numbers
    x, y = data.x[list(numbers)].double(), data.y[list(numbers)]
    with torch.no_grad():
        logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item()


def _mistake(answer, n, rank, ranks, due):
    """The hint for a wrong answer of a rank: by the samples that were read, and what was made of them."""
    shares = [found[n]["asked"] for found in ranks]
    everything = [number for share in shares for number in share]
    parts = [share[i : i + BATCH] for share in shares for i in range(0, len(share), BATCH)]

    def is_of(numbers, times=1):
        return close(answer, [value * times for value in _truth(n, numbers)], 1e-5)

    def is_mean_of(parts):
        return close(answer, [sum(values) / len(parts) for values in zip(*(_truth(n, part) for part in parts))], 1e-5)

    if rank and close(ranks[0][n]["answer"], due, 1e-5):
        return "one-rank-knows"
    if len(ranks) > 1 and 0 < len(shares[0]) < n and all(share == shares[0] for share in shares):
        return "same-share"
    if len(ranks) > 1 and shares[rank] and is_of(shares[rank]):
        return "own-share-only"
    if len(everything) > n and (is_of(everything) or is_of(everything, len(everything) / n)):
        return "padding-counted"
    nominal = sum(_truth(n, part)[0] for part in parts) * BATCH / n
    if close(answer[0], nominal, 1e-5) and not close(nominal, due[0], 1e-5):
        return "last-batch-nominal"
    if not is_of(everything) and is_mean_of([share for share in shares if share]):
        return "means-averaged"
    if len(set(everything)) < min(n, len(everything)):
        return "cut-differently"
    if len(set(everything)) < n:
        return "samples-not-seen" if 0 not in everything and is_of(everything) else "tail-not-seen"
    # one rank: what is left is how the batches were put together
    return "means-averaged" if len(ranks) == 1 and is_mean_of(parts) else "wrong-metric"


def _named(seen, due):
    """The hint for a wrong answer."""
    (loss, accuracy), n, _, ranks = seen
    if (slug := _mistake(*seen, due)) != "wrong-metric":
        return slug
    if any(found[n]["trained"] for found in ranks):
        return "evaluate-train-mode"  # dropout at work
    if close(accuracy, due[1], 1e-5):
        return "loss-alone-wrong"
    if close(loss, due[0], 1e-5):
        return "accuracy-alone-wrong"
    if loss and close(accuracy, due[1] * loss / due[0], 1e-5):
        return "divided-by-another-count"
    return slug if ranks[0][SIZES[0]]["messages"][0] <= 3 else "message-each-batch"


def _about(seen, due):
    answer, n, _, ranks = seen
    calls, batches = ranks[0][SIZES[0]]["messages"]
    return {"got": answer, "n": n, "found": n * due[0] / answer[0] if answer[0] else 0.0, "size": len(ranks),
            "read": ranks[0][n]["read"], "calls": calls, "batches": batches}  # fmt: skip


def _two_floats(got, _):
    return isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(value, float) for value in got)


def _fair(n, size):
    return -(-n // size)


def _largest_share(at):  # samples, ranks
    return max(_fair(*at), sum(divmod(*at)))


def _told(*names, **more):
    """A look's `fields`: what was seen, item by item, under these names; no values."""
    return lambda got, due: dict(zip(names, got)) | more | silent(got, due)


CLAIM = "{} samples over 1, 2, 3 and 4 ranks: loss and accuracy of all of them, on every rank"
VALUES = {n: [
    Look(CLAIM.format(n), "answer", "two floats: loss, accuracy", "evaluate-not-two", holds=_two_floats),
    Look("", "all", _truth(n), _named, holds=lambda seen, due: close(seen[0], due, 1e-5), fields=_about),
] for n in SIZES}  # fmt: skip
EMPTY = [recognised(CLAIM.format(SIZES[-1]), lambda error: (
    "empty-share-fails", {"size": error.world_size, "error": error.summary}))]  # fmt: skip
WORK = [
    each_rank("each rank goes through its own share, in eval mode, without recording gradients",
              "trained", False, "evaluate-train-mode", fields=silent),
    each_rank("", "changed", [], "mode-not-restored",
              fields=lambda got, due: dict(zip(("what", "before", "after"), got[0])) | silent(got, due)),
    each_rank("", "recorded", False, "evaluate-records", fields=silent),
    each_rank("", "share", _largest_share, "whole-set-everywhere",
              holds=lambda got, due: got[0] <= due, fields=_told("read", "n", "fair")),
]  # fmt: skip
MESSAGES = [
    each_rank("a few bytes are exchanged, however many batches there are", "messages", 3, "message-each-batch",
              holds=lambda got, due: got[0] <= due, fields=_told("calls", "batches")),
    each_rank("", "both sent", 2048, "results-gathered", fields=_told("sent", "fewer", n=SIZES[0], few=EVEN),
              holds=lambda got, due: got[0] <= min(got[1] + 16, due)),  # all_gather_object needs some hundred bytes
    each_rank("", "largest", BATCH, "batch-size-ignored",  # every share is larger
              fields=lambda got, due: {"found": got, "wanted": due} | silent(got, due)),
]  # fmt: skip


def _worlds(evaluate):
    """(the sizes of the data sets, what the ranks of each world saw, the error where a rank has no sample)."""
    try:
        return SIZES, on_ranks(observe, evaluate, timeout=20), None
    except launch.RankError as error:
        # where ranks fail together, one alone may tell that they exchange in each batch: they have not equally many
        with contextlib.suppress(launch.RankError):
            alone = on_ranks(observe, evaluate, SIZES[:1], sizes=(1,), timeout=10)[1]
            list(judged(MESSAGES[:1], lambda: [alone[0][SIZES[0]]]))
        if error.kind != "raised" or type(error.cause) not in (ZeroDivisionError, IndexError, ValueError):
            raise
        return SIZES[:-1], on_ranks(observe, evaluate, SIZES[:-1], timeout=20), error


def balise_2(evaluate):
    """Three data sets in worlds of 1 to 4, against one process in float64."""
    yield CLAIM.format(SIZES[0])
    sizes, worlds, empty = _worlds(evaluate)
    for n, (size, ranks) in itertools.product(sizes, worlds.items()):
        for rank, answer in enumerate(found[n]["answer"] for found in ranks):
            seen = {"answer": answer, "all": (answer, n, rank, ranks)}
            yield from judged(VALUES[n], lambda seen=seen: seen, where=f"rank {rank} of {size}, {n} samples")
    if empty:
        yield from judged(EMPTY, lambda: empty)
    for (size, ranks), n in itertools.product(worlds.items(), sizes):
        seen = [found[n] | {"share": (found[n]["read"], n, _fair(n, size))} for found in ranks]
        yield from judged(WORK, lambda seen=seen: seen, at=(n, size))
    for ranks in worlds.values():
        seen = [found[SIZES[0]] | {"both sent": (found[SIZES[0]]["sent"], found[EVEN]["sent"])} for found in ranks]
        yield from judged(MESSAGES, lambda seen=seen: seen)
    yield "the same where each of two ranks has a GPU"
    on_gpus(_on_gpu, evaluate, known=left_on_cpu("evaluate-not-on-gpu"))
