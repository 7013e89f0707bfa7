"""Libraries that are not installed everywhere: without them nothing is judged, nothing lost, and one line says so."""

import pytest

from dlojz_tp import course, frameworks, recorded
from dlojz_tp.authoring import records
from dlojz_tp.cards import render
from dlojz_tp.judging import checks
from dlojz_tp.works import source


@pytest.fixture
def without(monkeypatch):
    """The check of a balise needs a library that is not here."""
    work = source.find("00_welcome")

    def check(*_):
        frameworks.need("torch", "no_such_library")
        yield "something"

    monkeypatch.setattr(checks, "check", lambda work, number: check)
    return work


def test_a_folder_of_this_name_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert frameworks.here("torch") and not frameworks.here("no_such_library")


def test_without_it_nothing_is_judged(without, monkeypatch, capsys):
    monkeypatch.setenv("DLOJZ_STRICT", "1")
    course.Course(without, {}).check(1, *[abs] * len(without.balises[1].answers))  # raises nothing
    said = capsys.readouterr().out
    assert "could not judge" in said and "missing   no_such_library" in said and "[frameworks]" in said
    assert "no_such_library" in render.verdict(course.judge(without, 1, (abs,)))._repr_html_()


def test_without_it_the_records_stay(without, monkeypatch, tmp_path):
    path = tmp_path / "1.json"
    monkeypatch.setattr(records.mistakes, "path_of", lambda *_: path)
    monkeypatch.setattr(records.mistakes, "load", lambda *_: {"hints": {}, "mistakes": []})
    assert records.remake(without, 1) is None and not path.exists()
    path.write_text("as it was")
    assert records.remake(without, 1) is None and path.read_text() == "as it was"


def test_it_says_how_to_get_a_library(capsys):
    assert "[deploy]" in frameworks.install("torchao") and "[frameworks]" in frameworks.install("deepspeed")
    assert "[inference]" in frameworks.install("transformers") and "[inference]" in frameworks.install("peft")
    recorded.instead("onnxruntime", "00_welcome", "nothing")
    assert "[deploy]" in capsys.readouterr().out


def test_the_deployed_network_on_record_is_faster_and_as_good():
    (_, float_right, float_bytes, eager), _, (_, right, size, seconds) = recorded.load("22_compression", "deployed")
    assert eager >= 2 * seconds and abs(right - float_right) <= 0.01 and size < float_bytes / 3


def test_writing_on_record_is_no_slower_than_transformers_and_the_same():
    ((_, yours), (_, theirs)), same, count = recorded.load("23_inference", "generate")
    assert yours >= theirs and same == count
