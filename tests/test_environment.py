"""pyproject.toml and environment.yml say the same."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from importlib import import_module

import pytest
import yaml

from dlojz_tp.works.source import ROOT

CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


def split(requirement):
    name, ranges = re.match(r"([A-Za-z0-9_.-]+)(?:\[\w+\])?\s*(.*)", requirement).groups()
    return CONDA_NAMES.get(name, name), ranges.replace(" ", "")


def test_environments_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip = dict(split(r) for r in project["dependencies"])
    for name, extra in project["optional-dependencies"].items():
        # in an environment of its own; for `make test-browser`, `slides` or `site` alone; for those who use MLflow
        if name not in ("hub", "browser", "slides", "site", "tracking", "weights"):
            pip |= dict(split(r) for r in extra)
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (part,) = (part["pip"] for part in listed if isinstance(part, dict))
    assert [line for line in part if line.startswith("-")] == ["--editable ."], "conda makes a requirements file of it"
    of_pip = [line for line in part if not line.startswith("-")]
    conda = dict(split(r) for r in [*listed, *of_pip] if isinstance(r, str))
    assert conda.pop("python") == project["requires-python"]
    conda.pop("pip")
    conda.pop("lightning-utilities")  # what lightning-fabric needs, which conda-forge has within lightning alone
    assert conda == pip


def test_torch_range_is_the_supported_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.15" in project["dependencies"]


def make(*arguments, cwd=ROOT):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "DLOJZ_"))}
    return subprocess.run(["make", *arguments], cwd=cwd, env=plain, capture_output=True, text=True)


def test_a_course_of_somebody_else_is_not_installed_into(tmp_path):
    absent = make("OTHERS=yes", f"VENV={tmp_path}/none", "lab")
    assert absent.returncode and "ask whoever installed the course" in absent.stderr and "pip" not in absent.stdout
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".installed").touch()
    os.utime(tmp_path / "old" / ".installed", (1, 1))  # older than pyproject.toml
    data = f"DLOJZ_DATA={tmp_path}"
    found = make("OTHERS=yes", "--dry-run", f"VENV={tmp_path}/old", data, "lab")
    assert found.returncode == 0 and "pip" not in found.stdout and "-m dlojz_tp lab" in found.stdout


@pytest.fixture
def odd_clone(tmp_path):
    """A clone of the course in a folder whose name has a space, an accent and a bracket, with a Python in .venv."""
    if not (ROOT / ".git").exists():
        pytest.skip("this copy of the course is no clone")
    clone = tmp_path / "My Course é (2)"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    for name in ("Makefile", *(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.sh"))):
        shutil.copy(ROOT / name, clone / name)  # as they are now
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nprintf "<%s>" "$@"\nexec {sys.executable} -c pass\n')
    (clone / ".venv" / "bin" / "python").chmod(0o755)
    for name in ("photo_patches", "code_text", "search_table", "photo_cells", "pretrained"):
        (clone / "data" / name).mkdir(parents=True)
        (clone / "data" / name / "manifest.json").write_text("{}")
    return clone


def test_a_clone_in_a_folder_with_a_space_and_an_accent(odd_clone):
    shutil.rmtree(odd_clone / ".venv")
    first = make("--dry-run", "lab", cwd=odd_clone)
    assert first.returncode == 0 and "not yours" not in first.stderr and "-m venv" in first.stdout, first.stderr
    (odd_clone / ".venv").mkdir()
    odd_clone.joinpath(".venv", ".installed").touch()
    assert "pip" not in make("--dry-run", "lab", cwd=odd_clone).stdout


def test_make_in_such_a_folder(odd_clone):
    for name in (".installed", ".installed-dev"):
        (odd_clone / ".venv" / name).touch()
    assert make("lab", "ARGS=--sync-only", cwd=odd_clone).stdout == "<-m><dlojz_tp><lab><--sync-only>"
    assert "<tests><solutions><notebooks>" in make("test-all", cwd=odd_clone).stdout
    kit = make("trainee-kit", cwd=odd_clone)
    assert kit.returncode == 0, kit.stderr
    with tarfile.open(odd_clone / "build" / "dlojz-tp-kit.tar") as tar:
        names = tar.getnames()
    assert "dlojz-tp/data/code_text/manifest.json" in names and "dlojz-tp/Makefile" in names
    (odd_clone / "my data").mkdir()
    for name in ("photo_patches", "code_text", "search_table", "photo_cells", "pretrained"):
        (odd_clone / "data" / name).rename(odd_clone / "my data" / name)
    other = make("lab", f"DLOJZ_DATA={odd_clone}/my data", cwd=odd_clone)
    assert other.stdout == "<-m><dlojz_tp><lab>", "the data sets are found there, none is made"
    (odd_clone / ".venv").rename(odd_clone / "my venv")
    other = make("lab", f"VENV={odd_clone}/my venv", f"DLOJZ_DATA={odd_clone}/my data", cwd=odd_clone)
    assert other.stdout == "<-m><dlojz_tp><lab>", "and so is the environment"


def test_the_scripts_in_such_a_folder(odd_clone):
    """Without Slurm and Chromium they end early: after they have found their own folder and asked the other scripts."""
    browser = odd_clone / "a browser"
    browser.write_text("#!/bin/sh\ntrue\n")
    browser.chmod(0o755)
    found = subprocess.run(
        ["tools/find_browser.sh"], cwd=odd_clone, env=os.environ | {"DLOJZ_BROWSER": str(browser)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.strip() == str(browser)
    ran = subprocess.run(
        [str(odd_clone / "tools" / "test_browser.sh"), str(odd_clone / ".venv" / "bin" / "python"), "one word"],
        cwd="/", env=os.environ | {"DLOJZ_BROWSER": str(browser)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "<tests/browser><one word>" in ran.stdout and ran.returncode == 0, ran.stderr


def test_the_program_dlojz_is_the_command():
    place = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dlojz"]
    module, name = place.split(":")
    ran = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; from {module} import {name}; sys.exit({name}())", "none"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 2 and "no command 'none'" in ran.stderr and callable(getattr(import_module(module), name))


def test_a_test_in_the_background_can_interrupt_what_it_starts(request):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `make test &` has it
    try:
        request.getfixturevalue("interruptible")
        said = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT))"]
        assert "default_int_handler" in subprocess.check_output(said, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", ["check", "class", "doctor", "lab", "plan"])
def test_the_help_of_a_command_without_docstrings(command):
    words = [sys.executable, "-m", "dlojz_tp", command, "--help"]
    ran = subprocess.run(words, env=os.environ | {"PYTHONOPTIMIZE": "2"}, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and "usage:" in ran.stdout and not ran.stderr, ran.stderr


@pytest.mark.parametrize(
    "only, frameworks", [("20", True), ("07 14_fsdp", True), ("07 09", False), ("1", False), ("", True)]
)
def test_works_that_use_a_framework_are_executed_with_it(only, frameworks):
    lines = make("--dry-run", "solutions", f"ONLY={only}").stdout.splitlines()
    (build,) = [line for line in lines if "dlojz_tp build" in line]
    assert ("frameworks" in build) == frameworks
