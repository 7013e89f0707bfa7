"""What the site shows: a page for each practical work, and the start page with the map.

A work's page is its trainee notebook with what the executed solution has shown. The course's answers are cells of
their own, which are folded, or left out.
"""

import re

import nbformat

from dlojz_tp.authoring import glossary, minutes
from dlojz_tp.index import MAP, TWO_DAYS
from dlojz_tp.works import source
from dlojz_tp.works.source import checks_in

SHORT = 20  # characters: a shorter line tells no answer
ANSWER, CODE = "Show the course's answer", "Show the code"
LIBRARIES = {"lightning_fabric": "Fabric", "accelerate": "Accelerate", "deepspeed": "DeepSpeed"}  # as they write it
COLUMNS = "work", "you write", "core, min", "all, min", "builds on", "runs on"
LEGEND = (
    "A • marks the two-day path. No work needs a GPU. On a machine that has one, the same notebooks use it, at full "
    "size. Ranks are processes on one machine; with GPUs, each rank has one."
)
_USED = re.compile(r'frameworks\.(?:here|need)\("(\w+)"')
_COUNTED = re.compile(r"(^# .+?) · about (\d+) min(?:, core (\d+))?$", re.MULTILINE)


def of_work(trainee, executed, terms: list[glossary.Term], seen: set[str], answers: bool) -> nbformat.NotebookNode:
    """The page of a work. trainee, executed: its two notebooks. answers: whether the course's are shown, folded.

    Text links each of `terms` once; `seen`, their names, grows. Raises ValueError if the notebooks have other cells.
    """
    given = [cell for cell in trainee.cells if cell.id != "further"]  # what fills in answers has nothing to show
    kinds = [[cell.cell_type for cell in cells] for cells in (given, executed.cells)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{trainee.metadata.dlojz_tp.name}: the two notebooks differ: make notebooks, make solutions")
    cells, secret = [], lines_of_answers(given, executed.cells)
    for cell, solved in zip(given, executed.cells):
        if cell.cell_type == "markdown":
            cells.append(nbformat.v4.new_markdown_cell(text(cell.source, terms, seen), id=cell.id))
            continue
        own = any(tag.startswith("balise-") for tag in cell.metadata.get("tags", []))
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
        cells.append(_code(cell.source, cell.id, CODE if hidden else None))
        if own and answers:
            cells.append(_code(solved.source, f"{cell.id}-answer", ANSWER))
        if answers or not (own or checks_in(cell.source) or "tp.progress()" in cell.source):
            shown = [str(output.get("text", output.get("data"))) for output in solved.outputs]
            tells = [not answers and any(line in text for line in secret) for text in shown]
            cells[-1].outputs = [output for output, told in zip(solved.outputs, tells) if not told]
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": trainee.metadata.kernelspec})


def lines_of_answers(given: list, solved: list) -> set[str]:
    """Lines of the course's answers that a trainee's notebook doesn't have. given, solved: cells of both notebooks."""
    known = "\n".join(cell.source for cell in given)
    lines = {line.strip() for one, other in zip(given, solved) if one.source != other.source
             for line in other.source.splitlines()}  # fmt: skip
    return {line for line in lines if len(line) >= SHORT and line not in known}


def _code(text: str, name: str, folded: str | None = None):
    """A cell of code; folded: under these words."""
    metadata = {"tags": ["hide-input"], "mystnb": {"code_prompt_show": folded}} if folded else {}
    return nbformat.v4.new_code_cell(text, id=name, metadata=metadata)


def text(markdown: str, terms: list[glossary.Term] = (), seen: set[str] | None = None) -> str:
    """Markdown as JupyterLab reads it, for MyST, with links from terms."""
    markdown = re.sub(r"^(\s*)%", r"\1\\%", markdown, flags=re.MULTILINE)  # there, a comment begins like this
    return _COUNTED.sub(_in_words, glossary.linked(markdown, terms, set() if seen is None else seen))


def _in_words(found) -> str:
    core = f", its core {found[3]}" if found[3] else ""
    return f"{found[1]}\n\nAbout {found[2]} minutes{core}."


def needs(code: str) -> str:
    """What a work runs on, read from its source, in words."""
    places = ["several ranks" if "launch.ranks(" in code else "one process"]
    places += ["C compiler"] * ("c_compiler" in code)
    used = sorted(set(_USED.findall(code)))
    places += ["*if installed:* " + ", ".join(LIBRARIES.get(name, name) for name in used)] * bool(used)
    return "; ".join(places)


def start(readme: str, works: list[source.Work], codes: dict[str, str], pages: dict[str, str], verdict: str) -> str:
    """The start page.

    readme: its first paragraph, and what its table says of the works. codes: of the sources. pages: {path: title} of
    all others. verdict: HTML of one, on a single line.
    """
    by_number = {work.name[:2]: work for work in works}
    known = {number for part in MAP.values() for number in part}
    parts = MAP | {"More": {number: "" for number in by_number if number not in known}}
    rows, trees = [COLUMNS, ["---"] * len(COLUMNS)], []
    for part, builds_on in parts.items():
        inside = [number for number in builds_on if number in by_number]
        if not inside:
            continue
        rows.append([f"**{part}**", *[""] * (len(COLUMNS) - 1)])
        for number in inside:
            work = by_number[number]
            written = minutes.you_write(readme).get(work.name, "")
            before = ", ".join(_link(by_number[one], one) for one in builds_on[number].split())
            core = f"{work.core}{' •' * (number in TWO_DAYS)}"
            rows.append([_link(work, _short(work)), written, core, work.minutes, before, needs(codes[work.name])])
        trees.append(_tree(part, [f"{_short(by_number[one])} <works/{by_number[one].name}>" for one in inside]))
    trees.append(_tree("Beside the works", [f"{title} <{path}>" for path, title in pages.items()]))
    table = ["```{table}", ":class: works", "", *(f"| {' | '.join(map(str, row))} |" for row in rows), "```"]
    head = [*readme.split("\n\n")[:2], verdict, "## The practical works", "\n".join(table), LEGEND]
    return "\n\n".join([*head, *trees]) + "\n"


def _short(work: source.Work) -> str:
    return f"{work.name[:2]} · {work.title.split(': ')[0]}"


def _link(work: source.Work, words: str) -> str:
    return f"[{words}](works/{work.name}.ipynb)"


def _tree(caption: str, entries: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"])
