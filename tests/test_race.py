"""Races: only answers that have passed, against the course's and PyTorch's own; what is kept, what the board shows."""

import csv
import dataclasses
import io
import json
import sys
import time
from types import SimpleNamespace

import pytest

from dlojz_tp import course, launch, measure, progress
from dlojz_tp.classroom import desk, drop, races, reading, telling
from dlojz_tp.commands import reset
from dlojz_tp.frameworks import NotInstalled
from dlojz_tp.judging import contest
from dlojz_tp.judging.contest import COURSES, YOURS, Contest, Result
from dlojz_tp.launch.errors import TooBusy
from dlojz_tp.works import source
from tests.answers.bank import before

WORK, N = "10_learning_rate_and_large_batch", 3
RIVAL = contest.contests("learning_rate_and_large_batch")[N].rival
ALL = [(name, number) for name in source.names() for number in contest.contests(source.find(name).module)]


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    for owner, name in ((progress, "_here"), (contest, "_here"), (course, "_passed"), (course, "_given")):
        monkeypatch.setattr(owner, name, {})
    monkeypatch.delenv("DLOJZ_STRICT")  # wrong answers are no errors here


@pytest.fixture
def opened():
    """A work with a right answer in its namespace, not yet checked."""
    names = dict(before(WORK, N + 1))
    return course.open(WORK, names), names


@pytest.fixture
def times(monkeypatch):
    """What the next race measures: {candidate: seconds of each round}; the answers it was given are in `raced`."""
    found = SimpleNamespace(seconds={}, raced={})

    def timed(_module, _number, answers):
        found.raced = answers
        return measure.Race(found.seconds)

    monkeypatch.setattr(contest, "timed", timed)
    return found


def check(tp, names):
    tp.check(N, *(names[name] for name in tp.work.balises[N].answers))


def steady(yours, courses, rival):
    return {YOURS: [yours] * 5, COURSES: [courses] * 5, RIVAL: [rival] * 5}


def said(capsys):
    return capsys.readouterr().out.strip().splitlines()


def test_only_an_answer_that_has_passed_is_raced(opened, times, capsys):
    tp, names = opened
    times.seconds = steady(1, 1, 1)
    tp.race(N)
    (line,) = said(capsys)
    assert "before an answer of your own has passed" in line and "tp.check(3, parameter_groups, AdamW)" in line
    right, names["AdamW"] = names["AdamW"], type("AdamW", (), {})
    check(tp, names)
    capsys.readouterr()
    tp.race(N)
    assert "has passed" in said(capsys)[0] and not times.raced
    names["AdamW"] = right
    check(tp, names)
    tp.race(N)
    assert times.raced[YOURS] == (names["parameter_groups"], right)
    assert times.raced[COURSES][1] is not right and names["AdamW"] is right, "the course's own, in other names"


def test_a_cell_that_ran_again_and_a_failure_since_are_refused(opened, times, capsys):
    tp, names = opened
    check(tp, names)
    right = names["AdamW"]
    names["AdamW"] = type("AdamW", (right,), {})
    capsys.readouterr()
    tp.race(N)
    (line,) = said(capsys)
    assert "AdamW has changed since it passed" in line and not times.raced
    names["AdamW"] = type("AdamW", (), {})
    check(tp, names)
    names["AdamW"] = right
    tp.race(N)
    assert not times.raced, "the last verdict is a failure"


def test_what_the_course_has_written_is_refused(opened, times):
    tp, names = opened
    tp.catch_up(N)
    check(tp, names)
    tp.race(N)
    assert not times.raced


def test_a_balise_without_a_race_names_those_that_have_one(opened, capsys):
    tp, _ = opened
    tp.race(1)
    assert said(capsys)[-1].endswith("balise 1 has no race; in this work there is one for: 3")
    tp.race(99)
    assert "has no balise 99" in said(capsys)[-1]
    course.open("00_welcome", {}).race(1)
    assert said(capsys)[-1].endswith("balise 1 has no race")


def test_the_best_ratio_is_kept(opened, times, capsys, tmp_path):
    tp, names = opened
    check(tp, names)
    capsys.readouterr()
    for seconds, words in (
        (steady(0.9, 0.9, 1), f"level with the course's and 1.11 times faster than {RIVAL}. Best ratio so far: 0.90"),
        (steady(2, 1, 2.5), f"2.00 times slower than the course's and 1.25 times faster than {RIVAL}. Best"),
        (steady(0.95, 1, 1), "Best ratio so far: 0.80"),
        (steady(0.7, 1, 1), "Best ratio so far: 0.70"),
    ):  # fmt: skip
        times.seconds = seconds
        tp.race(N)
        lines = said(capsys)
        assert words in lines[-1] and len(lines) == 5, "a table of three, and a sentence"
    contest._here.clear()
    assert contest.best(WORK) == {N: Result(0.7, 0.0)}
    assert reset.main([WORK]) == 0 and not contest.best(WORK)


def test_noise_keeps_nothing(opened, times, capsys):
    tp, names = opened
    check(tp, names)
    times.seconds = steady(0.5, 1, 1) | {RIVAL: [0.8, 1, 1.2, 1, 1.3, 0.7]}
    tp.race(N)
    line = said(capsys)[-1]
    assert "vary by ± 15 %, so nothing is kept" in line and "faster" not in line and not contest.best(WORK)


def test_a_damaged_file_of_races_counts_as_empty(tmp_path):
    path = contest._path(WORK)
    for text in ("{", "[]", '{"3": 1}', '{"3": [-1, 0]}', '{"3": ["x", 0]}', "\0"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert contest.best(WORK) == {}
        assert contest.keep(WORK, N, Result(1.0, 0.0)) == Result(1.0, 0.0) == contest.best(WORK)[N]


def test_without_a_place_to_write_the_best_lasts_for_this_kernel(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "file"))
    contest.keep(WORK, N, Result(0.7, 0.0))
    assert contest.keep(WORK, N, Result(0.9, 0.0)) == contest.best(WORK)[N] == Result(0.7, 0.0)


def test_a_copy_without_solutions_races_against_pytorch_alone(opened, times, capsys):
    tp, names = opened
    check(tp, names)
    tp.work = dataclasses.replace(tp.work, solved=False)
    times.seconds = {YOURS: [1.0] * 5, RIVAL: [2.0] * 5}
    tp.race(N)
    assert [*times.raced] == [YOURS]
    assert said(capsys)[-1].endswith("ratio so far: 0.50. This copy of the course has no answer of its own to race.")


def test_a_rival_that_is_not_installed(opened, times, capsys):
    tp, names = opened
    check(tp, names)
    times.seconds = {YOURS: [1.0] * 5, COURSES: [1.0] * 5}
    tp.race(N)
    assert f"level with the course's. Nothing is kept, because {RIVAL} is not installed" in said(capsys)[-1]
    assert not contest.best(WORK)


def only(monkeypatch, answer, theirs=lambda: int):
    monkeypatch.setattr(contest, "contests", lambda _module: {1: Contest("the rival", answer, theirs, device="cpu")})


def failing():
    raise ValueError("of three\nlines\n")


def absent():
    raise NotInstalled("not here")


@pytest.mark.parametrize("first_call", [1, 3], ids=["at once", "later"])
def test_an_answer_that_raises_in_its_work(monkeypatch, first_call):
    calls = []
    only(monkeypatch, lambda: lambda: calls.append(1) or (len(calls) >= first_call and failing()))
    with pytest.raises(contest.Failed, match=r"raised ValueError: of three$"):
        contest.timed("x", 1, {YOURS: ()})


def test_an_answer_that_ends_the_program(monkeypatch):
    only(monkeypatch, lambda: sys.exit)
    with pytest.raises(contest.Failed, match="yours raised SystemExit"):
        contest.timed("x", 1, {YOURS: ()})


def test_a_machine_that_is_too_busy_for_ranks(monkeypatch):
    def busy(*_, **__):
        raise TooBusy("the machine is too busy")

    monkeypatch.setattr(contest, "contests", lambda _: {1: Contest("r", int, int, ranks=2)})
    monkeypatch.setattr(launch, "ranks", busy)
    with pytest.raises(contest.Failed, match="^the machine is too busy$"):
        contest.timed("x", 1, {YOURS: ()})


def test_an_answer_that_hangs_in_its_work(monkeypatch):
    monkeypatch.setattr(contest, "DEADLINE_S", 0.3)
    only(monkeypatch, lambda: lambda: time.sleep(600))
    with pytest.raises(contest.Failed, match="yours did not end within"):
        contest.timed("x", 1, {YOURS: ()})


def test_nobody_to_race_against(monkeypatch):
    only(monkeypatch, lambda: int, absent)
    with pytest.raises(contest.Failed, match="the rival is not installed here, and this copy"):
        contest.timed("x", 1, {YOURS: ()})
    assert [*contest.timed("x", 1, {YOURS: (), COURSES: ()}).seconds] == [YOURS, COURSES]


def test_a_failed_race_is_one_line(opened, monkeypatch, capsys):
    tp, names = opened
    check(tp, names)
    capsys.readouterr()
    only(monkeypatch, lambda *_: failing())
    monkeypatch.setattr(contest, "contests", lambda _: {N: Contest("r", lambda *_: failing(), failing, device="cpu")})
    tp.race(N)
    assert said(capsys) == ["✗ balise 3, no race: yours raised ValueError: of three"]


def test_a_round_over_ranks_takes_as_long_as_the_slowest(monkeypatch):
    monkeypatch.setattr(contest, "contests", lambda _: {1: Contest("r", int, int, ranks=2)})
    sides = [measure.Race({YOURS: [1, 4], "r": [2, 2]}), measure.Race({YOURS: [3, 2], "r": [1, 2]})]
    monkeypatch.setattr(launch, "ranks", lambda *_, **__: sides)
    assert contest.timed("x", 1, {YOURS: ()}).seconds == {YOURS: [3, 4], "r": [2, 2]}


def test_what_an_answer_raises_on_a_rank():
    with pytest.raises(contest.Failed, match=r"^yours raised ZeroDivisionError: division by zero$"):
        contest.timed("data_parallel_under_the_hood", 5, {YOURS: (lambda _parameters, _capacity: 1 / 0,)})


@pytest.mark.parametrize(("name", "number"), ALL)
def test_the_course_can_race_its_own_answers(name, number, monkeypatch):
    monkeypatch.setenv("DLOJZ_BRIEF", "1")
    work, names = source.find(name), before(name, number + 1)
    found = contest.timed(work.module, number, {YOURS: tuple(names[one] for one in work.balises[number].answers)}
                          | {COURSES: tuple(names[one] for one in work.balises[number].answers)})  # fmt: skip
    rival = contest.contests(work.module)[number].rival
    assert [*found.seconds][:2] == [YOURS, COURSES] and {*found.seconds} <= {YOURS, COURSES, rival}
    assert len(found.seconds) == 3 or rival.endswith("of transformers")
    assert all(len(times) <= 2 and min(times) > 0 for times in found.seconds.values())


def test_places():
    def places(**best):
        return [(line["name"], line["place"]) for line in races.ranked(best)]

    assert places(c=(1.5, 0.0), a=(0.9, 0.01), b=(0.91, 0.0)) == [("a", 1), ("b", 1), ("c", 3)]
    assert places(a=(1.0, 0.01), b=(1.05, 0.06)) == [("a", 1), ("b", 1)], "within the noise of one of them"
    assert places(a=(1.0, 0.0), b=(1.019, 0.0), c=(1.038, 0.0)) == [("a", 1), ("b", 1), ("c", 3)], "not a chain"
    assert races.ranked({}) == []


@pytest.fixture
def board(tmp_path, monkeypatch):
    """told(ratios): what one trainee's class folder says after these races, as the board reads it."""
    monkeypatch.setattr(telling, "_said", set())
    monkeypatch.setattr(telling, "_tellers", {})

    def told(user, work, number, **result):
        folder = tmp_path / user
        if not folder.exists():
            drop.make(folder)
        monkeypatch.setenv(drop.VARIABLE, str(folder))
        telling.tell(work, number, telling.RACED, **result)
        for teller in telling._tellers.values():
            assert teller._tried.wait(20)
        return [one for news in reading.Reader(folder).news().values() for one in news]

    return told


def test_the_board_shows_one_line_a_trainee(board):
    trainees = [desk.Trainee(uid) for uid in (60_001, 60_002, 60_003)]
    for one, ratios in zip(trainees, ((1.2, 0.8, 1.0), (0.81,), (0.7, 0.9))):
        for ratio in ratios:
            told = board(f"user{one.uid}", WORK, N, ratio=ratio, noise=0.02)
        one.hear(told)
    (race,) = desk.class_view(trainees, time.time())["races"]
    assert (race["work"], race["balise"]) == (WORK, N)
    assert [(line["place"], line["name"], line["ratio"]) for line in race["lines"]] == [
        (1, "user 60003", 0.7), (2, "user 60001", 0.8), (2, "user 60002", 0.81),
    ]  # fmt: skip
    assert not any(one.rows or one.last for one in trainees), "a race is no verdict"
    rows = list(csv.DictReader(io.StringIO(desk.table(trainees))))
    assert [(row["trainee"], row["attempts"], row["race ratio"], row["race place"]) for row in rows] == [
        ("user 60001", "0", "0.800", "2"), ("user 60002", "0", "0.810", "2"), ("user 60003", "0", "0.700", "1"),
    ]  # fmt: skip


def test_a_race_counts_as_no_attempt(board):
    board("one", WORK, N, ratio=1.0, noise=0.01)
    telling.tell(WORK, N, "fail", "a")
    told = board("one", WORK, N, ratio=1.0, noise=0.01)
    assert [(one.word, one.attempts) for one in sorted(told, key=lambda one: one.at)] == [
        ("raced", 0), ("fail", 1), ("raced", 1),
    ]  # fmt: skip
    trainee = desk.Trainee(1)
    trainee.hear(told)
    assert trainee.rows[WORK, N].attempts == 1 and trainee.rows[WORK, N].word == "fail"


@pytest.mark.parametrize("ratio", [-1, 0, "1", True, None, 1e9, float("nan")])
def test_what_is_no_ratio_is_left_aside(ratio):
    said = {"work": WORK, "balise": N, "verdict": "raced", "hint": "", "attempts": 0, "time": 1.0, "noise": 0.01}
    assert reading.understood(json.dumps(said | {"ratio": 0.9}).encode()).race == (0.9, 0.01)
    with pytest.raises(ValueError):  # noqa: PT011
        reading.understood(json.dumps(said | {"ratio": ratio}).encode())


@pytest.mark.parametrize("wanted", ["1", ""])
def test_the_board_is_told_only_where_that_is_asked_for(opened, times, wanted, monkeypatch):
    told, (tp, names) = [], opened
    monkeypatch.setattr(telling, "tell", lambda *given, **result: told.append((given, result)))
    monkeypatch.setenv("DLOJZ_RACE", wanted)
    check(tp, names)
    times.seconds = steady(0.9, 1, 1)
    tp.race(N)
    times.seconds = steady(1.0, 1, 1)
    tp.race(N)
    best = ((WORK, N, telling.RACED), {"ratio": 0.9, "noise": 0.0})
    assert told[1:] == [best] * 2 if wanted else [given[2] for given, _ in told] == ["pass"]
