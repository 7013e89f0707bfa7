"""`--skip-unchanged` in a course of one work: each edit makes exactly those tests run again that depend on it."""

import contextlib
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests import fingerprints

HERE = [
    "conftest.py",
    "dlojz_tp/authoring/banks.py",
    "dlojz_tp/judging/checks/__init__.py",
    "dlojz_tp/works/cells.py",
    "dlojz_tp/works/running.py",
    "dlojz_tp/works/source.py",
    *(f"tests/{name}.py" for name in ("__init__", "chosen_works", "cpu_seconds", "fingerprints", "skip_unchanged")),
    "tests/test_answers.py",
    "tests/answers/bank.py",
]
MADE = {
    # all that test_answers asks of it; the real one takes seconds to import, in every process of every run
    "torch/__init__.py": "class Tensor: pass",
    "torch/utils/__init__.py": "",
    "torch/utils/_pytree.py": "def tree_iter(values): return values.values()",
    "dlojz_tp/__init__.py": "",
    "dlojz_tp/works/__init__.py": "",
    "dlojz_tp/authoring/__init__.py": "notebooks = None",
    "dlojz_tp/authoring/records.py": "def numbers(work): return []\n\ndef record(*given): return None\n",
    "dlojz_tp/judging/__init__.py": "",
    "dlojz_tp/judging/checking/__init__.py": "",
    "dlojz_tp/cards/__init__.py": "",
    "dlojz_tp/cards/verdict.py": "EDGE = 'not yet robust'",
    "dlojz_tp/judging/checking/mistakes.py": """
        def load(*given): return {'mistakes': []}

        def edges(*given): return {}
    """,
    "dlojz_tp/judging/grading/__init__.py": "command = slicing = None",
    "dlojz_tp/course.py": """
        from types import SimpleNamespace

        from dlojz_tp.judging import checks

        def judge(work, number, answers):
            slug = checks.check("made", number)(*answers)
            word = "fail" if slug else "pass"
            return SimpleNamespace(slug=slug, verdict=word, hint="", expected="", got="", details="")
    """,
    "dlojz_tp/judging/checks/made/__init__.py": "",
    "dlojz_tp/judging/checks/made/words.py": 'HINTS = {"no-sum": "This is not the sum."}',
    "dlojz_tp/judging/checks/made/balise_1.py": """
        from dlojz_tp.judging.checks.made.values import GIVEN
        from dlojz_tp.judging import probes

        def balise_1(answer):
            return None if probes.near(answer(*GIVEN), 5) else "no-sum"
    """,
    "dlojz_tp/judging/checks/made/balise_2.py": """
        from dlojz_tp.judging.checks.made import values
        from dlojz_tp.judging import probes

        PROGRAM = "import sys; from dlojz_tp.room import begun; begun.main(sys.argv)"

        def balise_2(answer):
            return None if probes.near(answer(values.GIVEN), 5) else "no-sum"
    """,
    "dlojz_tp/judging/checks/made/values.py": "GIVEN = [2, 3]",
    "dlojz_tp/judging/probes/__init__.py": """
        def near(x, y):
            from dlojz_tp.numbers import distance
            return distance(x, y) < 1e-6
    """,
    "dlojz_tp/numbers.py": "def distance(x, y): return abs(x - y)",
    "dlojz_tp/room/__init__.py": "",
    "dlojz_tp/room/begun.py": "def main(arguments): pass",
    "dlojz_tp/other.py": "",
    "solutions/00_made.py": """
        # %% tags=["setup"]
        ZERO = 0

        # %% tags=["balise-1"]
        def add(a, b):
            return a + b

        # %%
        tp.check(1, add)

        # %% tags=["balise-2"]
        def add_all(values):
            total = ZERO
            for value in values:
                total = add(total, value)
            return total

        # %%
        tp.check(2, add_all)
    """,
    "tests/answers/__init__.py": "",
    "tests/answers/made/__init__.py": "",
    "tests/answers/made/balise_1.py": """
        from tests.answers.bank import Bank

        bank = Bank("00_made", 1, whole=True)
        bank.slip(None, ("a + b", "b + a"))

        def helper(a, b):
            return a - b

        @bank.wrong("no-sum")
        def add(a, b):
            return helper(a, b)
    """,
    "tests/answers/made/balise_2.py": """
        from tests.answers.bank import Bank

        bank = Bank("00_made", 2, whole=True)
        bank.slip(None, ("total = ZERO", "total = 0"))

        @bank.wrong("no-sum")
        def add_all(values):
            return values[0]
    """,
    "tests/test_other.py": "from dlojz_tp import other\n\ndef test_other(): pass\n",
}
SLIPS, WRONG = {"1-right", "2-right"}, {"1-no-sum", "2-no-sum"}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A checkout whose tests have passed."""
    root = tmp_path_factory.mktemp("course")
    for name in HERE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(fingerprints.ROOT / name, root / name)
    for name, text in MADE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(re.sub("^        ", "", text, flags=re.MULTILINE).lstrip("\n"))
    (root / "pytest.ini").write_text("[pytest]\n")
    assert run(root, "-n", "2") == SLIPS | WRONG | {"other"}
    return root


def run(root, *arguments, status=0, skip=("--skip-unchanged",)):
    """The tests that run with --skip-unchanged, as "1-no-sum"; each that runs and passes is noted."""
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:nbval", "-p", "no:anyio", *skip, *arguments]
    done = subprocess.run(
        [*words, "-k", "00_made-1 or 00_made-2 or test_other"], cwd=root, capture_output=True, text=True, timeout=120,
        # all of its answers: in CI, a day has a twelfth of the wrong ones
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "DLOJZ_TURN": "0/1"},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    ran = set(re.findall(r"test_(?:answer\[00_made-)?([\w-]+?)(?:-L\d+\])? (?:PASSED|FAILED)", done.stdout))
    ran |= set(re.findall(r"(?:PASSED|FAILED) .*test_(?:answer\[00_made-)?([\w-]+?)(?:-L\d+\])? *$", done.stdout, re.M))
    assert ("not run again" in done.stdout) == (ran != SLIPS | WRONG | {"other"})
    return ran


@contextlib.contextmanager
def edited(path, change):
    """A file changed for a while: what passed before is known again afterwards."""
    text = path.read_text()
    path.write_text(change(text))
    try:
        yield
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("file", "old", "new", "ran"),
    [
        pytest.param("tests/answers/made/balise_2.py", "values[0]", "values[1]", {"2-no-sum"}, id="an answer"),
        pytest.param("tests/answers/made/balise_1.py", '"b + a"', '"0 + b + a"', {"1-right"}, id="a slip"),
        pytest.param("tests/answers/made/balise_1.py", "a - b", "b - a", {"1-no-sum"}, id="what an answer uses"),
        pytest.param("tests/answers/made/balise_1.py", "bank = ", "\n\nbank = ", set(), id="lines above"),
        pytest.param(
            "dlojz_tp/judging/checks/made/balise_1.py", "answer(*", "answer( *", {"1-right", "1-no-sum"}, id="a check"
        ),
        pytest.param("dlojz_tp/judging/checks/made/values.py", "2, 3", "3, 2", SLIPS | WRONG, id="what checks share"),
        pytest.param("dlojz_tp/judging/checks/made/words.py", "sum.", "sum!", WRONG, id="a hint that is elsewhere"),
        pytest.param("dlojz_tp/numbers.py", "x - y", "y - x", SLIPS | WRONG | {"other"}, id="a probe far away"),
        pytest.param("dlojz_tp/room/begun.py", "pass", "1", {"2-right", "2-no-sum", "other"}, id="what a text starts"),
        pytest.param("dlojz_tp/other.py", "", "x = 1\n", {"other"}, id="what no check imports"),
        pytest.param("solutions/00_made.py", "ZERO = 0", "ZERO = 1 - 1", SLIPS, id="a setup cell"),
        pytest.param("solutions/00_made.py", "return a + b", "return +a + b", SLIPS, id="an earlier solution"),
        pytest.param("solutions/00_made.py", "in values", "in [*values]", {"2-right"}, id="a later solution"),
    ],
)
def test_an_edit_runs_again_what_depends_on_it(course, file, old, new, ran):
    with edited(course / file, lambda text: text.replace(old, new, 1) if old else new):
        assert run(course) == ran


def test_what_passed_is_not_run_again(course):
    assert run(course) == set()


def test_a_run_that_leaves_nothing_out_notes_what_passed(course):
    with edited(course / "dlojz_tp/numbers.py", lambda text: text.replace("x - y", "y - x")):
        assert run(course, "-n", "2", skip=()) == SLIPS | WRONG | {"other"}
        assert run(course) == set()


def test_a_failed_test_is_run_again(course):
    with edited(course / "dlojz_tp/numbers.py", lambda text: "def distance(x, y): return 0\n"):  # wrong answers pass
        assert run(course, status=1) == WRONG | SLIPS | {"other"}
        assert run(course, status=1) == WRONG


def test_nothing_is_noted_while_a_file_changes(course):
    touch = "from pathlib import Path\n\ndef test_other(): Path(__file__).touch()\n"
    with edited(course / "tests/test_other.py", lambda text: touch):
        assert run(course) == run(course) == {"other"}
