"""Answers to balise 6 of 07_data_augmentation: the loss on soft labels, and top-1."""

from tests.answers.bank import Bank

bank = Bank("07_data_augmentation", 6)
LOSS = "return -(labels * log_p).sum(dim=1).mean()"
TOP = "return (logits.argmax(dim=1) == soft.argmax(dim=1)).float().mean()"

SUMEXP = '''
def soft_cross_entropy(logits, labels, smoothing=0.0):
    """By log-sum-exp; smoothing as a second term."""
    x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if labels.ndim == 1:
        labels = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[labels]
    log_p = x - torch.logsumexp(x, dim=-1, keepdim=True)
    hard = -(labels.to(x.dtype) * log_p).sum(-1)
    even = -log_p.mean(-1)
    return ((1 - smoothing) * hard + smoothing * even).mean()


def top1(logits, soft):
    return torch.eq(logits.argmax(-1), soft.max(-1).indices).double().mean()
'''
bank.text(None, SUMEXP)

TERMS = '''
def soft_cross_entropy(logits, labels, smoothing=0.0):
    """Integer labels by gather; the smoothing as a mean of its own."""
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = F.log_softmax(logits, dim=-1, dtype=kind)
    picked = log_p.gather(1, labels[:, None])[:, 0] if labels.ndim == 1 else (log_p * labels).sum(-1)
    return -((1 - smoothing) * picked.mean() + smoothing * log_p.mean())


def top1(logits, soft):
    return (logits.max(1)[1] == soft.max(1)[1]).sum() / logits.shape[0]
'''
bank.text(None, TERMS)
bank.slip(
    None, ("-(labels * log_p).sum(dim=1).mean()", '-torch.einsum("bc,bc->b", labels.to(log_p.dtype), log_p).mean()')
)

bank.slip("nothing-returned", (LOSS, LOSS.removeprefix("return ")))
bank.slip("nothing-returned", (TOP, TOP.removeprefix("return ")))

bank.hint("library-loss", "You call PyTorch's own {got[0]}. Write the sum over classes yourself, with log_softmax.")
bank.slip("library-loss", (LOSS, "return F.cross_entropy(logits, labels)"))
bank.slip(
    "library-loss",
    (LOSS, "return F.cross_entropy(logits, labels) if smoothing else " + LOSS.removeprefix("return ")),
)
bank.variant("library-loss", TERMS, ("return -(", "return F.nll_loss(log_p, labels) if labels.ndim == 1 else -("))
bank.variant(
    "library-loss",
    SUMEXP,
    ("-(labels.to(x.dtype) * log_p).sum(-1)", "F.kl_div(log_p, labels.to(x.dtype), reduction='none').sum(-1)"),
)

bank.hint("loss-shape", "The loss must be one number, a tensor of shape ().")
bank.slip("loss-shape", (LOSS, LOSS.replace(".mean()", "")))
bank.slip("loss-shape", (LOSS, LOSS + ".item()"))
bank.variant("loss-shape", SUMEXP, ("* even).mean()", "* even)"))

bank.hint("loss-summed-up", "That is the sum over the images. Take the mean.")
bank.slip("loss-summed-up", (LOSS, LOSS.replace(".mean()", ".sum()")))
bank.variant("loss-summed-up", SUMEXP, ("* even).mean()", "* even).sum()"))

bank.hint(
    "loss-mean-of-all",
    "That is a mean over images and classes. Sum over the classes, then take the mean over the images.",
)
bank.slip("loss-mean-of-all", (LOSS, "return -(labels * log_p).mean()"))
bank.variant(
    "loss-mean-of-all",
    SUMEXP,
    ("hard = -(labels.to(x.dtype) * log_p).sum(-1)", "hard = -(labels.to(x.dtype) * log_p)"),
    ("log_p.mean(-1)", "log_p / x.shape[1]"),
)

bank.hint("sign", "The loss has the wrong sign.")
bank.slip("sign", (LOSS, LOSS.replace("-(", "(")))
bank.variant("sign", SUMEXP, ("= -", "= "))
bank.variant("sign", TERMS, ("return -(", "return ("))

bank.hint(
    "softmax-then-log",
    "With logits in the hundreds, the loss is wrong: softmax(x) rounds to 0 there, and its logarithm is lost, "
    "whatever you add to it. log_softmax does both at once.",
)
bank.slip("softmax-then-log", (".log_softmax(dim=1)", ".softmax(dim=1).log()"))
bank.slip("softmax-then-log", (".log_softmax(dim=1)", ".softmax(dim=1).clamp(min=1e-12).log()"))
bank.slip("softmax-then-log", (".log_softmax(dim=1)", ".softmax(dim=1).add(1e-7).log()"))
bank.variant(
    "softmax-then-log",
    SUMEXP,
    ("x - torch.logsumexp(x, dim=-1, keepdim=True)", "(x.exp() / x.exp().sum(-1, keepdim=True)).log()"),
)
bank.variant(
    "softmax-then-log",
    TERMS,
    ("F.log_softmax(logits, dim=-1, dtype=kind)", "(F.softmax(logits, dim=-1, dtype=kind) + 1e-9).log()"),
)

bank.hint("labels-argmaxed", "You turned each soft label into a single class. All of its mass counts.")
bank.slip("labels-argmaxed", ("    log_p =", "    labels = F.one_hot(labels.argmax(1), classes)\n    log_p ="))
bank.variant(
    "labels-argmaxed",
    TERMS,
    (
        "if labels.ndim == 1 else (log_p * labels).sum(-1)",
        "if labels.ndim == 1 else log_p.gather(1, labels.argmax(1, keepdim=True))",
    ),
)

bank.hint("no-smoothing", "With soft labels, the smoothing changes nothing.")
bank.slip("no-smoothing", ("    labels = (1 - smoothing) * labels + smoothing / classes\n", ""))
bank.variant("no-smoothing", SUMEXP, ("((1 - smoothing) * hard + smoothing * even)", "hard"))
bank.variant("no-smoothing", TERMS, ("((1 - smoothing) * picked.mean() + smoothing * log_p.mean())", "picked.mean()"))

bank.hint(
    "smoothing-too-strong",
    "Smoothing spreads the mass s equally over all classes, s / classes each, including the right one.",
)
bank.slip("smoothing-too-strong", ("smoothing / classes", "smoothing"))
bank.slip(
    "smoothing-too-strong",
    (
        "labels = (1 - smoothing) * labels + smoothing / classes",
        "hot = F.one_hot(labels.argmax(1), classes)\n    labels = (1 - smoothing) * labels + smoothing / (classes - 1) * (1 - hot)",
    ),
)
bank.slip("smoothing-too-strong", ("smoothing / classes", "smoothing / (classes - 1)"))
bank.variant("smoothing-too-strong", SUMEXP, ("-log_p.mean(-1)", "-log_p.sum(-1)"))
bank.variant("smoothing-too-strong", TERMS, ("log_p.mean())", "log_p.sum(-1).mean() / (log_p.shape[1] - 1))"))

bank.hint(
    "softmax-over-images",
    "The probabilities of each class add up to 1 over the images. They must add up to 1 over the classes of each "
    "image: dim=1.",
)
bank.slip("softmax-over-images", ("log_softmax(dim=1)", "log_softmax(dim=0)"))
bank.variant("softmax-over-images", SUMEXP, ("logsumexp(x, dim=-1", "logsumexp(x, dim=0"))
bank.variant("softmax-over-images", TERMS, ("log_softmax(logits, dim=-1", "log_softmax(logits, dim=0"))

bank.hint("no-log", "These are the probabilities themselves: the logarithm is missing.")
bank.slip("no-log", ("log_softmax(dim=1)", "softmax(dim=1)"))
bank.variant("no-log", TERMS, ("F.log_softmax", "F.softmax"))

bank.hint("no-softmax", "The logits aren't logarithms of probabilities yet: log_softmax turns them into these.")
bank.slip("no-softmax", (".log_softmax(dim=1)", ""))
bank.variant("no-softmax", SUMEXP, ("x - torch.logsumexp(x, dim=-1, keepdim=True)", "x"))
bank.variant("no-softmax", TERMS, ("F.log_softmax(logits, dim=-1, dtype=kind)", "logits.to(kind)"))

bank.hint("divided-by-classes", "You divided the sum by the number of classes. Take the mean over the images.")
bank.slip("divided-by-classes", (LOSS, "return -(labels * log_p).sum(dim=0).mean()"))
bank.variant("divided-by-classes", SUMEXP, ("* even).mean()", "* even).sum() / x.shape[1]"))

bank.hint(
    "entropy-subtracted",
    "That is the divergence from the labels (Kullback-Leibler): it also subtracts the labels' own entropy.",
)
bank.slip("entropy-subtracted", (LOSS, "return (labels * (labels.log() - log_p)).sum(dim=1).mean()"))
bank.variant(
    "entropy-subtracted",
    SUMEXP,
    (
        "* even).mean()",
        "* even).mean()\n    mass = (1 - smoothing) * labels + smoothing / x.shape[1]\n    return even + (mass * mass.log()).sum(-1).mean()",
    ),
    ("return ((1", "even = ((1"),
)

bank.hint(
    "smoothing-keeps-mass",
    "You gave the mass s to all classes but didn't take it from y: start with (1 − s) y.",
)
bank.slip("smoothing-keeps-mass", ("(1 - smoothing) * labels", "labels"))
bank.variant("smoothing-keeps-mass", SUMEXP, ("(1 - smoothing) * hard", "hard"))
bank.variant("smoothing-keeps-mass", TERMS, ("(1 - smoothing) * picked", "picked"))

bank.hint("integer-labels", "Integer labels (batch,) are allowed too: turn them into soft labels.")
bank.slip("integer-labels", ("F.one_hot(labels, classes)", "F.one_hot(labels)"))
bank.slip("integer-labels", ("    if labels.dim() == 1:\n        labels = F.one_hot(labels, classes)\n", ""))
bank.variant(
    "integer-labels", SUMEXP, ("    if labels.ndim == 1:\n", "    if labels.ndim == 1 and labels.max() > 99:\n")
)

bank.hint("wrong-soft-loss", "The loss isn't the mean cross-entropy with these soft labels.")
bank.slip(
    "wrong-soft-loss",
    (LOSS, "return -(labels * log_p + (1 - labels) * (-log_p.exp()).log1p()).sum(dim=1).mean()"),
)
bank.variant(
    "wrong-soft-loss",
    SUMEXP,
    ("-(labels.to(x.dtype) * log_p).sum(-1)", "-(labels.to(x.dtype) * log_p).sum(-1) ** 2"),
)

bank.hint("no-gradient", "The loss gives no gradient for the logits.")
bank.slip("no-gradient", ("logits.to(", "logits.detach().to("))
bank.variant("no-gradient", SUMEXP, ("log_p = x", "log_p = x.detach()"), ("(x, dim", "(x.detach(), dim"))
bank.variant("no-gradient", TERMS, ("F.log_softmax(logits,", "F.log_softmax(logits.data,"))

bank.hint("wrong-gradient", "The loss is right, but its gradient isn't.")
bank.slip("wrong-gradient", (LOSS, "log_p = 2 * log_p - log_p.detach()\n    " + LOSS))
bank.variant("wrong-gradient", SUMEXP, ("logsumexp(x,", "logsumexp(x.detach(),"))

bank.hint(
    "half-precision-loss",
    "With bfloat16 logits this is {got:.4f} instead of {expected:.4f}: compute in float32.",
)
bank.slip(
    "half-precision-loss",
    ("logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits"),
    ("    labels = (1", "    labels = labels.to(logits.dtype)\n    labels = (1"),
)
bank.variant(
    "half-precision-loss",
    SUMEXP,
    ("logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits", "logits"),
)
bank.slip("half-precision-loss", (TOP, TOP.replace(".float()", ".to(logits.dtype)")))
bank.variant("half-precision-loss", SUMEXP, (".indices).double().mean()", ".indices).to(logits.dtype).mean()"))

bank.hint("loss-waits", "On a GPU, this makes the CPU wait: {error}")
bank.slip("loss-waits", (LOSS, "assert torch.isfinite(log_p).all()\n    " + LOSS))
bank.variant("loss-waits", SUMEXP, ("    hard =", "    print(float(log_p.max()))\n    hard ="))
bank.variant("loss-waits", TERMS, ("return -(", "assert (labels >= 0).all()\n    return -("))

bank.hint(
    "logits-changed",
    "You changed the logits that you were given, which overwrites the network's result. Make new tensors.",
)
bank.slip("logits-changed", (".log_softmax(dim=1)\n", ".log_softmax(dim=1)\n    logits.mul_(0)\n"))
bank.variant("logits-changed", TERMS, ("    picked =", "    logits.mul_(2)\n    picked ="))
bank.slip("labels-changed", ("labels = (1 - smoothing) * labels + smoothing / classes", "labels = labels.mul_(1 - smoothing).add_(smoothing / classes) if labels.is_floating_point() else (1 - smoothing) * labels + smoothing / classes"))  # fmt: skip
bank.hint("top1-shape", "top1 must return one number as a tensor on the device of the logits, so that nothing waits.")
bank.slip("top1-shape", (TOP, TOP + ".item()"))
bank.variant("top1-shape", TERMS, ("soft.max(1)[1]).sum() / logits.shape[0]", "soft.max(1)[1])"))

bank.hint("top1-count", "That is the number of images. Return the fraction.")
bank.slip("top1-count", (TOP, TOP.replace(".float().mean()", ".sum()")))
bank.variant("top1-count", TERMS, (".sum() / logits.shape[0]", ".sum()"))
bank.variant("top1-count", SUMEXP, (".double().mean()\n", ".double().sum()\n"))

bank.hint(
    "top1-wrong",
    "That isn't the fraction of images whose largest logit and largest label mass are in the same class.",
)
bank.slip("top1-wrong", (TOP, "return (soft.gather(1, logits.argmax(1, keepdim=True)) > 0).float().mean()"))
bank.slip("top1-wrong", (TOP, "return (logits.argmax(dim=1) == soft.argmin(dim=1)).float().mean()"))
bank.variant("top1-wrong", SUMEXP, ("soft.max(-1)", "logits.roll(1, 0).max(-1)"))

bank.hint(
    "top1-half",
    "The largest mass of a mixed label may be less than one half. Compare classes, not masses with a threshold.",
)
bank.slip("top1-half", (TOP, "return (soft.gather(1, logits.argmax(1, keepdim=True)) >= 0.5).float().mean()"))
bank.variant("top1-half", TERMS, ("(logits.max(1)[1] == soft.max(1)[1]).sum()", "(soft[torch.arange(len(soft)), logits.argmax(-1)] > 0.5).sum()"))  # fmt: skip

bank.hint("top1-percent", "The accuracy must be a fraction between 0 and 1.")
bank.slip("top1-percent", (TOP, TOP + " * 100"))
bank.variant("top1-percent", TERMS, (".sum() / logits.shape[0]", ".sum() * 100 / logits.shape[0]"))

bank.hint(
    "top1-mass",
    "That is the label mass of the predicted class. Count the images whose most probable class has the largest mass.",
)
bank.slip("top1-mass", (TOP, "return soft.gather(1, logits.argmax(1, keepdim=True)).mean()"))
bank.variant(
    "top1-mass",
    SUMEXP,
    ("torch.eq(logits.argmax(-1), soft.max(-1).indices).double()", "soft[torch.arange(len(soft)), logits.argmax(-1)]"),
)
