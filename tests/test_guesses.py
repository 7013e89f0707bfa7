"""Guesses: committed before the measurement, shown beside it, kept; nothing of it ever stops a notebook."""

import json

import pytest

from dlojz_tp import course, guesses, progress
from dlojz_tp.commands import reset
from dlojz_tp.works import state

WORK, ASKED = "03_tensor_cores_channels_last", "How many times faster?"


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(guesses, "_here", {})
    monkeypatch.setattr(progress, "_here", {})


def cell(capsys, guess, measured=None, form="{:.3g}", choices=()):
    """What is printed by a cell with a guess, and by one that measures."""
    asked = guesses.predict(WORK, ASKED, guess, choices)
    said = capsys.readouterr().out
    if measured is not None:
        asked.shows(measured, form, "The reason.")
    return said, capsys.readouterr().out


@pytest.mark.parametrize(
    "guess, measured, right, words",
    [
        (3, 0.94, False, "You expected × 3.00, it was × 0.94. The reason."),
        (1, 0.94, True, "You expected × 1.00, it was × 0.94. The reason."),
        ((2, 1), 1.5, True, "You expected × 1.00 to × 2.00, it was × 1.50. The reason."),
        ((1, 2), 2.1, False, "You expected × 1.00 to × 2.00, it was × 2.10. The reason."),
        (0, 0.0, True, "You expected × 0.00, it was × 0.00. The reason."),
        (-1.0, -1.1, True, "You expected × -1.00, it was × -1.10. The reason."),
    ],
)
def test_guess_and_measurement_stand_side_by_side(capsys, guess, measured, right, words):
    said, shown = cell(capsys, guess, measured, "× {:.2f}")
    assert "You expect" in said and words in shown and ("✓" in shown) == right
    assert guesses.lines(WORK) == [(f"{words.split('. ')[0]}: {ASKED}".replace(". The reason", ""), right)]


def test_a_choice(capsys):
    said, shown = cell(capsys, "slower", "faster", choices=("faster", "slower"))
    assert "You expect slower." in said and "You expected slower, it was faster." in shown
    assert "one of 'faster', 'slower'" in cell(capsys, "sideways", choices=("faster", "slower"))[0]


@pytest.mark.parametrize("guess", ["a lot", (1,), (1, 2, 3), True, float("nan"), None, [1, "2"], object()])
def test_what_is_no_guess_gets_one_line(capsys, guess):
    said, shown = cell(capsys, guess, 2.0)
    assert "A guess is a number or a range" in said and "You made no guess" in shown


def test_anyone_who_runs_all_cells_first_finds_the_answer_folded_and_can_still_guess(capsys, monkeypatch):
    said, shown = cell(capsys, ..., 0.9)
    assert "Guess before you measure" in said and f"You made no guess: {ASKED}" in shown
    assert guesses.lines(WORK) == [], "the list of guesses would tell it"
    cards = []
    monkeypatch.setattr(guesses.render, "show", cards.append)
    guesses.predict(WORK, ASKED).shows(0.9, why="The reason.")
    before, folded = cards[-1]._repr_html_().split("<details")
    assert "0.9" not in before and " open" not in folded
    assert "It was 0.9. The reason." in folded and "</details>" in folded
    guesses.predict(WORK, ASKED, 0.9).shows(0.9)
    assert "You expected 0.9, it was 0.9" in cards[-1]._repr_html_() and guesses.lines(WORK)[0][1] is True


def test_the_guess_before_the_first_measurement_stands(capsys):
    cell(capsys, 5)
    assert "You expect 4." in cell(capsys, 4, 1.0)[0], "nothing was measured yet"
    said, shown = cell(capsys, 1, 1.0)
    assert "first guess, 4" in said and "stands" in said and "You expected 4, it was 1" in shown
    assert "You expected 4, it was 1.2" in cell(capsys, ..., 1.2)[1], "another session, another measurement"


def test_a_damaged_file_or_a_full_disk_disturbs_nobody(capsys, monkeypatch):
    cell(capsys, 5, 5.0)
    path = state.folder() / guesses.FOLDER / f"{WORK}.json"
    rows = ["", "[]", "7", "null", '{"q": 1}', json.dumps({ASKED: {"guess": {}}}), json.dumps({ASKED: {"was": "1"}})]
    for text in [*rows, json.dumps({ASKED: {"guess": "x" * 9}})]:
        path.write_text(text)
        assert guesses.lines(WORK) == []
        assert "You expected 2, it was 2" in cell(capsys, 2, 2.0)[1]
    monkeypatch.setattr(guesses.whole_file, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert "You expected 2, it was 3" in cell(capsys, 2, 3.0)[1] and "it was 3" in guesses.lines(WORK)[0][0]


def test_a_question_that_became_one_of_choices_forgets_the_number(capsys):
    cell(capsys, 5, 5.0)
    assert "You made no guess" in cell(capsys, ..., "faster", choices=("faster", "slower"))[1]


def test_progress_ends_with_the_guesses_and_reset_forgets_them(capsys, tmp_path):
    tp = course.open(WORK, {})
    tp.predict(ASKED, 3).shows(0.94, "× {:.2f}")
    capsys.readouterr()
    tp.progress()
    assert "You expected × 3.00, it was × 0.94: How many times faster?" in capsys.readouterr().out
    assert reset.main([WORK]) == 0 and guesses.lines(WORK) == []
