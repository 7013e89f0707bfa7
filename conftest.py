"""For all tests and notebooks: nothing is written outside the checkout, and a wrong verdict is an error."""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path, PurePath

import nbval.kernel
import pytest
from jupyter_client import KernelManager
from xdist.scheduler import LoadFileScheduling

if "DLOJZ_STATE" not in os.environ:  # the first process makes the folder and removes it; its workers inherit it
    os.environ["DLOJZ_STATE"] = tempfile.mkdtemp(prefix="dlojz-state-")
    atexit.register(shutil.rmtree, os.environ["DLOJZ_STATE"], ignore_errors=True)
os.environ.setdefault("DLOJZ_STRICT", "1")
os.environ.pop("DLOJZ_CLASS", None)  # no test is a trainee of a real class
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers share the cores: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def kernel_without_ports(**options) -> KernelManager:
    """As in `lab`. A port that is free when Jupyter chooses it may be a rank's before the kernel is up."""
    folder = tempfile.mkdtemp(prefix="kernel-", dir=os.environ["DLOJZ_STATE"])
    return KernelManager(transport="ipc", ip=str(Path(folder, "socket")), **options)


nbval.kernel.KernelManager = kernel_without_ports

if os.environ.get("DLOJZ_PRETENDED_GPUS"):  # a rehearsal of the tests marked gpu
    from dlojz_tp.judging.pretend_gpu import rehearsed

    rehearsed.enter()

pytest_plugins = ["tests.skip_unchanged", "tests.cpu_seconds"]


@pytest.hookimpl(tryfirst=True)  # before a kernel is started, which inherits it
def pytest_runtest_setup(item):
    """Notebooks are tested for what runs in them: their times would say nothing beside other workers."""
    os.environ["DLOJZ_BRIEF"] = str(int(item.path.suffix == ".ipynb"))


@pytest.fixture
def interruptible():
    """What the test starts can be interrupted, also where a shell lets a job in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def small_servers():
    """Servers of ranks start quickly: for a file that ends many."""
    from tests import small_server

    undo = small_server.use()
    yield
    undo()


class ByWork(LoadFileScheduling):
    """A file stays in one worker; the answers, half of all the time, go by practical work and balise.

    A work's two notebooks run one after the other, so that the second finds what torch.compile made for the first.
    """

    def _split_scope(self, nodeid):
        file, _, test = nodeid.partition("::")
        if file.endswith(".ipynb"):
            return PurePath(file).name
        return f"{file} {test.split('-')[:2]}" if test.startswith("test_answer[") else file


def pytest_xdist_make_scheduler(config, log):
    """In place of `--dist loadfile`."""
    return ByWork(config, log) if config.getvalue("dist") == "loadfile" else None
