"""Two trainees log in, answer, and log out, at the same time; what is one's stays one's."""

import subprocess
import time

import psutil
import pytest

from dlojz_tp.works import source
from tests.browser import seeing, traces
from tests.hub import conftest

pytestmark = pytest.mark.timeout(800)  # the first start of a hub installs it
RIGHT = source.without_markers(source.find("00_welcome").balises[1].code)
WRONG = RIGHT.replace("len(os.sched_getaffinity(0))", "os.cpu_count()")


def test_two_at_once(hub, folder, trainees, new_page):
    pages = {name: new_page() for name in trainees}
    for name, password in trainees.items():
        log_in(pages[name], hub.address, name, password)
    for page in pages.values():  # both servers start at once
        assert "Two cores: 2 cores, 1G of memory, no GPU, ends after 0.5 h" in page.locator("form").inner_text()
        page.get_by_role("button", name="Start", exact=True).click()
    for page in pages.values():  # the map is what a trainee sees first
        page.locator(f"{seeing.PANEL} h1:visible").first.wait_for(timeout=180_000)
    assert jobs() == [(name, "dlojz-hub", "RUNNING") for name in sorted(trainees)]
    assert {name: owners(folder, name) for name in trainees} == {name: {name} for name in trainees}

    for name, page in pages.items():
        page.goto(f"{hub.address}user/{name}/lab/tree/00_welcome.ipynb?reset")
    for page in pages.values():
        seeing.wait_for_notebook(page, "Welcome", 180)
    for page in pages.values():
        seeing.menu(page, "Run", "Run All Cells")
    for page in pages.values():
        last = seeing.cell(page, "report.inspection(record)")
        last.locator(".jp-OutputArea-output img").wait_for(timeout=240_000)
        seeing.idle(page, 60)
        assert seeing.problems(page, ("ValueError: the disk of rank 2 is full",)) == []
        assert "0 of 2 balises done" in seeing.said(seeing.cell(page, "tp.progress()"))
    assert traces.open_doors(str(folder)) == []

    one, other = trainees
    for name, code, mark in ((one, WRONG, "✗"), (one, RIGHT, "★"), (other, WRONG, "✗")):
        answer = seeing.cell(pages[name], "def describe_machine():")
        seeing.write(pages[name], answer, code)
        seeing.run(pages[name], answer)
        verdict = seeing.run(pages[name], seeing.cell(pages[name], "tp.check(1, "))
        assert verdict.startswith(f"{mark} Balise 1"), verdict
    for name, done in ((one, "1 of 2"), (other, "0 of 2")):  # the same notebook, two trainees
        assert f"{done} balises done" in seeing.run(pages[name], seeing.cell(pages[name], "tp.progress()"))
        pages[name].keyboard.press("Control+s")

    for name, stranger in ((one, other), (other, one)):
        assert pages[stranger].request.get(f"{hub.address}user/{name}/api/contents").status == 403
        assert readable(stranger, belonging_to=name, below=[folder, "/tmp", "/dev/shm", "/var/tmp"]) == []
        assert readable(name, belonging_to=name, below=[folder]) != []
        assert (
            readable(name, belonging_to="root", below=[folder / "hub", folder / "passwords", folder / "slurm/munge"])
            == []
        )

    log_out(pages[one], hub.address, one)
    wait_until(lambda: jobs() == [(other, "dlojz-hub", "RUNNING")] and not alive(one), "logged out", jobs)
    assert "0 of 2 balises done" in seeing.run(pages[other], seeing.cell(pages[other], "tp.progress()"))
    log_out(pages[other], hub.address, other)
    wait_until(lambda: jobs() == [] and not alive(other), "logged out", jobs)


def test_who_waits_in_the_queue_comes_in_and_goes_with_the_hub(hub, trainees, new_page):
    name, password = next(iter(trainees.items()))
    page = new_page()
    log_in(page, hub.address, name, "not " + password)
    page.get_by_text("Invalid username or password").wait_for()
    log_in(page, hub.address, name, password)
    page.get_by_label("Later").check()
    page.get_by_role("button", name="Start", exact=True).click()  # the page stands by itself until the job has begun
    page.get_by_text("Your server is starting up").wait_for()
    page.locator(f"{seeing.PANEL} h1:visible").first.wait_for(timeout=180_000)
    page.goto("about:blank")
    conftest.stop(hub.process)
    wait_until(lambda: jobs() == [] and not alive(name), "the hub has ended", jobs)


def log_in(page, address: str, name: str, password: str) -> None:
    page.goto(f"{address}hub/login")
    page.locator("input[name=username]").fill(name)
    page.locator("input[name=password]").fill(password)
    page.locator("input[type=submit], button[type=submit]").first.click()


def log_out(page, address: str, name: str) -> None:
    """File > Log Out, as JupyterLab has it under a hub."""
    page.once("dialog", lambda dialog: dialog.accept())
    seeing.menu(page, "File", "Log Out")
    page.locator("input[name=username], :text('Successfully logged out')").first.wait_for(timeout=60_000)


def jobs() -> list[tuple[str, ...]]:
    """(user, name, state) of what waits or runs, sorted by user."""
    command = ["squeue", "--noheader", "--Format=UserName:40,Name:40,State:40"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    return sorted(tuple(line.split()) for line in lines)


def alive(name: str) -> list[str]:
    """Processes of a user."""
    found = psutil.process_iter(["username", "cmdline", "status"])
    return [
        " ".join(process.info["cmdline"] or ["?"])
        for process in found
        if process.info["username"] == name and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def owners(folder, name: str) -> set[str]:
    """Whose the files are in a trainee's folder of notebooks."""
    return {path.owner() for path in (folder / "homes" / name / "dlojz-tp").rglob("*")}


def readable(user: str, belonging_to: str, below: list) -> list[str]:
    """Files of one user that another can read; what every new home has is no secret."""
    command = ["find", *map(str, below), "-xdev", "-type", "f", "-user", belonging_to]
    command += ["-not", "-path", "*/homes/*/.bash*", "-not", "-path", "*/homes/*/.profile", "-print0"]
    files = subprocess.run(command, cwd="/", capture_output=True, timeout=60).stdout
    those = ["xargs", "-0", "sh", "-c", 'for file; do if [ -r "$file" ]; then echo "$file"; fi; done', "sh"]
    tried = subprocess.run(["runuser", "-u", user, "--", *those], cwd="/", input=files, capture_output=True, timeout=60)
    return tried.stdout.decode().splitlines()


def wait_until(true, what: str, shown, seconds: float = 40) -> None:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            pytest.fail(f"{what}, and {seconds:.0f} s later there still is: {shown()}")
        time.sleep(0.3)
