"""Every answer of the bank gets the verdict, and the hint, that it must get."""

import builtins
import dis
import functools
import importlib
import sys
from types import CodeType, FunctionType

import pytest
import torch
from torch.utils._pytree import tree_iter

from dlojz_tp import course
from dlojz_tp.authoring import notebooks, records
from dlojz_tp.checking import mistakes
from dlojz_tp.grading import command, slicing
from dlojz_tp.works import source

WORKS = [source.find(name) for name in source.names()]
BANKS = {work.name: importlib.import_module(f"tests.answers.{work.module}").bank for work in WORKS}
KNOWN = [(work, number) for work in WORKS for number in records.numbers(work)]
STALE = "run `make notebooks`; where nothing changed but what checks share, `python -m dlojz_tp build --force NAME`"
ANSWERS = [answer for bank in BANKS.values() for answer in bank.answers]


@pytest.mark.flaky(reruns=1)  # on a busy machine one launch of many thousands is late: the summary names what ran twice
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_answer(answer):
    work = source.find(answer.work)
    before = [(tensor, tensor._version) for tensor in _held(work.module)]
    verdict = course.judge(work, answer.balise, answer.answers)
    assert all(tensor._version == version for tensor, version in before), (
        "it wrote into what its check holds, and the next answer would be judged by that: give a copy"
    )
    _skipped(verdict)
    found = verdict.slug or verdict.verdict
    assert found == (answer.slug or "pass"), f"{verdict.hint}\n{verdict.expected}\n{verdict.got}\n{verdict.details}"
    if answer.slug and not answer.variant:
        known = mistakes.load(work.module, answer.balise)["mistakes"]
        recorded = records.record(answer.slug, verdict, known)
        assert recorded is None or recorded in known, f"it behaves otherwise than is on record: {STALE}"


def _skipped(verdict):
    """Where a library is not installed, its balises are not judged: make test-frameworks does."""
    if verdict.slug == "not-installed":
        pytest.skip(verdict.got)


@functools.cache
def _held(name: str):
    """The tensors that the modules of a work's checks hold."""
    importlib.import_module(f"dlojz_tp.checks.{name}")
    modules = [module for path, module in sys.modules.items() if path.startswith(f"dlojz_tp.checks.{name}")]
    return [one for module in modules for one in tree_iter(vars(module)) if isinstance(one, torch.Tensor)]


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
    """What `check NN solutions/NN.ipynb` takes out of the notebook that the source gives now is all that answers need.

    Every balise is judged where the notebook is run; here the last one, which needs most.
    """
    path = notebooks.write(notebooks.solution(source.SOLUTIONS / f"{work.name}.py"), tmp_path / f"{work.name}.ipynb")
    nodes, broken = slicing.statements(path)
    for number in work.balises:
        taken = slicing.load(slicing.seen_by_check(nodes, number), broken, work, number)
        missing = _asked_for(taken) - taken.keys() - set(dir(builtins))
        assert not missing, f"balise {number} needs {sorted(missing)}"
    verdict = command.judge_file(work, path, number)
    _skipped(verdict)
    assert verdict.passed, f"balise {number}: {verdict.slug}: {verdict.hint} {verdict.got} {verdict.details}"


def _asked_for(taken: dict) -> set[str]:
    """The global names that the functions and methods of a namespace use."""
    made = [*taken.values(), *(m for each in taken.values() if isinstance(each, type) for m in vars(each).values())]
    made = [getattr(each, "fget", None) or getattr(each, "__func__", each) for each in made]
    codes = [each.__code__ for each in made if isinstance(each, FunctionType) and each.__globals__ is taken]
    found = set()
    while codes:
        code = codes.pop()
        found |= {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found
