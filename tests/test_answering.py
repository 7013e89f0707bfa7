"""`python -m dlojz_tp answers`: the bank of a work, judged, or compared with that of a commit."""

import contextlib
from pathlib import Path

import pytest

from dlojz_tp.authoring import answering
from dlojz_tp.works import source


def one(text, verdict="fail", slug="no-sum", words=(), due="no-sum", **more):
    """What is known of an answer after it was judged."""
    known = {"name": f"00_welcome-1-{due or 'right'}-L7", "balise": 1, "edge": False, "place": 0, "seconds": 0.1}
    said = {"hint": "Add up.", "expected": "", "got": "", "details": ""}
    return known | said | {"text": text, "verdict": verdict, "slug": slug, "words": list(words), "due": due} | more


@pytest.fixture
def runs(monkeypatch):
    """{tree: what its runs find, one after the other; the last one again and again}."""
    found = {}

    def judged(root, work, balises, only=None):
        listed = found[root]
        return listed.pop(0) if len(listed) > 1 else listed[0]

    monkeypatch.setattr(answering, "judged", judged)
    monkeypatch.setattr(answering, "tree_of", lambda revision: contextlib.nullcontext(Path("old")))
    return found


def test_works_have_two_digits_and_balises_one():
    asked = answering.wanted(["04", "2", "1", "09_ddp"])
    assert [(work.name, balises) for work, balises in asked] == [
        ("04_profiler", [2, 1]),
        ("09_ddp", [*asked[1][0].balises]),
    ]


def test_a_balise_may_follow_a_point():
    asked = answering.wanted(["17.10", "04", "2"])
    assert [(work.name[:2], balises) for work, balises in asked] == [("17", [10]), ("04", [2])]


@pytest.mark.parametrize(("words", "said"), [
    (["17.99"], "17_tensor_slicing has no balise 99."),
    (["4"], "4 is a balise: of which work? A work is two digits, such as 04."),
    (["00", "9"], "00_welcome has no balise 9. A work is two digits, such as 09."),
    (["99"], "no practical work is called '99'"),
    (["00", "--against", "no-such-commit"], "git has no files of 'no-such-commit'"),
])  # fmt: skip
def test_what_cannot_be_understood_is_one_line(words, said, capsys):
    assert answering.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[0] and len(lines) == 1


def test_a_hint_that_is_missing_is_one_line(tmp_path, monkeypatch, capsys):
    program = tmp_path / "program.py"
    program.write_text("from dlojz_tp.judging.checking.breakage import HintMissing\nraise HintMissing('no hint')")
    monkeypatch.setattr(answering, "PROGRAM", program)
    assert answering.main(["00", "1"]) == 2
    assert capsys.readouterr().err == "answers: 00_welcome: no hint\n"


def test_the_answers_of_a_balise(capsys):
    assert answering.main(["00", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"00_welcome: {len(lines)} answers, 0 misjudged") and len(lines) > 5
    assert any(line.startswith("1-right-L") and " pass " in line for line in lines)


@pytest.mark.parametrize(("verdict", "wrong"), [
    (one("a"), False),
    (one("a", slug="other"), True),
    (one("a", "not yet robust"), True),
    (one("a", "not yet robust", edge=True), False),
    (one("a", "pass", "", due=None), False),
    (one("a", due=None), True),
    (one("a", "not done", "", due="not done"), False),
    (one("a", "could not judge", ""), True),
    (one("a", "could not judge", "not-installed"), False),
])  # fmt: skip
def test_misjudged_answers_come_first_with_all_that_was_said(verdict, wrong, runs, capsys):
    runs[source.ROOT] = [[one("b"), verdict]]
    assert answering.main(["00", "1"]) == wrong
    lines = capsys.readouterr().out.splitlines()
    assert ("must be" in lines[0]) == wrong and ("    hint: Add up." in lines) == wrong
    assert f", {int(wrong)} misjudged" in lines[-1]


@pytest.mark.parametrize(("before", "now", "counts"), [
    ([one("x = 1")], [one("x  =  1  # the same")], "1 as at old, 0 differ, 0 lost, 0 new"),
    ([one("x = 1"), one("y")], [one("y"), one("x = 1")], "2 as at old, 0 differ, 0 lost, 0 new"),
    ([one("x = 1")], [one("x = 2")], "0 as at old, 0 differ, 1 lost, 1 new"),
    ([one("x", words=["a"])], [one("x", words=["b"])], "0 as at old, 1 differ, 0 lost, 0 new"),
    ([one("x", words=["a"])], [one("x")], "0 as at old, 1 differ, 0 lost, 0 new"),
    ([one("x", slug="a")], [one("x", slug="b")], "0 as at old, 1 differ, 0 lost, 0 new"),
    ([one("x")], [one("x", "not yet robust")], "0 as at old, 1 differ, 0 lost, 0 new"),
    ([one("x"), one("x", slug="b")], [one("x"), one("x")], "1 as at old, 1 differ, 0 lost, 0 new"),
    ([one("", due="a")], [one("", due="a")], "1 as at old, 0 differ, 0 lost, 0 new"),
    ([], [one("x")], "0 as at old, 0 differ, 0 lost, 1 new"),
])  # fmt: skip
def test_answers_are_compared_by_their_text(before, now, counts, runs, capsys):
    runs[Path("old")], runs[source.ROOT] = [before], [now]
    assert answering.main(["00", "1", "--against", "old"]) == ("0 differ, 0 lost" not in counts)
    assert capsys.readouterr().out.splitlines()[-1].endswith(counts)


def test_words_that_change_from_run_to_run_are_no_difference(runs):
    runs[Path("old")] = [[one("x", words=["port 1", "rank 0"])], [one("x", words=["port 2", "rank 0"])]]
    runs[source.ROOT] = [[one("x", words=["port 3", "rank 0"])], [one("x", words=["port 4", "rank 0"])]]
    assert answering.main(["00", "1", "--against", "old"]) == 0
    runs[Path("old")] = [[one("x", words=["port 1", "rank 0"])], [one("x", words=["port 2", "rank 0"])]]
    runs[source.ROOT] = [[one("x", words=["port 3", "rank 1"])], [one("x", words=["port 4", "rank 1"])]]
    assert answering.main(["00", "1", "--against", "old"]) == 1
