"""What a trainee does in JupyterLab and what is seen then, as functions of a browser's page."""

import io
import re
from collections import Counter

from PIL import Image

PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"  # the notebook in front
CARD = ".jp-OutputArea-output div[style*='border-left']"  # a verdict, progress, a calm line: dlojz_tp/cards/render.py
LEAST_COLOURS = 12  # of a figure that shows something

# Every cell stays in the page, so that its text can be read without scrolling.
SETTINGS = {"@jupyterlab/notebook-extension/tracker.jupyterlab-settings": '{"windowingMode": "none"}'}


def wait_for_notebook(page, title: str, seconds: float = 120) -> None:
    """Until the notebook with this word in its title is in front and its kernel waits for work."""
    page.locator(f"{PANEL} h1:visible", has_text=title).first.wait_for(timeout=1000 * seconds)
    idle(page, seconds)


def idle(page, seconds: float) -> None:
    """Until the kernel of the notebook in front has nothing to do."""
    page.locator(f"{PANEL} .jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=1000 * seconds)
    page.wait_for_function(
        "panel => ![...document.querySelectorAll(panel + ' .jp-InputPrompt')].some(p => p.innerText.includes('*'))",
        arg=PANEL,
        timeout=1000 * seconds,
    )


def menu(page, *names: str) -> None:
    """Choose from the menus: menu(page, "Run", "Run All Cells")."""
    page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{names[0]}$")).click()
    for name in names[1:]:
        page.locator(".lm-Menu-itemLabel:visible", has_text=re.compile(f"^{re.escape(name)}$")).click()


def press(page, button: str) -> None:
    """A button above the notebook in front: "interrupt", "restart"."""
    page.locator(f"{PANEL} .jp-Toolbar-item[data-jp-item-name={button}] jp-button").click()


def cell(page, text: str):
    """The cell of code that has this text now; it stays the one when its text changes."""
    cells = page.locator(f"{PANEL} .jp-CodeCell")
    cells.filter(has=page.locator(".cm-content", has_text=text)).first.wait_for()
    find = "(cells, text) => cells.findIndex(cell => cell.querySelector('.cm-content')?.innerText.includes(text))"
    return cells.nth(cells.evaluate_all(find, text))


def number_of(found) -> str:
    """What stands beside a cell: "[3]:"; "[ ]:" before it ran."""
    return found.locator(".jp-InputPrompt").inner_text()


def run_all(page, seconds: float) -> None:
    """Run > Run All Cells, until the last has run. Before the kernel takes it, JupyterLab loses it: then once more."""
    last = page.locator(f"{PANEL} .jp-CodeCell").last
    before = number_of(last)
    menu(page, "Run", "Run All Cells")
    for _ in range(3):
        page.wait_for_timeout(5000)
        if number_of(last) == before:
            menu(page, "Run", "Run All Cells")
    _has_run(page, last, before, seconds)


def write(page, found, code: str) -> None:
    """Put code into a cell, in place of what stands there."""
    found.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(code)


def run(page, found, seconds: float = 120) -> str:
    """Run a cell, until it is done; the text below it."""
    before = number_of(found)
    start(page, found)
    _has_run(page, found, before, seconds)
    return said(found)


def start(page, found) -> None:
    """Control-Enter in a cell."""
    found.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")


def _has_run(page, found, before: str, seconds: float) -> None:
    page.wait_for_function(
        "([cell, before]) => { const now = cell.querySelector('.jp-InputPrompt').innerText;"
        " return now !== before && /[0-9]/.test(now) }",
        arg=[found.element_handle(), before],
        timeout=1000 * seconds,
    )
    idle(page, seconds)


def said(found) -> str:
    """The text that is seen below a cell."""
    texts = (text.strip() for text in found.locator(".jp-OutputArea-output").all_inner_texts())
    return "\n".join(filter(None, texts))


def cards(page) -> list[str]:
    """The texts of all cards in the notebook in front."""
    return [text.strip() for text in page.locator(f"{PANEL} {CARD}").all_inner_texts()]


_PROBLEMS = """
([panel, card, least, meant]) => {
  const bad = [], front = document.querySelector(panel);
  const start = element => element.innerText.trim().slice(0, 300);
  for (const out of front.querySelectorAll('.jp-OutputArea-output')) {
    if (/error$|stderr$/.test(out.dataset.mimeType || '')) bad.push('red output: ' + start(out));
    else if (out.innerText.includes('Traceback (most') && !meant.some(words => out.innerText.includes(words)))
      bad.push('traceback: ' + start(out));
    for (const part of [out, ...out.querySelectorAll('*')])
      if (part.clientWidth && part.scrollWidth > part.clientWidth + 1 && !part.closest('details'))
        bad.push(`${part.scrollWidth} pixels in ${part.clientWidth}: ` + start(part));
  }
  for (const code of front.querySelectorAll('.cm-scroller'))
    if (code.scrollWidth > code.clientWidth + 1) bad.push('code cut off: ' + start(code));
  for (const one of front.querySelectorAll(card)) {
    if (!one.innerText.trim()) bad.push('an empty card');
  }
  for (const figure of front.querySelectorAll('.jp-OutputArea-output img')) {
    const canvas = document.createElement('canvas'), {naturalWidth: width, naturalHeight: height} = figure;
    if (!width || !height || !figure.clientWidth) { bad.push('a figure without a size'); continue }
    canvas.width = width; canvas.height = height;
    const context = canvas.getContext('2d');
    context.drawImage(figure, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
    const colours = new Set(pixels);
    if (colours.size < least) bad.push(`a figure of ${colours.size} colours`);
  }
  return bad;
}
"""


def problems(page, meant: tuple[str, ...] = ()) -> list[str]:
    """What a trainee should not see in the notebook in front: tracebacks, red text, text cut off, empty figures.

    meant: words of tracebacks that the notebook itself prints, to be read.
    """
    return page.evaluate(_PROBLEMS, [PANEL, CARD, LEAST_COLOURS, list(meant)])


def figures(page) -> int:
    """How many figures the notebook in front shows."""
    return page.locator(f"{PANEL} .jp-OutputArea-output img").count()


_TEXTS = """
card => {
  const found = [], walker = document.createTreeWalker(card, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const box = range.getClientRects()[0];
    if (box && box.width > 3 && walker.currentNode.data.trim())
      found.push([walker.currentNode.data.trim(), box.left, box.top, box.right, box.bottom]);
  }
  return found;
}
"""


def contrasts(page, card) -> dict[str, float]:
    """Of each text in a card, the contrast of letters and ground, from a picture: 1 to 21, as the web's rules count."""
    card.scroll_into_view_if_needed()
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    scale = picture.width / page.viewport_size["width"]
    found = {}
    for text, *box in card.evaluate(_TEXTS):
        colours = _colours(picture.crop([round(scale * x) for x in box]))
        ground = _light(colours.most_common(1)[0][0])
        ratios = (sorted((_light(colour) + 0.05, ground + 0.05)) for colour in colours)
        found[text] = max(high / low for low, high in ratios)
    return found


def ground(card, page) -> float:
    """How light the ground of a card is on the page: 0 black, 1 white."""
    card.scroll_into_view_if_needed()
    picture = Image.open(io.BytesIO(card.screenshot())).convert("RGB")
    return _light(_colours(picture).most_common(1)[0][0])


def _colours(picture) -> Counter:
    """{colour: pixels}"""
    return Counter({colour: count for count, colour in picture.getcolors(picture.width * picture.height)})


def _light(colour) -> float:
    """Relative luminance of an sRGB colour."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
