"""pyproject.toml and environment.yml say the same."""

import re
import tomllib

import yaml

from dlojz_tp.source import ROOT

CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


def split(requirement):
    name, ranges = re.match(r"([A-Za-z0-9_.-]+)\s*(.*)", requirement).groups()
    return CONDA_NAMES.get(name, name), ranges.replace(" ", "")


def test_environments_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip = dict(split(r) for r in project["dependencies"])
    for extra in project["optional-dependencies"].values():
        pip |= dict(split(r) for r in extra)
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = dict(split(r) for r in listed if isinstance(r, str))
    assert conda.pop("python") == project["requires-python"]
    conda.pop("pip")
    assert conda == pip


def test_torch_range_is_the_supported_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.15" in project["dependencies"]


def test_files_stay_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("dlojz_tp", "data_scripts", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 300
    }
    assert not long, f"one idea a file, under 300 lines: {long}"
