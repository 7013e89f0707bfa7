"""On a machine with other users, none of them can read a kernel's code and output."""

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq
from jupyter_client import KernelManager
from traitlets.config import Config

from dlojz_tp.commands import doctor, lab, sockets

SOMEBODY = 65534  # nobody, on most machines
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel as `lab` has them started; gives its manager and its client."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(sockets.folder()))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    for argument in lab.lab_arguments(tmp_path, None, False, "secret"):
        if argument.startswith("--KernelManager."):
            name, _, value = argument.removeprefix("--KernelManager.").partition("=")
            config.KernelManager[name] = value
    manager = KernelManager(config=config, kernel_name="python3")
    manager.connection_file = str(sockets.folder() / f"kernel-{os.getpid()}.json")
    manager.start_kernel(stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def listen(addresses: list[str], seconds: float) -> int:
    """Bytes that come from any of the addresses within some seconds."""
    context, total = zmq.Context(), 0
    ear = context.socket(zmq.SUB)
    ear.subscribe(b"")
    for address in addresses:
        ear.connect(address)
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        if ear.poll(1000 * left):
            total += sum(map(len, ear.recv_multipart()))
    return total


def as_somebody(call) -> int:
    """Call a function in a child process that is another user; returns its number, at most 255."""
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(SOMEBODY)
        os.setuid(SOMEBODY)
        os._exit(min(255, call()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def addresses(manager) -> list[str]:
    """All at which the kernel's process listens; first where it prints."""
    process, info = psutil.Process(manager.provisioner.pid), manager.get_connection_info()
    ports = [link.laddr.port for link in process.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
    known = f"{info['transport']}://{info['ip']}{'-' if info['transport'] == 'ipc' else ':'}"
    named = [f"{known}{info[f'{name}_port']}" for name in ("iopub", "shell", "stdin", "control", "hb")]
    return named + [f"tcp://127.0.0.1:{port}" for port in ports]


@as_root
def test_another_user_gets_nothing_from_a_kernel(kernel):
    manager, client = kernel
    heard, where = [], addresses(manager)

    def talk():
        for _ in range(6):
            heard.append(client.execute_interactive("print('a secret')", output_hook=lambda _: None, timeout=20))
            time.sleep(0.2)

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        assert listen(where[:1], 0.5) > 100, "its owner reads it"
        assert as_somebody(lambda: listen(where, 0.7)) == 0
    finally:
        talking.join()
    assert [reply["content"]["status"] for reply in heard] == ["ok"] * 6
    assert (
        as_somebody(lambda: len(list(sockets.folder().iterdir())) if os.access(sockets.folder(), os.R_OK) else 0) == 0
    )


def test_a_long_temporary_folder_is_no_trouble(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    (tmp_path / ("x" * 60)).mkdir()
    found = sockets.folder()
    assert found.parent == Path("/tmp") and found.stat().st_mode & 0o777 == 0o700
    assert len(os.fsencode(found)) + 50 <= 107


@pytest.mark.parametrize("kind", ["open", "file", pytest.param("foreign", marks=as_root)])
def test_a_folder_that_others_can_enter_is_not_taken(monkeypatch, kind):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        found = sockets.folder()
        assert found.parent == Path(short)
        if kind == "open":
            found.chmod(0o755)
        if kind == "file":
            found.rmdir()
            found.touch()
        if kind == "foreign":
            os.chown(found, SOMEBODY, SOMEBODY)
        assert sockets.folder() != found


def test_without_a_private_folder_lab_and_doctor_say_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sockets, "folder", lambda: None)
    assert lab.main(["--no-browser", "--work", str(tmp_path / "work")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "private folder" in error
    (row,) = doctor._kernels()
    assert row.mark == "gap" and row.todo
    monkeypatch.undo()
    assert str(sockets.folder()) in doctor._kernels()[0].value
