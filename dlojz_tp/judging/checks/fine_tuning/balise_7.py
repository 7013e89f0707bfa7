"""Balise 7: NF4 by blocks, against the published table and the scales of each block in float64."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent, within
from dlojz_tp.judging.checks.fine_tuning.nf4 import BLOCK, GROUP, TABLE, largest

NAMES = "codes", "scales", "steps", "mean"


def cases():
    """{claim: {case: weights}}."""
    draws = torch.Generator().manual_seed(21)

    def normal(*shape, spread=0.0):
        numbers = torch.randn(shape, generator=draws)
        return numbers * (spread * torch.randn(shape[:1], generator=draws)).exp().view(-1, *[1] * (len(shape) - 1))

    holes, uneven = normal(6, 70), normal(40, 64)
    holes[:, ::3], holes[2] = 0.0, 0.0
    uneven[3:30] *= 0.1
    uneven[30, 5] = -300.0
    plain = {
        "(300, 64): two groups of blocks": normal(300, 64, spread=0.4),
        "(7, 13): an odd number of weights, a short block": normal(7, 13),
        "(3, 4, 5, 6)": normal(3, 4, 5, 6),
        "5 weights": normal(5),
        "64 weights: one block": normal(8, 8),
        "the largest magnitude is that of a negative weight": -normal(10, 64).abs(),
    }
    hard = {
        "a transposed matrix": normal(20, 37).T,
        "bfloat16": normal(9, 64).bfloat16(),
        "float64": normal(9, 64).double(),
        "zeros among others": holes,
        "zeros alone": torch.zeros(3, 50),
        "some blocks far smaller than the largest": uneven,
    }
    empty = {"shape (0,)": torch.zeros(0), "shape (3, 0)": torch.zeros(3, 0)}
    return {"weights of all shapes": plain, "hard ones": hard, "none at all": empty}


CASES = cases()
DUE = {claim: {name: largest(weights) for name, weights in group.items()} for claim, group in CASES.items()}


def forms(packed):
    """In words what a Packed holds."""
    if packed is None or not all(hasattr(packed, name) for name in (*NAMES, "shape")):
        return form(packed) if packed is None else type(packed).__name__
    return [*(form(getattr(packed, name)) for name in NAMES), str(tuple(packed.shape))]


def due_forms(weights):
    n, blocks = weights.numel(), -(-weights.numel() // BLOCK)
    groups = -(-blocks // GROUP)
    return [
        f"uint8 ({(n + 1) // 2},)",
        f"int8 ({blocks},)",
        f"float32 ({groups},)",
        "float32 ()",
        str(tuple(weights.shape)),
    ]


def judged_scales(packed, due):
    """The scale of each block as its Packed says, and how far it is off, in steps: 0 up to half a step."""
    scales, mean, steps = due
    their_steps = packed.steps.detach().double().repeat_interleave(GROUP)[: len(scales)]
    again = packed.scales.double() * their_steps + (packed.mean.detach().double() if len(scales) else 0.0)
    off = (again - scales) / (steps.repeat_interleave(GROUP)[: len(scales)] + 1e-5 * mean + 1e-30)
    return again, off.where(~(off.abs() <= 0.51), 0.0)


def misses(weights, got, again, due):
    """How far each weight is from the nearest value, in parts of its block's largest; 0 where nothing is nearer."""
    scales, mean, steps = due
    n = weights.numel()
    w, got = weights.double().flatten(), got.detach().double().flatten()
    rounding = 1e-6 * (mean + 128 * steps.repeat_interleave(GROUP)[: len(scales)])
    again, near, unit = (x.repeat_interleave(BLOCK)[:n] for x in (again, 1e-5 * again.abs() + rounding, scales))
    values = again[:, None] * TABLE
    best = (values - w[:, None]).abs().argmin(1)
    best = values.gather(1, best[:, None])[:, 0] * (again > near)  # of a scale of 0 or below: 0 is near enough
    listed = (values - got[:, None]).abs().amin(1) <= near
    listed |= (again < 0) & ((values + got[:, None]).abs().amin(1) <= near)  # some take the magnitude of such a scale
    fine = ((got - w).abs() <= (best - w).abs() + near) & listed
    fine &= (w != 0) | (got == 0)
    return ((got - best) / (unit + 1e-30 * (unit == 0))).where(~fine, 0.0)


def observe(to_nf4, from_nf4):
    """Forms; the mean, steps and scales; what comes back, seen from the nearest value of the table."""
    for claim, group in CASES.items():
        given = [weights.clone(memory_format=torch.preserve_format) for weights in group.values()]
        packed = [to_nf4(weights) for weights in given]
        yield {f"{claim}: forms": dict(zip(group, map(forms, packed)))}
        yield {f"{claim}: same": all(map(torch.equal, given, group.values()))}
        due = list(DUE[claim].values())
        known = [(p, d) for p, d in zip(packed, due) if len(d[0])]
        yield {f"{claim}: mean": [p.mean.detach().double() for p, _ in known]}
        yield {f"{claim}: steps": [p.steps.detach().double() * (d[2] > 0) for p, d in known]}
        scales = [judged_scales(p, d) for p, d in zip(packed, due)]
        yield {f"{claim}: scales": [off for _, off in scales]}
        back = [from_nf4(p) for p in packed]
        yield {f"{claim}: back": dict(zip(group, map(form, back)))}
        made = zip(group.values(), back, scales, due)
        yield {f"{claim}: misses": [misses(w, got, again, d) for w, got, (again, _), d in made]}


def first_case(seen, due):
    """Fields: the first case that is otherwise."""
    name = next(name for name in due if seen[name] != due[name])
    return {"where": name, "expected": str(due[name]), "got": str(seen[name])}


def form_hint(seen, due):
    """The hint: which of the tensors has another form first."""
    name = next(name for name in due if seen[name] != due[name])
    if seen[name] is None:
        return "nothing-returned"
    if isinstance(seen[name], str):
        return "packed-form"
    k = next(k for k in (1, 2, 0, 3, 4) if seen[name][k] != due[name][k])  # a scale lost costs codes as well
    if k == 2:
        return "wrong-steps" if str(seen[name][k]).startswith("float32") else "packed-form"
    n = next(group[name].numel() for group in CASES.values() if name in group)
    return "scales-form" if k == 1 else "one-a-byte" if seen[name][0] == f"uint8 ({n},)" else "packed-form"


def back_hint(seen, due):
    return "nothing-returned" if None in seen.values() else "back-form"


def at_case(claim, told=True):
    """Fields: the case that is wrong, and its number where that tells something."""

    def fields(seen, due):
        k = next(k for k, (a, b) in enumerate(zip(seen, due)) if not within(1e-5)(a, b))
        values = {"expected": due[k].tolist(), "got": seen[k].tolist()} if told else silent(seen, due)
        return {"where": list(CASES[claim])[k]} | values

    return fields


LOOKS = []
for claim, group in CASES.items():
    due = [d for d in DUE[claim].values() if len(d[0])]
    at, where = at_case(claim), at_case(claim, told=False)
    LOOKS += [
        Look(claim, f"{claim}: forms", {name: due_forms(w) for name, w in group.items()}, form_hint, fields=first_case),
        Look("the weights are unchanged", f"{claim}: same", True, "weights-changed"),
    ]
    if due:
        LOOKS += [
            Value("the mean of the scales", f"{claim}: mean", [d[1] for d in due], "wrong-mean", holds=within(1e-5), fields=at),
            Value("one step for each group", f"{claim}: steps", [d[2] for d in due], "wrong-steps", holds=within(1e-5), fields=at),
            Value("the scales, rounded to steps", f"{claim}: scales", [0 * d[0] for d in due], "wrong-scales", holds=within(1e-5), fields=where),
        ]  # fmt: skip
    LOOKS.append(Look("they come back as float32, in their shape", f"{claim}: back",
                      {name: f"float32 {tuple(w.shape)}" for name, w in group.items()}, back_hint, fields=first_case))  # fmt: skip
    if due:
        LOOKS.append(Value("each comes back as the nearest value of the table, zero as zero", f"{claim}: misses",
                           [torch.zeros(w.numel(), dtype=torch.float64) for w in group.values()], "wrong-codes", holds=within(1e-5), fields=where))  # fmt: skip


def balise_7(to_nf4, from_nf4):
    yield from judged(LOOKS, observe, to_nf4, from_nf4)
