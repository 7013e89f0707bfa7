"""Both container images hold the same, and what runs in one is no root and loses nobody's work."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from dlojz_tp.works.source import ROOT
from tests.test_environment import make

FOLDER = ROOT / "deploy" / "container"
DOCKER, APPTAINER, INSTALL, ENTER = (
    (FOLDER / name).read_text() for name in ("Dockerfile", "course.def", "install.sh", "enter.sh")
)
NOBODY = 65534


def the(pattern, text):
    """The one thing in a text that has this pattern."""
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return found


def test_both_images_are_one():
    assert the(r"^FROM (\S+)$", DOCKER) == the(r"^From: (\S+)$", APPTAINER)
    for script in "install.sh", "enter.sh":
        call = rf"\bsh\W+(/opt/dlojz-tp/deploy/container/{re.escape(script)})\b"
        assert the(call, DOCKER.replace('", "', " ")) == the(call, APPTAINER)
    for text in DOCKER, APPTAINER:
        assert not re.search(r"\b(apt-get|apt|pip|conda|curl|wget)\b", text), "only install.sh installs"
        assert re.search(r"\bcourse\.tar\b", text), "what git keeps, not what lies about in a checkout"
    assert the(r"^USER (\d+)", DOCKER) != "0"


def test_they_hold_what_the_readme_asks_for():
    asked = the(r"^You need Linux, .*$", (ROOT / "README.md").read_text())
    needed = set(re.findall(r"`([\w+]+)`", asked))
    packages = the(r"^apt-get install .*$", INSTALL).split()
    assert {"make", "gcc", "g++"} <= needed <= set(packages)
    assert {"python3", "python3-venv", "python3-dev"} <= set(packages)


def test_what_is_made_in_them_is_what_the_makefile_makes():
    targets = the(r"^make ([^#\n]+)", INSTALL).split()
    for target in [*targets, *the(r"set -- make (\w+)$", ENTER).split()]:
        ran = make("--dry-run", target)
        assert ran.returncode == 0, ran.stderr


@pytest.fixture
def enter():
    """A function: runs enter.sh with these words, under a user that is not root, in a copy that everybody can read."""
    place = Path(tempfile.mkdtemp(prefix="dlojz-container-"))
    (place / "deploy" / "container").mkdir(parents=True)
    shutil.copy(FOLDER / "enter.sh", place / "deploy" / "container")
    place.chmod(0o755)

    def run(*words, user=NOBODY, **variables):
        mine = {"user": user} if os.getuid() == 0 else {}
        environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", **variables}
        command = ["sh", str(place / "deploy" / "container" / "enter.sh"), *words]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, **mine)

    run.place = place
    yield run
    shutil.rmtree(place)


def test_a_command_runs_in_the_courses_folder_with_its_own_python(enter):
    ran = enter("sh", "-c", "pwd; env", PYTHONPATH="/a/module/of/the/cluster", VENV="/elsewhere", DLOJZ_CLASS="/class")
    assert ran.returncode == 0 and ran.stdout.splitlines()[0] == str(enter.place), ran.stderr
    assert "cluster" not in ran.stdout and "VENV" not in ran.stdout and "DLOJZ_CLASS=/class" in ran.stdout


def test_lab_is_refused_where_its_notebooks_would_be_lost(enter):
    for words in [], ["make", "lab", "ARGS=--port 9000"]:
        lost = enter(*words, HOME="/home/trainee")
        assert lost.returncode == 1 and lost.stderr.count("\n") == 1 and "-v" in lost.stderr, lost.stderr
    assert enter("echo", "lab", HOME="/home/trainee").stdout == "lab\n", "other commands keep nothing"
    assert "No rule" in enter().stderr, "elsewhere make is started: here without a Makefile"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be refused")
def test_root_is_refused(enter):
    refused = enter("echo", "done", user=0)
    assert refused.returncode == 1 and not refused.stdout and "--user" in refused.stderr
