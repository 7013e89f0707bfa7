"""A trainee stops a launch, and starts the kernel afresh."""

import re
import time

import psutil

from dlojz_tp.works import source
from tests.browser import seeing

LONG = """
def too_long():
    import os, time
    print("process", os.getpid())
    time.sleep(200)

launch.ranks(too_long, n=2, timeout=150)
"""


def test_an_interrupted_launch_and_a_restart(notebook):
    page = notebook("00_welcome", "Welcome")
    first, hello = seeing.cell(page, 'course.open("00_welcome")'), seeing.cell(page, "launch.ranks(hello, n=4)")
    greeting = hello.locator(".cm-content").inner_text()
    seeing.run(page, first)
    right = source.without_markers(source.find("00_welcome").balises[1].code)
    answer = seeing.cell(page, "def describe_machine():")
    seeing.write(page, answer, right)
    seeing.run(page, answer)
    assert seeing.run(page, seeing.cell(page, "tp.check(1, ")).startswith("★ Balise 1")

    seeing.write(page, hello, LONG)
    seeing.start(page, hello)
    hello.get_by_text("[rank 0] process").wait_for(timeout=60_000)
    hello.get_by_text("[rank 1] process").wait_for(timeout=60_000)
    ranks = [int(number) for number in re.findall(r"process (\d+)", seeing.said(hello))]
    assert len(ranks) == 2 and seeing.number_of(hello) == "[*]:"
    seeing.press(page, "interrupt")
    hello.get_by_text("interrupted: the ranks were ended").wait_for(timeout=60_000)
    seeing.idle(page, 60)
    assert seeing.problems(page) == []
    limit = time.monotonic() + 10
    while left := [rank for rank in ranks if psutil.pid_exists(rank)]:
        assert time.monotonic() < limit, left
        time.sleep(0.1)
    seeing.write(page, hello, greeting)  # and the next launch works
    assert "I am rank 3 of 4, and the sum of 1 to 4 is 10" in seeing.run(page, hello)

    seeing.press(page, "restart")
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    page.locator(".jp-Dialog").wait_for(state="detached")
    seeing.idle(page, 60)
    progress = seeing.cell(page, "tp.progress()")
    assert "run the first cells of this notebook" in seeing.run(page, progress)  # the names are gone ...
    seeing.run(page, first)
    assert "1 of 2 balises done" in seeing.run(page, progress)  # ... and what was judged is not
    assert seeing.problems(page) == []


WAITING = """%%ranks 2
import time
print("process", rank)
while rank == 1:
    time.sleep(0.1)
"""


def test_an_interrupted_cell_leaves_its_ranks_and_one_calm_line(notebook):
    page = notebook("00_welcome", "Welcome")
    seeing.run(page, seeing.cell(page, 'course.open("00_welcome")'))
    cell = seeing.cell(page, "tp.progress()")
    seeing.write(page, cell, "%%ranks 2\nkept = 10 + rank")
    seeing.run(page, cell)
    seeing.write(page, cell, WAITING)
    seeing.start(page, cell)
    cell.get_by_text("[rank 1] process 1").wait_for(timeout=60_000)
    seeing.press(page, "interrupt")
    cell.get_by_text("interrupted: the 2 ranks live on, with their variables").wait_for(timeout=60_000)
    seeing.idle(page, 60)
    assert seeing.problems(page) == []
    seeing.write(page, cell, "%%ranks\nkept")
    assert seeing.run(page, cell) == "rank 0: 10\nrank 1: 11"
