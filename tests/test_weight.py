"""No work grows by more than 5 % unless somebody decides that it may: `make weight`, tests/weight.toml."""

import json
import tomllib
from types import SimpleNamespace

import pytest

from dlojz_tp.authoring import weight
from dlojz_tp.works import source
from tests import cpu_seconds

AGREED = tomllib.loads(weight.AGREED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", source.names())
def test_no_work_outgrows_its_figures(name):
    heavy = weight.too_heavy(source.find(name), AGREED)
    assert not heavy, "\n".join(heavy)


def test_growth_is_told_and_how_to_allow_it():
    work = source.find("00_welcome")
    check, bank, hints, answers = weight.of(work)
    (told,) = weight.too_heavy(work, {work.name: [check / 1.06, bank, hints / 1.04, answers]})
    assert f"{check:g} lines of check" in told and "weight.toml" in told
    (told,) = weight.too_heavy(work, {})
    assert tomllib.loads(told.split("\n")[1]) == {work.name: [check, bank, hints, answers]}


def test_every_line_of_the_file_is_a_work():
    assert AGREED.keys() == set(source.names())


def test_the_command_prints_seconds_where_they_were_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "00_welcome.py").touch()
    monkeypatch.setattr(weight.notebooks, "SOLUTIONS", tmp_path)
    monkeypatch.setattr(weight, "SECONDS", tmp_path / "cpu_seconds")
    assert weight.main([]) == 0 and "CPU" not in capsys.readouterr().out
    weight.SECONDS.write_text('{"00_welcome|answers": 12.4, "00_welcome|solution": 30, "05_dataloader|answers": 7}')
    monkeypatch.setattr(weight, "AGREED", tmp_path / "weight.toml")
    weight.AGREED.write_text("# why\n00_welcome = [1, 1, 1, 1]\n99_gone = [1, 1, 1, 1]\n")
    assert weight.main(["--write"]) == 0
    assert weight.AGREED.read_text() == f"# why\n{weight.line('00_welcome', weight.of(source.find('00_welcome')))}\n"
    weight.AGREED.write_text("# why\n00_welcome = [1, 1, 1, 1]\n05_dataloader = [1, 2, 3, 4]\n")
    assert weight.main(["00", "--write"]) == 0
    agreed = weight.AGREED.read_text()
    assert agreed.endswith("\n05_dataloader = [1, 2, 3, 4]\n") and "[1, 1, 1, 1]" not in agreed
    assert weight.main(["98"]) == 2
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert head.endswith("CPU seconds") and row.endswith("  42  00_welcome")


@pytest.mark.parametrize(
    "args, keyword, kept",
    [
        (("tests", "solutions", "notebooks"), "", True),
        (("tests", "solutions", "notebooks"), "welcome", False),
        (("tests",), "", False),
    ],
)
def test_seconds_are_kept_of_whole_runs_alone(args, keyword, kept, request, tmp_path, monkeypatch):
    monkeypatch.setattr(request.config.cache, "_cachedir", tmp_path / ".pytest_cache")
    monkeypatch.delenv("DLOJZ_TURN", raising=False)  # CI sets it, and then no run is whole
    option = SimpleNamespace(skip_unchanged=False, keyword=keyword, markexpr="")
    plugin = cpu_seconds.Seconds(SimpleNamespace(args=list(args), option=option, cache=request.config.cache))
    plugin.spent["00_welcome|answers"] = 12.5
    plugin.pytest_sessionfinish(0)
    written = tmp_path / weight.SECONDS.relative_to(weight.ROOT)
    assert written.exists() == kept and (not kept or json.loads(written.read_text()) == plugin.spent)
