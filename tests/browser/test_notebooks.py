"""Notebooks as they come, all run; then a wrong and a right answer, typed."""

import pytest

from dlojz_tp.works import source
from tests.browser import seeing

# a work, a word of its title, a core balise, what makes its answer wrong, a piece of the hint that is due, figures
WORKS = [
    ("00_welcome", "Welcome", 1, ("len(os.sched_getaffinity(0))", "os.cpu_count()"), "this process may use", 1),
    ("01_gpu_acceleration", "GPU acceleration", 2, ("    optimizer.zero_grad(set_to_none=True)\n", ""), "gradients", 2),
    ("07_data_augmentation", "Data augmentation", 2, ("blend(soft)", "soft"), "labels", 2),
]
MEANT = ("ValueError: the disk of rank 2 is full",)  # 00 shows what comes when a rank fails


@pytest.mark.parametrize(("name", "title", "number", "slip", "hint", "least"), WORKS, ids=[w[0] for w in WORKS])
def test_untouched_then_a_wrong_and_a_right_answer(notebook, name, title, number, slip, hint, least):
    work = source.find(name)
    page = notebook(name, title)
    seeing.run_all(page, 400)
    assert seeing.problems(page, MEANT) == []
    assert seeing.figures(page) >= least
    seen = "\n".join(seeing.cards(page))
    for each in work.balises.values():
        calm = "further" if each.further else "is not done yet"
        assert f"balise {each.number} {calm}" in seen or f"balise {each.number} is {calm}" in seen
    measured = page.locator(f"{seeing.PANEL} {seeing.CARD} details", has_text="what was measured")
    assert (name == "01_gpu_acceleration") == (measured.count() > 0), "00 asks for no guess, 07 measures answers alone"
    assert measured.evaluate_all("folded => folded.filter(one => one.open).length") == 0, "nobody has guessed yet"
    progress = seeing.cell(page, "tp.progress()")
    assert f"0 of {len(work.balises)} balises done" in seeing.said(progress)

    right = source.without_markers(work.balises[number].code)
    answer, check = seeing.cell(page, right.splitlines()[0]), seeing.cell(page, f"tp.check({number}, ")
    assert slip[0] in right
    seeing.write(page, answer, right.replace(*slip))
    assert seeing.run(page, answer) == ""
    verdict = seeing.run(page, check)
    assert verdict.startswith(f"✗ Balise {number}") and "expected" in verdict and hint in verdict

    seeing.write(page, answer, right)
    assert seeing.run(page, answer) == ""
    verdict = seeing.run(page, check)
    assert verdict.startswith(f"★ Balise {number}") and "✗" not in verdict
    assert f"1 of {len(work.balises)} balises done" in seeing.run(page, progress)
    assert seeing.problems(page, MEANT) == []


def test_run_all_goes_on_after_an_answer_that_does_not_parse(notebook):
    page = notebook("00_welcome", "Welcome")
    seeing.write(page, seeing.cell(page, "def describe_machine():"), "def describe_machine(:\n    return 1")
    seeing.run_all(page, 400)
    verdict = seeing.said(seeing.cell(page, "tp.check(1, "))
    assert "the cell that should define it did not run (SyntaxError in line 1)" in verdict
    assert "0 of 2 balises done" in seeing.said(seeing.cell(page, "tp.progress()"))
