"""Files in the folder at hand that have the name of a module."""

import json
import os
import subprocess
import sys

import pytest

from dlojz_tp.works import shadowing
from dlojz_tp.works.source import ROOT


@pytest.fixture
def folder(tmp_path):
    """A work folder with files that hide a module of Python, of PyTorch and of the course, and some that hide none."""
    for name in ("random.py", "queue.py", "json.py", "torch.py", "my_helpers.py", "conftest.py", "a-b.py"):
        (tmp_path / name).write_text("raise SystemExit('mine')\n")
    (tmp_path / "email").mkdir()
    (tmp_path / "email" / "__init__.py").touch()
    (tmp_path / "html").mkdir()  # no module: Python goes on to its own
    (tmp_path / "csv.py").mkdir()
    return tmp_path


def python(folder, *words, **settings):
    command = [sys.executable, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_which_file_hides_which_module(folder):
    (folder / "dlojz_tp.py").touch()
    hidden = [line.split(" from ")[0] for line in shadowing.lines(folder)]
    names = {"dlojz_tp.py": "dlojz_tp", "email": "email", "json.py": "json", "queue.py": "queue"}
    names |= {"random.py": "random", "torch.py": "torch"}
    assert hidden == [f"{folder / file} hides the module {module}" for file, module in names.items()]
    assert shadowing.lines(folder / "none") == []


def test_a_command_does_not_read_them_and_names_each_in_one_line(folder):
    ran = python(folder, "-m", "dlojz_tp", "plan", "--hidden=1024", "--layers=8", "--gpus=8", "--json")
    assert ran.returncode == 0 and json.loads(ran.stdout)
    assert ran.stderr.splitlines() == [f"dlojz_tp: {line}" for line in shadowing.lines(folder)]


def test_the_child_that_judges_does_not_read_them(folder):
    (folder / "answers.py").write_text(
        "import helper, torch\ndef describe_machine():\n    return helper.random.random()\n"
    )
    (folder / "helper.py").write_text("import random\n")  # the trainee's own module is still found there
    ran = python(folder, "-m", "dlojz_tp", "check", "00", "answers.py", "--balise", "1", "--json")
    (row,) = json.loads(ran.stdout)
    assert row["got"] == "float" and "keys device" in row["hint"], row  # Python's own random was found


def test_a_program_and_a_kernel_are_told_before_anything_fails(folder):
    ran = python(folder, "-c", "from dlojz_tp import course")
    assert "random.py hides the module random" in ran.stderr and ran.stderr.strip().endswith("mine")
    assert not python(folder, "-P", "-c", "import dlojz_tp").stderr


def test_lab_names_them(folder):
    ran = python(folder, "-m", "dlojz_tp", "lab", "--sync-only", "--work", str(folder))
    assert f"{folder / 'torch.py'} hides the module torch" in ran.stdout and ran.returncode == 0
