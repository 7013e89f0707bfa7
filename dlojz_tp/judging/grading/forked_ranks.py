"""The server that starts ranks, forked from a process that has all imported; a new one would import for seconds."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from dlojz_tp.launch import client, server
from dlojz_tp.launch.place import INSIDE
from dlojz_tp.works import temporary


def prepare() -> None:
    """Import what ranks need, once for all forks of this process."""
    for name in server.PRELOAD:
        importlib.import_module(name)


def start() -> None:
    """Fork this process's server; its launches find it. Call it before other code runs, and with one thread."""
    folder = Path(tempfile.mkdtemp(prefix=temporary.prefix("launch")))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            os.environ.update(client.CALM | {INSIDE: "server"})
            log = os.open(folder / "server.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.closerange(3, theirs.fileno())  # above all where the verdict goes
            os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            server.main({"fd": theirs.fileno(), "folder": str(folder)})
        finally:
            os._exit(0)
    theirs.close()
    client._server = client.Server(_Process(pid), ours, folder)


class _Process:
    """A child, with what the launcher asks of a subprocess.Popen."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """How it has ended; None if it has not."""
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                ended, status = self.pid, 0
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if limit is not None and time.monotonic() >= limit:
                raise subprocess.TimeoutExpired("server", timeout)
            time.sleep(0.002)
        return self.returncode

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
