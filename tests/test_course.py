"""What a notebook sees: verdicts, calm lines, catching up, progress. In a real kernel where it matters."""

import asyncio
import inspect
import json
import os
import re
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from dlojz_tp import course, progress
from dlojz_tp.cards import render
from dlojz_tp.commands import lab, reset
from dlojz_tp.judging import checks
from dlojz_tp.judging.checking import Verdict, Wrong, verdict_of
from dlojz_tp.judging.checking.breakage import HintMissing
from dlojz_tp.judging.grading import command
from dlojz_tp.works import balise, source, state

HINTS = {"too-small": "It is {size}, add one."}


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(progress, "_here", {})


def judged(check, answer=None, **options):
    return verdict_of(check, (answer,), number=1, title="Try", hints=HINTS, **options)


def run_cells(tmp_path, *cells, errors=False):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=60, resources=resources, allow_errors=errors).execute()
    texts = []
    for cell in notebook.cells:
        assert errors or not [o for o in cell.outputs if o.output_type == "error"]
        texts.append("".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs))
    return texts, notebook


HOLE = "def memory_model(peaks, capacity):\n    todo(6)"
STOP = "import os, signal, threading\nthreading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
NOTEBOOKS = {
    "unfinished": (
        "from dlojz_tp import course, todo, launch\ntp = course.open('00_welcome')",
        "def distributed_sum(values):\n    todo(2)",
        "tp.check(2, distributed_sum)",
        "total = distributed_sum(1)",
        "print(total)",
        "double = 2 * total",
        "print(double)",
        "launch.ranks(distributed_sum, 1, n=2)",
        "total = 3",
        "print(total)",
    ),
    "interrupted": (
        "from dlojz_tp import course, launch\nimport time\ntp = course.open('00_welcome')",
        "def forever():\n    time.sleep(60)\nlaunch.ranks(len, 'a', n=2)",
        STOP + "launch.ranks(forever, n=2, timeout=80)",
        STOP + "tp.check(1, forever)",
        STOP + "forever()",
    ),
    "further": (
        "import math\nfrom dlojz_tp import course, todo\ntp = course.open('01_gpu_acceleration')",
        HOLE,
        "tp.catch_up('further')",
        HOLE,
        "tp.check(6, memory_model)",
        "print(memory_model({1: 3, 2: 5}, 11)[2])",
        "def training_step():\n    todo(2)",
        "training_step()",
        HOLE.replace("todo(6)", "raise KeyError"),
        "try:\n    memory_model({}, 0)\nexcept KeyError:\n    print('own')",
        "tp.progress()",
        HOLE,
        "tp.catch_up(1)",
        "tp.check(6, memory_model)",
    ),
    "others": ("from dlojz_tp import course\ntp = course.open('00_welcome')", "undefined_name"),
}


@pytest.fixture(scope="module")
def in_one_kernel(tmp_path_factory):
    """{name: what its cells show, and the cells}: a kernel takes ten seconds to start, so that all have the same."""
    folder, cells = (
        tmp_path_factory.mktemp("one"),
        [cell for each in NOTEBOOKS.values() for cell in ("%reset -f", *each)],
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DLOJZ_STATE", str(folder / "state"))
        texts, notebook = run_cells(folder, *cells, errors=True)
    found, begin = {}, 0
    for name, each in NOTEBOOKS.items():
        mine = slice(begin + 1, begin + 1 + len(each))
        found[name], begin = (texts[mine], notebook.cells[mine]), mine.stop
    return found


def test_a_check_passes_and_fails_with_its_hint():
    def check(answer):
        yield "it is positive"
        if answer <= 0:
            raise Wrong("too-small", expected=1, got=answer, where="here", size=answer)
        yield "it is whole"

    assert judged(check, 3).passed and judged(check, 3).seen == ("it is positive", "it is whole")
    found = judged(check, -2)
    assert (found.verdict, found.hint, found.failed) == ("fail", "It is -2, add one.", "it is positive")
    text = repr(render.verdict(found))
    assert "expected" in text and "-2" in text and "here" in text


def test_a_hint_whose_field_is_missing_is_shown_without_it(monkeypatch):
    def check(_):
        yield "it is whole"
        raise Wrong("too-small")

    with pytest.raises(HintMissing, match="a look gives .*: It is {size}, add one"):  # in our own tests: a faulty check
        judged(check)
    monkeypatch.delenv("DLOJZ_STRICT")
    assert judged(check).hint == "It is …, add one."


def test_a_slug_without_a_hint_is_a_fault_of_the_check():
    def check(_):
        yield "it is whole"
        raise Wrong("too-smal")

    with pytest.raises(HintMissing, match="no hint 'too-smal' on record.*--records"):
        judged(check)


def test_a_name_of_a_hint_is_given_once(monkeypatch):
    first, second = SimpleNamespace(HINTS={"a": "1", "b": "2"}), SimpleNamespace(HINTS={"b": "3"}, __name__="second")
    monkeypatch.setattr(checks, "modules", lambda work: [first, second][: len(work)])
    assert checks.hints("w") == first.HINTS
    with pytest.raises(ValueError, match="second has hints that another module has too: b"):
        checks.hints("wo")


@pytest.mark.parametrize(
    ("error", "said"), [("It broke.", "It broke. Read"), ("Why?", "Why? Read"), ("and ...", "and .... Read")]
)
def test_no_sentence_ends_twice(error, said):
    exec(
        compile("def raises(_):\n    yield 'x'\n    raise ValueError(error)", "<cell>", "exec"),
        found := {"error": error},
    )
    assert said in judged(found["raises"]).hint


@pytest.mark.parametrize(
    ("error", "slug"),
    [
        (ValueError("no"), "raised"),
        (SystemExit(0), "left"),
        (RuntimeError("Expected all tensors to be on the same device, but found two"), "wrong-device"),
    ],
)
def test_exceptions_become_verdicts(error, slug):
    def check(_):
        yield "something"
        raise error

    assert judged(check).slug == slug


@pytest.mark.parametrize(
    ("answer", "slug"),
    [(lambda: 1, "signature"), (lambda x: len(x, x), "raised"), (lambda x: (lambda: x)(x), "raised")],
)
def test_a_call_that_does_not_fit_is_told_of_who_makes_it(answer, slug):
    exec(compile("def check(answer):\n    yield 'x'\n    answer([])", course.__file__, "exec"), found := {})
    assert judged(found["check"], answer).slug == slug


def test_a_missing_answer_is_not_a_failure():
    def check(_):
        yield "something"
        balise.todo(1)

    found = judged(check)
    assert found.verdict == "not done" and "balise 1 is not done yet" in found.hint


def test_an_endless_answer_meets_its_deadline():
    def check(_):
        yield "something"
        while True:
            try:
                pass
            except Exception:
                continue

    assert judged(check, deadline=0.3).slug == "endless"


def test_a_check_that_looks_at_nothing_is_no_pass():
    assert not judged(lambda _: iter(())).passed


def test_random_state_is_kept():
    import torch

    def check(_):
        torch.manual_seed(1)
        yield "something"

    torch.manual_seed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    judged(check)
    assert torch.equal(first, torch.rand(3))


def test_html_is_escaped():
    bad = Verdict(1, "<b>", "fail", hint="<script>", got="a<b", printed="<i>", details="<u>")
    page = render.verdict(bad)._repr_html_()
    assert not any(tag in page for tag in ("<script>", "a<b", "<i>", "<u>"))


def test_strict_runs_stop_at_a_wrong_answer(monkeypatch, capsys):
    monkeypatch.setenv("DLOJZ_STRICT", "1")
    tp = course.open("00_welcome", {})
    with pytest.raises(course.CheckFailed):
        tp.check(1, dict)
    monkeypatch.delenv("DLOJZ_STRICT")
    tp.check(1, dict)
    tp.check(9, 0)
    assert "no balise 9" in capsys.readouterr().out


def test_catch_up_and_progress(capsys):
    namespace = {}
    exec("import os, torch, torch.distributed as dist", namespace)
    tp = course.open("00_welcome", namespace)
    tp.catch_up(2)
    assert callable(namespace["describe_machine"]) and callable(namespace["distributed_sum"])
    assert inspect.getsource(namespace["describe_machine"]).startswith("def describe_machine")
    tp.check(1, namespace["describe_machine"])
    tp.progress()
    out = capsys.readouterr().out
    assert (
        "» balise 1 · Say what this process may use · by catch_up" in out
        and "0 of 2 balises done, 1 by catch_up" in out
    )
    tp.check(1, lambda: namespace["describe_machine"]())
    tp.progress()
    assert "1 of 2 balises done\n" in capsys.readouterr().out
    assert json.loads((state.folder() / "00_welcome.json").read_text()) == {"1": "pass"}


def test_catch_up_shows_the_solutions_folded(monkeypatch):
    shown = []
    monkeypatch.setattr(render, "show", shown.append)
    course.open("00_welcome", {}).catch_up(1)
    page = shown[0]._repr_html_()
    plain = re.sub(r"<.*?>", "", page)
    assert "<details" in page and "def describe_machine" in plain and "SOLUTION" not in plain
    assert "keyword-color" in page and "white-space:pre;" in page, "in colours, and no word is broken"
    assert "def describe_machine" not in repr(shown[0]), "the plain line stays one line"


@pytest.mark.parametrize("last", ["fail", "not done", "by catch_up", "pass"])
def test_the_last_verdict_counts_as_for_the_grader(last):
    progress.record("w2", 1, "pass")
    progress.record("w2", 1, last)
    assert progress.load("w2") == {1: last} and progress._here == {}, "in this session and in the next"


def test_progress_is_green_only_when_all_is_done():
    rows = [(1, "a", "pass"), (2, "b", "by catch_up")]
    border = "border-left:4px solid rgb({})"
    green, grey = (border.format(render._COLOUR[word]) for word in ("pass", "not done"))
    page = render.progress("W", rows)._repr_html_()
    assert grey in page and green not in page and "by catch_up" in page
    assert green in render.progress("W", rows[:1])._repr_html_()


def test_progress_belongs_to_a_work_folder_and_can_be_reset(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DLOJZ_STATE")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / state.WORK).write_text("{}")
    for name, work in (("one", "00_welcome"), ("one", "06_compile"), ("two", "00_welcome")):
        monkeypatch.setattr(state, "_started", tmp_path / name)
        progress.record(work, 1, "pass")
    assert state.folder() == tmp_path / "two" / ".course-progress"
    assert reset.main(["00", "--work", str(tmp_path / "one")]) == 0
    monkeypatch.setattr(state, "_started", tmp_path / "one")
    assert progress.load("00_welcome") == {} and progress.load("06_compile") == {1: "pass"}
    monkeypatch.setattr(state, "_started", tmp_path / "two")
    assert progress.load("00_welcome") == {1: "pass"}, "another folder keeps its own"
    assert reset.main(["--work", str(tmp_path / "two")]) == 0 and progress.load("00_welcome") == {}
    assert "forgotten: 00_welcome (in" in capsys.readouterr().out
    assert reset.main(["99_nothing"]) == 2
    progress.record("00_welcome", 1, "pass")
    assert reset.main(["--work", str(tmp_path / "tow")]) == 2 and progress.load("00_welcome") == {1: "pass"}
    assert "tow is no work folder" in capsys.readouterr().err


def test_progress_survives_damage_and_an_unwritable_folder(monkeypatch, tmp_path):
    progress.record("w", 1, "pass")
    (state.folder() / "w.json").write_text("{broken")
    monkeypatch.setattr(progress, "_here", {})
    assert progress.load("w") == {}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "file" / "below"))
    progress.record("w", 2, "pass")
    assert progress.load("w") == {2: "pass"}


def test_a_user_without_a_home_gets_a_private_folder(monkeypatch, tmp_path):
    for name in ("DLOJZ_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless(_=None):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(state.Path, "home", homeless)
    monkeypatch.setattr(state.tempfile, "tempdir", str(tmp_path))
    private = tmp_path / f"dlojz-state-{os.getuid()}"
    progress.record("w", 1, "pass")
    assert (private / "w.json").is_file() and private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o755)  # as another user may have made it
    assert state.folder() != private and not state.folder().exists()
    progress.record("w", 2, "pass")
    assert progress.load("w") == {2: "pass"} and "2" not in (private / "w.json").read_text()


@pytest.mark.parametrize("error", [BaseException("odd"), GeneratorExit(), asyncio.CancelledError()])
def test_base_exceptions_become_verdicts_too(error):
    def check(_):
        yield "something"
        raise error

    assert judged(check).verdict == "fail"


def test_the_stop_button_stops_a_check():
    def check(_):
        yield "something"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(check)


def test_unknown_works_are_named():
    with pytest.raises(source.UnknownWork, match="00_welcome"):
        course.open("99_nothing")


def test_a_number_names_a_work(capsys):
    assert source.full_name("09") == source.full_name("9") == source.full_name("09_ddp") == "09_ddp"
    assert source.full_name("99") == "99" and source.full_name("") == ""
    assert command.main(["09", "missing.py"]) == 2 and "cannot be read" in capsys.readouterr().err


def test_an_unfinished_notebook_stays_calm(in_one_kernel):
    texts, cells = in_one_kernel["unfinished"]
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    calm = "balise 2 is not done yet: sum a tensor over ranks"
    assert all(calm in texts[i] for i in (2, 3, 4, 5, 6, 7))
    assert texts[9].strip() == "3"


def test_an_older_answer_is_not_judged_silently(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path))
    monkeypatch.delenv("DLOJZ_STRICT")
    monkeypatch.setenv("PYTHONSTARTUP", str(lab.BEFORE_FIRST_CELL))
    right = "def describe_machine():\n    return {}"
    check = "tp.check(1, describe_machine)"
    texts, _ = run_cells(
        tmp_path,
        "tp.check(1, 2)",
        "from dlojz_tp import course",
        "import os, torch\ntp = course.open('00_welcome')",
        right,
        check,
        right + "(",
        check,
        right,
        check,
        "1 / 0\n" + right,
        check,
        right + "\n1 / 0",
        check,
        "def distributed_sum(",
        "tp.check(2, distributed_sum)",
        "tp.catch_up(1)",
        check,
        "tp.check(1)",
        "def helper(:",
        "@helper\n" + right,
        check,
        errors=True,
    )
    assert "tp is not defined: run the first cells of this notebook" in texts[0]
    old = "The cell that defines describe_machine did not run"
    assert [old in text for text in texts[4:13:2]] == [False, True, False, True, False]
    assert "SyntaxError in line 2" in texts[6] and "ZeroDivisionError" in texts[10]
    assert "helper is not defined" in texts[-2] and f"{old} (NameError)" in texts[-1], "an older one would be judged"
    assert "distributed_sum is not defined: the cell that should define it did not run (SyntaxError" in texts[14]
    assert "by catch_up" in texts[16] and "tp.check(1, describe_machine)" in texts[17]


def test_what_is_further_is_filled_until_it_is_written(in_one_kernel):
    texts, cells = in_one_kernel["further"]
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert texts[1] == "" and "core is balises 2, 3, 5" in texts[2]
    assert "balise 6 is further" in texts[3] and "write yours at todo(6)" in texts[4]
    assert texts[5].strip() == "5" and texts[6] == "" and "balise 2 is not done yet" in texts[7]
    assert texts[8] == "" and texts[9].strip() == "own"
    assert "0 of 6 balises done, 0 of 3 of the core" in texts[10] and "· further · about" in texts[10]
    assert "write yours at todo(6)" in texts[13], "the answers of earlier balises change nothing for this one"


def test_an_interrupted_launch_is_one_line(in_one_kernel):
    texts, cells = in_one_kernel["interrupted"]
    assert texts[2].strip() == "… interrupted: the ranks were ended"
    assert texts[3].strip() == "… interrupted: the balise was not judged"
    kinds = [[output.output_type for output in cell.outputs] for cell in cells[2:]]
    assert kinds == [["display_data"], ["display_data"], ["error"]], "the trainee's own loops keep their traceback"


def test_other_errors_stay_errors(in_one_kernel):
    (error,) = in_one_kernel["others"][1][1].outputs
    assert (error.output_type, error.ename) == ("error", "NameError") and "undefined_name" in error.evalue
