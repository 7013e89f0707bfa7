"""Slides of a practical work, from the cells of its executed solution that carry a tag.

    slide              the cell begins a slide
    slide-more         the cell continues the slide before it
    slide-mistake=SLUG on a balise's cell: a slide with a wrong answer of the bank and the verdict on it

A slide shows all of a cell of prose that isn't folded. Of a cell of code it shows the output, or the code if there is
none. Its title is the heading that its first cell begins with, or the last one above.
"""

import argparse
import html
import importlib.util
import re
import shutil
import string
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from dlojz_tp.authoring import instructor_notes, mistake_slide, notebooks
from dlojz_tp.authoring.rules import MISTAKE, MORE, SLIDE, SourceError
from dlojz_tp.works import source
from dlojz_tp.works.source import ROOT

FOLDER = ROOT / "build" / "slides"
TEMPLATE = Path(__file__).with_name("slides.html")
MISSING = "the slides need the extra slides: make slides installs it, or python -m pip install -e '.[slides]'"
NEEDED = "sphinx_revealjs", "ziamath", "latex2mathml", "nbconvert"
PARTS = {  # what a page needs, and the package that has it
    "sphinx_revealjs": [
        f"_static/revealjs/{part}"
        for part in (
            "dist/reveal.js",
            "dist/reveal.css",
            "dist/theme/fonts/source-sans-pro",
            "plugin/notes/notes.js",
            "LICENSE",
        )
    ],
    "ziamath": ["fonts/STIXTwoMath-Regular.ttf"],
}
_FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
_HEADING = re.compile(r"^(#{1,4}) (.+)$", re.MULTILINE)
_COUNTED = re.compile(r"^Balise \d+ · | · further\b.*$| · about \d+ min.*$")


@dataclass
class Slide:
    """One slide. title: text. body: pieces of HTML. notes: HTML.

    balise: the number of the one whose mistake it shows, else None. measured: whether it shows what a cell has shown.
    """

    title: str
    body: list[str] = field(default_factory=list)
    balise: int | None = None
    measured: bool = False
    notes: str = ""


def deck(notebook: nbformat.NotebookNode, work: source.Work, instructor: str) -> list[Slide]:
    """The slides of an executed solution, in order. instructor: the text of docs/instructor.md, for the notes.

    Raises ValueError for a cell that continues a slide where there is none, and for a mistake that the bank doesn't
    have, or whose verdict is another one.
    """
    slides, heading = [], work.title
    for cell in notebook.cells:
        text = _unfolded(cell.source) if cell.cell_type == "markdown" else ""
        if cell.cell_type == "markdown" and (found := _HEADING.findall(_FOLDED.sub("", cell.source))):
            heading = _COUNTED.sub("", found[-1][1])
        tags = cell.metadata.get("tags", [])
        for tag in tags:
            if tag.startswith(MISTAKE):
                number = next(int(one.removeprefix("balise-")) for one in tags if one.startswith("balise-"))
                slides.append(Slide(*mistake_slide.made(work, number, tag.removeprefix(MISTAKE)), balise=number))
            elif tag in (SLIDE, MORE):
                own = _HEADING.match(text)
                if tag == SLIDE:
                    slides.append(Slide(own[2] if own else heading))
                elif not slides:
                    raise ValueError(f"{work.name}: a cell has the tag {MORE}, but no slide is before it")
                slides[-1].body += [prose(text[own.end() :] if own else text)] if text else _of_code(cell)
                slides[-1].measured |= cell.cell_type == "code"
    for each, notes in zip(
        slides, instructor_notes.distributed(slides, instructor_notes.of_work(instructor, work.name))
    ):
        each.notes = prose(notes)
    return slides


def page(work: source.Work, slides: list[Slide]) -> str:
    """The deck as one page of HTML, which needs the folder `reveal` beside it."""
    sections = "\n".join(
        f'<section><div class="slide"><h2>{html.escape(each.title)}</h2><div>{"".join(each.body)}</div></div>'
        f'<aside class="notes">{each.notes}</aside></section>'
        for each in slides
    )
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(f"{work.name[:2]} · {work.title}"), sections=sections)


def _of_code(cell) -> list[str]:
    shown = [one for one in map(_output, cell.get("outputs", [])) if one]
    return shown or [mistake_slide.code(cell.source)]


def _unfolded(text: str) -> str:
    """The prose without its folded parts, the sections that are then empty, and what is counted in headings."""
    sections = re.split(r"^(?=#{1,4} )", _FOLDED.sub("", text), flags=re.MULTILINE)
    kept = [one for one in sections if "\n" in one.strip() or not one.startswith("##")]
    return _HEADING.sub(lambda found: f"{found[1]} {_COUNTED.sub('', found[2])}", "".join(kept))


def prose(markdown: str) -> str:
    """Markdown as HTML, with its formulas as MathML."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    from dlojz_tp.authoring import formulas

    class Renderer(IPythonRenderer):
        def block_math(self, body):
            return formulas.mathml(body, "block")

        def inline_math(self, body):
            return formulas.mathml(body)

    return MarkdownWithMath(renderer=Renderer(escape=False, exclude_anchor_links=True)).render(markdown)


def _output(output) -> str:
    """What a cell has shown, as HTML: a picture, a table, a card or text; "" for an error or a guess not made."""
    if output.output_type == "stream":
        return _text(output.text) if output.name == "stdout" else ""
    data = output.get("data", {})
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return f'<img src="data:{kind};base64,{data[kind].strip()}" alt="">'
    shown = data.get("text/html") or _text(data.get("text/plain", ""))
    return "" if "You made no guess" in shown or not re.sub("<.*?>", "", shown).strip() else f"<div>{shown}</div>"


def _text(text: str) -> str:
    """Text whose columns stay under each other, as large as its longest line allows."""
    widest = max(map(len, text.splitlines()), default=0)
    size = f"min(1em, {mistake_slide.WIDTH / 0.61 / widest:.1f}px)" if widest else "1em"
    return f'<pre style="font-size:{size}">{html.escape(text.rstrip())}</pre>' if text.strip() else ""


def copy_parts(folder: Path):
    """Put reveal.js and fonts into `folder`. Raises ModuleNotFoundError, with what to do, if a package isn't there."""
    specs = {name: importlib.util.find_spec(name) for name in NEEDED}
    if not all(specs.values()):
        raise ModuleNotFoundError(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    for package, parts in PARTS.items():
        for part in parts:
            origin = Path(specs[package].submodule_search_locations[0]) / part
            copy = shutil.copytree if origin.is_dir() else shutil.copy
            copy(origin, folder / origin.name, **({"dirs_exist_ok": True} if origin.is_dir() else {}))


def write(works: list[source.Work], folder: Path = FOLDER) -> int:
    """Write a page for each work, an index of all pages, and reveal.js beside them; how many works failed."""
    copy_parts(folder / "reveal")
    instructor, failed = instructor_notes.PAGE.read_text(encoding="utf-8"), 0
    for work in works:
        try:
            notebook = notebooks.executed(work.name)
            slides = deck(notebook, work, instructor)
            (folder / f"{work.name}.html").write_text(page(work, slides), encoding="utf-8")
            print(f"{work.name}: {len(slides)} slides", flush=True)
        except (OSError, ValueError, SourceError) as error:  # the other decks are written
            print(f"{error}", file=sys.stderr)
            failed += 1
    links = [(path.name, re.search("<title>(.*)</title>", path.read_text(encoding="utf-8"))[1])
             for path in sorted(folder.glob("[0-9][0-9]_*.html"))]  # fmt: skip
    items = "".join(f'<li><a href="{name}">{title}</a></li>' for name, title in links)
    index = (
        f"<!doctype html><meta charset=utf-8><title>Slides</title><body style='font:1.4em sans-serif'><ul>{items}</ul>"
    )
    (folder / "index.html").write_text(index, encoding="utf-8")
    return failed


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp slides [NAME or NUMBER ...]`: slides of these works, or of all, in build/slides."""
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp slides", description="Write slides into build/slides.")
    parser.add_argument("names", nargs="*", help="practical works, such as 08 (default: all)")
    paths = notebooks.chosen([source.full_name(name) for name in parser.parse_args(argv).names])
    if paths is None:
        return 2
    try:
        failed = write([source.read(path) for path in paths])
    except ModuleNotFoundError as missing:
        print(missing, file=sys.stderr)
        return 1
    print(f"open {FOLDER / 'index.html'}; S opens the speaker's view")
    return int(failed > 0)
