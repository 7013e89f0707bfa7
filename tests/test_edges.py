"""A verdict in two steps: mistakes at the edge, after which a check goes on."""

import json

import pytest
import torch

from dlojz_tp import course, progress
from dlojz_tp.cards import render
from dlojz_tp.cards.verdict import EDGE
from dlojz_tp.classroom import desk
from dlojz_tp.classroom.reading import Told
from dlojz_tp.judging import checks
from dlojz_tp.judging.checking import Wrong, edge, mistakes
from dlojz_tp.judging.checking.looks import Look, Value, form, judged
from dlojz_tp.judging.checking.verdicts import after_effects, verdict_of
from dlojz_tp.judging.grading import command, keepers, whole_class
from dlojz_tp.works import source

HINTS = {"half-form": "Half stays half.", "wrong": "Not the square.", "doubled": "Twice, not squared."}
INPUT = torch.arange(3.0, 9.0)
HALVES = torch.tensor([1.0, 2.0], dtype=torch.float16)
LOOKS = [
    Look("a half", "half", "float16 (2,)", "half-form"),
    Value("squares", "squares", INPUT**2, "wrong"),
]


def observe(answer):
    return {"half": form(answer(torch.ones(2, dtype=torch.float16))), "squares": answer(INPUT)}


def by_looks(answer):
    yield from judged(LOOKS, observe, answer)


def by_hand(answer):
    """The same check, written without a table."""
    seen = observe(answer)
    yield "a half"
    if seen["half"] != "float16 (2,)":
        edge("half-form", got=seen["half"])
    yield "squares"
    if not torch.equal(seen["squares"], INPUT**2):
        raise Wrong("doubled" if torch.equal(seen["squares"], 2 * INPUT) else "wrong")


def verdict(answer, check=by_looks, edges=("half-form",), after=()):
    known = [{"slug": "doubled", "look": "squares", "at": None, "seen": mistakes.sketch(2 * INPUT)}]
    marked = {slug: set(after) for slug in edges}
    return verdict_of(check, (answer,), number=1, title="Square", hints=HINTS, known=known, edges=marked)


def in_float32(x):
    return x.float() ** 2


def doubled_in_float32(x):
    return x.float() * 2


@pytest.mark.parametrize("check", [by_looks, by_hand])
def test_only_a_mistake_at_the_edge_is_not_yet_robust(check):
    found = verdict(in_float32, check)
    assert (found.verdict, found.slug, found.failed, found.seen) == (EDGE, "half-form", "a half", ("squares",))
    assert not found.passed and found.hint == HINTS["half-form"]
    assert verdict(lambda x: x**2, check).passed


@pytest.mark.parametrize("check", [by_looks, by_hand])
def test_no_mistake_of_the_idea_hides_after_an_edge(check):
    found = verdict(doubled_in_float32, check)
    assert (found.verdict, found.slug, found.failed, found.seen) == ("fail", "doubled", "squares", ())


@pytest.mark.parametrize("check", [by_looks, by_hand])
def test_where_it_is_not_at_the_edge_the_same_mistake_fails(check):
    found = verdict(in_float32, check, edges=())
    assert (found.verdict, found.slug, found.failed) == ("fail", "half-form", "a half")


def test_a_value_is_at_the_edge_by_the_mistake_that_it_is_near():
    assert verdict(lambda x: x * 2, edges=("doubled",)).verdict == EDGE
    assert verdict(lambda x: x * 3, edges=("doubled",)).verdict == "fail", "another mistake, though at the same look"


def always_of_float32(x):
    """A mistake at the edge, and what follows from it: the sums of the squares come out with other digits."""
    return x.float() ** 2 + (x.dtype == torch.float16)


def test_what_an_edge_makes_fail_is_learnt_and_passed_over():
    looks = [*LOOKS, Look("the sum of halves", lambda seen: seen["sum"], 5.0, "wrong")]

    def check(answer):
        yield from judged(looks, lambda answer: observe(answer) | {"sum": float(answer(HALVES).sum())}, answer)

    after = after_effects(check, (always_of_float32,), "half-form", hints=HINTS, known=[])
    assert after == {("the sum of halves", "wrong")}
    assert verdict(always_of_float32, check).verdict == "fail"
    assert verdict(always_of_float32, check, after=after).verdict == EDGE
    assert verdict(doubled_in_float32, check, after=after).slug == "doubled", "another look, another mistake"
    assert verdict(lambda x: x**2 + (x.sum() == 3), check, after=after).verdict == "fail", "without the edge it counts"


def test_the_first_edge_is_told_and_no_failed_claim_is_said_to_hold():
    found = verdict(doubled_in_float32, edges=("half-form", "doubled"))
    assert (found.verdict, found.slug, found.seen) == (EDGE, "half-form", ())


def test_an_error_after_an_edge_has_the_hint_of_the_edge():
    """It may come of it; and it is no pass, since nobody knows."""

    def check(answer):
        yield from by_hand(answer)
        answer(torch.ones(1, dtype=torch.float16)).half().numpy().tolist()[3]

    found = verdict(in_float32, check)
    assert (found.verdict, found.slug, found.failed) == ("fail", "half-form", "a half")


def test_edge_outside_of_a_verdict_raises():
    with pytest.raises(Wrong):
        edge("half-form")


@pytest.fixture
def judged_edge(monkeypatch):
    """Work 00, whose second balise finds one mistake, at the edge."""

    def check(answer):
        yield from by_hand(in_float32)

    monkeypatch.setattr(checks, "check", lambda work, number: check)
    monkeypatch.setattr(mistakes, "edges", lambda work, number: {"half-form": set()})
    monkeypatch.setattr(checks, "hints", lambda work: HINTS)


def test_a_notebook_shows_amber_and_counts_it_as_done(judged_edge, monkeypatch, tmp_path):
    monkeypatch.delenv("DLOJZ_STRICT", raising=False)
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path))
    shown = []
    monkeypatch.setattr(render, "show", shown.append)
    tp = course.open("00_welcome", {})
    tp.check(2, lambda values: values)
    page = shown[-1]._repr_html_()
    assert "works, not yet robust" in page and render._COLOUR[EDGE] in page and render._COLOUR["fail"] not in page
    assert progress.load("00_welcome") == {2: EDGE}
    tp.progress()
    assert "1 of 2 balises done, 1 of them not yet robust" in repr(shown[-1]) and "★" not in repr(shown[-1])
    progress.record("00_welcome", 2, "pass")
    tp.progress()
    assert "1 of 2 balises done\n" in repr(shown[-1]) and "★  2" in repr(shown[-1])


def test_an_automatic_run_takes_it_for_a_failure(judged_edge, monkeypatch):
    monkeypatch.setenv("DLOJZ_STRICT", "1")
    with pytest.raises(course.CheckFailed):
        course.open("00_welcome", {}).check(2, lambda values: values)


@pytest.mark.parametrize(("options", "status"), [((), 0), (("--strict",), 1)])
def test_the_grader_counts_it_unless_it_is_strict(options, status, monkeypatch, tmp_path, capsys):
    found = [(tmp_path, [verdict(in_float32), verdict(lambda x: x**2)])]
    monkeypatch.setattr(command, "run", lambda *_: found)
    monkeypatch.setattr(command, "chosen", lambda paths, name: ([tmp_path], []))
    assert command.main(["00", str(tmp_path), *options]) == status
    assert "2 of 2 passed, 1 of them not yet robust" in capsys.readouterr().out


def test_a_class_has_a_column_for_it(tmp_path):
    work, path = source.find("00_welcome"), tmp_path / "00.ipynb"
    rows = [whole_class._row("ada", path, work.name, "", one) for one in (verdict(in_float32), verdict(lambda x: x**2))]
    rows[1]["balise"] = 2
    text = "\n".join(whole_class.shown(rows, {"hints": whole_class.hints(rows, {}), "equal": []}))
    head, line = (line.split("  ") for line in text.splitlines()[1:3])
    assert EDGE in head and line[-1] == "ada" and text.splitlines()[2].split()[:2] == ["1", "1"]
    assert "half-form" in text, "what is left to mend"
    assert keepers.WORDS.index("pass") < keepers.WORDS.index(EDGE) < keepers.WORDS.index("by catch_up"), (
        "the best counts"
    )


def test_the_board_counts_it_as_done():
    told = [Told("00_welcome", 1, EDGE, "half-form", 1, 1000.0)]
    one = desk.Trainee(0)
    one.hear(told)
    view = desk.class_view([one], 1001.0)
    assert view["works"][0]["balises"][0]["passed"] == 1 and one.place() == 2
    assert json.loads(json.dumps(view))["trainees"][0]["cells"]["00_welcome"]["1"][0] == EDGE
