"""Every answer of the bank gets the verdict, and the hint, that it must get."""

import importlib

import pytest

from dlojz_tp import course
from dlojz_tp.authoring import notebooks
from dlojz_tp.grading import command
from dlojz_tp.works import source

WORKS = [source.find(name) for name in source.names()]
BANKS = {work.name: importlib.import_module(f"tests.answers.{work.module}").bank for work in WORKS}
ANSWERS = [answer for bank in BANKS.values() for answer in bank.answers]


@pytest.mark.flaky(reruns=1)  # on a busy machine one launch of many thousands is late: the summary names what ran twice
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_answer(answer):
    verdict = course.judge(source.find(answer.work), answer.balise, answer.answers)
    found = verdict.slug or verdict.verdict
    assert found == (answer.slug or "pass"), f"{verdict.hint}\n{verdict.expected}\n{verdict.got}\n{verdict.details}"


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_enough_answers(work):
    for number in work.balises:
        answers = [a for a in BANKS[work.name].answers if a.balise == number]
        assert sum(a.slug is not None for a in answers) >= 6, f"balise {number}: at least six wrong answers"
        assert sum(a.slug is None for a in answers) >= 2, f"balise {number}: at least two right answers"


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_every_hint_is_given(work):
    """A hint that no wrong answer gets is untested, or can never be given."""
    module = course.checks_of(work)
    given = {a.slug for a in BANKS[work.name].answers}
    unused = set(module.HINTS) - given
    assert not unused, f"no wrong answer gets: {sorted(unused)}"


@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_the_grader_passes_the_solution_notebook(work, tmp_path):
    """As `check NN solutions/NN.ipynb` does, on the notebook that the source gives now."""
    path = notebooks.write(notebooks.solution(source.SOLUTIONS / f"{work.name}.py"), tmp_path / f"{work.name}.ipynb")
    for number in work.balises:
        verdict = command.judge_file(work, path, number)
        assert verdict.passed, f"balise {number}: {verdict.slug}: {verdict.hint} {verdict.got} {verdict.details}"
