"""The command `check`: slices, verdicts, exit statuses, answers that end the process."""

import json
import subprocess
import sys
import textwrap

import nbformat
import pytest

from dlojz_tp import source
from dlojz_tp.grading import command, slicing

RIGHT = """
import torch.distributed as dist
import torch, os

def describe_machine():
    cuda = torch.cuda.is_available()
    return {"device": "cuda" if cuda else "cpu", "gpus": torch.cuda.device_count(),
            "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}

def distributed_sum(values):
    total = share(values).sum()
    dist.all_reduce(total)
    return total

def share(values):
    return values[dist.get_rank()::dist.get_world_size()]
"""


def write(tmp_path, text, name="answers.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def check(*arguments, timeout=120):
    done = subprocess.run(
        [sys.executable, "-m", "dlojz_tp", "check", *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, cwd=source.ROOT,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_right_answers_pass(tmp_path):
    status, out, _ = check("00_welcome", write(tmp_path, RIGHT), "--json")
    rows = json.loads(out)
    assert status == 0 and [row["verdict"] for row in rows] == ["pass", "pass"]
    assert all(set(row) == {"balise", "title", "verdict", "hint", "seconds"} for row in rows)


def test_a_wrong_and_a_missing_answer(tmp_path):
    wrong = RIGHT.replace("    dist.all_reduce(total)\n", "").replace("def describe_machine", "def other")
    status, out, _ = check("00_welcome", write(tmp_path, wrong))
    assert status == 1 and "not done" in out and "all_reduce" in out and "0 of 2 passed" in out
    status, out, _ = check("00_welcome", write(tmp_path, wrong), "--balise", "2", "--json")
    assert status == 1 and [row["balise"] for row in json.loads(out)] == [2]


def test_trainee_and_solution_notebooks():
    status, out, _ = check("00_welcome", source.NOTEBOOKS / "00_welcome.ipynb", "--json")
    assert status == 1 and {row["verdict"] for row in json.loads(out)} == {"not done"}
    status, out, _ = check("01_gpu_acceleration", source.SOLUTIONS / "01_gpu_acceleration.ipynb")
    assert status == 0 and "6 of 6 passed" in out


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(0)"])
def test_an_answer_that_ends_the_process_fails(tmp_path, ending):
    text = f"import os, sys\ndef describe_machine():\n    {ending}\n"
    status, out, _ = check("00_welcome", write(tmp_path, text), "--balise", "1", "--json")
    assert status == 1 and "ended the program" in json.loads(out)[0]["hint"]


def test_an_endless_answer_fails(tmp_path):
    text = "def describe_machine():\n    while True:\n        pass\n"
    found = command.run(source.find("00_welcome"), write(tmp_path, text), [1], grace=12)
    assert found[0].verdict == "fail" and "Nothing came back" in found[0].hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("77_nothing", "x.py"), "no practical work is called"),
        (("00_welcome", "missing.py"), "cannot be read"),
        (("00_welcome", "{tmp}/broken.py"), "line 1: does not parse"),
        (("00_welcome", "{tmp}/broken.ipynb"), "is not a notebook"),
        (("00_welcome", "{tmp}/notes.txt"), "give a notebook"),
        (("00_welcome", "{tmp}/fine.py", "--balise", "9"), "has no balise 9"),
        (("00_welcome",), "usage"),
    ],
)
def test_commands_that_cannot_be_understood(tmp_path, arguments, message):
    write(tmp_path, "def f(:", "broken.py")
    write(tmp_path, "{}", "broken.ipynb")
    write(tmp_path, "", "notes.txt")
    write(tmp_path, "", "fine.py")
    status, _, err = check(*(a.format(tmp=tmp_path) for a in arguments))
    assert status == 2 and message in err and "Traceback" not in err


def test_slices_take_what_is_needed_and_nothing_else(tmp_path):
    text = """
        %matplotlib inline
        N = 3
        M = N + 1
        print(1 / 0)
        big = [0] * 10**12
        def helper(): return M
        def answer(): return helper()
        answer()
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(text))])
    path = tmp_path / "n.ipynb"
    nbformat.write(notebook, path)
    nodes = slicing.needed(slicing.statements(path), {"answer"})
    assert [sorted(slicing.bound_names(node)) for node in nodes] == [["N"], ["M"], ["helper"], ["answer"]]


def test_local_names_are_not_taken_for_global_ones():
    code = "path = train()\nN = 2\ndef f(path):\n    size = path * N\n    return [x for x in size]\n"
    nodes = slicing._parse("made", code)
    assert slicing.used_names(nodes[2]) == {"N"}
    assert [sorted(slicing.bound_names(node)) for node in slicing.needed(nodes, {"f"})] == [["N"], ["f"]]


def test_loop_variables_of_comprehensions_bind_nothing():
    nodes = slicing._parse("made", "b = 1\nslow = [b for b in train()]\nfrom math import *\ndef f(): return b\n")
    assert slicing.bound_names(nodes[1]) == {"slow"}
    assert [node.lineno for node in slicing.needed(nodes, {"f"})] == [1, 3, 4]
