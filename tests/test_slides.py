"""Slides from tagged cells: what they show, their notes, and that they need no network."""

import re

import nbformat
import pytest

from dlojz_tp.authoring import instructor_notes, mistake_slide, notebooks, rules, slides
from dlojz_tp.works import source

WORK = source.find("00_welcome")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PAGE = """### 00 · Welcome

- **Idea.** Look at what
  code does.
- **They ask.** *Why?* So.
- **They stick.** 1: The cores of the node. 2: Only rank 0.
- **On a GPU.** Show it.

### 01 · GPU
"""
installed = pytest.mark.skipif(
    any(slides.importlib.util.find_spec(name) is None for name in slides.NEEDED), reason="needs the extra slides"
)


def text(words, *tags):
    return nbformat.v4.new_markdown_cell(words, metadata={"tags": list(tags)})


def code(lines, outputs=(), *tags):
    return nbformat.v4.new_code_cell(lines, outputs=list(outputs), metadata={"tags": list(tags)})


def printed(words):
    return nbformat.v4.new_output("stream", name="stdout", text=words)


def notebook():
    picture = nbformat.v4.new_output("display_data", data={"image/png": PIXEL, "text/plain": "a figure"})
    guess = nbformat.v4.new_output("display_data", data={"text/html": "<div>… You made no guess: how many?</div>"})
    cells = [
        text("# A work · about 30 min, core 20\n\nGain.", "slide"),
        text("## The idea\n\n$$a_1 = \\frac{1}{N}$$ and $b$.\n\n<details>folded</details>", "slide"),
        text("not tagged"),
        code("draw()", [picture, guess], "slide-more"),
        code("wrong", [], "balise-1", "slide-mistake=cores-of-the-node"),
        text("## Measured again · further"),
        code("report.table()", [printed("a  b\n1  <2")], "slide"),
        code("given = 1", [], "slide"),
        text("## Three questions\n\n<details>answer</details>\n\n## To remember\n\nAll of it.", "slide"),
    ]
    return nbformat.v4.new_notebook(cells=cells)


@installed
def test_a_deck():
    deck = slides.deck(notebook(), WORK, PAGE)
    titles = [slide.title for slide in deck]
    mistake = f"{WORK.balises[1].title}: cores of the node"
    assert titles == ["A work", "The idea", mistake, "Measured again", "Measured again", "To remember"]
    bodies = ["".join(slide.body) for slide in deck]
    assert "<math" in bodies[1] and "$" not in bodies[1] and "folded" not in bodies[1]
    assert f"base64,{PIXEL}" in bodies[1] and "no guess" not in bodies[1]
    assert "cpu_count" in bodies[2] and "Balise 1" in bodies[2] and "✗" in bodies[2]
    assert "1  &lt;2" in bodies[3] and "given" in bodies[4] and "answer" not in bodies[5]
    assert "not tagged" not in "".join(bodies)
    notes = [slide.notes for slide in deck]
    assert all("what code does" in each for each in notes[:2]) and "Only rank 0" in notes[2] and "Why?" in notes[5]
    assert "Show it" in notes[4] and "Why?" not in notes[0]


@installed
def test_pages_need_no_network(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slides.nbformat, "read", lambda *_args, **_options: notebook())
    assert slides.write([WORK], tmp_path) == 0
    page = (tmp_path / "00_welcome.html").read_text()
    assert page.count("<section>") == 6 and page.count('class="notes"') == 6
    assert "00_welcome.html" in (tmp_path / "index.html").read_text()
    linked = re.findall(r"""(?:src|href)="(?!data:)([^"]+)"|url\(([^)]+)\)""", page)
    assert {"reveal/reveal.js", "reveal/notes.js"} <= {"".join(link) for link in linked}
    for link in linked:
        assert (tmp_path / "".join(link)).is_file(), link
    for sheet in (tmp_path / "reveal").rglob("*.css"):
        assert not re.search("@import|url\\(.?http", sheet.read_text()), sheet


@pytest.mark.parametrize("change", ["no-such-slug", "no-slide-before"])
@installed
def test_what_cannot_be_a_slide(change):
    if change == "no-such-slug":
        cells, says = [code("x", [], "balise-1", "slide-mistake=never-seen")], "never-seen"
    else:
        cells, says = [text("more", "slide-more")], "no slide is before it"
    with pytest.raises(ValueError, match=says):
        slides.deck(nbformat.v4.new_notebook(cells=cells), WORK, PAGE)


def test_missing_packages_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(slides, "NEEDED", ("no_such_package",))
    assert slides.main(["00"]) == 1
    said = capsys.readouterr().err
    assert said.strip() == slides.MISSING and "make slides" in said


def test_only_what_differs_is_shown():
    lines = "\n".join(f"    a{k} = {k}" for k in range(20))
    solution = f'def f(x):\n    """Doc."""\n{lines}\n    # why\n    return x\n'
    shown, marked = mistake_slide.changed(solution, solution.replace("a9 = 9", "a9 = 8"))
    assert shown == ["def f(x):", "    # …", "    a8 = 8", "    a9 = 8", "    a10 = 10"] and marked == [4]


def test_tagged_works_have_five_to_seven_slides():
    for name in source.names():
        tags = re.findall(r'"(slide|slide-mistake=[^"]+)"', "\n".join(cell.options for cell in source.find(name).cells))
        assert not tags or 5 <= len(tags) <= 7, (name, tags)
        assert not tags or any(tag.startswith(rules.MISTAKE) for tag in tags), name


def test_every_work_has_notes():
    page = instructor_notes.PAGE.read_text(encoding="utf-8")
    keys = {instructor_notes.IDEA, instructor_notes.ASK, instructor_notes.STICK, instructor_notes.GPU}
    for name in source.names():
        assert instructor_notes.of_work(page, name).keys() == keys, name


SOURCE = """# %% [markdown] tags=["slide"]
# # A work
# <details>hint</details>
#
# ### Balise 1 · Add
# <details>hint</details>

# %% tags=["setup"]
tp = course.open("09_made")

# %% tags=["balise-1", "slide-mistake=zero"]
def add(a, b):
    # BEGIN SOLUTION
    return a + b
    # END SOLUTION

# %%
tp.check(1, add)
"""


def test_tags_reach_the_solution_alone_and_change_no_output(tmp_path):
    path = tmp_path / "09_made.py"
    path.write_text(SOURCE)
    assert [cell.metadata.get("tags") for cell in notebooks.trainee(path).cells] == [
        None, ["setup"], ["balise-1", "raises-exception"], None,
    ]  # fmt: skip
    tagged = notebooks.solution(path)
    assert tagged.cells[0].metadata.tags == ["slide"] and "slide-mistake=zero" in tagged.cells[2].metadata.tags
    tagged.cells[3].outputs = [printed("kept")]
    path.write_text(SOURCE.replace(', "slide-mistake=zero"', ""))
    plain = notebooks.solution(path)
    assert notebooks._outputs_from(tagged, plain) and plain.cells[3].outputs[0].text == "kept"


@pytest.mark.parametrize("bad", ['"slides"', '"slide-mistake"', '"slide-output"'])
def test_unknown_tags_are_refused(tmp_path, bad):
    path = tmp_path / "09_made.py"
    path.write_text(SOURCE.replace('"slide"', bad))
    with pytest.raises(rules.SourceError, match="the tags for slides are"):
        rules.verify(path)
