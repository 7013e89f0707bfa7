"""The sources of the site: what a work's page has, links from terms, and what trainees must not get."""

import importlib.util

import nbformat
import pytest

from dlojz_tp.authoring import glossary, site, site_pages
from dlojz_tp.works import source
from dlojz_tp.works.source import BEGIN, NOTEBOOKS, SOLUTIONS

TERMS = glossary.read(
    "# Glossary\n\n- **all-reduce**: A sum for all.\n- **tensor parallelism** (slicing): A cut.\n"
    "- **rank**: One process. <!-- not in 21 22 -->\n- **DDP**: PyTorch's own.\n- **parallelism**: Many.\n"
)


def linked(text, seen=None):
    return glossary.linked(text, TERMS, set() if seen is None else seen)


def test_entries():
    assert [term.name for term in TERMS] == ["all-reduce", "tensor parallelism", "rank", "DDP", "parallelism"]
    assert TERMS[1].words == ("tensor parallelism", "slicing") and TERMS[2].but == {"21", "22"}
    assert TERMS[2].said == "One process."


def test_the_first_use_is_linked_and_no_other():
    seen = set()
    assert linked("All-reduces here. An all-reduce.", seen) == "{term}`All-reduces <all-reduce>` here. An all-reduce."
    assert seen == {"all-reduce"} and linked("an all-reduce", seen) == "an all-reduce"
    assert linked("a tensor\nparallelism") == "a {term}`tensor parallelism <tensor parallelism>`", "the longest"
    assert linked("by slicing, **DDP**") == "by {term}`slicing <tensor parallelism>`, **{term}`DDP <DDP>`**"


@pytest.mark.parametrize(
    "text",
    ["# A rank", "`rank`", "$rank$", "$$\nrank\n$$", "[a rank](there)", "```\nrank\n```", "rank-0", "rank 0", "ddp",
     "<details><summary>Hint</summary>\n\nrank\n</details>", '<b title="rank">', "ranking", "x.rank"],
)  # fmt: skip
def test_nothing_is_linked_in(text):
    assert linked(text) == text


def test_every_entry_of_the_glossary_is_read():
    text = glossary.PAGE.read_text(encoding="utf-8")
    terms = glossary.read(text)
    assert len(terms) == sum(line.startswith("- ") for line in text.splitlines()) >= 60
    assert len({word for term in terms for word in term.words}) == sum(len(term.words) for term in terms)
    assert all(term.said.endswith(".") and ". " not in term.said for term in terms), "one sentence each"
    made = glossary.page(text, {"all-reduce": "08_work"})
    assert made.count("First used in") == 1 and "<!--" not in made and "- **" not in made


def notebooks_of(name):
    return (nbformat.read(folder / f"{name}.ipynb", as_version=4) for folder in (NOTEBOOKS, SOLUTIONS))


def test_answers_are_folded_or_not_there():
    name = "00_welcome"
    work, seen = source.find(name), set()
    line = "len(os.sched_getaffinity(0))"
    assert line in work.balises[1].code.split(BEGIN)[1]
    terms = glossary.read(glossary.PAGE.read_text(encoding="utf-8"))
    page = site_pages.of_work(*notebooks_of(name), terms, seen, answers=True)
    answers = [
        cell for cell in page.cells if cell.metadata.get("mystnb", {}).get("code_prompt_show") == site_pages.ANSWER
    ]
    assert len(answers) == len(work.balises) and line in answers[0].source
    assert all("hide-input" in cell.metadata.tags for cell in answers)
    assert "rank" in seen and "About 30 minutes." in page.cells[0].source
    nbformat.validate(page)
    bare = nbformat.writes(site_pages.of_work(*notebooks_of(name), [], set(), answers=False))
    assert line not in bare and "★</span>" not in bare and "image/png" in bare, (
        "figures stay, verdicts on answers don't"
    )


def test_an_output_that_repeats_a_line_of_an_answer_is_left_out():
    def cell(text, printed, *tags):
        shown = [nbformat.v4.new_output("stream", name="stdout", text=printed)]
        return nbformat.v4.new_code_cell(text, metadata={"tags": list(tags)}, outputs=shown)

    line = "#SBATCH --output=%x-%j.out"
    solved = [
        cell(f"def script():\n    {line}", "", "balise-1"),
        cell("print(script())", f"text\n{line}"),
        cell("1", "1"),
    ]
    given = [cell("def script():\n    todo(1)", "", "balise-1"), cell("print(script())", ""), cell("1", "")]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "dlojz_tp": {"name": "99"}}
    both = [nbformat.v4.new_notebook(cells=cells, metadata=metadata) for cells in (given, solved)]
    for answers, shown in ((True, [1, 1]), (False, [0, 1])):
        page = site_pages.of_work(*both, [], set(), answers=answers)
        assert [len(one.outputs) for one in page.cells[-2:]] == shown


def test_notebooks_that_differ_are_refused():
    given, executed = notebooks_of("00_welcome")
    del executed.cells[3]
    with pytest.raises(ValueError, match="00_welcome: the two notebooks differ"):
        site_pages.of_work(given, executed, [], set(), answers=True)


def test_a_line_that_begins_with_a_percent_sign_is_no_comment():
    assert site_pages.text("20\n% of it") == "20\n\\% of it"


def test_the_start_page_has_every_work_on_the_map():
    readme = (source.ROOT / "README.md").read_text(encoding="utf-8")
    works = [source.find(name) for name in source.names()]
    codes = {name: (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8") for name in source.names()}
    page = site_pages.start(readme, works, codes, {"docs/glossary": "Glossary"}, "<div>★</div>")
    for work in works:
        assert f" <works/{work.name}>" in page and f"](works/{work.name}.ipynb) | " in page
    assert "Glossary <docs/glossary>" in page and "| 50 • | 95 | [00](works/00_welcome.ipynb) | one process |" in page


def test_what_a_work_runs_on():
    assert site_pages.needs("x = 1") == "one process"
    assert (
        site_pages.needs('launch.ranks(f)\nframeworks.here("deepspeed")') == "several ranks; *if installed:* DeepSpeed"
    )


def test_links_out_of_the_site():
    pages = ["README.md", "docs/slurm.md"]
    text = "[a](../README.md#grading) [b](slurm.md) [c](instructor.md) [d](../deploy/site.toml) [e](https://x.y) [f](g)"
    mended, files = site.with_links(text, "docs/jupyterhub.md", pages)
    assert mended == text.replace("[c](instructor.md)", "c") and files == {"deploy/site.toml"}
    assert site.with_links("[c](deploy/container)", "README.md", pages) == ("c", set())
    assert "docs/instructor.md" in site.documents(False) and "docs/instructor.md" not in site.documents(True)


def test_sources_that_have_not_changed_stay_and_others_go(tmp_path):
    site._write(tmp_path, {"a/b.md": "b", "c.png": b"c"})
    before = (tmp_path / "a" / "b.md").stat().st_mtime_ns
    site._write(tmp_path, {"a/b.md": "b"})
    assert [path.name for path in tmp_path.rglob("*.*")] == ["b.md"] and (
        tmp_path / "a/b.md"
    ).stat().st_mtime_ns == before


def test_without_sphinx_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert site.main([]) == 1
    assert capsys.readouterr().err.strip() == site.MISSING
