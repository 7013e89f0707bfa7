"""Answers to balise 1 of 22_compression: the distillation loss."""

from tests.answers.bank import Bank

bank = Bank("22_compression", 1, whole=True)

# sums written out, labelled rows picked
WRITTEN = """
def distillation_loss(student, teacher, labels, temperature, weight):
    with torch.no_grad():
        log_p = (teacher / temperature).log_softmax(-1)
        p = log_p.exp()
    log_q = (student / temperature).log_softmax(-1)
    loss = temperature**2 * (p * (log_p - log_q)).sum(1).mean()
    known = labels != -1
    if known.any():
        loss = loss + weight * F.cross_entropy(student[known], labels[known])
    return loss
"""
bank.text(None, WRITTEN)

# cross-entropy with probabilities, less their entropy; the labelled by gather and a mask
ENTROPY = """
def distillation_loss(student, teacher, labels, temperature, weight):
    soft_labels = torch.softmax(teacher.detach() / temperature, dim=-1)
    entropy = -torch.xlogy(soft_labels, soft_labels).sum(-1).mean()
    soft = F.cross_entropy(student / temperature, soft_labels) - entropy
    known = (labels >= 0).to(student.dtype)
    log_q = F.log_softmax(student, dim=-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    hard = -(log_q * known).sum() / known.sum().clamp(min=1)
    return soft * temperature**2 + weight * hard
"""
bank.text(None, ENTROPY)
bank.slip(None, ("its = F.log_softmax(teacher.detach() / temperature, dim=1)", "its = F.softmax(teacher.detach() / temperature, dim=1)"), (", log_target=True", ""))  # fmt: skip
bank.slip("nothing-returned", ("    return soft + weight", "    soft + weight"))

KL = 'F.kl_div(mine, its, reduction="batchmean", log_target=True)'

bank.hint("loss-form", "The loss is one number: a tensor of shape (), in the dtype of the logits. You returned {got}.")
bank.slip("loss-form", (KL, 'F.kl_div(mine, its, reduction="none", log_target=True).sum(1)'))
bank.slip("loss-form", ("return soft + weight * hard / ", "return soft, weight * hard / "))
bank.variant("loss-form", WRITTEN, (".sum(1).mean()", ".mean(0)"))

bank.hint("wrong-soft", "The soft part is not T² times the mean over the images of KL(p ‖ q), where KL is the "
                           "sum over classes of p (log p - log q).")  # fmt: skip
bank.slip("wrong-soft", (KL, "F.mse_loss(student, teacher)"))
bank.slip("wrong-soft", (KL, "0 * student.sum()"))
bank.slip("wrong-soft", (KL, "F.smooth_l1_loss(mine, its)"))
bank.slip(
    "wrong-soft",
    (
        'F.kl_div(mine, its, reduction="batchmean", log_target=True)',
        "F.cross_entropy(student / temperature, teacher.argmax(1))",
    ),
)
bank.variant("wrong-soft", WRITTEN, ("(p * (log_p - log_q))", "(log_p - log_q).square()"))

bank.hint("other-direction", "The direction is reversed: this is KL(q ‖ p), weighted by the student's "
                                "probabilities. F.kl_div takes the student's log-probabilities first.")  # fmt: skip
bank.slip("other-direction", ("F.kl_div(mine, its,", "F.kl_div(its, mine,"))
bank.variant("other-direction", WRITTEN, ("(p * (log_p - log_q))", "(log_q.exp() * (log_q - log_p))"))

bank.hint("divided-by-classes", "The soft part is also divided by the number of classes, as F.kl_div does with "
                                   'reduction="mean". A KL is a sum over classes; only the images are averaged.')  # fmt: skip
bank.slip("divided-by-classes", ('"batchmean"', '"mean"'))
bank.slip("divided-by-classes", ('reduction="batchmean", ', ""))
bank.variant("divided-by-classes", WRITTEN, (".sum(1).mean()", ".mean()"))

bank.hint(
    "summed",
    "The soft part is summed over the images. Take the mean, or the learning rate would have to follow the batch size.",
)
bank.slip("summed", ('"batchmean"', '"sum"'))
bank.variant("summed", WRITTEN, (".sum(1).mean()", ".sum()"))

bank.hint("no-t-squared", "Multiply the soft part by T². Without this factor its gradient fades like 1/T², and "
                             "the labels take over.")  # fmt: skip
bank.slip("no-t-squared", ("temperature**2 * ", ""))
bank.slip("no-t-squared", ("temperature**2 * ", "temperature * "))
bank.variant("no-t-squared", ENTROPY, ("soft * temperature**2", "soft"))

bank.hint(
    "one-side-soft",
    "Only one of the two is divided by the temperature. Compare teacher and student at the same temperature.",
)
bank.slip("one-side-soft", ("F.log_softmax(student / temperature", "F.log_softmax(student"))
bank.slip("one-side-soft", ("teacher.detach() / temperature", "teacher.detach()"))
bank.variant("one-side-soft", WRITTEN, ("(teacher / temperature)", "teacher"))
bank.variant("one-side-soft", ENTROPY, ("F.cross_entropy(student / temperature", "F.cross_entropy(student"))

bank.hint("entropy-left", "This is the cross-entropy with the teacher's probabilities. It has the same gradient "
                             "as the KL, but it is not 0 where student and teacher agree: it still contains the "
                             "teacher's entropy, so it doesn't show how far apart they are.")  # fmt: skip
bank.slip("entropy-left", (KL, "-(its.exp() * mine).sum(1).mean()"))
bank.variant("entropy-left", ENTROPY, (" - entropy", ""))

bank.hint("kl-arguments", "F.kl_div expects log-probabilities as its first argument. Its second argument is "
                             "probabilities, or log-probabilities with log_target=True.")  # fmt: skip
bank.slip("kl-arguments", (", log_target=True", ""))
bank.slip("kl-arguments", ("its = F.log_softmax", "its = F.softmax"))
bank.slip("kl-arguments", ("mine = F.log_softmax", "mine = F.softmax"))
bank.variant("kl-arguments", WRITTEN, ("(p * (log_p - log_q)).sum(1).mean()", 'F.kl_div(log_q, log_p, reduction="batchmean")'))  # fmt: skip

bank.hint(
    "over-images",
    "The softmax is taken over the images. The probabilities of one image's classes must sum to 1, so take it over "
    "the last axis.",
)
bank.slip("over-images", ("dim=1", "dim=0"))
bank.variant("over-images", WRITTEN, ("log_softmax(-1)", "log_softmax(0)"))

bank.hint(
    "wrong-hard",
    "Without labels the loss is right. With labels, add weight times the mean of the cross-entropies at temperature 1.",
)
bank.slip("wrong-hard", ("return soft + weight * hard", "return soft - weight * hard"))
bank.variant("wrong-hard", ENTROPY, ("hard = -(log_q", "hard = (log_q"))

bank.hint("hard-softened", "The labels are also compared at temperature T. Compare them with the student's "
                              "probabilities at temperature 1, the temperature at which it will be used.")  # fmt: skip
bank.slip("hard-softened", ("F.cross_entropy(student, ", "F.cross_entropy(student / temperature, "))
bank.slip(
    "hard-softened", ("F.cross_entropy(student, labels, ignore_index=-1", "F.nll_loss(mine, labels, ignore_index=-1")
)
bank.variant(
    "hard-softened", WRITTEN, ("F.cross_entropy(student[known]", "F.cross_entropy(student[known] / temperature")
)

bank.hint(
    "shares",
    "The soft part always counts in full: weight applies to the labels alone. Here the soft part loses what the "
    "labels get.",
)
bank.slip("shares", ("return soft + weight", "return (1 - weight) * soft + weight"))
bank.variant("shares", WRITTEN, ("loss = loss + weight *", "loss = (1 - weight) * loss + weight *"))

bank.hint("labels-instead", "With a weight of 0 the labels must not count, and only the soft part is left. Here "
                               "only the labels are left: weight is the weight of the labels.")  # fmt: skip
bank.slip("labels-instead", ("return soft + weight * hard", "return weight * soft + (1 - weight) * hard"))
bank.slip("labels-instead", ("return soft + weight * hard", "return hard"))
bank.variant("labels-instead", ENTROPY, ("return soft * temperature**2 + weight * hard", "return weight * soft * temperature**2 + (1 - weight) * hard"))  # fmt: skip

bank.hint("wrong-labelled", "With a label for each image the loss is right, but with some missing it is not. "
                               "The soft part takes all images, the cross-entropy only the labelled ones.")  # fmt: skip
bank.slip("wrong-labelled", ("    mine =", "    weight = weight * (labels >= 0).all()\n    mine ="))
bank.variant("wrong-labelled", WRITTEN, ("    if known.any():", "    if known.all():"))

bank.hint("mean-over-all", "The cross-entropies are divided by the number of all images. Divide by the number "
                              "of images with a label, or a few labels would weigh next to nothing.")  # fmt: skip
bank.slip("mean-over-all", ("(labels >= 0).sum().clamp(min=1)", "len(labels)"))
bank.variant("mean-over-all", ENTROPY, ("(log_q * known).sum() / known.sum().clamp(min=1)", "(log_q * known).mean()"))

bank.hint("soft-on-labelled", "The soft part leaves out the images without a label. The teacher has an answer "
                                 "for them too, and this is where distillation gains most.")  # fmt: skip
bank.slip("soft-on-labelled", ("    mine =", "    known = labels >= 0\n    mine ="), ("F.kl_div(mine, its,", "F.kl_div(mine[known], its[known],"))  # fmt: skip
bank.variant("soft-on-labelled", WRITTEN, ("    loss =", "    known = labels != -1\n    loss ="), ("(p * (log_p - log_q)).sum(1).mean()", "(p * (log_p - log_q)).sum(1)[known].mean()"))  # fmt: skip

bank.hint(
    "minus-one-as-class",
    "An image without a label counts as one of the last class, because the index -1 means the last. Leave these "
    "images out.",
)
bank.slip("minus-one-as-class", ("hard = F.cross_entropy(student, labels, ignore_index=-1, reduction=\"sum\")", "hard = -F.log_softmax(student, 1)[torch.arange(len(labels)), labels].sum()"))  # fmt: skip
bank.slip("minus-one-as-class", ("hard = F.cross_entropy(student, labels, ignore_index=-1, reduction=\"sum\")", "hard = -F.log_softmax(student, 1)[torch.arange(len(labels)), labels].mean()"), ("(labels >= 0).sum().clamp(min=1)", "1"))  # fmt: skip
bank.variant("minus-one-as-class", ENTROPY, ("labels.clamp(min=0)", "(labels % student.shape[1])"), ("known = (labels >= 0)", "known = (labels >= -1)"))  # fmt: skip

bank.hint(
    "no-labels-nan",
    "Without any label the loss is not finite, because a mean over no images is 0 / 0. The second part must then be 0.",
)
bank.slip("no-labels-nan", (".clamp(min=1)", ""))
bank.slip("no-labels-nan", ('ignore_index=-1, reduction="sum")', "ignore_index=-1)"), (" / (labels >= 0).sum().clamp(min=1)", ""))  # fmt: skip
bank.variant("no-labels-nan", WRITTEN, ("    if known.any():", "    if True:"))

bank.hint("not-finite", "The loss is not finite where teacher or student is very sure. The logarithm of a "
                           "probability of 0 is -∞: compute log-probabilities with log_softmax, never from "
                           "probabilities, and don't call a function that takes such a logarithm.")  # fmt: skip
bank.slip("not-finite", (KL, "(its.exp() * (its.exp().log() - mine)).sum(1).mean()"))
bank.slip(
    "not-finite",
    ("mine = F.log_softmax(student / temperature, dim=1)", "mine = F.softmax(student / temperature, dim=1).log()"),
)
bank.variant("not-finite", WRITTEN, ("        p = log_p.exp()", "        p = log_p.exp()\n        log_p = p.log()"))
bank.variant("not-finite", ENTROPY, ("torch.softmax(teacher.detach() / temperature, dim=-1)", "(teacher.detach() / temperature).exp() / (teacher.detach() / temperature).exp().sum(-1, keepdim=True)"))  # fmt: skip

bank.text(
    "not-finite",
    """
def distillation_loss(student, teacher, labels, temperature, weight):
    of = torch.distributions.Categorical
    teacher = teacher.detach()
    soft = torch.distributions.kl_divergence(of(logits=teacher / temperature), of(logits=student / temperature)).mean()
    hard = F.cross_entropy(student, labels, ignore_index=-1, reduction="sum")
    return temperature**2 * soft + weight * hard / (labels >= 0).sum().clamp(min=1)
""",
)

bank.hint("epsilon", "You add a small number to the probabilities, so the loss is no longer exact where one of them "
                  "is small. log_softmax needs no such help: it never takes the logarithm of 0."
)  # fmt: skip
bank.slip("epsilon", ("F.log_softmax(student / temperature, dim=1)", "(F.softmax(student / temperature, dim=1) + 1e-8).log()"),
          ("F.log_softmax(teacher.detach() / temperature, dim=1)", "(F.softmax(teacher.detach() / temperature, dim=1) + 1e-8).log()"))  # fmt: skip
bank.slip(
    "epsilon",
    ("F.log_softmax(student / temperature, dim=1)", "(F.softmax(student / temperature, dim=1) + 1e-6).log()"),
)
bank.variant("epsilon", WRITTEN, ("log_q = (student / temperature).log_softmax(-1)", "log_q = ((student / temperature).softmax(-1) + 1e-8).log()"))  # fmt: skip

bank.hint(
    "teacher-learns",
    "The loss has a gradient for the teacher, so the teacher would learn from its student. "
    "Detach the teacher's logits.",
)
bank.slip("teacher-learns", (".detach()", ""))
bank.variant("teacher-learns", WRITTEN, ("with torch.no_grad():", "if True:"))

bank.hint(
    "wrong-gradient",
    "The values are right, but the gradient of the student is not. Do you detach part of the student's computation?",
)
bank.slip("wrong-gradient", ("F.cross_entropy(student, ", "F.cross_entropy(student.detach(), "))
bank.slip("wrong-gradient", ("mine = F.log_softmax(student / ", "mine = F.log_softmax(student.detach() / "))
bank.variant("wrong-gradient", WRITTEN, ("log_q = (student / temperature)", "log_q = (student.detach() / temperature)"))

bank.hint("logits-written", "You changed the logits that were given, so the next step reads other values. "
                               "Methods whose names end in _ write in place; make new tensors.")  # fmt: skip
bank.slip("logits-written", ("teacher.detach() / temperature", "teacher.detach().div_(temperature)"))
bank.variant("logits-written", WRITTEN, ("        log_p = (teacher / temperature)", "        teacher /= temperature\n        log_p = teacher"))  # fmt: skip

bank.slip(
    None,
    ("F.log_softmax(student / temperature", "F.log_softmax(student.float() / temperature"),
    ("F.log_softmax(teacher.detach()", "F.log_softmax(teacher.detach().float()"),
)
