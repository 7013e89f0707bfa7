"""Balise 5: 1-bit Adam: signs and scales, errors fed back on both sides, few bytes sent, the denominator frozen."""

from contextlib import closing
from functools import cache
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dlojz_tp.judging.checking.looks import Look, Value, every, form, judged, nothing, silent
from dlojz_tp.judging.probes.ranks import hung, world_after_world
from dlojz_tp.judging.probes.shared_looks import stacked
from dlojz_tp.judging.probes.traffic import Traffic, on_the_wire, sent

SIZES = (2, 3, 1)
BLOCKS, BLOCK = 3, {1: 8, 2: 16, 3: 24}  # of a row, where numbers are compared; {ranks: numbers of a block}
LONG = 6, 512  # the same where bytes are counted
ROUNDS, WARMUP, STEPS = 3, 2, 5
RATE, EPSILON = 0.1, 0.02  # so large an ε shows a sum in the place of a mean
KNOWN = ((hung, "ranks-waiting"), ("ZeroDivisionError", "steps-not-counted"))


def drawn(seed, *shape):
    """float32, blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator) ** 3


def numbers(rank, size, turn):
    return drawn(100 * rank + turn, size, BLOCKS, BLOCK[size])


class Plain:
    """The truth, in float64 in one process: all ranks at once. Errors (N ranks, N rows, k, b) and (N, k, b)."""

    def __init__(self, size):
        self.size, shape = size, (size, BLOCKS, BLOCK[size])
        self.workers, self.servers = torch.zeros(size, *shape).double(), torch.zeros(*shape).double()

    def mean(self, given):
        """given (N ranks, N rows, k, b) -> (N rows, k, b), written as lossy(mean(lossy)))."""
        given = given + self.workers
        heard = lossy(given)
        self.workers = given - heard
        mean = heard.mean(0) + self.servers
        told = lossy(mean)
        self.servers = mean - told
        return told


def lossy(x):
    return torch.sign(x) * x.abs().mean(-1, keepdim=True)


@cache
def exchanged(size):
    """(rounds, N, k, b)"""
    plain = Plain(size)
    return torch.stack(
        [plain.mean(torch.stack([numbers(r, size, t).double() for r in range(size)])) for t in range(ROUNDS)]
    )


@cache
def trained(size):
    """(steps, N, k, b) the weights after each step of 1-bit Adam."""
    plain, weights = Plain(size), drawn(7, size, BLOCKS, BLOCK[size]).double()
    mean, squares, found = torch.zeros_like(weights), torch.zeros_like(weights), []
    for t in range(1, STEPS + 1):
        own = torch.stack([numbers(rank, size, t).double() for rank in range(size)])
        if t <= WARMUP:
            mean = 0.9 * mean + 0.1 * own.mean(0)
            squares = 0.999 * squares + 0.001 * own.mean(0) ** 2
            root = (squares / (1 - 0.999**t)).sqrt() + EPSILON
        else:
            mean = plain.mean(0.9 * mean + 0.1 * own)
        weights = weights - RATE * mean / (1 - 0.9**t) / root
        found.append(weights)
    return torch.stack(found)


def new_state(size, blocks=BLOCKS, block=None):
    weights = drawn(7, size, blocks, block or BLOCK[size])
    zeros = {name: torch.zeros_like(weights) for name in ("mean", "squares", "root", "worker_error")}
    return SimpleNamespace(steps=0, weights=weights, server_error=torch.zeros_like(weights[0]), **zeros)


def observe(compress, expand, one_bit_mean, one_bit_adam):
    """On a rank: what is compressed, exchanged, sent, and trained."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = numbers(rank, size, 0)
    packed = compress(x.clone())
    yield {"forms": form(packed)}
    yield {"back": expand(*packed)}
    worker, server = torch.zeros_like(x), torch.zeros_like(x[0])
    results = [one_bit_mean(x.clone(), worker, server)]
    errors = {"worker_error": worker} | ({"server_error": server} if size > 1 else {})  # alone, a server loses nothing
    kept = [name for name, error in errors.items() if not error.any()]
    yield {"result": form(results[0]), "kept": kept}
    yield {"sent": bytes_of(lambda: one_bit_mean(*long(rank, size)))}
    given = [numbers(rank, size, turn) for turn in range(1, ROUNDS)]
    results += [one_bit_mean(x, worker, server) for x in given]
    stays = all(torch.equal(x, numbers(rank, size, turn)) for turn, x in enumerate(given, 1))
    yield {"first": results[0], "rounds": torch.stack(results), "stays": stays}
    yield training(one_bit_adam, rank, size)


def long(rank, size):
    x = drawn(rank, size, *LONG)
    return x, torch.zeros_like(x), torch.zeros_like(x[0])


def bytes_of(call):
    """(bytes that this rank sends, those of them in whole bytes, uint8), as shares of what is due."""
    with Traffic() as log:
        call()
    size = max(dist.get_world_size(), 2)
    due = 2 * (size - 1) / size * size * LONG[0] * (LONG[1] / 8 + 4)
    bits = [event for event in sent(log.events) if event.dtype in (torch.uint8, torch.int8, torch.bool)]
    return [on_the_wire(log.events) / due, on_the_wire(bits) / due]


def training(one_bit_adam, rank, size):
    state, weights = new_state(size), []
    held = state.weights
    for t in range(1, STEPS + 1):
        one_bit_adam(state, numbers(rank, size, t), RATE, WARMUP, epsilon=EPSILON)
        weights.append(held.clone())
        if t == WARMUP:
            frozen = state.squares.clone()
    far = new_state(size, *LONG)
    far.steps, far.root = 3, torch.ones_like(far.weights)
    return {
        "warm": torch.stack(weights[:WARMUP]), "trained": torch.stack(weights), "frozen": torch.equal(frozen, state.squares),
        "moved": not torch.equal(weights[0], drawn(7, size, BLOCKS, BLOCK[size])),
        "later": bytes_of(lambda: one_bit_adam(far, drawn(rank, size, *LONG), RATE, WARMUP)),
    }  # fmt: skip


def _heavy(seen, due):
    """What travels too much: floats; bytes for bits; all rows to everyone, 1.5 times what is due on two ranks; or more."""
    whole, bits = max(seen)
    if whole < 1.3:
        return "more-than-due"
    return "floats-travel" if whole - bits > 0.3 else "not-packed" if bits > 4 else "all-to-everyone"


def _light(seen, due):
    return len(seen) == 1 or max(whole for whole, _ in seen) <= due


def _times(seen, due):
    return {
        "times": f"{max(seen)[0]:.2f}",
        "expected": "1 bit and a share of a scale",
        "got": f"{max(seen)[0]:.2f} times that",
    }


def _forms(n):
    return [[f"uint8 ({n}, {BLOCKS}, {BLOCK[n] // 8})", f"float32 ({n}, {BLOCKS}, 1)"]] * n


def _alike(seen, due):
    return [list(one) if isinstance(one, list | tuple) else one for one in seen] == due


def _first(seen, due):
    return {"expected": due[0], "got": seen[0]}


def _on_all(truth):
    return lambda size: truth(size).float().expand(size, -1, -1, -1, -1)


LOOKS = [
    Look("signs are packed, 8 per byte, with one scale per block", "forms", _forms, "compress-form",
         holds=_alike, fields=_first),
    Value("expanded again, they are plus or minus the block's mean absolute value", stacked("back"),
          lambda n: torch.stack([lossy(numbers(rank, n, 0)) for rank in range(n)]), "wrong-expansion"),
    Look("one_bit_mean gives (N, k, b)", "result", lambda n: [f"float32 ({n}, {BLOCKS}, {BLOCK[n]})"] * n, "mean-form",
         fields=_first),
    Look("what was lost is written into both errors", "kept", [], "errors-not-kept", holds=nothing,
         fields=lambda seen, due: {"which": " and ".join(max(seen)), "expected": "", "got": ""}),
    Look("each rank sends something", "sent", 0, "nothing-travels", holds=lambda seen, due: len(seen) == 1 or min(seen)[0] > 0,
         fields=silent),
    Look("only bits and scales travel", "sent", 1.02, _heavy, holds=_light, fields=_times),
    Value("all ranks get the mean of what was compressed", stacked("first"), lambda n: exchanged(n)[0].float().expand(n, -1, -1, -1), "wrong-mean"),
    Value("three rounds: errors of earlier rounds are added", stacked("rounds"), _on_all(exchanged), "wrong-feedback"),
    Look("x is not changed", "stays", True, "x-changed", holds=every, fields=silent),
    Look("weights move in place", "moved", True, "weights-rebound", holds=every, fields=silent),
    Value("the warm-up is Adam with the mean gradient", stacked("warm"), lambda n: trained(n)[:WARMUP].float().expand(n, -1, -1, -1, -1), "wrong-warm-up"),
    Look("after it, a step sends only bits and scales", "later", 1.02, "still-all-reduce", holds=_light, fields=_times),
    Value("three compressed steps", stacked("trained"), _on_all(trained), "wrong-compressed-step"),
    Look("and the squares do not change", "frozen", True, "squares-go-on", holds=every, fields=silent),
]  # fmt: skip


class _Rank(dict):
    """What a rank has observed so far; what is missing is waited for, so that an early mistake hides a later failure."""

    def __init__(self, more):
        super().__init__()
        self._more = more

    def __missing__(self, key):
        while key not in self:
            self._more()
        return self[key]


def _ranks_of(parts, size):
    """What all ranks of a world observe, each part once it is asked for."""

    def more():
        for rank, part in zip(ranks, next(parts)[1]):
            rank.update(part)

    ranks = [_Rank(more) for _ in range(size)]
    return ranks


def balise_5(compress, expand, one_bit_mean, one_bit_adam):
    answers = compress, expand, one_bit_mean, one_bit_adam
    parts = world_after_world(observe, *answers, known=KNOWN, sizes=SIZES)
    with closing(parts):  # at the first mistake the ranks end
        for size in SIZES:
            yield from judged(LOOKS, _ranks_of, parts, size, at=size, where=f"{size} rank{'s' * (size > 1)}")
        for _ in parts:  # until the ranks are through
            pass
