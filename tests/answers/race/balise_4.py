"""Answers to balise 4 of 25_race: images of any size, and a plan of steps whose size, batch and rate change."""

from tests.answers.bank import Bank

bank = Bank("25_race", 4, whole=True)

# a filter of its own, a matrix for each of the two dimensions; a plan step by step
BY_STEP = """
def resized(x, size):
    side = x.shape[-1]
    if side == size:
        return x
    step = side / size
    wide = max(step, 1.0)
    at = (torch.arange(size, dtype=x.dtype) + 0.5) * step
    far = (torch.arange(side, dtype=x.dtype) + 0.5 - at[:, None]).abs() / wide
    weights = F.relu(1 - far)
    weights /= weights.sum(1, keepdim=True)
    return torch.einsum("ij,bcjk,lk->bcil", weights, x, weights)


def progressive(sizes, images, batch, peak, pixels=None):
    plan, total = [], 0
    for size in sizes:
        if size % 8 != 0:
            raise ValueError(size)
        many = batch
        if pixels is not None:
            many = int(pixels / (size * size))
            if many < 1:
                many = 1
            if many > images:
                many = images
        epoch = [(size, many)] * int(images / many)
        plan.append(epoch)
        total += len(epoch)
    done = 0
    for e in range(len(plan)):
        for k in range(len(plan[e])):
            share = (done + 0.5) / total
            size, many = plan[e][k]
            plan[e][k] = (size, many, peak * one_cycle(share) * many / batch)
            done += 1
    return plan
"""
bank.text(None, BY_STEP)

# torchvision; tables in numpy and torch, cut at the ends of the epochs
BY_TABLE = """
def resized(x, size):
    from torchvision.transforms.v2.functional import resize

    return x if size == x.shape[-1] == x.shape[-2] else resize(x, [size, size], antialias=True)


def progressive(sizes, images, batch, peak, pixels=None):
    import numpy as np

    sizes = np.array(sizes)
    if (sizes % STRIDE).any():
        raise ValueError("sizes")
    batches = np.full(len(sizes), batch) if pixels is None else np.clip(pixels // sizes**2, 1, images)
    steps = images // batches
    ends = np.cumsum(steps)
    shares = (torch.arange(ends[-1]) + 0.5) / int(ends[-1])
    rates = torch.tensor([peak * one_cycle(s) for s in shares.tolist()]) * torch.tensor(np.repeat(batches, steps) / batch)
    epochs = rates.float().tensor_split(torch.tensor(ends[:-1]))
    return tuple([(int(size), b, rate) for rate in epoch] for size, b, epoch in zip(sizes, batches, epochs))
"""
bank.text(None, BY_TABLE)
bank.slip(None, ("    if x.shape[-2:] == (size, size):\n        return x\n    return F.interpolate(x, size=(size, size)", "    if x.shape[2] == x.shape[3] == size:\n        return x.view_as(x)\n    return F.interpolate(x, scale_factor=size / x.shape[-1]"))  # fmt: skip

bank.slip("nothing-returned", ("    return [[(size, b", "    [[(size, b"))

bank.hint("not-antialiased", "You use a bilinear filter without antialiasing, so many pixels of the larger "
                                "image have no effect. With antialias=True the average is over all of them.", edge=True)  # fmt: skip
bank.slip("not-antialiased", (", antialias=True", ""))
bank.variant("not-antialiased", BY_STEP, ("wide = max(step, 1.0)", "wide = 1.0"))

bank.hint("wrong-resized", "resized returns (b, c, size, size), in the dtype of x, from a bilinear, antialiased filter: F.interpolate with mode='bilinear' and antialias=True.")  # fmt: skip
bank.slip("wrong-resized", ('mode="bilinear", antialias=True', 'mode="nearest"'))
bank.slip("wrong-resized", ('mode="bilinear", antialias=True', 'mode="area"'))
bank.slip("wrong-resized", ("bilinear", "bicubic"))
bank.slip("wrong-resized", ("F.interpolate(x, size=(size, size), mode=\"bilinear\", antialias=True)", "x[..., (at := torch.arange(size) * x.shape[-1] // size)[:, None], at]"))  # fmt: skip
bank.slip("wrong-resized", ("antialias=True)", "antialias=True, align_corners=True)"))
bank.slip("wrong-resized", ("interpolate(x, size", "interpolate(x.float(), size"))
bank.variant("wrong-resized", BY_STEP, ("wide = max(step, 1.0)", "wide = step"))

bank.hint("same-size-copied", "You copy or recompute images that already have this size. Return x itself: "
                                 "otherwise each step at full size pays for it.", edge=True)  # fmt: skip
bank.slip("same-size-copied", ("    if x.shape[-2:] == (size, size):\n        return x\n", ""))
bank.variant("same-size-copied", BY_STEP, ("return x\n", "return x.clone()\n"))

bank.hint("plan-form", "A plan is a list with one entry per epoch: a list of its steps, each (size, batch, "
                          "rate) in this order. The first two are whole numbers.")  # fmt: skip
bank.slip("plan-form", ("(size, b, peak * b / batch * one_cycle(next(shares)))", "(b, size, peak * b / batch * one_cycle(next(shares)))"))  # fmt: skip
bank.slip("plan-form", ("return [[(size, b, peak * b / batch * one_cycle(next(shares))) for _ in range(n)] for size, b, n in plan]", "return [(size, b, peak * b / batch * one_cycle(next(shares))) for size, b, n in zip(sizes, batches, steps) for _ in range(n)]"))  # fmt: skip
bank.variant("plan-form", BY_STEP, ("    return plan\n", "    yield from plan\n"))
bank.variant("plan-form", BY_STEP, ("int(pixels / (size * size))", "pixels / (size * size)"))

bank.hint("no-value-error", "A size that is not a multiple of STRIDE must raise a ValueError, wherever it is in "
                               "the list. In your answer there is {got}.", edge=True)  # fmt: skip
bank.slip("no-value-error", ("    if any(size % STRIDE for size in sizes):\n        raise ValueError(f\"sizes must be multiples of {STRIDE}, got {sizes}\")\n", ""))  # fmt: skip
bank.slip("no-value-error", ("any(", "all("))
bank.slip("no-value-error", ('raise ValueError(f"sizes must be multiples of {STRIDE}, got {sizes}")', "assert False"))
bank.variant("no-value-error", BY_STEP, ("size % 8 != 0", "size < 8"))

bank.hint("wrong-batch", "Without `pixels` a step takes `batch` images. With it, a step takes as many as fit in "
                            "at size · size pixels each: at least one, and at most all there are.")  # fmt: skip
bank.slip("wrong-batch", ("size**2", "size"))
bank.slip("wrong-batch", ("min(images, max(1, pixels // size**2))", "max(1, pixels // size**2)"))
bank.slip("wrong-batch", ("max(1, pixels // size**2)", "max(1, pixels // (3 * size**2))"))
bank.slip("wrong-batch", ("max(1, pixels // size**2)", "max(1, batch * SIDE**2 // size**2)"))
bank.slip("wrong-batch", ("max(1, pixels // size**2)", "max(batch, pixels // size**2)"))
bank.slip("wrong-batch", ("pixels // size**2", "round(pixels / size**2)"))
bank.variant("wrong-batch", BY_STEP, ("            if many > images:\n                many = images\n", "            many = min(many, batch)\n"))  # fmt: skip
bank.variant("wrong-batch", BY_TABLE, ("sizes**2, 1, images", "sizes**2 // STRIDE * STRIDE, 1, images"))

bank.hint("wrong-steps", "An epoch has images // b steps, where b is the batch of this epoch. The remaining "
                            "images don't fill a batch and are dropped.")  # fmt: skip
bank.slip("wrong-steps", ("images // b ", "math.ceil(images / b) "))
bank.slip("wrong-steps", ("images // b ", "images // batch "))
bank.slip("wrong-steps", ("images // b ", "images // batches[0] "))
bank.variant("wrong-steps", BY_STEP, ("int(images / many)", "round(images / many)"))

bank.hint(
    "off-by-half",
    "You take the rates at the beginnings or ends of the steps. Take them at the middles: "
    "step k of n, from 0, is at (k + 0.5) / n.",
    edge=True,
)
bank.slip("off-by-half", ("(k + 0.5)", "k"))
bank.slip("off-by-half", ("(k + 0.5)", "(k + 1)"))
bank.slip("off-by-half", ("(k + 0.5) / sum(steps)", "k / max(1, sum(steps) - 1)"))
bank.variant("off-by-half", BY_STEP, ("done + 0.5", "done"))

bank.hint("cycle-of-epochs", "The rate goes through one cycle over all steps together. In your answer it "
                                "restarts in each epoch, or stays the same within one. Count k through all epochs.")  # fmt: skip
bank.slip(
    "cycle-of-epochs", ("one_cycle(next(shares))) for _ in range(n)", "one_cycle((k + 0.5) / n)) for k in range(n)")
)
bank.slip("cycle-of-epochs", ("one_cycle(next(shares))) for _ in range(n)] for size, b, n in plan", "one_cycle((e + 0.5) / len(sizes))) for _ in range(n)] for e, (size, b, n) in enumerate(zip(sizes, batches, steps))"))  # fmt: skip
bank.variant("cycle-of-epochs", BY_STEP, ("share = (done + 0.5) / total", "share = (k + 0.5) / len(plan[e])"))
bank.variant("cycle-of-epochs", BY_STEP, ("share = (done + 0.5) / total", "share = (e + 0.5) / len(plan)"))

bank.hint("wrong-total", "Epochs with different batches have different numbers of steps, and n is the sum of "
                            "all of these. The cycle advances by 1 / n at each step, in each epoch.", edge=True)  # fmt: skip
bank.slip("wrong-total", ("(k + 0.5) / sum(steps) for", "min(1.0, (k + 0.5) / (images // batch * len(sizes))) for"))
bank.slip("wrong-total", ("(k + 0.5) / sum(steps) for", "(k + 0.5) / (images // batch * len(sizes)) for"))
bank.slip("wrong-total", ("(k + 0.5) / sum(steps) for", "min(1.0, (k + 0.5) / (steps[0] * len(sizes))) for"))
bank.slip("wrong-total", ("one_cycle(next(shares))) for _ in range(n)] for size, b, n in plan", "one_cycle((e + (k + 0.5) / n) / len(sizes))) for k in range(n)] for e, (size, b, n) in enumerate(zip(sizes, batches, steps))"))  # fmt: skip
bank.variant(
    "wrong-total", BY_STEP, ("share = (done + 0.5) / total", "share = (e + (k + 0.5) / len(plan[e])) / len(plan)")
)
bank.variant("wrong-total", BY_STEP, ("share = (done + 0.5) / total", "share = min((done + 0.5) / (len(plan) * (images // batch)), 1)"))  # fmt: skip

bank.hint("rate-not-scaled", "Your rate is not proportional to the batch. With b images, the cycle's peak is "
                                "peak · b / batch.")  # fmt: skip
bank.slip("rate-not-scaled", ("peak * b / batch *", "peak *"))
bank.slip("rate-not-scaled", ("peak * b / batch *", "peak * math.sqrt(b / batch) *"))
bank.slip("rate-not-scaled", ("peak * b / batch *", "peak * batch / b *"))
bank.variant("rate-not-scaled", BY_STEP, (" * many / batch", ""))
bank.variant("rate-not-scaled", BY_STEP, (" * many / batch", " * (many / batch) ** 0.5"))

bank.hint("wrong-rate", "A step of b images has the rate peak · b / batch · one_cycle((k + 0.5) / n), where k counts the steps of all epochs from 0, and n is how many there are.")  # fmt: skip
bank.slip("wrong-rate", ("peak * b / batch * one_cycle(next(shares))", "peak * b / batch * (1 - next(shares))"))
bank.slip("wrong-rate", ("peak * b / batch *", "peak * b / max(batches) *"))
bank.slip("wrong-rate", ("peak * b / batch *", "PEAK * b / batch *"))
bank.variant("wrong-rate", BY_STEP, ("peak * one_cycle(share)", "peak"))
