"""Balise 2: validation over ranks, exact where the data set does not divide."""

import contextlib
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close, nearest
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.ranks import on_ranks
from dlojz_tp.probes.traffic import Traffic
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "evaluate-not-two": "Return two Python floats: the mean loss and the accuracy.",
    "padding-counted": "Some samples were counted twice. A DistributedSampler repeats samples until the ranks have "
                       "equally many: right for training, but wrong for a metric.",
    "tail-not-seen": "Some samples were never seen: drop_last, or a division with a remainder, cuts off the tail.",
    "cut-differently": "Some samples were seen twice, others never. All ranks must split the same order, but a "
                       "shuffle draws a different one on each rank.",
    "means-averaged": "This is a mean of means, but the parts differ in size. All-reduce the sums and the number "
                      "of samples, and divide once.",
    "same-share": "All {size} ranks go through the same {read} of {n} samples. Each rank's share must start at the "
                  "rank's own position.",
    "own-share-only": "Each rank reports the result of its own share of the data set.",
    "one-rank-knows": "Rank 0 has the right numbers, but the others do not. All ranks must return them.",
    "whole-set-everywhere": "Rank {rank} went through {read} of {n} samples. With {size} ranks, its share is {fair}.",
    "samples-not-seen": "Some samples were never seen, the first one among them. The share of rank r starts at "
                        "sample r and goes in steps of world_size, or it is the r-th of equal pieces, counted from "
                        "0.",
    "empty-share-fails": "With 2 samples and {size} ranks, some ranks have none: {error}",
    "evaluate-train-mode": "The network ran in training mode. Call eval() first.",
    "mode-not-restored": "{what} was in {before} mode before the call and is in {after} mode after it. Restore the "
                         "mode you found: model.train(mode) reaches submodules, model.training = mode does not.",
    "last-batch-nominal": "The last batch of a rank is smaller than batch_size. Weight a batch's mean by its "
                          "number of samples, len(y).",
    "batch-size-ignored": "The network got {found} samples at once. batch_size is the batch size of one rank, here "
                          "{wanted}: don't divide it by the number of ranks, and don't leave it out.",
    "evaluate-records": "The forward pass recorded the graph for a backward pass. Use torch.inference_mode().",
    "message-each-batch": "You call {calls} collectives for {batches} batches. Add up on each rank first, then "
                          "exchange once: ranks may have different numbers of batches, and then some would wait "
                          "forever.",
    "results-gathered": "A rank sent {sent} bytes for {n} samples, but {fewer} for {few}. Two sums and a count are "
                        "enough.",
    "divided-by-another-count": "The sums are right, but you divide them by {found:g} instead of the {n} samples "
                                "of the data set.",
    "loss-alone-wrong": "The accuracy is right, but the loss is not: it is the mean cross-entropy of all samples.",
    "accuracy-alone-wrong": "The loss is right, but the accuracy is not. It is the fraction of samples, from 0 to "
                            "1, whose largest logit is that of their label.",
    "evaluate-not-on-gpu": "On GPUs, a tensor stays in the CPU's memory: {error}. The model is on this rank's GPU. "
                           "Move samples and labels there (x.to(device)), and the tensor of the sums too, because "
                           "NCCL sends only from the GPU.",
    "wrong-metric": "Loss and accuracy of the whole data set are wrong.",
}

SIZES = (23, 8, 2)  # uneven everywhere, even, and fewer samples than ranks
BATCH = 3  # samples of a rank's batch
EVEN = 8  # here the network is in eval mode before, and stays there


def balise_2(evaluate):
    """Three data sets in worlds of 1 to 4, against one process in float64."""
    torch.set_num_threads(1)  # small truths: threads would only wait for each other; judge() puts the number back
    try:
        worlds = on_ranks(_evaluated, evaluate, timeout=20)
    except launch.RankError as error:
        _right_alone(evaluate)
        if error.kind == "raised" and type(error.cause).__name__ in ("ZeroDivisionError", "IndexError", "ValueError"):
            _right_on_most(evaluate)
            raise Wrong("empty-share-fails", size=error.world_size, error=error.summary) from error
        raise
    for n in SIZES:
        yield f"{n} samples over 1, 2, 3 and 4 ranks: loss and accuracy of all of them, on every rank"
        for size, ranks in worlds.items():
            try:
                _right_values(n, size, [found[n] for found in ranks])
            except Wrong as wrong:
                if wrong.slug == "wrong-metric":
                    _one_exchange(size, 0, ranks[0])
                raise
    yield "each rank goes through its own share, in eval mode, without recording gradients"
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            _right_work(size, rank, found)
    yield "a few bytes are exchanged, however many batches there are"
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            _right_messages(size, rank, found)
    yield "the same where each of two ranks has a GPU"
    on_gpus(_on_gpu, evaluate, known=left_on_cpu("evaluate-not-on-gpu"))


def _right_alone(evaluate):
    """Where ranks fail together, one alone may tell that they exchange in each batch: they have not equally many."""
    with contextlib.suppress(launch.RankError):
        _one_exchange(1, 0, on_ranks(_evaluated, evaluate, SIZES[:1], sizes=(1,), timeout=10)[1][0])


def _right_on_most(evaluate):
    """A share that is lost may show as a division by zero, too: the larger data set tells it better."""
    with contextlib.suppress(launch.RankError):
        for size, ranks in on_ranks(_evaluated, evaluate, SIZES[:1], sizes=(2, 3, 1), timeout=10).items():
            _right_values(SIZES[0], size, [found[SIZES[0]] for found in ranks])


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


def _evaluated(evaluate, sizes=SIZES):
    """On a rank: {n: (answer, asked, calls of the network, names of the collectives, bytes sent, modes after)}."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as if each had a node of its own
    found = {}
    for n in sizes:
        data, model = Items(n), Network().train(n != EVEN)
        with Withheld() as running, Traffic() as traffic:
            answer = evaluate(model, data, BATCH)
        running.left()
        found[n] = (answer, data.asked, model.calls, traffic.names(), traffic.volume(), _modes(model))
    return found


def _on_gpu(_, evaluate):
    evaluate(Network().to(launch.device()), Items(EVEN), BATCH)


def _modes(model):
    return {
        f"Its submodule {name}" if name else "The network": module.training for name, module in model.named_modules()
    }


def _truth(n, numbers=None):
    data, model = Items(n), Network().double().eval()
    numbers = range(n) if numbers is None else numbers
    x, y = data.x[list(numbers)].double(), data.y[list(numbers)]
    with torch.no_grad():
        logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item()


def _right_values(n, size, ranks):
    wanted = _truth(n)
    answers = [found[0] for found in ranks]
    for rank, answer in enumerate(answers):
        where = f"rank {rank} of {size}, {n} samples"
        if answer is None:
            raise Wrong("nothing-returned")
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise Wrong("evaluate-not-two", expected="(loss, accuracy)", got=answer, where=where)
        if not all(isinstance(value, float) for value in answer):
            raise Wrong("evaluate-not-two", expected="two floats", got=answer, where=where)
        if close(answer, wanted, 1e-5):
            continue
        slug = _mistake(n, rank, ranks, wanted)
        if slug == "wrong-metric" and any(training for found in ranks for training, *_ in found[2]):
            slug = "evaluate-train-mode"  # dropout at work
        count = 0.0
        if slug == "wrong-metric":
            slug, count = _named(n, answer, wanted)
        raise Wrong(
            slug, expected=wanted, got=answer, where=where, found=count, n=n, size=len(ranks), read=len(ranks[0][1])
        )


def _named(n, answer, wanted):
    """Which of the two numbers is wrong, or by which count both were divided."""
    loss_right, accuracy_right = (close(a, w, 1e-5) for a, w in zip(answer, wanted))
    if accuracy_right:
        return "loss-alone-wrong", 0.0
    if loss_right:
        return "accuracy-alone-wrong", 0.0
    factor = answer[0] / wanted[0]
    count = n / factor if factor else 0.0
    if count and close(answer[1], wanted[1] * factor, 1e-5):
        return "divided-by-another-count", count
    return "wrong-metric", 0.0


def _mistake(n, rank, ranks, wanted):
    answer = ranks[rank][0]
    asked = [found[1] for found in ranks]
    shares = [share for share in asked if share]
    everything = [number for share in asked for number in share]
    if rank and close(ranks[0][0], wanted, 1e-5):
        return "one-rank-knows"
    if len(ranks) > 1 and 0 < len(asked[0]) < n and all(share == asked[0] for share in asked):
        return "same-share"
    if len(ranks) > 1 and asked[rank] and close(answer, _truth(n, asked[rank]), 1e-5):
        return "own-share-only"
    again = len(everything) / n
    if again > 1 and any(close(answer, [value * k for value in _truth(n, everything)], 1e-5) for k in (1, again)):
        return "padding-counted"
    each = [_truth(n, share) for share in shares]
    parts = [share[i : i + BATCH] for share in shares for i in range(0, len(share), BATCH)]
    nominal = sum(_truth(n, part)[0] for part in parts) * BATCH / n
    if close(answer[0], nominal, 1e-5) and not close(nominal, wanted[0], 1e-5):
        return "last-batch-nominal"
    known = {}
    if set(everything) != set(range(n)):
        known["tail-not-seen"] = _truth(n, everything)
    elif len(everything) > n:
        known["padding-counted"] = _truth(n, everything)
    known["means-averaged"] = tuple(sum(values) / len(each) for values in zip(*each))
    slug = nearest(answer, known, "wrong-metric", 1e-5)
    if slug in ("tail-not-seen", "wrong-metric") and len(set(everything)) < min(n, len(everything)):
        return "cut-differently"
    if slug == "tail-not-seen" and 0 not in everything:
        return "samples-not-seen"
    if slug == "wrong-metric" and len(set(everything)) < n:
        return "tail-not-seen"
    if slug == "wrong-metric" and len(ranks) == 1:  # one rank: what is left is how the batches were put together
        batches = [_truth(n, asked[0][i : i + BATCH]) for i in range(0, n, BATCH)]
        return nearest(answer, {"means-averaged": tuple(sum(v) / len(batches) for v in zip(*batches))}, slug, 1e-5)
    return slug


def _right_work(size, rank, found):
    for n in SIZES:
        _, asked, calls, *_, modes = found[n]
        where, fair = f"rank {rank} of {size}, {n} samples", -(-n // size)
        if any(mode for mode, *_ in calls):
            raise Wrong("evaluate-train-mode", where=where)
        if changed := [name for name, mode in modes.items() if mode != (n != EVEN)]:
            before, after = ("eval", "training") if n == EVEN else ("training", "eval")
            raise Wrong("mode-not-restored", where=where, what=changed[0], before=before, after=after)
        if any(grad for _, grad, _ in calls):
            raise Wrong("evaluate-records", where=where)
        if len(asked) > max(fair, n // size + n % size):
            raise Wrong("whole-set-everywhere", where=where, rank=rank, read=len(asked), n=n, size=size, fair=fair)


def _one_exchange(size, rank, found):
    _, asked, _, names, *_ = found[SIZES[0]]
    if len(names) > 3:
        where = f"rank {rank} of {size}, {SIZES[0]} samples"
        raise Wrong("message-each-batch", where=where, calls=len(names), batches=-(-len(asked) // BATCH))


def _right_messages(size, rank, found):
    _one_exchange(size, rank, found)
    where = f"rank {rank} of {size}, {SIZES[0]} samples"
    sent, fewer = found[SIZES[0]][4], found[EVEN][4]
    if sent > fewer + 16 or sent > 2048:  # all_gather_object needs some hundred bytes, however many samples there are
        raise Wrong("results-gathered", where=where, sent=sent, fewer=fewer, n=SIZES[0], few=EVEN)
    largest = max(samples for *_, samples in found[SIZES[0]][2])
    if largest != BATCH:  # every share is larger
        raise Wrong("batch-size-ignored", where=where, found=largest, wanted=BATCH)
