"""A site of the course, for a browser without a kernel: `make site`.

Its sources are written into `build/site-source`, from the notebooks and the pages of the repository, and Sphinx makes
`build/site` of them. Nothing is executed again, except for the page of verdicts. For trainees, all is made without
answers: neither the sources nor the pages have them.
"""

import argparse
import importlib.util
import re
import shutil
import sys
import time
from pathlib import Path

import nbformat

from dlojz_tp.authoring import glossary, notebooks
from dlojz_tp.works import source
from dlojz_tp.works.source import NOTEBOOKS, ROOT, SOLUTIONS

SETTINGS = ROOT / "docs" / "site"
MISSING = "the site needs the extra site: make site installs it, or python -m pip install -e '.[site]'"
NEEDED = "sphinx", "myst_nb", "sphinx_book_theme", "latex2mathml", "ziamath"
NOT_FOR_TRAINEES = {"docs/instructor.md", "docs/measured_minutes.md", "CONTRIBUTING.md"}  # they have answers
VERDICTS = "docs/verdicts"
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]+)((?:#[^)]*)?)\)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def documents(trainee: bool) -> list[str]:
    """The repository's pages that the site has, as paths in it."""
    found = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))), "CONTRIBUTING.md"]
    return [path for path in [*found, "CHANGELOG.md"] if not (trainee and path in NOT_FOR_TRAINEES)]


def with_links(markdown: str, path: str, pages: list[str]) -> tuple[str, set[str]]:
    """(text, files) of the page at `path`: links to `pages` stay; so do those to files, which have to be copied.

    A link to anything else of the repository becomes plain text.
    """
    files = set()

    def mend(found):
        words, target, anchor = found.groups()
        there = (ROOT / path).parent.joinpath(target).resolve()
        if ":" in target or not there.is_relative_to(ROOT) or not there.exists():
            return found[0]
        name = there.relative_to(ROOT).as_posix()
        if name in pages:
            return found[0]
        if there.is_dir() or there.suffix == ".md":
            return words[1:-1]
        files.add(name)
        return f"{words}({target}{anchor})"

    return _LINK.sub(mend, markdown), files


def prepare(folder: Path, trainee: bool = False) -> int:
    """Write the sources of the site into `folder`; returns how many files. What hasn't changed is left alone.

    Raises ValueError where notebooks of a work differ, OSError where one is missing.
    """
    from dlojz_tp.authoring import site_pages, verdict_page  # torch

    pages = documents(trainee)
    contents: dict[str, str | bytes] = {}
    works, terms, first, codes = [], glossary.read(glossary.PAGE.read_text(encoding="utf-8")), {}, {}
    for name in source.names():
        executed, given = notebooks.executed(name), nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        seen: set[str] = set()
        own = [term for term in terms if name[:2] not in term.but]
        contents[f"works/{name}.ipynb"] = nbformat.writes(site_pages.of_work(given, executed, own, seen, not trainee))
        first = dict.fromkeys(seen, name) | first
        codes[name] = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
        works.append(source.find(name))
    verdicts = verdict_page.made()
    contents[f"{VERDICTS}.ipynb"] = nbformat.writes(verdicts)
    wrong = next(cell.outputs[0].data["text/html"] for cell in verdicts.cells if cell.cell_type == "code")
    titles = {VERDICTS: "What a verdict looks like"}
    for path in pages:
        markdown = (ROOT / path).read_text(encoding="utf-8")
        titles[path.removesuffix(".md")] = _TITLE.search(markdown)[1] if path != "README.md" else "Install and use"
        if path == "docs/glossary.md":
            markdown = glossary.page(markdown, first)
        contents[path], files = with_links(markdown, path, pages)
        contents |= {name: (ROOT / name).read_bytes() for name in files}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    contents["index.md"], files = with_links(site_pages.start(readme, works, codes, titles, wrong), "README.md", pages)
    _write(folder, contents)
    return len(contents)


def _write(folder: Path, contents: dict[str, str | bytes]):
    """Make `folder` hold these files and no others; one that would not change keeps its time."""
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        if path.relative_to(folder).as_posix() not in contents:
            path.unlink()
    for name, text in contents.items():
        data, path = text.encode() if isinstance(text, str) else text, folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def build(trainee: bool = False) -> tuple[Path, int]:
    """Make the site; returns its folder and Sphinx's exit status, which isn't 0 if there is a warning."""
    from sphinx.cmd.build import build_main

    kind = "-trainee" * trainee
    sources, made, kept = (ROOT / "build" / f"site{kind}{what}" for what in ("-source", "", "-kept"))
    before = {path.relative_to(sources) for path in sources.rglob("*")}
    prepare(sources, trainee)
    if before - {path.relative_to(sources) for path in sources.rglob("*")}:  # a page is gone, and its remains go
        for folder in (made, kept):
            shutil.rmtree(folder, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-j", "2", "-b", "html", "-c", str(SETTINGS), "-d", str(kept)]
    return made, build_main([*options, str(sources), str(made)])


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp site [--trainee]`: the site, in build/site; without answers in build/site-trainee."""
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp site", description="Build a site of the course.")
    parser.add_argument("--trainee", action="store_true", help="without answers and instructor's notes")
    options, begin = parser.parse_args(argv), time.monotonic()
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        print(MISSING, file=sys.stderr)
        return 1
    try:
        made, status = build(options.trainee)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    complained = "; Sphinx has complained, see above" * bool(status)
    print(f"open {made / 'index.html'}; built in {time.monotonic() - begin:.0f} s, needs no network{complained}")
    return status
