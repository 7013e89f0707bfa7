"""Every answer of the bank gets the verdict, and the hint, that it must get."""

import builtins
import dis
import functools
import importlib
import os
import sys
import zlib
from types import CodeType, FunctionType

import pytest
import torch
from torch.utils._pytree import tree_iter

from dlojz_tp import course
from dlojz_tp.authoring import banks, notebooks, records
from dlojz_tp.cards.verdict import EDGE
from dlojz_tp.judging import checks
from dlojz_tp.judging.checking import mistakes
from dlojz_tp.judging.grading import command, slicing
from dlojz_tp.works import source
from tests import chosen_works

WORKS = [source.find(name) for name in source.names()]
KNOWN = [(work, number) for work in WORKS for number in records.numbers(work)]
STALE = "run `python -m dlojz_tp answers NAME --records`; after a change of shared code, `... build --force NAME`"


def pytest_generate_tests(metafunc):
    """The bank of a work is read when one of its answers is asked for."""
    if "answer" in metafunc.fixturenames:
        works = chosen_works.of(metafunc.config, WORKS)
        metafunc.parametrize(
            "answer", [answer for work in works for answer in _in_turn(banks.of(work).answers)], ids=str
        )


def _in_turn(answers):
    """All answers; where DLOJZ_TURN is "1/12", as in CI, a twelfth of the wrong ones and a half of the right ones.

    0/12 to 11/12 have all of them.
    """
    turn, turns = map(int, os.environ.get("DLOJZ_TURN", "0/1").split("/"))
    for answer in answers:
        of = turns if answer.slug else min(turns, 2)
        if zlib.crc32(str(answer).encode()) % of == turn % of:
            yield answer


@pytest.mark.flaky(reruns=1)  # on a busy machine one launch of many thousands is late: the summary names what ran twice
def test_answer(answer):
    work = source.find(answer.work)
    before = [(tensor, tensor._version) for tensor in _held(work.module)]
    verdict = course.judge(work, answer.balise, answer.answers)
    assert all(tensor._version == version for tensor, version in before), (
        "it wrote into what its check holds, and the next answer would be judged by that: give a copy"
    )
    _skipped(verdict)
    found = verdict.slug or verdict.verdict
    told = f"{verdict.verdict}\n{verdict.hint}\n{verdict.expected}\n{verdict.got}\n{verdict.details}"
    assert (found, verdict.verdict) == (answer.slug or "pass", _word(answer)), told
    if answer.slug and not answer.variant:
        known = mistakes.load(work.module, answer.balise)["mistakes"]
        recorded = records.record(answer.slug, verdict, known)
        assert recorded is None or recorded in known, f"it behaves otherwise than is on record: {STALE}"


def _word(answer) -> str:
    edge = answer.slug in banks.of(source.find(answer.work)).edges.get(answer.balise, ())
    return "pass" if answer.slug is None else EDGE if edge else "not done" if answer.slug == "not done" else "fail"


def _skipped(verdict):
    """Where a library is not installed, its balises are not judged: make test-frameworks does."""
    if verdict.slug == "not-installed":
        pytest.skip(verdict.got)


@functools.cache
def _held(name: str):
    """The tensors that the modules of a work's checks hold."""
    importlib.import_module(f"dlojz_tp.judging.checks.{name}")
    modules = [module for path, module in sys.modules.items() if path.startswith(f"dlojz_tp.judging.checks.{name}")]
    return [one for module in modules for one in tree_iter(vars(module)) if isinstance(one, torch.Tensor)]


def test_all_turns_judge_every_answer(monkeypatch):
    answers, turns = banks.of(WORKS[0]).answers, []
    for turn in range(4):
        monkeypatch.setenv("DLOJZ_TURN", f"{turn}/4")
        turns.append(set(_in_turn(answers)))
    assert set().union(*turns) == set(answers) and max(map(len, turns)) < len(answers)
    right = {answer for answer in answers if answer.slug is None}
    assert all(turns[k] & right | turns[k + 1] & right == right for k in range(3))  # two days have all right ones


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_enough_answers(work):
    for number in work.balises:
        answers = [a for a in banks.of(work).answers if a.balise == number]
        assert sum(a.slug is not None for a in answers) >= 6, f"balise {number}: at least six wrong answers"
        assert sum(a.slug is None for a in answers) >= 2, f"balise {number}: at least two right answers"


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_the_names_of_answers_are_known_without_the_bank(work):
    """Else -k would leave out an answer that it asks for: its slug isn't in the bank's files as it is."""
    names = chosen_works.names(work)
    missing = {
        str(one) for one in banks.of(work).answers if f"test_answer[{str(one).rstrip('0123456789')}" not in names
    }
    assert not missing, sorted(missing)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_every_hint_is_given(work):
    """A hint that no wrong answer gets is untested, or can never be given."""
    given = {a.slug for a in banks.of(work).answers}
    unused = set(checks.hints(work.module)) - given
    for number, hints in banks.of(work).hints.items():
        unused |= set(hints) - {a.slug for a in banks.of(work).answers if a.balise == number}
    assert not unused, f"no wrong answer gets: {sorted(unused)}"


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_mistakes_at_the_edge_are_on_record(work):
    """The package reads what the bank marks, and an answer shows each mark."""
    marked = {(number, slug) for number, slugs in banks.of(work).edges.items() for slug in slugs}
    assert {(n, slug) for n in work.balises for slug in mistakes.edges(work.module, n)} == marked, STALE
    unused = marked - {(a.balise, a.slug) for a in banks.of(work).answers}
    assert not unused, f"no wrong answer shows: {sorted(unused)}"


def test_a_third_of_the_mistakes_of_the_cores_are_at_the_edge():
    """A first failure is often one of these: it shall not look as if the idea was wrong."""
    core = {(work.name, number) for work in WORKS for number, balise in work.balises.items() if not balise.further}
    given = {work.name: banks.of(work) for work in WORKS}
    answers = [answer for bank in given.values() for answer in bank.answers]
    known = {(a.work, a.balise, a.slug) for a in answers if a.slug and (a.work, a.balise) in core}
    marked = {one for one in known if one[2] in given[one[0]].edges.get(one[1], ())}
    assert 3 * len(marked) >= len(known), f"{len(marked)} of {len(known)}"


@pytest.mark.parametrize("work, number", KNOWN, ids=lambda one: getattr(one, "name", str(one)))
def test_the_records_are_fresh(work, number):
    """The answers themselves are compared with what is on record where they are judged, above."""
    assert records.is_fresh(work, number), f"known mistakes of balise {number} of {work.name}: {STALE}"


@pytest.mark.parametrize("work, number", KNOWN, ids=lambda one: getattr(one, "name", str(one)))
def test_every_mistake_has_a_variant(work, number):
    """The same mistake in another design, never recorded, shows that its hint is not learnt by heart."""
    shown = {a.slug for a in banks.of(work).answers if a.balise == number and a.variant}
    missing = set(banks.of(work).hints.get(number, {})) - shown
    assert not missing, f"balise {number} has no variant of: {sorted(missing)}"


def test_a_hint_has_one_home():
    """Two texts under one name: one would hide the other."""
    for work, number in KNOWN:
        double = set(banks.of(work).hints.get(number, {})) & set(checks.hints(work.module))
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
