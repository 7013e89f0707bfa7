"""Balise 5: which drafted tokens are kept, and the distribution of the next one: all draws of a small model added up."""

import itertools
from fractions import Fraction
from numbers import Integral

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, same, shape, silent, within

# probabilities in sixteenths: target at three drafted places and behind them, draft at the three
TARGET = torch.tensor([[4, 8, 2, 2], [1, 3, 8, 4], [6, 2, 6, 2], [9, 1, 2, 4]]) / 16
DRAFT = torch.tensor([[8, 2, 2, 4], [2, 6, 4, 4], [8, 4, 2, 2]]) / 16
TRIED = {  # drafted tokens, uniforms: how many are kept
    "all kept": ((1, 2, 2), (0.99, 0.6, 0.99), 3),
    "less likely than drafted": ((0, 1, 0), (0.4, 0.4, 0.6), 3),
    "the first refused": ((0, 2, 2), (0.6, 0.1, 0.1), 0),
    "the second refused": ((2, 1, 2), (0.5, 0.6, 0.2), 1),
    "the last refused": ((3, 3, 1), (0.3, 0.9, 0.7), 2),
    "two refused": ((1, 0, 0), (0.3, 0.7, 0.9), 1),
    "more likely than drafted": ((1, 2, 2), (0.4, 0.3, 0.2), 3),
}


def one_hot(*tokens):
    return torch.eye(4)[list(tokens)]


HALVES = torch.tensor([[8.0, 8, 0, 0], [0, 0, 8, 8]]) / 16
RARE = torch.tensor([[5e-6, 1.0 - 5e-6, 0, 0], [1e-5, 1.0 - 1e-5, 0, 0]])
HARD = {  # target, draft, drafted, uniforms: what is kept, the next token's distribution
    "draft equal to target": (TARGET, TARGET[:3], (0, 1, 3), (0.9999, 0.9999, 0.9999), 3, TARGET[3]),
    "nothing drafted": (TARGET[:1], DRAFT[:0], (), (), 0, TARGET[0]),
    "one drafted, kept": (TARGET[:2], DRAFT[:1], (1,), (0.5,), 1, TARGET[1]),
    "no token in common": (HALVES[[0, 1]], HALVES[[1]], (2,), (0.001,), 0, HALVES[0]),
    "a token of probability 0, and a uniform of 0": (HALVES[[0, 1]], TARGET[:1], (3,), (0.0,), 0, one_hot(0)[0]),
    "temperature 0, the target's own": (one_hot(1, 2), DRAFT[:1], (1,), (0.99,), 1, one_hot(2)[0]),
    "temperature 0, another": (one_hot(1, 2), DRAFT[:1], (0,), (0.3,), 0, one_hot(1)[0]),
    "a token that the draft hardly ever proposes": (torch.stack([RARE[0], TARGET[0]]), RARE[1:], (0,), (0.45,), 1, TARGET[0]),
    "temperature 0 of both": (one_hot(1, 2, 3), one_hot(1, 0), (1, 0), (0.5, 0.5), 1, one_hot(2)[0]),
}  # fmt: skip

# a model of three tokens: the target after nothing, after each token, after each two; the draft after nothing, after each
FIRST, SECOND, THIRD = (torch.tensor(rows, dtype=torch.float64) / 8 for rows in (
    [4, 1, 3], [[2, 5, 1], [1, 1, 6], [2, 4, 2]],
    [[[1, 2, 5], [6, 1, 1], [2, 2, 4]], [[8, 0, 0], [3, 4, 1], [1, 6, 1]], [[2, 3, 3], [5, 0, 3], [1, 1, 6]]],
))  # fmt: skip
DRAFTS = (
    torch.tensor([1.0, 6, 1], dtype=torch.float64) / 8,
    torch.tensor([[1.0, 1, 6], [2, 4, 2], [1, 1, 6]]).double() / 8,
)
JOINT = FIRST[:, None, None] * SECOND[:, :, None] * THIRD
STEPS = 12  # uniforms in the middle of so many steps: every ratio above is a number of whole steps
ROUNDS, LONG = 1000, 4


def called(verify, target, draft, drafted, uniforms):
    tokens, numbers = torch.tensor(drafted, dtype=torch.int64), torch.tensor(uniforms).to(target.dtype)
    return verify(target.clone(), draft.clone(), tokens, numbers)


def joint(verify):
    """The distribution of three tokens: all drafts and uniforms, weighed; (3, 3, 3)."""
    total = torch.zeros(3, 3, 3, dtype=torch.float64)
    grid = [(k + 0.5) / STEPS for k in range(STEPS)]
    for a, b in itertools.product(range(3), repeat=2):
        weight = DRAFTS[0][a] * DRAFTS[1][a, b] / STEPS**2
        target, draft = torch.stack([FIRST, SECOND[a], THIRD[a, b]]), torch.stack([DRAFTS[0], DRAFTS[1][a]])
        for uniforms in itertools.product(grid, repeat=2):
            kept, after = called(verify, target, draft, (a, b), uniforms)
            if kept == 0:  # what is drawn goes on as the target does
                total += weight * after[:, None, None] * SECOND[:, :, None] * THIRD
            elif kept == 1:
                total[a] += weight * after[:, None] * THIRD[a]
            else:
                total[a, b] += weight * after
    return total


def drawn_tokens(verify):
    """How far the counts of many rounds are from the target's: chi-squared of 25 degrees of freedom."""
    draws = torch.Generator().manual_seed(5)
    scores = torch.randn(LONG + 1, 6, generator=draws, dtype=torch.float64)
    target, draft = scores.softmax(1), (0.5 * scores[:-1]).softmax(1)
    counts = torch.zeros(LONG + 1, 6, dtype=torch.float64)
    for _ in range(
        ROUNDS
    ):  # tokens here do not depend on those before: whatever is new at a place has its distribution
        drafted = torch.multinomial(draft, 1, generator=draws)[:, 0]
        uniforms, last = torch.rand(LONG + 1, generator=draws, dtype=torch.float64).split([LONG, 1])
        kept, after = verify(target.clone(), draft.clone(), drafted.clone(), uniforms)
        token = int((after.cumsum(0) < last).sum().clamp(max=5))
        for place, one in enumerate([*drafted[: int(kept)].tolist(), token]):
            counts[place, one] += 1
    due = target * counts.sum(1, keepdim=True)
    return ((counts - due) ** 2 / due.clamp(min=1e-9)).sum().item()


def observe(verify):
    cases = [(TARGET, DRAFT, drafted, uniforms) for drafted, uniforms, _ in TRIED.values()]
    refused, kept = called(verify, *cases[2]), called(verify, *cases[0])
    yield {"form": [in_words(refused), in_words(kept)]}
    given = TARGET.clone(), DRAFT.clone(), torch.tensor(cases[3][2]), torch.tensor(cases[3][3])
    before = [one.clone() for one in given]
    first = verify(*given)
    yield {"changed": [name for name, one, old in zip(NAMES, given, before) if not torch.equal(one, old)]}
    again = [verify(*(one.clone() for one in before)) for _ in range(6)]
    yield {"again": all(same([int(first[0]), first[1]], [int(n), rest]) for n, rest in again)}
    yield {"kept": torch.tensor([float(called(verify, *case)[0]) for case in cases])}
    found = [called(verify, *case[:4]) for case in HARD.values()]
    yield {"hard kept": torch.tensor([float(n) for n, _ in found])}
    rests = [called(verify, *case)[1] for case in cases]
    yield {"sums": [float(one.sum()) for one in rests]}
    yield {"joint": joint(verify)}
    yield {"hard": [one.double() for _, one in found]}
    yield {"chi": drawn_tokens(verify)}


NAMES = "target", "draft", "drafted", "uniforms"


def in_words(pair):
    """What came back: a whole number or what else, the shape of the distribution."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return form(pair)
    number, after = (one.numpy()[()] if isinstance(one, torch.Tensor) and one.dim() == 0 else one for one in pair)
    return ["a whole number" if isinstance(number, Integral) else form(pair[0]), shape(after)]


def first_of(cases):
    """Fields: the first case that is wrong."""

    def fields(seen, due):
        k = next(k for k, (a, b) in enumerate(zip(seen, due)) if not same(a, b))
        return {"where": list(cases)[k], "got": shown(seen[k]), "expected": shown(due[k])}

    return fields


def shown(value):
    value = torch.as_tensor(value).tolist()
    return [round(one, 4) for one in value] if isinstance(value, list) else f"{value:g}"


def hard_hint(seen, due):
    """The hint: which of the hard cases keeps too few or too many."""
    wrong = [name for name, a, b in zip(HARD, seen, due) if not same(a, b)]
    if wrong == ["a token of probability 0, and a uniform of 0"]:
        return "impossible-kept"
    if wrong == ["a token that the draft hardly ever proposes"]:
        return "rare-refused"
    return "equal-refused" if wrong and wrong[0] == "draft equal to target" else "wrong-kept"


def sum_hint(seen, due):
    """The hint: with its negative numbers p - q adds up to 0, and to NaN once it is divided by that."""
    first = seen[list(TRIED).index("the first refused")]
    return "not-normalised" if 0.01 < abs(first) < 100 else "not-clamped"


PAIR = ["a whole number", shape(TARGET[0])]
LOOKS = [
    Look("a number and a distribution, even when all tokens are kept", "form", [PAIR, PAIR], "speculation-form",
         holds=lambda seen, due: seen == due),
    Look("the inputs are not changed", "changed", [], "inputs-changed", fields=lambda seen, due: {"what": " and ".join(seen)}),
    Look("the same inputs give the same answer", "again", True, "own-random"),
    Value("how many tokens are kept", "kept", torch.tensor([float(kept) for *_, kept in TRIED.values()]), "wrong-kept", fields=first_of(TRIED)),
    Look("draft equal to target, nothing drafted, no token in common, temperature 0", "hard kept",
         torch.tensor([float(case[4]) for case in HARD.values()]), hard_hint, fields=first_of(HARD)),
    Look("a distribution adds up to 1", "sums", [1.0] * len(TRIED), sum_hint, fields=first_of(TRIED)),
    Value("over all drafts and uniforms of a small model, the tokens have exactly the target's distribution", "joint", JOINT,
          "wrong-next", holds=within(1e-6), fields=silent),
    Value("the next token where nothing was drafted, where no token is in common, and at temperature 0", "hard",
          [case[5].double() for case in HARD.values()], "wrong-next", holds=within(1e-6), fields=first_of(HARD)),
    Look(f"{ROUNDS:,} rounds of {LONG} drafted tokens: the counts match the target", "chi", 75.0, "other-counts", holds=at_most, fields=silent),
]  # fmt: skip
assert all((Fraction(STEPS * a) / Fraction(b)).denominator == 1
           for ours, its in ((FIRST, DRAFTS[0]), *zip(SECOND, DRAFTS[1]))
           for a, b in zip(ours.tolist(), its.tolist()))  # fmt: skip


def balise_5(verify):
    yield from judged(LOOKS, observe, verify)
