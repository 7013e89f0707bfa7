"""Balise 1: the distillation loss, against sums written out in Python's own numbers."""

import functools
import math

import torch

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, same, silent, within

DRAWN = torch.Generator().manual_seed(22)
STUDENT = 2 * torch.randn(6, 5, generator=DRAWN, dtype=torch.float64)
TEACHER = 3 * torch.randn(6, 5, generator=DRAWN, dtype=torch.float64)
LABELS = torch.tensor([4, 0, 2, 1, 4, 3])
PARTLY = torch.tensor([4, -1, 2, -1, -1, 3])
NOBODY = torch.full((6,), -1)
SHARP = 400 * TEACHER  # probabilities of exactly 0, and logits that exp cannot take
SOFT = (1.0, 2.0, 5.0, 0.5)  # temperatures
HARD = ((2.0, 0.7), (1.0, 2.0), (4.0, 0.3))  # and weights


def log_probabilities(row):
    high = max(row)
    total = high + math.log(sum(math.exp(one - high) for one in row))
    return [one - total for one in row]


def truth(student, teacher, labels, temperature, weight):
    """The loss of float64 logits, row by row and class by class."""
    soft, hard = 0.0, []
    for mine, its, label in zip(student.tolist(), teacher.tolist(), labels.tolist()):
        q, p = (log_probabilities([one / temperature for one in row]) for row in (mine, its))
        soft += sum(math.exp(a) * (a - b) for a, b in zip(p, q)) * temperature**2 / len(student)
        if label >= 0:
            hard.append(-log_probabilities(mine)[label])
    return soft + weight * (sum(hard) / len(hard) if hard else 0.0)


def losses(loss, cases, dtype=torch.float64):
    """Of several (student, teacher, labels, temperature, weight), one tensor."""
    found = [loss(s.to(dtype, copy=True), t.to(dtype, copy=True), y.clone(), *rest) for s, t, y, *rest in cases]
    return torch.stack([torch.as_tensor(one, dtype=torch.float64).detach() for one in found])


def gradients(loss):
    """(of the student, largest of the teacher)."""
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    found = loss(student, teacher, PARTLY.clone(), 2.0, 0.7)
    if not found.requires_grad:
        return torch.zeros_like(student), 0.0
    mine, its = torch.autograd.grad(found, (student, teacher), allow_unused=True)
    return torch.zeros_like(student) if mine is None else mine, 0.0 if its is None else its.abs().max().item()


@functools.cache
def true_gradient(step=1e-6):
    """Of the student, by differences of the truth."""
    found = torch.zeros_like(STUDENT)
    for k in range(STUDENT.numel()):
        move = torch.zeros(STUDENT.numel(), dtype=torch.float64)
        move[k] = step
        up, down = (truth(STUDENT + sign * move.view_as(STUDENT), TEACHER, PARTLY, 2.0, 0.7) for sign in (1, -1))
        found.view(-1)[k] = (up - down) / (2 * step)
    return found


CASES = {
    "soft": [(STUDENT, TEACHER, LABELS, T, 0.0) for T in SOFT] + [(TEACHER, TEACHER, LABELS, 3.0, 0.0)],
    "hard": [(STUDENT, TEACHER, LABELS, *rest) for rest in HARD],
    "partly": [(STUDENT, TEACHER, PARTLY, *rest) for rest in HARD],
    "nobody": [(STUDENT, TEACHER, NOBODY, *rest) for rest in HARD],
    "sharp": [(STUDENT, SHARP, LABELS, 1.0, 0.0), (SHARP, TEACHER, LABELS, 1.0, 1.0)],
    "one": [(STUDENT[:1], TEACHER[:1], LABELS[:1], 2.0, 0.7), (STUDENT[:2, :2], TEACHER[:2, :2], LABELS[1:3] // 2, 1.5, 1.0)],
}  # fmt: skip


def observe(loss):
    given = STUDENT.float(), TEACHER.float(), LABELS.clone()
    got = loss(*given, 2.0, 0.5)
    yield {"form": form(got), "kept": same(given, (STUDENT.float(), TEACHER.float(), LABELS))}
    # who computes in float32 whatever comes, as for logits in half precision, is right to float32
    single = bool(torch.equal(losses(loss, CASES["soft"]), losses(loss, CASES["soft"], torch.float32)))
    for name, cases in CASES.items():
        found = losses(loss, cases)
        yield {name: due(name) if single and close(found, due(name), 1e-5) else found}
    mine, its = gradients(loss)
    yield {"teacher": its, "gradient": true_gradient() if single and close(mine, true_gradient(), 1e-5) else mine}


@functools.cache
def due(name):
    return torch.tensor([truth(*case) for case in CASES[name]], dtype=torch.float64)


LOOKS = [
    Look("one number", "form", "float32 ()", "loss-form"),
    Value("the soft part, at four temperatures", "soft", due("soft"), "wrong-soft"),
    Value("with labels for all", "hard", due("hard"), "wrong-hard"),
    Value("with labels for some", "partly", due("partly"), "wrong-labelled"),
    Look("without any label", lambda seen: seen["nobody"].isfinite().all().item(), True, "no-labels-nan"),
    Value("", "nobody", due("nobody"), "wrong-labelled"),
    Look("a very sure teacher", lambda seen: seen["sharp"].isfinite().all().item(), True, "not-finite"),
    Value("", "sharp", due("sharp"), "wrong-soft"),
    Value("one image; two classes", "one", due("one"), "wrong-soft"),
    Look("the inputs are unchanged", "kept", True, "logits-written"),
    Look("no gradient for the teacher", "teacher", 0.0, "teacher-learns", holds=at_most, fields=silent),
    Value("the gradient of the student", "gradient", true_gradient(), "wrong-gradient", holds=within(1e-6)),
]


def balise_1(distillation_loss):
    yield from judged(LOOKS, observe, distillation_loss)
