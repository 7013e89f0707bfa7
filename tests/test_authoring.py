"""One source, two notebooks; bad sources are refused with file and line."""

import nbformat
import pytest

from dlojz_tp import frameworks
from dlojz_tp.authoring import notebooks, rules
from dlojz_tp.works import source

GOOD = '''# %% [markdown]
# # A work

# %%
tp = open_it()

# %% [markdown]
# ### Balise 1 · Add two numbers
# <details><summary>Hint</summary>plus</details>

# %% tags=["balise-1"]
def add(a, b):
    """Sum."""
    # BEGIN SOLUTION
    c = a + b
    return c
    # END SOLUTION

# %%
tp.check(1, add)
'''
HEAD = 'tags=["balise-1"]'
BODY = "    # BEGIN SOLUTION\n    c = a + b\n    return c\n    # END SOLUTION\n"


def write(tmp_path, text):
    path = tmp_path / "09_made.py"
    path.write_text(text)
    return path


def test_a_good_source(tmp_path):
    work = rules.verify(write(tmp_path, GOOD))
    assert work.title == "A work" and work.module == "made"
    assert work.balises[1].title == "Add two numbers" and work.balises[1].answers == ("add",)


def test_punching_keeps_the_rest(tmp_path):
    path = write(tmp_path, GOOD)
    code = notebooks.trainee(path).cells[3].source
    assert code == 'def add(a, b):\n    """Sum."""\n    todo(1)'
    whole = notebooks.solution(path).cells[3].source
    assert "a + b" in whole and "SOLUTION" not in whole


def test_what_a_cell_prints_in_pieces_is_kept_in_one():
    def stream(name, text):
        return nbformat.v4.new_output("stream", name=name, text=text)

    figure = nbformat.v4.new_output("display_data", data={"text/plain": "a figure"})
    outputs = [stream("stdout", "1\n"), stream("stdout", "2\n"), stream("stdout", "3\n"), stream("stderr", "!"), figure]
    outputs += [stream("stdout", "4\n"), stream("stdout", "5\n")]
    notebooks._in_one_piece(outputs)
    assert [one.get("text") for one in outputs] == ["1\n2\n3\n", "!", None, "4\n5\n"]


def test_no_solution_shows_one_text_in_pieces():
    for path in source.SOLUTIONS.glob("*.ipynb"):
        for cell in nbformat.read(path, 4).cells:
            kinds = [one.get("name") for one in cell.get("outputs", [])]
            assert all(a is None or a != b for a, b in zip(kinds, kinds[1:])), f"{path.name}: {cell.source}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    # END SOLUTION\n", "", "09_made.py:14: # BEGIN SOLUTION is not closed"),
        ("    # BEGIN SOLUTION\n", "", "09_made.py:16: # END SOLUTION without"),
        ("    c = a + b\n", "    # BEGIN SOLUTION\n    c = a + b\n", "09_made.py:15: # BEGIN SOLUTION inside"),
        ("    c = a + b\n    return c\n", "", "09_made.py:14: the region between the markers is empty"),
        ("    c = a + b\n    return c\n", "    # think\n", "the region between the markers is empty"),
        (
            "    # BEGIN SOLUTION\n    c",
            "    x = 1  # BEGIN SOLUTION\n    c",
            "09_made.py:14: a marker must stand alone",
        ),
        (BODY, BODY.replace("    # END", "# END"), "09_made.py:17: # END SOLUTION is not indented"),
        (BODY, "    return 1\n# BEGIN SOLUTION\nc = 2\n# END SOLUTION\n", ":15: a hole outside a function"),
        ("def add(a, b):", "class add:", "a hole outside a function|'return' outside"),
        (HEAD, "", "09_made.py:14: a hole outside a balise's cell"),
        (BODY, "    return a + b\n", "09_made.py:12: balise 1 has no hole"),
        (HEAD, 'tags=["balise-2"]', "balise 1 has no cell"),
        (HEAD, 'tags=["balise-one"]', "09_made.py:11: a balise tag reads"),
        ("tp.check(1, add)", "add(1, 2)", "09_made.py:12: balise 1 has no check"),
        ("tp.check(1, add)", "tp.check(1)", "tp.check.1. is given no answer"),
        ("tp.check(1, add)", "tp.check(1, add)\n\n# %%\ntp.check(1, add)", "has a second check"),
        ("### Balise 1", "### Balise 2", "balise 1 has no heading"),
        ("### Balise 1 · Add", "### Add", "balise 1 has no heading"),
        ("<details>", "", "balise 1 has no folded hint"),
        ("tp = open_it()", "tp = (", "this is not Python"),
        (
            "tp.check(1, add)",
            "tp.check(1, add)\n\n# %%\nx = 1\nfor add in (x,):\n    x\n",
            "09_made.py:24: add is the answer of",
        ),
        ("tp = open_it()", "tp = open_it()\nfrom operator import add\n", "09_made.py:6: add is the answer of balise 1"),
    ],
)
def test_bad_sources_are_refused(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(rules.SourceError, match=message):
        rules.verify(write(tmp_path, GOOD.replace(old, new, 1)))


def test_a_source_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "99_latin.py"
    path.write_bytes("# %%\nx = 'é'\n".encode("latin-1"))
    with pytest.raises(rules.SourceError, match="99_latin.py:2: this is not UTF-8"):
        rules.verify(path)


def test_a_doubled_number_is_refused(tmp_path):
    cell = GOOD[GOOD.index("# %% tags") : GOOD.index("# %%\ntp.check")]
    with pytest.raises(rules.SourceError, match="09_made.py:20: balise 1 has a second cell"):
        rules.verify(write(tmp_path, GOOD.replace(cell, cell + cell)))


def test_a_cell_that_only_draws_is_collapsed_in_both_notebooks(tmp_path):
    hidden = '# %% jupyter={"source_hidden": true}\ndraw()\n'
    path = write(tmp_path, GOOD + "\n" + hidden)
    both = (notebooks.trainee(path), ["balise-1", "raises-exception"]), (notebooks.solution(path), ["balise-1"])
    for notebook, tags in both:
        nbformat.validate(notebook)
        assert notebook.cells[-1].metadata == {"jupyter": {"source_hidden": True}}
        assert notebook.cells[-1].source == "draw()"
        assert notebook.cells[3].metadata == {"tags": tags}, "Run All goes on after an answer that raises"


def test_cell_ids_come_from_the_content(tmp_path):
    first = notebooks.trainee(write(tmp_path, GOOD))
    second = notebooks.trainee(write(tmp_path, GOOD.replace("# # A work", "# # Another")))
    assert [c.id for c in first.cells][1:] == [c.id for c in second.cells][1:]
    assert first.cells[0].id != second.cells[0].id and len({c.id for c in first.cells}) == len(first.cells)


@pytest.mark.parametrize("name", source.names())
def test_committed_notebooks_equal_their_source(name, tmp_path):
    path = source.SOLUTIONS / f"{name}.py"
    built = nbformat.read(notebooks.build_trainee(path, tmp_path), 4)
    kept = nbformat.read(source.NOTEBOOKS / f"{name}.ipynb", 4)
    parts = [[(c.id, c.cell_type, c.source, c.metadata) for c in each.cells] for each in (built, kept)]
    assert parts[0] == parts[1], "run: make notebooks"
    assert all(not c.get("outputs") for c in kept.cells), "run: make notebooks"
    solution, kept = notebooks.solution(path), nbformat.read(source.SOLUTIONS / f"{name}.ipynb", 4)
    parts = [[(c.id, c.source, c.metadata) for c in each.cells] for each in (solution, kept)]
    assert parts[0] == parts[1], "run: make solutions"
    assert kept.metadata["dlojz_tp"]["source_sha256"] == notebooks.source_hash(path)


@pytest.mark.parametrize("name", source.names())
def test_executed_solutions_are_whole_and_small(name):
    path = source.SOLUTIONS / f"{name}.ipynb"
    text = path.read_text()
    assert path.stat().st_size < 400_000
    assert "is not done yet" not in text and str(source.ROOT) not in text and "/home/" not in text
    assert frameworks.INSTALL not in text, "executed without the extra: run make solutions"
    cells = [c for c in nbformat.reads(text, 4).cells if c.cell_type == "code"]
    assert all(c.execution_count for c in cells)
    assert not [o for c in cells for o in c.outputs if o.output_type == "error"]


def test_a_trainee_notebook_says_what_is_further(tmp_path):
    source_text = GOOD.replace("open_it()", 'course.open("09_made")')
    plain = notebooks.trainee(write(tmp_path, source_text))
    marked = notebooks.trainee(write(tmp_path, source_text.replace("two numbers", "two numbers · further")))
    assert len(marked.cells) == len(plain.cells) + 1
    assert marked.cells[2].source.endswith('tp.catch_up("further")') and "balise 1 is" in marked.cells[2].source


def test_a_solution_is_executed_only_when_its_code_changed(tmp_path, monkeypatch):
    runs = []

    def execute(notebook):
        runs.append(1)
        notebook.cells[1].execution_count = len(runs)

    monkeypatch.setattr(notebooks, "execute", execute)
    path = write(tmp_path, GOOD)
    assert notebooks.build_solution(path, tmp_path) and notebooks.build_solution(path, tmp_path) is None
    path.write_text(GOOD.replace("plus", "more"))
    kept = nbformat.read(notebooks.build_solution(path, tmp_path), 4)
    assert len(runs) == 1 and kept.cells[1].execution_count == 1 and "more" in kept.cells[2].source
    assert notebooks.build_solution(path, tmp_path) is None
    for old, new in (("a + b", "b + a"), ("Add two", "Sum two")):
        path.write_text(path.read_text().replace(old, new))
        assert notebooks.build_solution(path, tmp_path)
    assert len(runs) == 3
    (tmp_path / f"{path.stem}.ipynb").write_text("<<<<<<< HEAD")
    assert nbformat.read(notebooks.build_solution(path, tmp_path), 4).cells and len(runs) == 4
