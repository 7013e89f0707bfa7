"""Balise 4: images against triangle filters written as matrices, plans against numbers worked out by hand."""

import math
import operator

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, same, tried, within

#  images (b, c, side, side), size
SCALED = [
    (torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)), 16),
    (torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(2)) * 4 - 2, 24),
    (torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64), 8),
    (torch.rand(4, 24, 24, 3, generator=torch.Generator().manual_seed(4)).permute(0, 3, 1, 2), 16),
    (torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(5)), 24),
    ((torch.arange(32)[:, None] + torch.arange(32)).remainder(2).float().expand(2, 3, 32, 32), 8),  # squares of a board
]


def triangles(before, after):
    """(after, before): weights of a linear filter, as wide as the pixels of the smaller of the two images."""
    step = before / after
    centres, pixels = (torch.arange(n, dtype=torch.float64) + 0.5 for n in (after, before))
    weights = (1 - (pixels - step * centres[:, None]).abs() / max(step, 1)).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def scaled(x, size):
    matrix = triangles(x.shape[-1], size)
    return (matrix @ x.double() @ matrix.T).to(x.dtype)


#  (sizes, images, batch, peak, pixels), batch of each epoch, steps of each epoch
ALIKE = {
    "100 images in batches of 10": (([16, 16, 24, 32], 100, 10, 0.2, None), [10, 10, 10, 10], [10, 10, 10, 10]),
    "107 images in batches of 10": (([8, 32, 16], 107, 10, 0.4, None), [10, 10, 10], [10, 10, 10]),
    "a single step": (([24], 32, 32, 0.1, None), [32], [1]),
    "63 images in batches of 16": (([40] * 5, 63, 16, 3.0, None), [16] * 5, [3] * 5),
}
BUDGETS = {
    "pixels for 32 images of 32 × 32": (([8, 16, 16, 32], 1000, 32, 0.1, 32768), [512, 128, 128, 32], [1, 7, 7, 31]),
    "5,000 pixels": (([16, 24, 32, 32, 16], 83, 4, 0.05, 5000), [19, 8, 4, 4, 19], [4, 10, 20, 20, 4]),
    "fewer pixels than one image has": (([16, 24, 32], 9, 8, 0.8, 600), [2, 1, 1], [4, 9, 9]),
    "pixels for more images than there are": (([8, 16, 32], 30, 10, 0.2, 6400), [30, 25, 6], [1, 1, 5]),
    "a larger batch at full size": (([32, 64], 50, 3, 0.3, 10240), [10, 2], [5, 25]),
}
PLANS = ALIKE | BUDGETS
NO_STEP = "no step"
REFUSED = [([16, 20, 32], 100, 10, 0.2, None), ([32, 30], 64, 8, 0.1, 8192), ([4], 40, 10, 0.2, None), ([28, 16], 40, 10, 0.2, None)]  # fmt: skip


def cycle(n):
    """Parts of the peak at each of n steps."""
    shares = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return torch.where(shares < 0.25, 4 * shares, (1 + torch.cos(math.pi * (4 * shares - 1) / 3)) / 2)


def observe(resized, progressive):
    got = [resized(x.clone(), size) for x, size in SCALED]
    yield {"forms": form(got), "scaled": got}
    own = [(x, resized(x, x.shape[-1])) for x in [x.clone() for x, _ in SCALED]]
    yield {
        "as they are": all(
            isinstance(y, torch.Tensor) and y.data_ptr() == x.data_ptr() and y.stride() == x.stride() for x, y in own
        )
    }
    plans = [progressive(list(sizes), *rest) for (sizes, *rest), *_ in PLANS.values()]
    yield {"sizes": [sizes_of(plan) for plan in plans]}
    yield {"refused": [outcome(tried(progressive, list(sizes), *rest)) for sizes, *rest in REFUSED]}
    yield {
        "batches": [
            [max(operator.index(batch) for _, batch, _ in epoch) if epoch else NO_STEP for epoch in plan]
            for plan in plans
        ]
    }
    yield {"steps": [[len(epoch) for epoch in plan] for plan in plans]}
    rates = [relative(plan, *truth[:2]) for plan, truth in zip(plans, PLANS.values())]
    yield {"alike": rates[: len(ALIKE)], "budgets": rates[len(ALIKE) :]}


def outcome(got):
    """The name of the error, or what came back instead."""
    return got.split(":")[0] if isinstance(got, str) else "no error"


def sizes_of(plan):
    """The size of each epoch; words where something is not as the text says; None for None."""
    if not isinstance(plan, list | tuple):
        return None if plan is None else f"a {type(plan).__name__}"
    if not all(isinstance(epoch, list | tuple) for epoch in plan):
        return "an epoch that is not a list of steps"
    if not all(isinstance(step, list | tuple) and len(step) == 3 for epoch in plan for step in epoch):
        return "a step that is not (size, batch, rate)"
    try:
        sizes = [{(operator.index(size), operator.index(batch))[0] for size, batch, _ in epoch} for epoch in plan]
    except TypeError:
        return "a size or a batch that is not a whole number"
    return [min(of) if len(of) == 1 else "several sizes" if of else NO_STEP for of in sizes]


def right_sizes(seen, due):
    """A look's `holds`: an epoch without steps is looked at with the batches."""
    return all(
        isinstance(plan, list) and len(plan) == len(of) and all(a in (b, NO_STEP) for a, b in zip(plan, of))
        for plan, of in zip(seen, due)
    )


def relative(plan, given, batches):
    """The rate of each step, as a part of the highest that its batch may have."""
    _, _, batch, peak, _ = given
    rates = [float(rate) * batch / (peak * b) for epoch, b in zip(plan, batches) for _, _, rate in epoch]
    return torch.tensor(rates, dtype=torch.float64)


def of_plan(kind, plans=PLANS):
    """Fields: the first plan that is wrong."""

    def fields(seen, due):
        name, got, expected = next(one for one in zip(plans, seen, due) if not within(1e-5)(*one[1:]))
        (sizes, images, batch, peak, pixels), batches, _ = plans[name]
        where = f"progressive({sizes}, images={images}, batch={batch}, peak={peak}, pixels={pixels})"
        if kind != "rates":
            return {"where": where, "got": f"{kind}: {got}", "expected": f"{kind}: {expected}"}
        k = int(((got - expected).abs() > 1e-5).int().argmax())
        top = peak / batch * [b for b, n in zip(batches, plans[name][2]) for _ in range(n)][k]
        return {
            "where": where,
            "got": f"step {k}: {got[k].item() * top:.6g}",
            "expected": f"step {k}: {expected[k].item() * top:.6g}",
        }

    return fields


def of_images(seen, due):
    """Fields: the first images that are wrong."""
    k = next(k for k, one in enumerate(due) if not same(seen[k], one))
    return {"where": f"x of shape {tuple(SCALED[k][0].shape)}, size={SCALED[k][1]}", "expected": due[k], "got": seen[k]}


def first_refused(seen, due):
    k = next(k for k, one in enumerate(seen) if one != "ValueError")
    return {"where": f"sizes={REFUSED[k][0]}", "got": seen[k], "expected": "ValueError"}


def rates(plans):
    return [cycle(sum(steps)) for _, _, steps in plans.values()]


DUE = [scaled(*case) for case in SCALED]
LOOKS = [
    Look("images of size × size", "forms", form(DUE), "wrong-resized", fields=of_images),
    Value("bilinear and antialiased", "scaled", DUE, "wrong-resized", fields=of_images),
    Look("images of this size come back as they are", "as they are", True, "same-size-copied"),
    Look("a plan in the right form", "sizes", [given[0] for given, *_ in PLANS.values()], "plan-form", holds=right_sizes, fields=of_plan("sizes")),
    Look("only sizes that are multiples of 8", "refused", ["ValueError"] * len(REFUSED), "no-value-error", fields=first_refused),
    Value("the batch of each epoch", "batches", [batches for _, batches, _ in PLANS.values()], "wrong-batch", fields=of_plan("batches")),
    Value("the steps of each epoch", "steps", [steps for *_, steps in PLANS.values()], "wrong-steps", fields=of_plan("steps")),
    Value("rates where all steps have the same batch", "alike", rates(ALIKE), "wrong-rate", holds=within(1e-5), fields=of_plan("rates", ALIKE)),
    Value("rates with a budget of pixels", "budgets", rates(BUDGETS), "wrong-rate", holds=within(1e-5), fields=of_plan("rates", BUDGETS)),
]  # fmt: skip


def balise_4(resized, progressive):
    yield from judged(LOOKS, observe, resized, progressive)
