"""Every answer of the bank gets the verdict, and the hint, that it must get."""

import importlib

import pytest

from dlojz_tp import course
from dlojz_tp.authoring import notebooks, records
from dlojz_tp.checking import mistakes
from dlojz_tp.grading import command
from dlojz_tp.works import source

WORKS = [source.find(name) for name in source.names()]
BANKS = {work.name: importlib.import_module(f"tests.answers.{work.module}").bank for work in WORKS}
KNOWN = [(work, number) for work in WORKS for number in records.numbers(work)]
STALE = "run `make notebooks`; where nothing changed but what checks share, `python -m dlojz_tp build --force NAME`"
ANSWERS = [answer for bank in BANKS.values() for answer in bank.answers]


@pytest.mark.flaky(reruns=1)  # on a busy machine one launch of many thousands is late: the summary names what ran twice
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_answer(answer):
    verdict = course.judge(source.find(answer.work), answer.balise, answer.answers)
    found = verdict.slug or verdict.verdict
    assert found == (answer.slug or "pass"), f"{verdict.hint}\n{verdict.expected}\n{verdict.got}\n{verdict.details}"
    if answer.slug and not answer.variant:
        known = mistakes.load(source.find(answer.work).module, answer.balise)["mistakes"]
        recorded = records.record(answer.slug, verdict, known)
        assert recorded is None or recorded in known, f"it behaves otherwise than is on record: {STALE}"


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_enough_answers(work):
    for number in work.balises:
        answers = [a for a in BANKS[work.name].answers if a.balise == number]
        assert sum(a.slug is not None for a in answers) >= 6, f"balise {number}: at least six wrong answers"
        assert sum(a.slug is None for a in answers) >= 2, f"balise {number}: at least two right answers"


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_every_hint_is_given(work):
    """A hint that no wrong answer gets is untested, or can never be given."""
    given = {a.slug for a in BANKS[work.name].answers}
    unused = set(course.checks_of(work).HINTS) - given
    for number, hints in BANKS[work.name].hints.items():
        unused |= set(hints) - {a.slug for a in BANKS[work.name].answers if a.balise == number}
    assert not unused, f"no wrong answer gets: {sorted(unused)}"


@pytest.mark.parametrize("work, number", KNOWN, ids=lambda one: getattr(one, "name", str(one)))
def test_the_records_are_fresh(work, number):
    """The answers themselves are compared with what is on record where they are judged, above."""
    assert records.is_fresh(work, number), f"known mistakes of balise {number} of {work.name}: {STALE}"


@pytest.mark.parametrize("work, number", KNOWN, ids=lambda one: getattr(one, "name", str(one)))
def test_every_mistake_has_a_variant(work, number):
    """The same mistake in another design, never recorded, shows that its hint is not learnt by heart."""
    shown = {a.slug for a in BANKS[work.name].answers if a.balise == number and a.variant}
    missing = set(BANKS[work.name].hints.get(number, {})) - shown
    assert not missing, f"balise {number} has no variant of: {sorted(missing)}"


def test_a_hint_has_one_home():
    """Two texts under one name: one would hide the other."""
    for work, number in KNOWN:
        double = set(BANKS[work.name].hints.get(number, {})) & set(course.checks_of(work).HINTS)
        assert not double, f"balise {number} of {work.name}: {sorted(double)} stand in the checks too"


@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_the_grader_passes_the_solution_notebook(work, tmp_path):
    """As `check NN solutions/NN.ipynb` does, on the notebook that the source gives now."""
    path = notebooks.write(notebooks.solution(source.SOLUTIONS / f"{work.name}.py"), tmp_path / f"{work.name}.ipynb")
    for number in work.balises:
        verdict = command.judge_file(work, path, number)
        assert verdict.passed, f"balise {number}: {verdict.slug}: {verdict.hint} {verdict.got} {verdict.details}"
