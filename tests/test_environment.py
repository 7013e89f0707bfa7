"""pyproject.toml and environment.yml say the same."""

import os
import re
import subprocess
import tomllib

import yaml

from dlojz_tp.works.source import ROOT

CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib", "ray-tune": "ray"}


def split(requirement):
    name, ranges = re.match(r"([A-Za-z0-9_.-]+)(?:\[\w+\])?\s*(.*)", requirement).groups()
    return CONDA_NAMES.get(name, name), ranges.replace(" ", "")


def test_environments_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip = dict(split(r) for r in project["dependencies"])
    for name, extra in project["optional-dependencies"].items():
        if name not in ("hub", "browser"):  # in an environment of its own; what only `make test-browser` needs
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


def test_a_course_of_somebody_else_is_not_installed_into(tmp_path):
    def make(*arguments):
        plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        command = ["make", "OTHERS=yes", *arguments]
        return subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)

    absent = make(f"VENV={tmp_path}/none", "lab")
    assert absent.returncode and "ask whoever installed the course" in absent.stderr and "pip" not in absent.stdout
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".installed").touch()
    os.utime(tmp_path / "old" / ".installed", (1, 1))  # older than pyproject.toml
    data = f"DLOJZ_DATA={tmp_path}"
    found = make("--dry-run", f"VENV={tmp_path}/old", data, "lab")
    assert found.returncode == 0 and "pip" not in found.stdout and "-m dlojz_tp lab" in found.stdout
