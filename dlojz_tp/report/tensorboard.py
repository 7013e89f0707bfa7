"""TensorBoard for one trainee: on this machine only, under a path that nobody can guess, gone when the kernel is."""

import atexit
import contextlib
import importlib.util
import json
import os
import re
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

SECONDS = 40  # a first start reads many files; on a busy file system that takes a while

# The child reads what to serve from its standard input, so that no list of processes shows the path, and it ends when
# that input ends: however this process ends, the system then closes it.
_SERVER = """
import json, os, sys, threading
given = json.loads(sys.stdin.readline())
def watch():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=watch, daemon=True).start()
from tensorboard import program
board = program.TensorBoard()
board.configure(argv=["tensorboard", "--logdir", given["folder"], "--host", "127.0.0.1", "--port", "0",
                      "--path_prefix", given["prefix"], "--load_fast", "false", "--reload_interval", "5"])
print("ADDRESS", board.launch(), flush=True)
threading.Event().wait()
"""
_running: dict[Path, "Board"] = {}


class Board:
    """A TensorBoard that was started. address: its page on this machine, None where it is not up; why: why not."""

    def __init__(self, folder: Path, process: subprocess.Popen | None, address: str | None, why: str = ""):
        self.folder, self.process, self.address, self.why = folder, process, address, why

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.address is not None and self.process.poll() is None

    def visit(self, page: str = "", seconds: float = 10.0) -> tuple[int | None, str]:
        """Ask for a page below the address: (HTTP status, text); (None, what went wrong) where nothing answers."""
        if not self.up:
            return None, self.why or "TensorBoard has ended"
        try:
            with _opener().open(self.address + page, timeout=seconds) as answer:
                return answer.status, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            return error.code, str(error)
        except OSError as error:
            return None, str(error)

    def show(self, height: int = 500):
        """The page in the notebook, where the browser is on this machine; elsewhere a line that says how to see it."""
        if not self.up or _automatic() or not _browser_here():
            print(self)
            return None
        from IPython.display import IFrame

        return IFrame(self.address, width="100%", height=height)

    def stop(self) -> None:
        """End it; a second time does nothing."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.address, self.why, self.process = None, "TensorBoard was stopped", None

    def __str__(self) -> str:
        if not self.up:
            return f"TensorBoard is not up: {self.why or 'it has ended'}"
        shown = self.address
        if _automatic():  # a notebook that is kept with its outputs keeps no secret
            shown = re.sub(r"(//[^/]*/).*", r"\1… (the secret path is shown to you alone)", shown)
        line = f"TensorBoard is up: {shown}"
        if not _browser_here():
            port = self.address.split(":")[2].split("/")[0]
            line += f"\nfrom your own machine, first: ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        return line

    __repr__ = __str__


def start(folder: str | os.PathLike, seconds: float = SECONDS) -> Board:
    """Start TensorBoard on a folder, wait until its page answers, and print one line: the address, or why not.

    It listens on 127.0.0.1 only, on a free port, below a random path: other users of the machine can neither reach it
    from outside nor guess where its pages are. It ends with `stop()`, or with this process, however that ends. Started
    again on the same folder, it is the one that runs.

    Args:
        folder: where scalars were written, by `torch.utils.tensorboard.SummaryWriter` for example.
        seconds: how long to wait for the page.

    Returns:
        A `Board`, also where nothing could be started: then its `address` is None.
    """
    folder = Path(folder).resolve()
    board = _running.get(folder)
    if board is None or not board.up:
        board = _running[folder] = _start(folder, seconds)
    print(board)
    return board


@atexit.register
def stop() -> None:
    """End every TensorBoard that this process has started."""
    while _running:
        _running.popitem()[1].stop()


def _start(folder: Path, seconds: float) -> Board:
    if importlib.util.find_spec("tensorboard") is None:
        return Board(folder, None, None, "it is not installed (pip install tensorboard)")
    if not folder.is_dir():
        return Board(folder, None, None, "there is no such folder yet: write something to it first")
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, start_new_session=True,
        )  # fmt: skip
        board = Board(folder, process, None)
        try:
            prefix = "/" + secrets.token_urlsafe(16)
            process.stdin.write(json.dumps({"folder": str(folder), "prefix": prefix}).encode() + b"\n")
            process.stdin.flush()
            board.address = _address(process.stdout, deadline)
            while board.up and board.visit(seconds=5)[0] != 200:
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(0.1)
            if not board.up:
                raise TimeoutError
        except (OSError, TimeoutError):
            late = time.monotonic() >= deadline  # one that has closed its output may still be on its way out
            board.stop()
            errors.seek(0)
            said = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
            board.why = f"no answer within {seconds:.0f} s" if late else (said or ["it ended at once"])[-1][:300]
        except BaseException:  # the trainee's interrupt, say
            board.stop()
            raise
    return board


def _address(pipe, deadline: float) -> str:
    """The address that the child prints once it listens. Raises TimeoutError, also where the child has ended."""
    text = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        some = os.read(pipe.fileno(), 4096)
        text += some
        found = re.search(rb"ADDRESS (http\S+)\s", text)
        if found:
            return found[1].decode().rstrip("/") + "/"
        if not some:
            break
    raise TimeoutError


def _opener():
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a centre's proxy does not know this machine


def _automatic() -> bool:
    """Whether this is a build or a test: nobody looks, and outputs are kept."""
    return bool(os.environ.get("DLOJZ_STRICT"))


def _browser_here() -> bool:
    """Whether the browser can be on this machine: not behind a hub, in a job, or at the other end of an ssh."""
    remote = ("JUPYTERHUB_USER", "JUPYTERHUB_SERVICE_PREFIX", "SSH_CONNECTION", "SLURM_JOB_ID")
    return not any(name in os.environ for name in remote)
