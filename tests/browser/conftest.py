"""JupyterLab as `make lab` starts it, for `make test-browser` alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from types import SimpleNamespace

import pytest

from dlojz_tp.works.source import ROOT
from tests.browser import seeing, traces

if "DLOJZ_BROWSER" not in os.environ:  # `make test` has neither browser nor playwright
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The server, with a work folder and settings of its own; .address(name) is the page of a notebook."""
    folder = tmp_path_factory.mktemp("lab")
    for name, text in seeing.SETTINGS.items():
        (path := folder / "settings" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "DLOJZ_"))},
        "DLOJZ_BRIEF": "1", "JUPYTER_CONFIG_DIR": str(folder / "config"), "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "XDG_DATA_HOME": str(folder / "share"),
    }  # fmt: skip
    if "DLOJZ_DATA" in os.environ:
        environment["DLOJZ_DATA"] = os.environ["DLOJZ_DATA"]
    command = [sys.executable, "-m", "dlojz_tp", "lab", "--no-browser", "--work", str(folder / "work")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    try:
        found = None
        while not found and (line := process.stdout.readline()):
            found = re.search(r"(http://127\.0\.0\.1:\d+/)lab/tree/index\.ipynb\?token=(\w{40,})$", line)
        assert found, "no address was printed"
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the server
        base, token = found.groups()
        yield SimpleNamespace(
            base=base,
            token=token,
            work=folder / "work",
            process=process,
            address=lambda name: f"{base}lab/tree/{name}.ipynb?reset&token={token}",
        )
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(autouse=True)
def afresh(lab):
    """No verdict from before; afterwards nobody outside this machine could have come in, and no kernel is left."""
    shutil.rmtree(lab.work / ".course-progress", ignore_errors=True)
    yield
    assert traces.open_doors(os.environ["DLOJZ_RUN"]) == []
    for session in ask(lab, "api/sessions"):
        ask(lab, f"api/sessions/{session['id']}", "DELETE")


def ask(lab, path: str, method: str = "GET"):
    """What the server answers."""
    headers = {"Authorization": f"token {lab.token}"}
    with urllib.request.urlopen(urllib.request.Request(lab.base + path, headers=headers, method=method)) as reply:
        return json.loads(reply.read() or "null")


@pytest.fixture
def notebook(lab, new_page):
    """A function of a work's name and a word of its title: the page that shows its notebook."""

    def show(name: str, title: str, **options):
        page = new_page(**options)
        page.goto(lab.address(name))
        seeing.wait_for_notebook(page, title)
        return page

    return show
