"""The course without its solutions: sources stand in trainee notebooks, checks judge, catch_up says one line."""

import os
import subprocess
import sys
import tarfile

import pytest

from dlojz_tp.judging.grading import slicing
from dlojz_tp.works import source
from tests.test_grading import RIGHT, write

LEFT_OUT = {
    "absent": None,
    "encrypted": b"\0GITCRYPT\0\xff\xfe\x93",
    "armoured": b"-----BEGIN PGP MESSAGE-----\n\nhQEM\n",
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_work_is_the_same_in_its_trainee_notebook(kind, tmp_path, monkeypatch):
    whole = {name: source.find(name) for name in source.names()}
    monkeypatch.setattr(source, "SOLUTIONS", tmp_path)
    for name in whole if LEFT_OUT[kind] else ():
        (tmp_path / f"{name}.py").write_bytes(LEFT_OUT[kind])
    assert source.names() == list(whole)
    for name, work in whole.items():
        found = source.find(name)
        assert work.solved and not found.solved and found.title == work.title and found.module == work.module
        assert {n: (b.title, b.answers) for n, b in found.balises.items()} == {
            n: (b.title, b.answers) for n, b in work.balises.items()
        }
        assert all(f"todo({n})" in b.code and source.BEGIN not in b.code for n, b in found.balises.items())
        if kind == "absent":  # the others are read from the same notebooks
            given = [[slicing._text(node) for node in slicing._given(each.cells)] for each in (found, work)]
            assert given[0] == given[1]


@pytest.mark.skipif(not (source.ROOT / ".git").exists(), reason="the kit is made from a git checkout")
def test_the_kit_works_and_holds_no_solution(tmp_path):
    for name in ("photo_patches", "code_text", "search_table", "photo_cells", "pretrained"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "manifest.json").write_text("{}")
    kit = tmp_path / "kit.tar"
    script = [source.ROOT / "tools" / "trainee_kit.sh", kit, tmp_path / "data"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert "make -C dlojz-tp lab" in done.stdout and not list(tmp_path.glob("*.partial"))
    with tarfile.open(kit) as archive:
        names = [name.removeprefix("dlojz-tp/") for name in archive.getnames()]
        archive.extractall(tmp_path, filter="data")
    assert {"notebooks/00_welcome.ipynb", "data/code_text/manifest.json", "Makefile", "dlojz_tp/course.py"} <= set(
        names
    )
    assert not [n for n in names if n.startswith(("solutions/0", "solutions/1", "solutions/2", "tests", ".ci"))]
    assert not {"docs/instructor.md", "conftest.py"} & set(names)
    code = f"""
from pathlib import Path
from dlojz_tp import course
tp = course.open("00_welcome")
tp.catch_up(1)
from dlojz_tp.judging.grading import command
print(course.__file__, command.judge_file(tp.work, Path({str(write(tmp_path, RIGHT))!r}), 1).verdict)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "dlojz-tp")},
    )  # fmt: skip
    said, judged = done.stdout.splitlines()
    assert "ask your instructor" in said, done.stderr
    assert judged == f"{tmp_path}/dlojz-tp/dlojz_tp/course.py pass"
