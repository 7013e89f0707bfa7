"""What a notebook has bound or changed when its check ran is what the grader judges."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from dlojz_tp import course
from dlojz_tp.judging.grading import command
from dlojz_tp.works import source
from tests.test_grading import notebook

HEAD = "import os, torch\nfrom dlojz_tp import course\ntp = course.open('00_welcome')"
# the answer asks TABLE or LINES for one of its values, or a helper file
ANSWER = """
def describe_machine():
    return {"device": "cuda" if torch.cuda.is_available() else "cpu", "gpus": torch.cuda.device_count(),
            "cores": len(os.sched_getaffinity(0)), "torch": %s}
"""
FORMS = {  # name: (cells before the answer, its value of "torch")
    "a table filled by item": (["TABLE = {{}}", "TABLE['torch'] = lambda: {}"], "TABLE['torch']()"),
    "a table updated": (["TABLE = dict()", "TABLE.update(torch={})"], "TABLE['torch']"),
    "a list that grows": (["LINES = []", "LINES.append({})"], "LINES[-1]"),
    "a table filled in a loop": (
        ["TABLE = {{}}", "for key in ('torch', 'numpy'):\n    TABLE[key] = {}"], "TABLE['torch']"),
    "an item taken away": (["TABLE = {{'bad': 0, 'torch': {}}}", "del TABLE['bad']"], "list(TABLE.values())[0]"),
    "a registry": (
        ["TABLE = {{}}", "def register(name):\n    return lambda f: TABLE.setdefault(name, f)",
         "@register('torch')\ndef version():\n    return {}"],
        "TABLE['torch']()"),
    "an attribute of a class": (
        ["class Asked:\n    pass", "def version(self):\n    return {}", "Asked.version = version"],
        "Asked().version()"),
    "setattr": (["class Asked:\n    pass", "setattr(Asked, 'version', {})"], "Asked.version"),
    "a method added by a decorator": (
        ["class Asked:\n    pass", "def add_to(kind):\n    return lambda f: setattr(kind, f.__name__, f)",
         "@add_to(Asked)\ndef version(self):\n    return {}"], "Asked().version()"),
    "a method added by its annotation": (
        ["class Asked:\n    pass", "def patch(f):\n    kind = next(iter(f.__annotations__.values()))\n"
         "    setattr(kind, f.__name__, f)", "@patch\ndef version(self: Asked):\n    return {}"], "Asked().version()"),
    "annotations of a later Python": (
        ["from __future__ import annotations", "def version(x: NotThere = None) -> AlsoNot:\n    return {}"],
        "version()"),
    "a module beside": (["from helpers_beside import version", "VERSION = {}"], "version(VERSION)"),
    "a file that is run": (["%run helpers_beside.py", "VERSION = {}"], "version(VERSION)"),
    "the notebook's own functions": (
        ["shell = bool(get_ipython())\nshown = display('seen')\nVERSION = {}"], "[shell, shown, VERSION][2]"),
    "magics and commands": (
        ["%load_ext autoreload\n%autoreload 2\nVERSION = {}\n!true\nfiles = !echo", "%%time\nx = 1",
         "if True:\n    %time VERSION = VERSION"], "VERSION"),
}  # fmt: skip
HELPERS = "def version(known):\n    return known\n"


@pytest.mark.parametrize(("before", "value"), FORMS.values(), ids=FORMS)
def test_what_changes_an_answer_counts_as_in_the_notebook(tmp_path, monkeypatch, before, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helpers_beside.py").write_text(HELPERS)
    work = source.find("00_welcome")
    for version, due in (("torch.__version__", "pass"), ("'0.0'", "fail")):
        cells = [HEAD, *(cell.format(version) for cell in before), ANSWER % value, "tp.check(1, describe_machine)"]
        graded = command.judge_file(work, notebook(tmp_path, *cells), 1)
        assert graded.verdict == due, graded
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            shell = InteractiveShell()
            for cell in cells[:-1]:
                shell.run_cell(cell).raise_error()
            in_notebook = course.judge(work, 1, (shell.user_ns["describe_machine"],))
        assert (in_notebook.verdict, in_notebook.slug) == (graded.verdict, graded.slug)


def test_what_only_runs_is_left_out(tmp_path):
    """And so is what changes an answer after its check, and a line that fails in the notebook too."""
    cells = [
        HEAD, "TABLE = {}\nlosses = []", "VERSION = torch.__version__",
        "TABLE['torch'] = VERSION", ANSWER % "TABLE['torch']",
        "class Net:\n    def train(self): raise SystemExit\nnet = Net()", "net.train()", "TABLE.update(missing)",
        "for step in range(3):\n    losses.append(net.train())", "tp.check(1, describe_machine)",
        "TABLE['torch'] = '0.0'",
    ]  # fmt: skip
    assert command.judge_file(source.find("00_welcome"), notebook(tmp_path, *cells), 1).passed


@pytest.mark.parametrize("name", source.names())
def test_what_nobody_has_begun_is_not_done(name):
    """In an untouched notebook no line runs that an answer which is missing would have made."""
    work, path = source.find(name), source.NOTEBOOKS / f"{name}.ipynb"
    for number in work.balises:
        assert command.judge_file(work, path, number).verdict == "not done", number


def test_a_word_changed_is_judged(tmp_path):
    path = source.NOTEBOOKS / "00_welcome.ipynb"
    (tmp_path / path.name).write_text(path.read_text().replace("todo(1)", "return 1"))
    assert command.judge_file(source.find("00_welcome"), tmp_path / path.name, 1).verdict == "fail"
