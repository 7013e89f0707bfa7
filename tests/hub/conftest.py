"""The hub that `make hub` starts. Copy of the course, users and Slurm are those that tools/test_hub.sh has made."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.browser import seeing

if "DLOJZ_HUB" not in os.environ:  # `make test` has neither hub nor browser
    collect_ignore_glob = ["test_*.py"]

SITE = """
servers = "slurm"
port = {port}
users = {names}
folder = "{folder}/hub"
node_address = "127.0.0.1"

[environment]
DLOJZ_BRIEF = "1"

[profiles."Two cores"]
cores = 2
memory = "1G"
hours = 0.5

[profiles."Later"]
cores = 1
gpus = 1
hours = 0.5
sbatch = {{ begin = "now+25" }}
"""


@pytest.fixture(scope="session")
def folder() -> Path:
    """What tools/test_hub.sh has prepared: course/, homes/, slurm/."""
    return Path(os.environ["DLOJZ_HUB"])


@pytest.fixture(scope="session")
def trainees() -> dict[str, str]:
    """{name: password} of two users of this machine."""
    lines = Path(os.environ["DLOJZ_HUB"], "passwords").read_text().splitlines()
    return dict(line.split(":") for line in lines)


@pytest.fixture(scope="session")
def hub(folder, trainees):
    """The hub: .address, .process, .log; it is stopped as by Ctrl-C."""
    port = three_free_ports()
    for name in trainees:
        for setting, text in seeing.SETTINGS.items():
            path = folder / "homes" / name / ".jupyter" / "lab" / "user-settings" / setting
            lines = f"umask 077; mkdir -p {path.parent}; cat >{path}"
            subprocess.run(["runuser", "-u", name, "--", "sh", "-c", lines], input=text, text=True, cwd="/", check=True)
    site, log = folder / "site.toml", folder / "hub.log"
    site.write_text(SITE.format(port=port, names=list(trainees), folder=folder))
    command = ["make", "-C", str(folder / "course"), "hub", "VENV=.venv", f"SITE={site}"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "DLOJZ_", "PYTHON"))}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=plain, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}/"
    try:
        until_it_answers(f"{address}hub/api", process, 240)  # the first start installs
        yield SimpleNamespace(address=address, process=process, log=log)
    finally:
        stop(process)


def stop(process) -> None:
    """Ctrl-C: all processes of the terminal hear it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    process.wait(60)


def until_it_answers(address: str, process, seconds: float = 60) -> None:
    """Until there is a page; fails where the process that serves it has ended."""
    until = time.monotonic() + seconds
    while not _answers(address):
        assert process.poll() is None and time.monotonic() < until, f"no answer from {address}"
        time.sleep(0.3)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def three_free_ports() -> int:
    """The first of three in a row, below those that the system gives out by itself; two runs at once take others."""
    for first in (20000 + (os.getpid() + k) % 4000 * 3 for k in range(4000)):
        with closing(socket.socket()) as one, closing(socket.socket()) as two, closing(socket.socket()) as three:
            try:
                for k, each in enumerate((one, two, three)):
                    each.bind(("127.0.0.1", first + k))
            except OSError:
                continue
            return first
    raise OSError("no three ports in a row are free")
