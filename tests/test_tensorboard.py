"""TensorBoard: up on this machine alone, below a secret path, and gone when it should be."""

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from dlojz_tp.report import tensorboard

needs_it = pytest.mark.skipif(not tensorboard.importlib.util.find_spec("tensorboard"), reason="not installed")


@pytest.fixture
def folder(tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path / "run")
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    yield tmp_path
    tensorboard.stop()


@needs_it
def test_it_answers_below_its_path_only(folder, monkeypatch, capsys):
    for name in ("DLOJZ_STRICT", "JUPYTERHUB_USER", "JUPYTERHUB_SERVICE_PREFIX", "SSH_CONNECTION", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    board = tensorboard.start(folder)
    assert board.up and capsys.readouterr().out == f"TensorBoard is up: {board.address}\n"
    status, page = board.visit()
    assert status == 200 and "<title>TensorBoard</title>" in page
    assert board.visit("data/runs") == (200, '["run"]')
    root, prefix = board.address.rstrip("/").rsplit("/", 1)
    assert len(prefix) >= 20
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(root + "/", timeout=10)
    # on the loopback alone, and no list of processes shows the path
    server = psutil.Process(board.process.pid)
    assert {c.laddr.ip for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    assert prefix not in " ".join(server.cmdline())
    assert tensorboard.start(folder) is board  # a second call finds the first
    monkeypatch.setenv("DLOJZ_STRICT", "1")  # kept outputs hold no secret
    assert prefix not in str(board) and board.show() is None
    monkeypatch.delenv("DLOJZ_STRICT")
    assert prefix in board.show().src
    monkeypatch.setenv("SSH_CONNECTION", "there here")
    assert "ssh -N -L" in str(board)
    board.stop()
    assert not board.up and not server.is_running() and board.visit() == (None, "TensorBoard was stopped")
    board.stop()


SCRIPT = """
import sys, time
from dlojz_tp.report import tensorboard
board = tensorboard.start(sys.argv[1])
print("PID", board.process.pid, flush=True)
time.sleep(60)
"""


@needs_it
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(folder, how):
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("PID"))
        assert psutil.pid_exists(pid)
    finally:
        parent.send_signal(how)
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < deadline, "TensorBoard outlived the process that started it"
        time.sleep(0.1)


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_why_not(tmp_path, monkeypatch, capsys):
    board = tensorboard.start(tmp_path / "nothing")
    assert not board.up and board.address is None and board.show() is None
    assert "no such folder" in capsys.readouterr().out
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    board = tensorboard.start(tmp_path)
    assert "pip install tensorboard" in str(board) and board.visit()[0] is None
    tensorboard.stop()


def test_a_server_that_fails_or_hangs_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: True)
    fails = "raise SystemExit('the disk is on fire')"
    for server in (fails, f"import os, time; os.close(1); time.sleep(0.5); {fails}"):  # the second is slow to go
        monkeypatch.setattr(tensorboard, "_SERVER", server)
        board = tensorboard.start(tmp_path)
        assert str(board) == "TensorBoard is not up: the disk is on fire"
    monkeypatch.setattr(tensorboard, "_SERVER", "import time; time.sleep(60)")
    board = tensorboard.start(tmp_path, seconds=0.5)
    assert "no answer within" in str(board) and board.process is None
