"""Balise 4: AdamW on lists of tensors: torch's weights, in place, as many operators for many tensors as for few."""

import functools
import importlib

import torch

from dlojz_tp.judging.checking.borrowed import Borrowed, refusing
from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged
from dlojz_tp.judging.checking.verdicts import Wrong
from dlojz_tp.judging.probes.memory import Memory
from dlojz_tp.measure.operations import Operations

SHAPES = (3, 4), (5,), (), (2, 3, 2), (1, 1)
FEW, MANY = 3, 30  # tensors whose operators are counted
SIZE = 4096  # elements of a tensor whose memory is counted
USUAL = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1}
CASES = {  # rates, one a step, and the other options
    "first": ((0.2,), USUAL),
    "later": ((0.1, 0.02, 0.05), USUAL),
    "options": ((0.1, 0.1), {"beta1": 0.6, "beta2": 0.8, "epsilon": 0.3, "weight_decay": 0.5}),
    "no decay": ((0.1, 0.1), USUAL | {"weight_decay": 0.0}),
}


def drawn(seed):
    """Tensors of all shapes; one is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [*tensors, torch.randn(4, 3, generator=generator).t()]


def gradients(step):
    return [g * (0.0 if k == 1 else 1.0) for k, g in enumerate(drawn(10 + step))]  # those of one tensor are zero


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


@functools.cache
def truth(case):
    """After each step of torch's AdamW, tensor after tensor: (steps, elements) the weights, the means, and the squares."""
    rates, options = CASES[case]
    weights = [w.requires_grad_() for w in drawn(1)]
    betas = options["beta1"], options["beta2"]
    more = {"eps": options["epsilon"], "weight_decay": options["weight_decay"], "foreach": False}
    optimizer, found = torch.optim.AdamW(weights, betas=betas, **more), []
    for step, rate in enumerate(rates, 1):
        optimizer.param_groups[0]["lr"] = rate
        for w, g in zip(weights, gradients(step)):
            w.grad = g
        optimizer.step()
        averages = ([optimizer.state[w][name] for w in weights] for name in ("exp_avg", "exp_avg_sq"))
        found.append([flat(tensors) for tensors in (weights, *averages)])
    return [torch.stack(kind) for kind in zip(*found)]


def trained(fused_adamw, case):
    """What `truth` gives, of an answer; and whether the gradients stayed as they were."""
    rates, options = CASES[case]
    weights, kept, found = drawn(1), True, []
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step, rate in enumerate(rates, 1):
        given = gradients(step)
        fused_adamw(weights, given, means, squares, step, rate, **options)
        kept &= torch.equal(flat(given), flat(gradients(step)))
        found.append([flat(tensors) for tensors in (weights, means, squares)])
    return *(torch.stack(kind) for kind in zip(*found)), kept


def cost(fused_adamw, count):
    """(operators, copies of the weights that live at the peak beside the four lists) for so many tensors."""
    lists = [[torch.full((SIZE,), value) for _ in range(count)] for value in (1.0, 0.5, 0.1, 0.1)]
    with Memory(*sum(lists, [])) as memory, Operations() as operations:
        memory.reset()
        before = memory.peak
        fused_adamw(*lists, 2, 0.1, **USUAL)
    for name in operations.calls:  # also by torch.ops
        if name.startswith("aten._fused_"):
            raise Borrowed(name.replace("aten", "torch"))
    return operations.total, (memory.peak - before) / (4 * SIZE * count)


def unmoved(fused_adamw):
    """Which lists hold what they held before a step, the second one, without decay."""
    weights = drawn(1)
    averages = [torch.full_like(w, 0.1) for w in weights]
    before = {"weights": weights, "means": averages, "squares": averages}
    now = {name: [t.clone() for t in tensors] for name, tensors in before.items()}
    fused_adamw([*now["weights"]], gradients(1), [*now["means"]], [*now["squares"]], 2, 0.1, **CASES["no decay"][1])
    return [name for name in before if torch.equal(flat(now[name]), flat(before[name]))]


def observe(fused_adamw):
    yield {"unmoved": unmoved(fused_adamw)}
    for case in CASES:
        found, means, squares, kept = trained(fused_adamw, case)
        yield {case: found, f"{case} kept": kept, f"{case} means": means, f"{case} squares": squares}
    (few, _), (many, copies) = (cost(fused_adamw, count) for count in (FEW, MANY))
    yield {"operators": [few, many], "copies": copies}


def few_and_many(seen, due):
    return {"few": seen[0], "many": seen[1], "expected": seen[0], "got": seen[1]}


LOOKS = [
    Look("weights, means and squares change in place", "unmoved", [], "not-in-place",
         fields=lambda seen, due: {"what": " and ".join(seen), "expected": "", "got": ""}),
    Look("the gradients stay", "first kept", True, "gradients-changed"),
    Value("means and squares are those of torch's AdamW", "options means", truth("options")[1], "wrong-mean"),
    Value("", "options squares", truth("options")[2], "wrong-squares"),
    Value("one step gives AdamW's weights", "first", truth("first")[0], "wrong-step"),
    Value("three steps, with a rate that changes", "later", truth("later")[0], "wrong-step"),
    Value("other betas, a large ε, a large decay", "options", truth("options")[0], "wrong-step"),
    Value("without decay", "no decay", truth("no decay")[0], "wrong-step"),
    Look(f"as many operators for {MANY} tensors as for {FEW}", "operators", None, "operators-grow",
         holds=lambda seen, due: seen[0] == seen[1], fields=few_and_many),
    Look("besides the lists, at most one copy of the weights' size", "copies", 1.5, "copies", holds=at_most,
         fields=lambda seen, due: {"copies": f"{seen:.0f}", "expected": "1", "got": f"{seen:.0f}"}),
]  # fmt: skip

ADAM = importlib.import_module("torch.optim.adam")  # all of torch's Adams end in one of these
THEIRS = [(ADAM, f"_{kind}_adam", "torch's AdamW") for kind in ("single_tensor", "multi_tensor", "fused")]


def balise_4(fused_adamw):
    try:
        with refusing(*THEIRS, (torch, "_fused_adamw_", "torch._fused_adamw_")):
            yield from judged(LOOKS, observe, fused_adamw)
    except ZeroDivisionError as error:  # 1 − β⁰
        raise Wrong("step-from-zero", got=str(error)) from error
    except Borrowed as error:
        raise Wrong("borrowed", what=str(error)) from None
