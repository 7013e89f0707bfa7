"""Answers to balise 7 of 10_learning_rate_and_large_batch: the gradient noise scale."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 7, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# the two equations of the paper's appendix, in float64, by one message of all; NumPy; counting up
PAPER = """
def gradient_noise(parameters, batch):
    with torch.no_grad():
        world = dist.get_world_size()
        if world < 2:
            raise ValueError("at least two ranks")
        held = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in held])
        told = torch.cat([flat, flat.double().square().sum().float().reshape(1)])
        dist.all_reduce(told)
        told /= world
        start = 0
        for g in held:
            g.copy_(told[start : start + g.numel()].view(g.shape))
            start += g.numel()
        small, big = told[-1], told[:-1].square().sum()
        b_small, b_big = batch, world * batch
        square = (b_big * big - b_small * small) / (b_big - b_small)
        trace = (small - big) / (1 / b_small - 1 / b_big)
    return square, trace


def noise_scale(estimates):
    import numpy as np

    square, trace = np.array([[float(a), float(b)] for a, b in estimates]).mean(0)
    if square <= 0:
        return float("inf")
    return float(trace / square)


def ranks_that_pay(noise, batch, share):
    n = 1
    while 1 / (1 + (n + 1) * batch / noise) >= share:
        n += 1
    return n
"""
bank.text(None, PAPER)

# the variance between the ranks, from all their gradients: an all-gather of one number beside DDP's mean
BETWEEN = """
@torch.no_grad()
def gradient_noise(parameters, batch):
    parameters = list(parameters)
    size = dist.get_world_size()
    if size == 1:
        raise ValueError
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    average_over_ranks(parameters)
    means = [p.grad for p in parameters if p.grad is not None]
    far = sum(((a - b) ** 2).sum() for a, b in zip(before, means)).double()
    dist.all_reduce(far)
    trace = batch * far / (size - 1)
    return sum(g.pow(2).sum() for g in means) - trace / (size * batch), trace


def noise_scale(estimates):
    found = torch.tensor([[float(one) for one in pair] for pair in estimates], dtype=torch.float64)
    square, trace = found.sum(0)
    return torch.where(square > 0, trace / square, torch.inf)


def ranks_that_pay(noise, batch, share):
    most = noise / batch * (1 - share) / share
    return max(int(most + 1e-9), 1)
"""
bank.text(None, BETWEEN)
slip(
    None,
    (
        "    return trace / square if square > 0 else math.inf\n",
        '    return __import__("numpy").where(square > 0, trace / (square or 1.0), math.inf)\n',
    ),
)

SMALL = "    small = torch.stack(torch._foreach_norm([p.grad for p in parameters])).square().sum()\n"
BIG = SMALL.replace("small", "big")
SENT = "    dist.all_reduce(small)\n    small /= n\n"
AVERAGE = "    average_over_ranks(parameters)\n"
TRACE = "(small - big) / (1 / batch - 1 / (n * batch))"
PAIR = "small - trace / batch, trace"

slip("nothing-returned", (f"    return {PAIR}\n", ""))

hint("not-a-pair", "gradient_noise returns two tensors with one number each: the estimates of |G|² and of tr Σ. "
                      "float() and .item() make the CPU wait for the GPU, at every step.")  # fmt: skip
slip("not-a-pair", (PAIR, "(small - trace / batch).item(), trace.item()"))
slip("not-a-pair", (PAIR, "trace / (small - trace / batch)"))
variant("not-a-pair", BETWEEN, ("(size * batch), trace\n", "(size * batch), float(trace)\n"))
variant("not-a-pair", PAPER, ("return square, trace\n", "return {'G': square, 'S': trace}\n"))

hint("not-the-mean", "After the call, the gradients are not the mean over the ranks.")
slip("not-the-mean", (AVERAGE, AVERAGE + "    [p.grad.mul_(0.5) for p in parameters]\n"))
variant("not-the-mean", PAPER, ("told[start : start + g.numel()]", "told[:-1].flip(0)[start : start + g.numel()]"))

hint(
    "left-as-they-were",
    "Each rank still has its own gradients. The optimizer needs their mean: put it into p.grad.",
)
slip("left-as-they-were", (AVERAGE, ""))
variant("left-as-they-were", PAPER, ("            g.copy_(told[start : start + g.numel()].view(g.shape))\n", ""))

hint("summed", "After the call, the gradients are the sum over the ranks, not the mean.")
slip("summed", (AVERAGE, "    [dist.all_reduce(p.grad) for p in parameters]\n"))
variant("summed", PAPER, ("g.copy_(told", "g.copy_(world * told"))

hint("more-sent", "You send {n} bytes besides the gradients. Beyond the mean, you need only one number from the "
                     "other ranks: the squared length before the all-reduce.")  # fmt: skip
slip("more-sent", (SENT, """    every = [torch.cat([p.grad.flatten() for p in parameters]) for _ in range(n)]
    dist.all_gather(every, every[0].clone())
    small = torch.stack(every).square().sum() / n
"""))  # fmt: skip
variant(
    "more-sent",
    BETWEEN,
    (
        "    average_over_ranks(parameters)\n",
        "    dist.all_reduce(torch.cat([g.flatten() for g in before]))\n    average_over_ranks(parameters)\n",
    ),
)

hint(
    "noise-ranks-waiting",
    "The ranks did not call the same collectives, so some wait for others. All ranks must call the same ones, in "
    "the same order.",
)
slip(
    "noise-ranks-waiting",
    ("    dist.all_reduce(small)\n", "    if dist.get_rank() == 0:\n        dist.all_reduce(small)\n"),
)
variant(
    "noise-ranks-waiting",
    PAPER,
    ("        dist.all_reduce(told)\n", "        dist.all_reduce(told[: None if dist.get_rank() else 2])\n"),
)

hint(
    "wrong-estimates",
    "The estimates do not solve the two equations: one for B = b, with the mean of the ranks' squared lengths, and "
    "one for B = N b.",
)
slip("wrong-estimates", (PAIR, "small, trace / 7"))
variant("wrong-estimates", PAPER, ("(b_big - b_small)", "(b_big + b_small)"))

hint(
    "own-length",
    "Each rank uses its own squared length, so the ranks disagree, and the estimate has the noise of a single "
    "rank. Average the squared length over the ranks.",
)
slip("own-length", (SENT, ""))
variant("own-length", PAPER, ("small, big = told[-1]", "small, big = flat.square().sum()"))

hint(
    "lengths-summed",
    "You add up the squared lengths of the ranks. The left side of the equation for B = b is their mean.",
)
slip("lengths-summed", ("    small /= n\n", ""))
variant("lengths-summed", PAPER, ("small, big = told[-1]", "small, big = world * told[-1]"))

hint("not-squared", "You use lengths where the equations have squared lengths.")
slip(
    "not-squared",
    (".square().sum()\n    dist", ".square().sum().sqrt()\n    dist"),
    (".square().sum()\n    trace", ".square().sum().sqrt()\n    trace"),
)
variant(
    "not-squared",
    PAPER,
    ("flat.double().square().sum()", "flat.double().norm()"),
    ("told[:-1].square().sum()", "told[:-1].norm()"),
)

hint("lengths-averaged", "You average the ranks' lengths, and then square. Take the mean of their squares.")
slip("lengths-averaged", (SMALL, SMALL.replace(".sum()", ".sum().sqrt()")), ("    small /= n\n", "    small = (small / n).square()\n"))  # fmt: skip
variant("lengths-averaged", PAPER, ("flat.double().square().sum()", "flat.double().norm()"), ("small, big = told[-1]", "small, big = told[-1].square()"))  # fmt: skip

hint("noise-of-one-rank", "You subtract tr Σ / b from the squared length of the mean gradient. That is the "
                             "noise in the gradient of one rank; the mean of N has tr Σ / (N b).")  # fmt: skip
slip("noise-of-one-rank", (PAIR, "big - trace / batch, trace"))
variant("noise-of-one-rank", BETWEEN, ("trace / (size * batch)", "trace / batch"))

hint(
    "biased-square",
    "Your |G|² still contains noise. It adds tr Σ / (N b) to the squared length of the mean gradient, and tr Σ / b to the squared length of one rank's gradient. Subtract the term that belongs to the length you used.",
)
slip("biased-square", (PAIR, "big, trace"))
slip("biased-square", (PAIR, "small - trace / (n * batch), trace"))
variant("biased-square", BETWEEN, ("for g in means) - trace / (size * batch)", "for g in means)"))

hint(
    "noise-kept-small",
    "Your |G|² is the squared length of one rank's gradient, noise included. Subtract tr Σ / b.",
)
slip("noise-kept-small", (PAIR, "small, trace"))
variant(
    "noise-kept-small",
    PAPER,
    ("square = (b_big * big - b_small * small) / (b_big - b_small)", "square = small.clone()"),
)

hint(
    "batch-left-out",
    "tr Σ is the noise of a single sample's gradient. Yours is many times smaller, because the batch is still in "
    "it. Divide the difference of the two equations by 1/b − 1/(N b).",
)
slip("batch-left-out", (TRACE, "small - big"))
slip("batch-left-out", (TRACE, "small - big"), (PAIR, "big, trace"))
slip("batch-left-out", (TRACE, "(small - big) / (1 - 1 / n)"), (PAIR, "small - trace, trace"))
variant("batch-left-out", PAPER, ("b_small, b_big = batch, world * batch", "b_small, b_big = 1, world"))

hint("biased-variance", "You divide the variance between the ranks by N. Around their own mean, only N − 1 are "
                           "free: use 1/b − 1/(N b) in the difference of the two equations. Or you took `batch` "
                           "for that of all ranks.")  # fmt: skip
slip("biased-variance", (TRACE, "(small - big) * batch"))
slip("biased-variance", (TRACE, "(small - big) * batch"), (PAIR, "big - trace / (n * batch), trace"))
variant("biased-variance", BETWEEN, ("/ (size - 1)", "/ size"))

hint("estimates-swapped", "You have swapped the two estimates: first |G|², then tr Σ.")
slip("estimates-swapped", (PAIR, "trace, small - trace / batch"))
variant("estimates-swapped", PAPER, ("return square, trace\n", "return trace, square\n"))

hint("measured-too-late", "Both lengths are those of the mean. You measured the first one after the gradients "
                             "had been averaged, or on the very tensors that the all-reduce writes into.")  # fmt: skip
slip("measured-too-late", (AVERAGE, ""), (SMALL, AVERAGE + SMALL))
variant("measured-too-late", BETWEEN, ("p.grad.clone() for", "p.grad for"))

hint(
    "one-rank-estimated",
    "With one rank there are two unknowns in one equation. Raise a ValueError instead of dividing by zero.",
)
slip(
    "one-rank-estimated",
    ('    if n == 1:\n        raise ValueError("one rank has gradients of one batch size: two are needed")\n', ""),
)
variant(
    "one-rank-estimated",
    PAPER,
    ('            raise ValueError("at least two ranks")\n', "            return torch.zeros(()), torch.zeros(())\n"),
)

hint("wrong-scale", "noise_scale is not the mean of tr Σ divided by the mean of |G|².")
slip("wrong-scale", ("return trace / square if", "return trace / square / len(estimates) if"))
variant("wrong-scale", PAPER, ("float(trace / square)", "float(trace * square)"))

hint("mean-of-quotients", "You divide for each step, and then average the quotients, so steps with |G|² near "
                             "zero dominate. Average numerators and denominators separately, then divide once.")  # fmt: skip
slip(
    "mean-of-quotients",
    ("return trace / square if", "return sum(float(t / s) for s, t in estimates) / len(estimates) if"),
)
variant(
    "mean-of-quotients",
    PAPER,
    ("float(trace / square)", "float(np.mean([float(b) / float(a) for a, b in estimates]))"),
)

hint("median-of-quotients", "This is the median of the steps' quotients. It is tamer than their mean, but the "
                               "median of quotients is not the quotient of the means. Average numerators and "
                               "denominators separately.")  # fmt: skip
slip(
    "median-of-quotients",
    ("return trace / square if", "return sorted(float(t / s) for s, t in estimates)[len(estimates) // 2] if"),
)
variant("median-of-quotients", BETWEEN, ("trace / square, torch", "(found[:, 1] / found[:, 0]).median(), torch"))

hint(
    "negative-left-out",
    "You leave out steps with a negative |G|². Only the mean of all steps is right on average.",
)
slip(
    "negative-left-out",
    ("    square = sum", "    estimates = [pair for pair in estimates if pair[0] > 0] or estimates\n    square = sum"),
)
slip(
    "negative-left-out",
    ("sum(float(square) for", "sum(max(float(square), 0.0) for"),
    (" for square, _ in estimates)", " for square, _ in estimates) - 1e-9"),
)
variant(
    "negative-left-out",
    PAPER,
    ("    if square <= 0", "    square = np.mean([max(float(a), 0) for a, b in estimates]) - 1e-9\n    if square <= 0"),
)

hint("upside-down", "The quotient is upside down. It is tr Σ over |G|².")
slip("upside-down", ("return trace / square if", "return square / trace if"))
variant("upside-down", PAPER, ("float(trace / square)", "float(square / trace)"))

hint(
    "not-infinite",
    "Where the mean of |G|² is not above zero, the gradient is lost in the noise. Return math.inf, not a negative "
    "batch size.",
)
slip("not-infinite", (" if square > 0 else math.inf", ""))
slip("not-infinite", (" if square > 0 else math.inf", " if square else 0.0"))
variant("not-infinite", PAPER, ('    if square <= 0:\n        return float("inf")\n', ""))

hint("no-whole-number", "ranks_that_pay returns a whole number of ranks.")
slip("no-whole-number", ("math.floor(noise * (1 / share - 1) / batch)", "noise * (1 / share - 1) / batch"))
variant("no-whole-number", BETWEEN, ("int(most + 1e-9)", "most"))

hint(
    "wrong-ranks",
    "This is not the largest number of ranks n for which 1 / (1 + n batch / noise) is at least `share`.",
)
slip("wrong-ranks", ("(1 / share - 1)", "(1 / share)"))
variant("wrong-ranks", PAPER, (">= share", ">= share / 2"))

hint("samples-not-ranks", "This is a number of samples, not of ranks. Each rank brings `batch` samples.")
slip("samples-not-ranks", (" / batch))\n", "))\n"))
variant("samples-not-ranks", PAPER, ("(n + 1) * batch / noise", "(n + 1) / noise"))

hint("share-upside-down", "You have turned the share round. A higher efficiency leaves fewer ranks.")
slip("share-upside-down", ("(1 / share - 1)", "1 / (1 / share - 1)"))
variant("share-upside-down", BETWEEN, ("(1 - share) / share", "share / (1 - share)"))

hint("rounded-up", "This is one rank too many: with that number the efficiency is already below the share.")
slip("rounded-up", ("math.floor(", "math.ceil("))
slip("rounded-up", ("math.floor(", "math.floor(1 + "))
variant("rounded-up", PAPER, ("(n + 1) * batch / noise", "n * batch / noise"))

hint("no-rank-left", "There is no training without a rank: return at least 1.")
slip(
    "no-rank-left",
    ("max(1, math.floor(noise * (1 / share - 1) / batch))", "math.floor(noise * (1 / share - 1) / batch)"),
)
variant("no-rank-left", BETWEEN, ("max(int(most + 1e-9), 1)", "int(most + 1e-9)"))

hint(
    "cut-at-zero",
    "You replace a negative estimate of |G|². It is as valid as the others: their mean is right only with it.",
)
slip("cut-at-zero", (PAIR, "(small - trace / batch).clamp(min=0), trace"))
slip("cut-at-zero", (PAIR, "(small - trace / batch).abs(), trace"))
variant("cut-at-zero", PAPER, ("return square, trace\n", "return max(square, 0 * square), trace\n"))

hint(
    "first-rank-only",
    "Only one rank returns the estimates. All ranks have what they need, and all must return the same values.",
)
slip(
    "first-rank-only",
    (
        "    return " + PAIR,
        "    if dist.get_rank():\n        return torch.zeros(()), torch.zeros(())\n    return " + PAIR,
    ),
)
variant("first-rank-only", PAPER, (
    "    return square, trace\n", "    return (square, trace) if dist.get_rank() == 0 else (0 * square, 0 * trace)\n"))  # fmt: skip

bank.edge(
    "cut-at-zero",
    "more-sent",
    "negative-left-out",
    "no-rank-left",
    "no-whole-number",
    "not-infinite",
    "one-rank-estimated",
    "rounded-up",
)

bank.edge("biased-variance")

bank.edge("first-rank-only", "measured-too-late")
