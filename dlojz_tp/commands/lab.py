"""`python -m dlojz_tp lab`: bring the course's notebooks into `work/` and open JupyterLab there."""

import argparse
import importlib.util
import os
import secrets
import socket
import sys
from pathlib import Path

from dlojz_tp import index
from dlojz_tp.commands import sockets
from dlojz_tp.commands.copies import LEVELS, LabError, create, renew, sync
from dlojz_tp.commands.doctor import to_install
from dlojz_tp.data import folders
from dlojz_tp.works import shadowing, state

CHECKOUT = Path(__file__).resolve().parents[2]
BEFORE_FIRST_CELL = Path(__file__).parent / "lab_settings" / "before_first_cell.py"  # each kernel runs it
PAGE = f"/lab/tree/{index.NAME}"  # beside what was open last
SETTINGS = Path(__file__).parent / "lab_settings"
LAYOUT = Path(".jupyterlab", "default-37a8.jupyterlab-workspace")  # the name that jupyterlab_server gives it


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 could not be done, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="dlojz_tp lab", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=usual_work(), help="folder of your copies [%(default)s]")
    parser.add_argument("--port", type=_port, help="port on 127.0.0.1 [8888, or the next free one]")
    parser.add_argument("--no-browser", action="store_true", help="print the address, open no browser")
    parser.add_argument("--sync-only", action="store_true", help="bring the notebooks, start nothing")
    parser.add_argument("--level", choices=LEVELS, help="open: write each balise from its names alone [as last time]")
    parser.error = lambda message: parser.exit(2, f"dlojz_tp lab: {message} (--help shows all)\n")
    args = parser.parse_args(argv)
    work = args.work
    try:
        work = folders.resolve(args.work, "--work")
        for line in bring(work, args.level):
            print(line, flush=True)
        if not args.sync_only:
            start(work, args.port, browser=not args.no_browser)
        return 0
    except (LabError, folders.NoFolder) as error:
        problem = str(error)
    except OSError as error:
        problem = folders.explain(error, work, "--work")
    except KeyboardInterrupt:
        problem = "interrupted"
    print(f"dlojz_tp lab: {problem}", file=sys.stderr)
    return 1


def bring(work: Path, level: str | None = None) -> list[str]:
    """Bring the notebooks and the map of now into `work`; one line a notebook that changed, or a file in the way."""
    lines = sync(CHECKOUT / "notebooks", work, level or _asked())
    return lines + renew(index.NAME, index.notebook(state.folder(work)), work) + shadowing.lines(work)


def _asked() -> str | None:
    """The level that the environment asks for, which an instructor sets for a class; None where it does not."""
    level = os.environ.get("DLOJZ_LEVEL") or None
    if level not in (None, *LEVELS):
        raise LabError(f"DLOJZ_LEVEL is {level!r}: it must be one of {', '.join(LEVELS)}")
    return level


def usual_work() -> Path:
    """`work/` in the checkout; a folder in the user's home where the checkout belongs to somebody else."""
    work = CHECKOUT / "work"
    return work if os.access(work if work.exists() else CHECKOUT, os.W_OK) else Path("~/dlojz-tp")


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 65535, got {text!r}")
    return int(text)


def lab_arguments(work: Path, port: int | None, browser: bool, token: str) -> list[str]:
    """JupyterLab's arguments: this machine only, with a token, and the course's settings."""
    return [
        "--ServerApp.ip=127.0.0.1",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.open_browser={browser}",
        f"--ServerApp.port={port or 8888}",
        f"--ServerApp.port_retries={0 if port else 50}",
        *settings(work),
    ]


def settings(work: Path) -> list[str]:
    """The arguments of every JupyterLab of the course: in `work`, and nothing fetched from outside."""
    arguments = [
        f"--ServerApp.root_dir={work}",
        "--ServerApp.contents_manager_class=dlojz_tp.commands.lab_contents.Contents",  # the map is always that of now
        f"--LabApp.default_url={PAGE}",
        "--Application.log_level=ERROR",  # warnings are for who runs a server; the address must not drown in them
        "--LabApp.news_url=None",
        f"--LabApp.app_settings_dir={SETTINGS}",  # no question about news to answer
        f"--LabApp.workspaces_dir={work / LAYOUT.parent}",  # where the windows of other projects are not
        "--KernelManager.transport=ipc",  # any user of the machine can read from a kernel's ports
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]
    return [*arguments, "--ServerApp.allow_root=True"] if os.getuid() == 0 else arguments


def start(work: Path, port: int | None, browser: bool) -> None:
    """Run JupyterLab until it is stopped. Raises LabError where it is not installed or the port is taken."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise LabError(f"JupyterLab is not installed: {to_install('jupyterlab>=4.4')}")
    if port is not None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                why = error.strerror or error
                raise LabError(f"port {port} cannot be used ({why}): give another --port, or none") from error
    prepare(work)
    from jupyterlab.labapp import LabApp
    from tornado.ioloop import IOLoop

    # Started in this process, so that the token shows in no list of processes and the address is known when printed.
    token = secrets.token_hex(24)
    server = LabApp.initialize_server(argv=lab_arguments(work, port, browser, token))
    loop = IOLoop.current()

    def announce():
        """Say the address once the server listens: it may have moved to another port until then."""
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", server.port)):
                loop.call_later(0.05, announce)
                return
        address = f"http://127.0.0.1:{server.port}{server.base_url.rstrip('/')}{PAGE}?token={token}"
        print(f"\nJupyterLab is ready in {work}\n\n    {address}\n\nStop it here with Ctrl-C, twice.", flush=True)

    loop.add_callback(announce)
    server.start()


def prepare(work: Path) -> None:
    """Before JupyterLab runs in `work`: a place for its sockets, a layout, variables for the kernels."""
    if (private := sockets.folder()) is None:
        raise LabError(
            "no private folder for the kernels' sockets can be made in /tmp or /dev/shm: free some space there"
        )
    os.environ["JUPYTER_RUNTIME_DIR"] = str(private)  # short: Jupyter's own, in the home, may be too long for a socket
    if not (work / LAYOUT).exists():  # a column wide enough for the names; what the trainee moves later stays
        (work / LAYOUT).parent.mkdir(exist_ok=True)
        create(work / LAYOUT, (SETTINGS / LAYOUT.name).read_bytes())
    # Kernels must find the package also where it is not installed.
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # threads that wait must not spin: loader workers and ranks need the same few cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("PYTHONSTARTUP", str(BEFORE_FIRST_CELL))
    os.chdir(work)
