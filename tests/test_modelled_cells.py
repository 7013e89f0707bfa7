"""The modelled cells of works over ranks, with trainees' answers in them: figures, or one line that tells why not."""

import matplotlib.pyplot as plt
import pytest

from dlojz_tp.authoring import banks
from dlojz_tp.works import source


@pytest.mark.parametrize(("name", "number", "slug", "said"), [
    ("08_data_parallel_under_the_hood", 4, "nothing-returned", "your buckets, during backward: no model of it: rank "),
    ("13_zero_under_the_hood", 5, "empty-in-forward", "gathered ahead: no model of it: rank "),
    ("17_tensor_slicing", 6, "rank-failed", "your blocks, NVLink: no model of it: rank "),
    ("17_tensor_slicing", 7, None, "modelled, H100: your blocks, NVLink, "),  # its parts are new layers of the CPU
])  # fmt: skip
def test_a_modelled_cell_shows_figures_or_a_line(name, number, slug, said, capsys, monkeypatch):
    """The first answer of the bank with this hint (None: a right one) stands in the place of the solution."""
    monkeypatch.setenv("DLOJZ_BRIEF", "1")
    work, names = source.find(name), {"__name__": "__main__"}
    place, text = next((k, c.text) for k, c in enumerate(work.cells) if "modelled_gpu.each_on_ranks" in c.text)
    for cell in work.cells[:place]:
        if cell.balise is not None or "setup" in cell.options:
            exec(compile(cell.text, f"<{name}>", "exec"), names)
    answers = banks.of(work).answers
    answer = next(each for each in answers if (each.balise, each.slug) == (number, slug))
    names |= dict(zip(work.balises[number].answers, answer.answers, strict=True))
    exec(compile(text, "<cell>", "exec"), names)
    plt.close("all")
    assert capsys.readouterr().out.startswith(said)
