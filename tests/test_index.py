"""The map of the course: no work missing, nothing said that the sources and README do not say."""

import json
import time

from dlojz_tp import index, progress
from dlojz_tp.authoring import minutes
from dlojz_tp.works import source

ORDER = {work: before.split() for part in index.MAP.values() for work, before in part.items()}


def test_every_work_is_on_the_map_and_builds_on_earlier_ones():
    assert list(ORDER) == [name[:2] for name in source.names()]
    assert all(earlier in ORDER and earlier < work for work, before in ORDER.items() for earlier in before)
    assert [work for work, before in ORDER.items() if not before] == ["00"]


def test_the_map_says_minutes_and_frames_the_core(tmp_path):
    page, work = index.card(tmp_path)._repr_html_(), source.find("01_gpu_acceleration")
    assert f'<td style="text-align:left">{work.core}</td><td style="text-align:left">{work.minutes}</td>' in page
    works = [source.find(name) for name in source.names()]
    assert page.count(index._FRAME) == sum(not balise.further for each in works for balise in each.balises.values())


def test_the_map_marks_the_path_of_the_two_day_plan(tmp_path):
    assert minutes.of_plan("Two days") == index.TWO_DAYS
    text = repr(index.card(tmp_path))
    assert text.count(" •: ") == len(index.TWO_DAYS)


def test_the_map_shows_each_balise_with_its_last_verdict(tmp_path):
    (tmp_path / "01_gpu_acceleration.json").write_text(json.dumps({1: "pass", 2: "fail", 3: "by catch_up"}))
    card = index.card(tmp_path)
    works = [source.find(name) for name in source.names()]
    page = card._repr_html_()
    assert all(f'<a href="{work.name}.ipynb">' in page for work in works)
    assert page.count("<span title=") == sum(len(work.balises) for work in works)
    titles = source.find("01_gpu_acceleration").balises
    for number, word in enumerate(("pass", "fail", "by catch_up", "not done"), 1):
        assert f'title="{number} · {titles[number].title}{titles[number].about}: {word}"' in page
    assert "1 of 6, " in repr(card) and repr(card).startswith("1 of ")


def test_the_shown_map_follows_new_verdicts(monkeypatch, tmp_path):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(index, "LOOKS_EVERY_S", 0.01)
    pages = []

    class Page:
        def update(self, card):
            pages.append(repr(card))

    monkeypatch.setattr("IPython.display.display", lambda card, display_id: pages.append(repr(card)) or Page())
    index.show()
    assert pages[0].startswith("0 of ")
    progress.record("00_welcome", 1, "pass")
    until = time.monotonic() + 60
    while len(pages) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    monkeypatch.setattr(index, "_shown", None)  # the thread ends
    assert pages[1].startswith("1 of ")


def test_a_work_without_a_place_on_the_map_is_still_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(index, "MAP", {"One device": {"00": ""}})
    assert all(f'href="{name}.ipynb"' in index.card(tmp_path)._repr_html_() for name in source.names())
