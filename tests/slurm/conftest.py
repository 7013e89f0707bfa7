"""These tests submit to the Slurm that `make test-slurm` starts on this machine, never to a centre's own."""

import os
import subprocess
import time

import psutil
import pytest


def pytest_collection_modifyitems(items):
    if "DLOJZ_TEST_SLURM" not in os.environ:
        skip = pytest.mark.skip(reason="no Slurm of its own is up: `make test-slurm` starts one and runs this")
        for item in items:
            if item.get_closest_marker("slurm"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    """A state folder and a configuration of its own for each test; afterwards no job and no process is left."""
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("DLOJZ_SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DLOJZ_SLURM_ENVIRONMENT", "GLOO_SOCKET_IFNAME=lo")  # all nodes are this machine
    monkeypatch.setenv("DLOJZ_SLURM_GPUS_PER_NODE", "4")
    monkeypatch.setenv("DLOJZ_SLURM_CPUS_PER_TASK", "1")
    yield
    limit = time.monotonic() + 10
    while left := in_queue() + processes(tmp_path):
        assert time.monotonic() < limit, left
        time.sleep(0.1)


def in_queue(*options: str) -> list[str]:
    """Jobs that wait or run; of those, what the options of squeue name."""
    command = ["squeue", "--noheader", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()


def processes(folder) -> list[str]:
    """Processes that belong to jobs whose folders lie in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(words))
    return found
