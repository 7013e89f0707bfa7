"""A general hint says in numbers what an answer did: a mistake without a hint of its own is seen all the same."""

import pytest

from dlojz_tp import course
from dlojz_tp.works import source
from tests.answers.bank import Bank

SHARE, ROUND = "loss_of(part) * len(part) / total", "beta=b, alpha=c), x, beta=a)"
RENEWED = "        x = F.normalize(x, dim=(-2, -1))\n        squares ="
CASES = [  # work, balise, what is changed in the solution, what the hint must say
    ("08", 6, (SHARE, "loss_of(part) / len(part)"), "3, 3 rows were added up with the weights 0.3333, 0.3333;"),
    ("08", 6, (SHARE, "loss_of(part) / len(parts)"), "0.3333, 0.3333, 0.3333; expected are 0.5, 0.3333, 0.1667"),
    ("10", 1, ("peak * (step + 1) / warmup", "peak * (step + 1) / (warmup + 1)"), "in the warm-up"),
    ("10", 1, ("math.cos(math.pi * t)) / 2", "math.cos(math.pi * t / 2)) / 2"), "on the cosine"),
    ("10", 1, ("return far + (peak - far) * w, high", "return far + peak * w, high"), "on the way up"),
    ("10", 2, ("smooth = average / (1", "smooth = average = average / (1"), "back into the running mean"),
    ("10", 6, (ROUND, "beta=c, alpha=b), x, beta=a)"), "3.4445 X +2.0315 A X -4.775 A² X"),
    ("10", 6, (ROUND, "beta=b, alpha=c), x, beta=1)"), "1 X -4.775 A X +2.0315 A² X"),
    ("10", 6, ("        squares =", RENEWED), "One round is right, five are not"),
    ("10", 6, ("-0.2 * max(shape) ** 0.5 * rate", "-0.2 * max(shape) * rate"), "0.36 times the orthogonal matrix"),
    ("11", 1, ("axis.low - half, axis", "axis.low, axis"), "On 'few', the values 1, 2, 3, 4 came up in"),
    ("11", 1, ("math.log(low)", "math.log(low / 2)"), "On 'rate', 5, 50 and 95 % of the draws are below"),
    ("11", 1, ("counts[name])", "counts[name] + 1)"), "has 0.001, 0.02154, 0.4642, 10. It should have 0.001, 0.1, 10"),
    ("11", 3, ("order[: len(order) // self.eta]", "order[: 1]"), "Rung at 1 epochs: 1 reported, 1 // 3 = 0 go on, 0"),
    ("12", 4, ("d + 3 * d + d + h", "3 * d + d + h"), ("d + f + f", "f + f"), "keeps the norm's output"),
    ("12", 6, ("optimizers[p].step()", "p.grad /= 2; optimizers[p].step()"), "moved 0.52 times as far"),
]  # fmt: skip


@pytest.mark.parametrize("work, balise, changes, said", [(w, n, c, said) for w, n, *c, said in CASES])
def test_a_hint_says_what_was_seen(work, balise, changes, said):
    bank = Bank(source.full_name(work), balise, whole=True)
    bank.slip("general", *changes)
    verdict = course.judge(source.find(bank.work), balise, bank.answers[0].answers)
    assert verdict.verdict == "fail" and said in verdict.hint, verdict.hint
    assert "…" not in verdict.hint, "a field is missing"
