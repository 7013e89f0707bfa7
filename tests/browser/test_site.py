"""The site in a browser: every page at two widths, every link; and no answer in the site for trainees."""

import functools
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from dlojz_tp.authoring import site
from dlojz_tp.works import source
from dlojz_tp.works.source import BEGIN, END, NOTEBOOKS, ROOT
from tests.browser import seeing

WIDTHS = 1366, 390  # pixels: a laptop, a telephone
SHORT = 20  # characters: a line of an answer that is shorter proves nothing
PROBLEMS = r"""
() => {
  const found = [], page = document.documentElement, width = page.clientWidth;
  const boxed = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || boxed(e.parentElement));
  if (page.scrollWidth > width) {
    const wide = [...document.querySelectorAll('main *')].filter(
      e => e.getBoundingClientRect().right > width + 1 && !boxed(e.parentElement));
    found.push(`${page.scrollWidth} pixels in ${width}: ` + wide.slice(0, 3).map(e => e.outerHTML.slice(0, 90)));
  }
  for (const image of document.images)
    if (!image.naturalWidth) found.push('no figure: ' + image.src.slice(0, 90));
  const texts = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  const raw = /\$[^$]+\$|:::|```|\{[a-z-]+\}`|<\/?(div|span|details|p|b)\b|\*\*|\]\(/;
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (!text.parentElement.closest('pre, code, script, noscript, style, math') && raw.test(text.data))
      found.push('markup: ' + text.data.trim().slice(0, 90));
  }
  if (document.querySelector('.system-message, .problematic, merror')) found.push('an error of Sphinx');
  return found;
}
"""


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.anchors = [], {"", "top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id":
                self.anchors.add(value)


@pytest.fixture(autouse=True)
def afresh():
    """No JupyterLab runs here."""


@functools.cache
def made(*options: str) -> Path:
    """The folder of the site, built once."""
    asked = [sys.executable, "-m", "dlojz_tp", "site", *options]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return ROOT / "build" / ("site-trainee" if options else "site")


@pytest.fixture
def built():
    return made()


def pages_of(folder: Path) -> list[Path]:
    """All pages; a theme's own folder has pieces of others."""
    return sorted(path for path in folder.rglob("*.html") if "_static" not in path.parts)


@pytest.mark.parametrize("options", [[], ["--trainee"]], ids=["whole", "trainee"])
def test_every_link_leads_somewhere(options):
    built = made(*options)
    pages = {path: Page(path) for path in pages_of(built)}
    assert len(pages) > len(source.names()) + 8
    bad, asked = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            asked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                bad.append(f"{path.relative_to(built)}: {link}")
    assert asked > 1000 and bad == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_shows_all_of_it(built, new_page, width):
    page, bad = new_page(), {}
    page.set_viewport_size({"width": width, "height": 900})
    for path in pages_of(built):
        page.goto(path.as_uri())
        page.evaluate("() => document.querySelectorAll('details').forEach(one => one.open = true)")
        if found := page.evaluate(PROBLEMS):
            bad[path.relative_to(built).as_posix()] = found
    assert bad == {}


def test_no_answer_is_in_the_site_for_trainees():
    given, lines = "".join(map(_given, source.names())), set()
    for name in source.names():
        for balise in source.find(name).balises.values():
            for answer in re.findall(rf"{BEGIN}\n(.*?){END}", balise.code, re.DOTALL):
                lines |= {re.sub(r"\s+", " ", line.strip()) for line in answer.splitlines()}
    hidden = {line for line in lines if len(line) >= SHORT and line not in given}
    whole, trainee = (_text(made(*options)) for options in ([], ["--trainee"]))
    assert sum(line in whole for line in hidden) > max(500, 0.95 * len(hidden)), "answers aren't found where they are"
    assert {line for line in hidden if line in trainee} == set()
    for path in site.NOT_FOR_TRAINEES:
        assert not (made("--trainee") / path).with_suffix(".html").exists()


def _text(folder: Path) -> str:
    """All text of a site, also what nobody sees."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".js", ".ipynb", ".txt", ".md")]
    text = "\n".join(re.sub(r"<[^>]+>", "", path.read_text(encoding="utf-8")) for path in paths)
    return re.sub(r"\s+", " ", html.unescape(text))


def _given(name: str) -> str:
    """What a trainee's notebook has."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return re.sub(r"\s+", " ", "\n".join("".join(cell["source"]) for cell in cells))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_verdicts_can_be_read_in_both_themes(built, new_page, theme):
    page = new_page(color_scheme=theme)
    page.goto((built / "docs" / "verdicts.html").as_uri())
    page.locator(f"html[data-theme={theme}]").wait_for(state="attached")
    cards = page.locator(".cell_output div[style*='border-left']")
    assert cards.count() == 5
    for card in cards.all():
        found = seeing.contrasts(page, card)
        low = {text: round(ratio, 1) for text, ratio in found.items() if ratio < (3.0 if len(text) == 1 else 4.5)}
        assert found and low == {}


def test_a_search_finds_a_page(built, new_page):
    page = new_page()
    page.goto((built / "search.html").as_uri() + "?q=micro-batches")
    page.locator("#search-results li a", has_text="ipeline").first.wait_for(timeout=60_000)
