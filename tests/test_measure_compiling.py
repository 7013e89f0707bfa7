"""Folders of the compiler, its messages, and the counts of graphs."""

import ctypes
import os
import stat
import sys

import pytest
import torch

from dlojz_tp.measure import compiling

needs_cc = pytest.mark.skipif(compiling.c_compiler() is None, reason="no C compiler")


def _source(text):
    folder = compiling.private_folder()
    (folder / "a.c").write_text(text)
    return folder / "a.c", folder / "a.so"


@needs_cc
def test_a_library_is_built_in_a_private_folder():
    source, library = _source("int three(void) { return 3; }")
    command = [compiling.c_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)]
    assert ctypes.CDLL(str(compiling.run_compiler(command, library))).three() == 3
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


@needs_cc
def test_the_compilers_first_error_is_told_without_the_folder():
    source, library = _source("int three(void) { return 3 }")
    with pytest.raises(compiling.BuildError, match="^a.c:1:.*error") as caught:
        compiling.run_compiler([compiling.c_compiler(), "-shared", str(source), "-o", str(library)], library)
    assert str(library.parent) not in str(caught.value)


def test_no_compiler_no_file_and_no_end_are_told_in_one_line():
    _, library = _source("")
    for command, words in (
        (["no-such-compiler"], "no compiler 'no-such-compiler'"),
        ([sys.executable, "-c", ""], "made no file a.so"),
        ([sys.executable, "-c", "import time; time.sleep(9)"], "not ready after"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "status 3"),
    ):
        with pytest.raises(compiling.BuildError, match=words):
            compiling.run_compiler(command, library, seconds=0.7)


def test_missing_compilers_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-c++")
    assert compiling.c_compiler() is None
    assert "no-such-c++ is not installed" in compiling.compile_missing()


def test_breaks_are_told_with_their_line():
    def function(x):
        y = x + 1
        if y.sum() > 0:
            y = y * 2
        return y.cos()

    found = compiling.capture(function, torch.ones(3))
    assert found.graphs == 2
    assert [line for line, _ in found.breaks] == ["if y.sum() > 0:"]
    assert "2 graphs, 1 break" in str(found)


def test_the_cache_is_private(monkeypatch, tmp_path):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folder = compiling.settle_compiler()
    assert folder == tmp_path / "state" / "compiled"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)


def test_a_cache_that_cannot_be_written_is_replaced(monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", os.devnull)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folder = compiling.settle_compiler()
    assert folder.is_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
