"""Balise 1: schedules as functions of the step, and a loop that sets every group's rate before each batch."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, judged, within

PEAK = 1000.0  # large, so that an absolute tolerance sees the small rates as well
ORDER = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()  # a function of the step: in any order
COSINES = [(40, 8, PEAK, 0.0), (40, 0, PEAK, 100.0), (57, 20, PEAK, 250.0), (30, 1, PEAK, 50.0)]
CYCLES = [(40, PEAK, {}), (57, PEAK, {}), (24, PEAK, {"share": 0.2, "start": 10, "end": 50, "low": 0.6, "high": 0.9})]
TRIANGLES = [(8, 100.0, PEAK), (5, 0.0, PEAK), (1, 10.0, PEAK)]
BATCHES = torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(1))
LABELS = (BATCHES[..., 0] > 0).long() + (BATCHES[..., 1] > 0).long()
SCALES = 1.0, 0.1, None  # None: a group without a factor of its own
FIRST = 4


def _numbers(one):
    """A number, or a tuple of them, as floats; what it is, where it is none."""
    if isinstance(one, tuple | list):
        return tuple(_numbers(part) for part in one)
    if isinstance(one, int | float | torch.Tensor) or hasattr(one, "__float__"):
        return float(one)
    return type(one).__name__


def _form(one):
    """In words what a schedule returns."""
    if isinstance(one, tuple):
        return "a tuple of " + " and ".join(map(_form, one))
    return "nothing" if one is None else "number" if isinstance(_numbers(one), float) else type(one).__name__


def _drawn(schedule, cases):
    """What it returns for the steps 0 to 63 of all cases, asked for in another order: (cases, 64) or (cases, 64, 2)."""
    rows = []
    for case in cases:
        *positional, named = case if isinstance(case[-1], dict) else (*case, {})
        seen = {step: _numbers(schedule(step, *positional, **named)) for step in ORDER}
        rows.append([seen[step] for step in range(64)])
    return torch.tensor(rows, dtype=torch.float64)


def _falling(t):
    """Half a cosine from 1 to 0, by its square."""
    return torch.cos(torch.as_tensor(t, dtype=torch.float64).clamp(0, 1) * math.pi / 2) ** 2


STEP = torch.arange(64.0, dtype=torch.float64)


def _true_cosine(total, warmup, peak, floor):
    rising = peak * (STEP + 1) / max(warmup, 1)
    return torch.where(
        warmup > STEP, rising, floor + (peak - floor) * _falling((STEP - warmup) / max(total - warmup, 1e-9))
    )


def _true_cycle(total, peak, named):
    named = {"share": 0.3, "start": 25, "end": 1e4, "low": 0.85, "high": 0.95} | named
    top, first = named["share"] * total - 1, peak / named["start"]
    w = torch.where(top >= STEP, 1 - _falling(STEP / top), _falling((STEP - top) / (total - 1 - top)))
    far = torch.where(top >= STEP, first, first / named["end"])
    return torch.stack([far + (peak - far) * w, named["high"] + (named["low"] - named["high"]) * w], 1)


def _true_triangle(half, low, high):
    return low + (high - low) * (half - (STEP % (2 * half) - half).abs()) / half


def observe_schedules(warmup_cosine, one_cycle, cyclical):
    """What the three return, in words and in numbers."""
    yield {"cosine form": _form(warmup_cosine(3, *COSINES[0]))}
    yield {"cosine": _drawn(warmup_cosine, COSINES)}
    yield {"cycle form": _form(one_cycle(3, 40, PEAK))}
    cycle = _drawn(one_cycle, CYCLES)
    yield {"cycle": cycle[..., 0], "momentum": cycle[..., 1]}
    yield {"triangle form": _form(cyclical(3, *TRIANGLES[0]))}
    yield {"triangle": _drawn(cyclical, TRIANGLES)}


def _said(seen, due):
    return {"due": f"a {due}" if due == "number" else due, "got": seen}


def _of_cosine(total, warmup, *_):
    return {
        "in the warm-up": warmup,
        "at the first step after the warm-up, which has `peak`": warmup + 1,
        "on the cosine": total,
    }


def _of_cycle(total, peak, named):
    return {"at step 0": 1, "on the way up": int(named.get("share", 0.3) * total), "on the way down": total}


def _first(cases, parts):
    """A look's `fields`: where a schedule leaves its way. parts(*case): {part of the way: the step that ends it}."""

    def fields(seen, due):
        case, step = (~seen.isclose(due, ERROR, ERROR)).nonzero()[0].tolist()
        part = next((name for name, end in parts(*cases[case]).items() if step < end), "after its end")
        numbers = ", ".join(f"{one:g}" for one in cases[case] if not isinstance(one, dict))
        where = f"step {step} with {numbers}" + (f" and {cases[case][-1]}" if isinstance(cases[case][-1], dict) else "")
        return {"part": part, "where": where, "expected": due[case, step].item(), "got": seen[case, step].item()}

    return fields


ERROR = 1e-4
CLOSE = within(ERROR)
SCHEDULES = [
    Look("warm-up and cosine: a number for each step", "cosine form", "number", "schedule-form", fields=_said),
    Value("", "cosine", torch.stack([_true_cosine(*case) for case in COSINES]), "wrong-cosine", holds=CLOSE, fields=_first(COSINES, _of_cosine)),
    Look("one cycle: rate and momentum", "cycle form", "a tuple of number and number", "schedule-form", fields=_said),
    Value("", "cycle", torch.stack([_true_cycle(*case)[:, 0] for case in CYCLES]), "wrong-cycle", holds=CLOSE, fields=_first(CYCLES, _of_cycle)),
    Value("", "momentum", torch.stack([_true_cycle(*case)[:, 1] for case in CYCLES]), "wrong-momentum", holds=CLOSE, fields=_first(CYCLES, _of_cycle)),
    Look("cyclical: a triangle", "triangle form", "number", "schedule-form", fields=_said),
    Value("", "triangle", torch.stack([_true_triangle(*case) for case in TRIANGLES]), "wrong-triangle", holds=CLOSE),
]  # fmt: skip


def _rate(step):
    return 0.02 + 0.01 * step


def _pair(step):
    return 0.02 + 0.01 * step, 0.5 + 0.02 * step


class _Noting:
    """Notes the rate and the momentum of each group before each of an optimizer's steps."""

    def __init__(self, optimizer):
        self.seen = []
        optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer, *_):
        groups = optimizer.param_groups
        momenta = [group["betas"][0] if "betas" in group else group["momentum"] for group in groups]
        self.seen.append([[float(group["lr"]) for group in groups], [float(one) for one in momenta]])

    def tensors(self):
        """(steps, 2, groups): rates, momenta."""
        return torch.tensor(self.seen, dtype=torch.float64)


def _model(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 3)).eval()
    groups = [{"params": list(model[k].parameters())} for k in (0, 3, 4)]
    for group, scale in zip(groups, SCALES):
        group |= {} if scale is None else {"lr_scale": scale}
    return model, make(groups)


def _sgd(groups):
    return torch.optim.SGD(groups, lr=0.3, momentum=0.8)


def _adamw(groups):
    return torch.optim.AdamW(groups, lr=0.3, betas=(0.8, 0.97))


def _batches(n):
    """No length, no second time."""
    yield from zip(BATCHES[:n], LABELS[:n])


def _now(optimizer):
    return torch.tensor([float(group["lr"]) for group in optimizer.param_groups], dtype=torch.float64)


def observe_train(set_rates, train):
    """What set_rates sets; the rates at each step of a training; its weights; the step that it returns."""
    _, optimizer = _model(_sgd)
    set_rates(optimizer, 0.05)
    yield {"set": _now(optimizer)}
    set_rates(optimizer, (0.02, 0.6))
    yield {"twice": _now(optimizer)}
    momenta = [float(group["momentum"]) for group in optimizer.param_groups]
    set_rates(optimizer, (0.02, 0.0))
    yield {"momenta": momenta + [float(group["momentum"]) for group in optimizer.param_groups]}
    _, optimizer = _model(_adamw)
    set_rates(optimizer, (0.02, 0.6))
    yield {"betas": [[float(beta) for beta in group["betas"]] for group in optimizer.param_groups]}
    model, optimizer = _model(_sgd)
    noting = _Noting(optimizer)
    following = train(model, _batches(5), optimizer, _rate)
    yield {"steps": len(noting.seen), "rates": noting.tensors()[:, 0] if noting.seen else None}
    yield {"next": following}
    following = train(model, _batches(3), optimizer, _rate, FIRST)
    yield {"later": noting.tensors()[5:, 0], "mode": model.training}
    yield {"later next": following, "weights": nn.utils.parameters_to_vector(model.parameters()).detach()}
    model, optimizer = _model(_adamw)
    noting = _Noting(optimizer)
    train(model, _batches(4), optimizer, _pair)
    yield {"pairs": noting.tensors()}
    yield {"none": train(model, [], optimizer, _rate, 3)}


def _by_hand():
    """The weights of the same two trainings, by the formula of SGD with momentum."""
    model = copy.deepcopy(_model(_sgd)[0])
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for step, n in ((0, 5), (FIRST, 3)):
        for x, y in _batches(n):
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            with torch.no_grad():
                for k, (p, g, v) in enumerate(zip(model.parameters(), gradients, velocity)):
                    v.mul_(0.8).add_(g)
                    p.sub_(_rate(step) * (SCALES[k // 2] or 1.0) * v)
            step += 1
    return nn.utils.parameters_to_vector(model.parameters()).detach()


FACTORS = torch.tensor([scale or 1.0 for scale in SCALES], dtype=torch.float64)


def _rates(steps):
    return torch.tensor([_rate(step) for step in steps], dtype=torch.float64)[:, None] * FACTORS


def _wrong_set(seen, due):
    """The hint where set_rates has set other rates."""
    if abs(seen[0] - due[0]) > 1e-9:
        return "wrong-set"
    if (seen[1:] - 0.3).abs().min() < 1e-9:
        return "one-group-set"
    return "scale-ignored" if (seen == seen[0]).all() else "wrong-set"


def _wrong_rates(seen, due):
    """The hint where the rates of a training are not those of its steps."""
    if seen.shape == due.shape and (seen == seen[0]).all():
        return "one-rate"
    if seen.shape == due.shape and torch.allclose(seen[1:], due[:-1]):
        return "rate-late"
    return "other-steps"


def _next(seen, due):
    return {"due": due, "got": seen}


def _later_wrong(seen, _):
    return "first-ignored" if torch.allclose(seen, _rates(range(3))) else "other-steps"


TRAIN = [
    Look("set_rates: every group, with its own factor", "set", 0.05 * FACTORS, _wrong_set, fields=lambda _, due: {"due": ", ".join(f"{one:g}" for one in due)}),
    Look("", "twice", 0.02 * FACTORS, "scale-piles-up"),
    Look("the momentum where the optimizer has one", "momenta", [0.6] * 3 + [0.0] * 3, lambda seen, _: "momentum-zero" if seen[:3] == [0.6] * 3 else "momentum-not-set"),
    Look("", "betas", [[0.6, 0.97]] * 3, lambda seen, _: "second-beta" if [b[0] for b in seen] == [0.6] * 3 else "betas-not-set"),
    Look("train: each step at its rate", "steps", 5, "not-a-step-each", fields="n"),
    Look("", "rates", _rates(range(5)), _wrong_rates),
    Look("returns the next step", "next", 5, "wrong-next", fields=_next),
    Look("continues at the step that it is given", "later", _rates(range(FIRST, FIRST + 3)),
         _later_wrong, fields={"first": FIRST}),
    Look("", "later next", FIRST + 3, "wrong-next", fields=_next),
    Look("", "mode", False, "mode-changed"),
    Value("and trains", "weights", _by_hand(), "wrong-training", holds=within(1e-4)),
    Look("a schedule that returns pairs", "pairs", torch.stack([torch.stack([_pair(k)[0] * FACTORS, torch.full((3,), _pair(k)[1], dtype=torch.float64)]) for k in range(4)]),
         "pairs-lost"),
    Look("with no batches, no step", "none", 3, "wrong-next", fields=_next),
]  # fmt: skip


def balise_1(warmup_cosine, one_cycle, cyclical, set_rates, train):
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    yield from judged(SCHEDULES, observe_schedules, warmup_cosine, one_cycle, cyclical)
    yield from judged(TRAIN, observe_train, set_rates, train)
