"""An answer that works but isn't yet robust is amber in both themes; once it is mended, it gets its star."""

import re

import pytest

from dlojz_tp.works import source
from tests.browser import seeing
from tests.browser.test_themes import LEAST, SIGNS

NAME, TITLE, NUMBER = "07_data_augmentation", "Data augmentation", 2
AT_THE_EDGE = ("raise TypeError", "raise ValueError")  # the refusal of whole numbers is of another kind


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_amber_then_a_star(notebook, theme):
    page = notebook(NAME, TITLE, device_scale_factor=2)
    seeing.menu(page, "Settings", "Theme", theme)
    page.locator(f"body[data-jp-theme-name='{theme}']").wait_for(state="attached")
    page.locator(f"{seeing.PANEL} .jp-InputPlaceholder").first.click()  # the first cell comes folded
    seeing.run(page, seeing.cell(page, "course.open(NAME)"))
    balise = source.find(NAME).balises[NUMBER]
    right = source.without_markers(balise.code)
    answer = seeing.cell(page, right.splitlines()[0])
    check, progress = seeing.cell(page, f"tp.check({NUMBER}, "), seeing.cell(page, "tp.progress()")
    assert AT_THE_EDGE[0] in right
    for code, mark, said in ((right.replace(*AT_THE_EDGE), "✓", " · works, not yet robust"), (right, "★", "")):
        seeing.write(page, answer, code)
        assert seeing.run(page, answer) == ""
        verdict, shown = seeing.run(page, check), seeing.run(page, progress)
        assert verdict.startswith(f"{mark} Balise {NUMBER} · {balise.title}{said}")
        assert ("✗" in verdict) == ("not yet robust" in verdict) == ("1 of them not yet robust" in shown) == bool(said)
        assert re.search(rf"{mark}\s*{NUMBER}\s+{balise.title}", shown)
        for where in (check, progress):
            found = seeing.contrasts(page, where.locator(seeing.CARD))
            low = {text: ratio for text, ratio in found.items() if ratio < (SIGNS if len(text) == 1 else LEAST)}
            assert low == {}
    assert seeing.problems(page) == []
