"""A browser for tests. A test that fails leaves pictures of its pages, and the last line says where.

A plugin of pytest: `-p tests.browser.screens`, as tools/test_browser.sh and tools/test_hub.sh say it.
"""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

FOLDER = Path(os.environ["DLOJZ_SCREENS"])  # of the pictures
PROGRAM = os.environ["DLOJZ_BROWSER"]
ARGUMENTS = ["--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
TALLEST = 12000  # pixels of a picture


@pytest.fixture(scope="session")
def browser():
    """The browser, with a new and empty profile."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=PROGRAM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def new_page(browser, request):
    """A function that opens a page as after a first visit. It may ask this machine alone, for whatever it shows."""
    request.node.pages, outside = [], []

    def ask(asked):
        address = urlsplit(asked.url)
        if address.scheme not in ("data", "blob", "file") and address.hostname != "127.0.0.1":
            outside.append(asked.url)

    def open_page(**options):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        context.on("request", ask)
        page = context.new_page()
        request.node.pages.append(page)
        return page

    yield open_page
    for page in request.node.pages:  # after the pictures are taken
        page.context.close()
    assert outside == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and call.when == "call":
        for number, page in enumerate(getattr(item, "pages", ()), 1):
            name = re.sub(r"\W+", "-", item.name).strip("-") + f"-{number}"
            try:
                _take(page, FOLDER / name)
            except Exception as error:  # of a page that is gone: the test's own failure matters more
                report.sections.append(("pictures", f"none of page {number}: {error}"))
    return report


def _take(page, path: Path) -> None:
    """What the window shows, and the whole notebook in front."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=f"{path}.png", timeout=10_000)
    height = page.evaluate(
        "Math.max(0, ...[...document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer')]"
        ".map(e => e.scrollHeight))"
    )
    if height > page.viewport_size["height"]:
        page.set_viewport_size({"width": page.viewport_size["width"], "height": min(TALLEST, height + 150)})
        page.wait_for_timeout(500)
        page.screenshot(path=f"{path}-whole.png", timeout=20_000)


def pytest_terminal_summary(terminalreporter):
    if taken := sorted(path.name for path in FOLDER.glob("*.png")):  # by this process or its workers
        terminalreporter.write_line(f"screenshots of what failed, in {FOLDER}: {', '.join(taken)}")
