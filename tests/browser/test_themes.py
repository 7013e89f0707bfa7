"""Verdicts can be read in both themes: letters and ground are compared in a picture of the page."""

import pytest

from tests.browser import seeing

LEAST, SIGNS = 4.5, 3.0  # what the web's rules for accessible pages ask for: of words, and of signs such as ✓


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_cards_are_readable(notebook, theme):
    page = notebook("00_welcome", "Welcome", device_scale_factor=2)
    seeing.menu(page, "Settings", "Theme", theme)
    page.locator(f"body[data-jp-theme-name='{theme}']").wait_for(state="attached")
    wrong = seeing.cell(page, "describe_machine_of_a_hurried_person")
    for text in ('course.open("00_welcome")', "def describe_machine():"):
        seeing.run(page, seeing.cell(page, text))
    found = {}
    check, progress = (seeing.cell(page, text) for text in ("tp.check(1", "tp.progress()"))
    for where, words in ((wrong, "✗ Balise 1"), (check, "… balise 1 is not done"), (progress, "")):
        seeing.run(page, where)
        card = where.locator(seeing.CARD)
        assert card.inner_text().strip().startswith(words)
        assert (seeing.ground(card, page) < 0.2) == (theme == "JupyterLab Dark")
        found |= seeing.contrasts(page, card)
    assert len(found) > 12, found
    assert not {text: round(ratio, 1) for text, ratio in found.items() if ratio < (SIGNS if len(text) == 1 else LEAST)}
