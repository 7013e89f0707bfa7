"""Open tasks: a cell with names, signatures and docstrings alone, made from the trainee notebook."""

import ast
import json

import pytest

from dlojz_tp import course
from dlojz_tp.commands import copies, lab
from dlojz_tp.works import open_task, source

GUIDED = '''
@once
def given(x):
    return x


class Reducer(Base):
    """Averages gradients.

    capacity: bytes."""

    size: int = 3
    cache = {}

    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity

    @property
    def full(self):
        """Whether it is."""
        return todo(4)

    def _help(self): ...


def join(first, *,
         second=None):
    """Both."""
    if first:
        todo(4)


def short(x): return todo(4)
'''
OPEN = '''class Reducer(Base):
    """Averages gradients.

    capacity: bytes."""
    size: int = 3

    def __init__(self, capacity):
        todo(4)

    @property
    def full(self):
        """Whether it is."""
        todo(4)


def join(first, *,
         second=None):
    """Both."""
    todo(4)'''


def test_a_stub_has_names_signatures_and_docstrings_alone():
    assert open_task.stub(source.Balise(4, "", GUIDED, ("Reducer", "join"))) == OPEN


@pytest.mark.parametrize("name", source.names())
def test_every_balise_has_a_stub_with_its_answers_and_nothing_of_their_code(name):
    for number, balise in source.guided(name).balises.items():
        tree = ast.parse(open_task.stub(balise))
        assert {node.name for node in tree.body} == set(balise.answers), number
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            body = function.body[1:] if ast.get_docstring(function) else function.body
            assert [ast.unparse(line) for line in body] == [f"todo({number})"], function.name


class Shell:
    def __init__(self):
        self.below = []

    def set_next_input(self, text, replace=False):
        assert not replace
        self.below.append(text)


def test_an_open_task_is_put_below_and_so_is_the_guided_cell(monkeypatch, capsys):
    shell, tp = Shell(), course.open("08_data_parallel_under_the_hood", {})
    monkeypatch.setattr(course, "_shell", lambda: shell)
    tp.open_task(5)
    tp.back_to(5)
    bare, guided = shell.below
    assert "class Overlap" in bare and "todo(5)" in bare and len(bare) < len(guided)
    assert guided == source.guided(tp.work.name).balises[5].code
    tp.open_task(99)
    assert "has no balise 99" in capsys.readouterr().out and len(shell.below) == 2


def test_outside_of_a_notebook_it_is_printed(capsys):
    course.open("00_welcome", {}).open_task(1)
    assert "todo(1)" in capsys.readouterr().out


def test_without_the_notebook_one_line_says_so(monkeypatch, tmp_path, capsys):
    tp = course.open("00_welcome", {})
    monkeypatch.setattr(source, "NOTEBOOKS", tmp_path)
    tp.open_task(1)
    assert "cannot be read: No such file" in capsys.readouterr().out


def test_a_work_folder_remembers_its_level(tmp_path):
    work, name = tmp_path / "work", "13_zero_under_the_hood"

    def bare():
        cells = json.loads((work / f"{name}.ipynb").read_bytes())["cells"]
        code = {tag: "".join(cell["source"]) for cell in cells for tag in cell["metadata"].get("tags", [])}
        return [code[f"balise-{n}"] == open_task.stub(b) for n, b in source.guided(name).balises.items()]

    copies.sync(source.NOTEBOOKS, work, "open")
    assert all(bare()) and copies.sync(source.NOTEBOOKS, work) == [], "the next start changes nothing"
    touched = work / "08_data_parallel_under_the_hood.ipynb"
    touched.write_bytes(touched.read_bytes().replace(b"todo(1)", b"return 1"))
    lines = copies.sync(source.NOTEBOOKS, work, "guided")
    assert not any(bare()) and b"return 1" in touched.read_bytes()
    assert [line for line in lines if line.startswith(f"{touched.name}: yours is kept")]


def test_an_assistant_is_told_how_to_help_and_edits_of_it_are_kept(tmp_path):
    work = tmp_path / "work"
    copies.sync(source.NOTEBOOKS, work)
    assert "Never write a balise" in (work / "AGENTS.md").read_text()
    (work / "AGENTS.md").write_text("mine")
    assert copies.sync(source.NOTEBOOKS, work) == [] and (work / "AGENTS.md").read_text() == "mine"


def test_the_environment_may_ask_for_a_level(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DLOJZ_LEVEL", "open")
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    assert lab.main(["--work", str(tmp_path / "work"), "--sync-only"]) == 0
    assert open_task.stub(source.guided("00_welcome").balises[1]).splitlines()[-1].strip() == "todo(1)"
    monkeypatch.setenv("DLOJZ_LEVEL", "hard")
    assert lab.main(["--work", str(tmp_path / "work"), "--sync-only"]) == 1
    assert "must be one of guided, open" in capsys.readouterr().err
