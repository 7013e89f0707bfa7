"""A measurement without a guess stays folded until a click; open tasks and guided cells are put below."""

from dlojz_tp.works import open_task, source
from tests.browser import seeing

NAME, TITLE = "00_welcome", "Welcome"
GUIDED = "02_mixed_precision"  # balise 1 gives lines that its open task has not
MEASURED = """
expected = tp.predict("How many?", {guess})
expected.shows(12.0, "{{:.0f}}", "They were counted.")
"""


def opened(page):
    """A cell that nobody needs any more, once the notebook is open."""
    seeing.run(page, seeing.cell(page, f'course.open("{NAME}")'))
    return seeing.cell(page, "tp.progress()")


def test_without_a_guess_the_measurement_is_folded_until_a_click(notebook):
    page = notebook(NAME, TITLE)
    cell = opened(page)
    seeing.write(page, cell, MEASURED.format(guess="..."))
    seeing.run(page, cell)
    card, answer = cell.locator(seeing.CARD).last, cell.get_by_text("It was 12. They were counted.")
    assert card.inner_text().strip().startswith("… You made no guess: How many?")
    assert not answer.is_visible()
    card.locator("summary").click()
    answer.wait_for(state="visible")
    seeing.write(page, cell, MEASURED.format(guess="(10, 15)"))
    assert "They were counted." in seeing.run(page, cell), "with a guess it is told at once"
    assert seeing.problems(page) == []


def test_an_open_task_is_put_below_and_the_guided_cell_brought_back(notebook):
    balise = source.guided(GUIDED).balises[1]
    bare = open_task.stub(balise)
    assert bare != balise.code.strip()
    page = notebook(NAME, TITLE)
    cell = opened(page)
    seeing.write(page, cell, f'tp = course.open("{GUIDED}")')
    seeing.run(page, cell)
    cells = page.locator(f"{seeing.PANEL} .jp-CodeCell")
    before = cells.count()
    for more, (call, text) in enumerate((("tp.open_task(1)", bare), ("tp.back_to(1)", balise.code)), 1):
        seeing.write(page, cell, call)
        assert "balise 1" in seeing.run(page, cell)
        cells.nth(before + more - 1).wait_for(state="attached")
        below = cell.locator("xpath=following-sibling::*[1]")
        assert below.locator(".cm-content").inner_text().split() == text.split()
    assert cells.count() == before + 2
    assert seeing.problems(page) == []
