"""Balise 2: a rate that rises until the loss diverges, and all that must be afterwards as it was before."""

import copy
import functools
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dlojz_tp.judging.checking.looks import Look, Value, judged, within
from dlojz_tp.judging.checks.learning_rate_and_large_batch.running_mean import RunningMean
from dlojz_tp.judging.probes.seeded import seeded

SCALES = 1.0, 0.25
IN, MIDDLE, OUT = (functools.partial(nn.Linear, *sizes) for sizes in ((4, 8), (8, 8), (8, 3)))
DROP, AWAY = functools.partial(nn.Dropout, 0.3), functools.partial(RunningMean, 8)
# (low, high, n, beta), and what of the batches
RISES = [
    ((1e-4, 1e-1, 24, 0.9), {}),
    ((1e-7, 1e-6, 20, 0.8), {"leaps": True}),
    ((1e-7, 1e-6, 18, 0.0), {"leaps": True}),
]
NAN = (1e-4, 1e-1, 24, 0.9), {"nan": 7}


class _Epochs:
    """Other batches in each epoch, as of a loader that shuffles; the batch at place `nan` is not finite.

    leaps: the batches suit the untrained model, after the first four, and contradict it, loudly, from the 15th on: the
    loss falls, and leaps to less than 4 times the first one. No rate makes it do so, so that rounding has no part.
    """

    def __init__(self, nan=None, leaps=False):
        self.epoch, self.nan, self.leaps = 0, nan, leaps

    def __iter__(self):
        self.epoch += 1
        g, suits = torch.Generator().manual_seed(self.epoch), _linear()[0]
        for k in range(5 * self.epoch - 5, 5 * self.epoch):
            x = torch.randn(6, 4, generator=g)
            y = x[:, :3].argmax(1)
            if self.leaps:
                x *= 1 if k < 4 else 30 if k < 14 else 10
                y = suits(x).argsort(1)[:, 2 if 4 <= k < 14 else 0]
            yield (x * math.nan if k == self.nan else x), y


class _Noisy(Dataset):
    """Images with noise drawn from all three generators; raises at the `last` one, if there is such."""

    def __init__(self, last=None):
        self.last, self.read = last, 0

    def __len__(self):
        return 30

    def __getitem__(self, k):
        self.read += 1
        if self.read == self.last:
            raise OSError("a file of the data set is gone")
        return torch.full((4,), k / 30) + random.random() + np.random.rand() + 0.1 * torch.randn(4), k % 3


@functools.cache
def _seeded(seed, *layers):
    """A model of these layers, made from a seed; the random state stays as it was."""
    with seeded(seed):
        return nn.Sequential(*(layer() for layer in layers))


def _linear():
    model = copy.deepcopy(_seeded(0, IN, nn.ReLU, OUT))
    return model, torch.optim.SGD(_groups(model, 2), lr=0.3, momentum=0.9)


def _groups(model, second):
    """The second group has a factor of its own."""
    return [
        {"params": list(model[0].parameters())},
        {"params": list(model[second].parameters()), "lr_scale": SCALES[1]},
    ]


def _true_rise(low, high, n, beta, **batches):
    """Rates and smoothed losses, by SGD's formula and an explicit weighted mean."""
    model, _ = _linear()
    weights = list(model.parameters())
    velocity = [torch.zeros_like(p) for p in weights]
    loader = _Epochs(**batches)
    batches = (batch for _ in range(n) for batch in loader)
    raw, rates, smooth = [], [], []
    for k in range(n):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        raw.append(loss.item())
        shares = [(1 - beta) * beta ** (k - j) for j in range(k + 1)]
        s = sum(share * one for share, one in zip(shares, raw)) / sum(shares)
        if not math.isfinite(s) or s > 4 * min([*smooth, math.inf]):
            break
        rate = math.exp(math.log(low) + (math.log(high) - math.log(low)) * k / (n - 1))
        rates.append(rate)
        smooth.append(s)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for j, (p, g, v) in enumerate(zip(weights, gradients, velocity)):
                v.mul_(0.9).add_(g)
                p.sub_(rate * SCALES[j // 2] * v)
    return rates, smooth


def _lists(found):
    """The two lists as rows of 40, float64: what is not there counts as -1."""
    rates, losses = ([float(one) for one in some] for some in found)
    return torch.tensor([(some + [-1.0] * 40)[:40] for some in (rates, losses)], dtype=torch.float64)


def _pair(found):
    """In words."""
    if not (isinstance(found, tuple | list) and len(found) == 2 and all(hasattr(one, "__len__") for one in found)):
        return None if found is None else type(found).__name__
    return "two lists" if len(found[0]) == len(found[1]) else f"{len(found[0])} rates and {len(found[1])} losses"


def _deep():
    """A model with dropout and running means that was trained; its optimizer; some gradients there, one that is None."""
    model = copy.deepcopy(_seeded(1, IN, AWAY, DROP, MIDDLE, AWAY, OUT))
    optimizer = torch.optim.SGD(_groups(model, 3), lr=0.3, momentum=0.9)
    for x, y in _Epochs():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.07
    model[0].bias.grad = None
    model[4].eval()
    return model, optimizer


def _state(model, optimizer, loader):
    """{what: numbers and words} of all that must stay."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy({
        "the weights": [p.detach() for p in model.parameters()],
        "the buffers (running statistics)": list(model.buffers()),
        "the mode (train or eval) of a module": [module.training for module in model.modules()],
        "the gradients": [p.grad for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "the optimizer's rates": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "the optimizer's state": [[k, v] for p in trained for k, v in sorted(optimizer.state.get(p, {}).items())],
        "torch's random state": torch.get_rng_state(),
        "NumPy's random state": np.random.get_state()[1:3],
        "Python's random state": random.getstate(),
        "the loader's generator": loader.generator and loader.generator.get_state(),
    })  # fmt: skip


def _same(one, other):
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one == other


def _changed(find_rates, own=True, last=None, fresh=False):
    """What differs after a search; what it raised, if that was due."""
    model, optimizer = _deep()
    if fresh:
        optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(_Noisy(last), 5, shuffle=True, generator=torch.Generator().manual_seed(3) if own else None)
    torch.manual_seed(4), np.random.seed(5), random.seed(6)
    torch.rand(3, generator=loader.generator)  # all are somewhere behind their seed
    np.random.rand(), random.random()
    before, raised = _state(model, optimizer, loader), "nothing"
    held = list(model.parameters())
    try:
        find_rates(model, loader, optimizer, 1e-4, 1e-2, 8)
    except OSError:
        raised = "OSError"
    after = _state(model, optimizer, loader)
    changed = [what for what in before if not _same(before[what], after[what])]
    linked = {id(p) for group in optimizer.param_groups for p in group["params"]} <= {id(p) for p in model.parameters()}
    if not linked or any(a is not b for a, b in zip(held, model.parameters())):
        changed.append("which parameters model and optimizer hold")
    return changed, raised


def observe(find_rates):
    """What is returned of three searches, and of one that meets a NaN; what has changed in three."""
    found = _found(find_rates, *RISES[0])
    yield {"form": _pair(found)}
    yield {"graphs": any(getattr(one, "requires_grad", False) for one in found[1])}
    yield {"all": _lists(found)}
    yield {"eval": not _modes(find_rates)}
    yield {"diverging": [_lists(_found(find_rates, *rise)) for rise in RISES[1:]]}
    yield {"nan": _lists(_found(find_rates, *NAN))}
    yield {"changed": _changed(find_rates)[0]}
    yield {"without": _changed(find_rates, own=False, fresh=True)[0]}
    changed, raised = _changed(find_rates, last=33)
    yield {"raised": raised, "after error": changed}


def _found(find_rates, rise, batches):
    model, optimizer = _linear()
    return find_rates(model, _Epochs(**batches), optimizer, *rise)


_MODES: list[bool] = []


def _note_mode(module, _):
    """A hook that pickle finds by its name."""
    _MODES.append(module.training)


def _modes(find_rates):
    """Whether a module in training mode is still in it at the second batch of a search."""
    model, optimizer = _linear()
    _MODES.clear()
    model[1].register_forward_pre_hook(_note_mode)
    find_rates(model, _Epochs(), optimizer, 1e-4, 1e-3, 2)
    return all(_MODES)


def _rates_or_losses(seen, due):
    """The hint where a search returns something else."""
    lengths = (seen >= 0).sum(1).tolist()
    if lengths != (due >= 0).sum(1).tolist():
        return "length"
    return "wrong-rates" if not torch.allclose(seen[0], due[0], rtol=1e-3) else "wrong-losses"


def _wrong_rates(seen, due):
    """The hint for rates: other ones, or another number of right ones."""
    n, wanted = (int((one >= 0).sum()) for one in (seen, due))
    common = min(n, wanted)
    if n == wanted or not torch.allclose(seen[:common], due[:common], rtol=1e-3):
        return "wrong-rates"
    return "stopped-early" if n < 5 else "length"


def _length(seen, due):
    return {"n": int((seen[0] >= 0).sum()), "due": int((due[0] >= 0).sum())}


def _stopped(seen, due):
    return [int((one[0] >= 0).sum()) for one in seen] == [int((one[0] >= 0).sum()) for one in due]


def _lengths(seen, due):
    return _length(seen[None], due[None])


def _say(seen, due):
    return {"what": ", ".join(dict.fromkeys(seen)), "got": "", "expected": ""}


def _first_changed(seen, due):
    """The hint for what has changed."""
    return next((slug for words, slug in CHANGED.items() if seen[0].startswith(words)), "changed")


CHANGED = {"the gradients": "gradients-not-back", "the optimizer's": "optimizer-changed", "torch's": "random-changed",
           "NumPy's": "random-changed", "Python's": "random-changed", "the loader's": "generator-changed"}  # fmt: skip
DUE = [_lists(_true_rise(*rise, **batches)) for rise, batches in RISES]
LOOSE = within(2e-3)
FIND = [
    Look("find_rates: two lists, with one rate and one smoothed loss per step", "form", "two lists", "find-form", fields="got"),
    Look("", "graphs", False, "graphs-held"),
    Look("from low to high, with a constant ratio", lambda o: o["all"][0], DUE[0][0],
         _wrong_rates, holds=within(1e-6), fields=_lengths),
    Value("the smoothed losses", lambda o: o["all"][1], DUE[0][1], "wrong-losses", holds=LOOSE),
    Look("in the mode in which the model came", "eval", False, "searched-in-eval"),
    Look("stops where the loss diverges", "diverging", DUE[1:], "wrong-stop", holds=_stopped,
         fields=lambda seen, due: {"n": _length(seen[0], due[0])["n"], "due": _length(seen[0], due[0])["due"], "got": "", "expected": ""}),
    Value("", "diverging", DUE[1:], "wrong-losses", holds=LOOSE),
    Look("and where the loss is not finite", "nan", _lists(_true_rise(*NAN[0], **NAN[1])), "nan-kept", holds=LOOSE),
    Look("afterwards everything is as it was", "changed", [], _first_changed, fields=_say),
    Look("", "without", [], _first_changed, fields=_say),
    Look("an error reaches the caller", "raised", "OSError", "error-swallowed"),
    Look("and changes nothing either", "after error", [], "left-after-error", fields=_say),
]  # fmt: skip

RATES = [0.001 * 3**k for k in range(10)]
CURVES = [
    [2.4, 2.39, 2.35, 2.2, 1.9, 1.2, 0.8, 0.7, 1.5, 2.6],
    [2.0, 2.1, 2.05, 1.9, 1.5, 1.0, 0.9, 1.1, 3.0],  # rises at first; shorter
    [2.0, 1.0, 0.9, 0.5, 0.6, 0.55, 0.4, 0.9, 1.0, 1.1],  # falls at once; two minima
    [2.3, 2.29, 2.28, 2.27, 2.2, 2.0, 1.8, 1.5, 1.2, 1.0],  # still falling at the end
]
PLACES = (3, 7), (4, 6), (1, 6), (5, 9)  # of the smallest, and of the lowest loss
DUE_PAIRS = torch.tensor([[RATES[first], RATES[lowest] / 4] for first, lowest in PLACES], dtype=torch.float64)


def observe_proposal(propose):
    """What is proposed for some curves, and where nothing falls."""
    found = [propose(RATES[: len(curve)], list(curve)) for curve in CURVES]
    yield {"form": [len(one) if isinstance(one, tuple | list) else type(one).__name__ for one in found]}
    yield {"pairs": torch.tensor([[float(a), float(b)] for a, b in found], dtype=torch.float64)}
    try:
        yield {"never": f"no error but {propose(RATES[:4], [1.0, 1.1, 1.5, 2.0])}"}
    except ValueError:
        yield {"never": "ValueError"}


PROPOSE = [
    Look("propose: (smallest, largest)", "form", [2] * 4, "propose-form"),
    Value("by the rule above", lambda o: o["pairs"][:, 1], DUE_PAIRS[:, 1], "wrong-largest"),
    Value("", lambda o: o["pairs"][:, 0], DUE_PAIRS[:, 0], "wrong-smallest"),
    Look("where the loss never falls, nothing is proposed", "never", "ValueError", "never-fell"),
]  # fmt: skip


def balise_2(find_rates, propose):
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    yield from judged(FIND, observe, find_rates)
    yield from judged(PROPOSE, observe_proposal, propose)
