"""`python -m dlojz_tp class FOLDER`: the verdicts of a class on one page of this machine, live; or as a table, CSV."""

import argparse
import asyncio
import hmac
import json
import logging
import secrets
import sys
import threading
import time
from pathlib import Path

from dlojz_tp.classroom import desk, drop, pace, reading
from dlojz_tp.data import folders
from dlojz_tp.works.source import ROOT

PAGE = Path(__file__).parent / "page"
KINDS = {
    "": ("board.html", "text/html"),
    "board.css": ("board.css", "text/css"),
    "board.js": ("board.js", "text/javascript"),
}
FRESH = 1.5  # seconds: a reading that is older is done again when the page asks
PATIENCE = 3.0  # seconds that the page waits for the folder
OLD = 15.0  # seconds: an older reading is said to be old
PORT = 8990
MEASURED = ROOT / "docs" / "measured_minutes.md"


def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 could not be done, 2 wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m dlojz_tp class", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="the class folder, that DLOJZ_CLASS names for trainees"
    )
    parser.add_argument("--make", action="store_true", help="make the folder, show nothing")
    parser.add_argument("--csv", action="store_true", help="print a line for each trainee and balise, serve nothing")
    parser.add_argument(
        "--minutes", action="store_true",
        help="print each balise's median minutes beside those stated, and write them to docs/measured_minutes.md",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, choices=range(1, 65536), metavar="PORT", help=f"on 127.0.0.1 [{PORT}, or a free one]"
    )
    options = parser.parse_args(argv)
    try:
        shared = folders.resolve(options.folder, "FOLDER")
        if options.make:
            return _make(shared)
        board = Board(shared)
        board.read()
        if options.csv:
            print(board.table(), end="")
            for line in board.left:
                print(f"class: {line}", file=sys.stderr)
            return 0
        if options.minutes:
            return _minutes(board)
        return serve(board, options.port)
    except folders.NoFolder as error:
        problem = str(error)
    except OSError as error:
        problem = f"{options.folder}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            problem += f" (`python -m dlojz_tp class {options.folder} --make` makes it)"
    print(f"class: {problem}", file=sys.stderr)
    return 1


def _minutes(board: "Board") -> int:
    found = pace.rows(board.now())
    print(pace.text(found), end="")
    print(f"class: {pace.keep(found, time.strftime('%Y-%m-%d'), MEASURED)}", file=sys.stderr)
    return 0


def _make(shared: Path) -> int:
    for line in drop.make(shared):
        print(f"class: {line}", file=sys.stderr)
    print(f"{shared} is ready. In the trainees' environment, before they start JupyterLab:\n")
    print(f"    export {drop.VARIABLE}={shared}\n\nand on this machine, for you:\n")
    print(f"    python -m dlojz_tp class {shared}")
    return 0


class Board:
    """The state of a class, read when asked for. trainees: {uid: Trainee}. left: what is not read, in lines."""

    def __init__(self, shared: Path):
        self.trainees: dict[int, desk.Trainee] = {}
        self.left: list[str] = []
        self._shared, self._reader = shared, reading.Reader(shared)
        self._view: dict = {}
        self._read_at, self._problem = 0.0, ""
        self._asked, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def read(self):
        """Take in what is new. Raises OSError where the folder cannot be read."""
        news = self._reader.news()
        with self._lock:
            for uid, told in news.items():
                if told or self._reader.aside[uid]:
                    self.trainees.setdefault(uid, desk.Trainee(uid)).hear(told)
            self._read_at = time.time()
            self._view = desk.class_view(list(self.trainees.values()), self._read_at)
            self.left = self._reader.warnings(desk.name_of)

    def now(self) -> dict:
        """What `desk.class_view` says of what was read."""
        with self._lock:
            return self._view

    def table(self) -> str:
        """All that is known, as CSV."""
        with self._lock:
            return desk.table(list(self.trainees.values()))

    def _read_when_asked(self):
        while self._asked.wait():
            try:
                self.read()
                self._problem = ""
            except OSError as error:
                self._problem = f"The folder cannot be read: {error.strerror or error}."
            self._asked.clear()

    async def view(self) -> dict:
        """What the page shows. A folder that does not answer leaves it as it was, with a warning."""
        if self._thread is None:  # a daemon: a dead folder must not hold the command when it is stopped
            self._thread = threading.Thread(target=self._read_when_asked, daemon=True)
            self._thread.start()
        if not 0 <= time.time() - self._read_at <= FRESH:  # also after the clock was set back
            self._asked.set()
        until = time.monotonic() + PATIENCE
        while self._asked.is_set() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        warnings = [self._problem] * bool(self._problem)
        if (late := time.time() - self._read_at) > OLD:
            warnings.append(f"What you see is {late:.0f} s old.")
        warnings += self.left
        return self._view | {"folder": str(self._shared), "warnings": warnings}


def application(board: Board, token: str):
    """The page, its state and its table, below an address that only who was told it can know."""
    from tornado import web

    class Handler(web.RequestHandler):
        def set_default_headers(self):
            self.set_header(
                "Content-Security-Policy",
                "default-src 'none'; style-src 'self'; script-src 'self'; "
                "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            )
            self.set_header("Referrer-Policy", "no-referrer")
            self.set_header("X-Content-Type-Options", "nosniff")
            self.set_header("Cache-Control", "no-store")
            self.clear_header("Server")

        async def get(self, given: str, what: str):
            if not hmac.compare_digest(given.encode(), token.encode()):
                raise web.HTTPError(403)
            if what == "state.json":
                self.set_header("Content-Type", "application/json")
                self.finish(json.dumps(await board.view()))
            elif what == "class.csv":
                await board.view()
                self.set_header("Content-Type", "text/csv; charset=utf-8")
                self.set_header("Content-Disposition", 'attachment; filename="class.csv"')
                self.finish(board.table())
            elif what in KINDS:
                name, kind = KINDS[what]
                self.set_header("Content-Type", f"{kind}; charset=utf-8")
                self.finish((PAGE / name).read_bytes())
            else:
                raise web.HTTPError(404)

        def write_error(self, status_code, **_):
            self.set_header("Content-Type", "text/plain")
            self.finish(
                {403: "Open the address that the command printed, with all that follows the port."}.get(status_code, "")
                + "\n"
            )

    return web.Application([(r"/([^/]*)/?(.*)", Handler)], compress_response=True)


def serve(board: Board, port: int | None) -> int:
    """Serve the page until Ctrl-C."""
    try:
        from tornado import netutil
        from tornado.httpserver import HTTPServer
    except ImportError:
        print("class: the page needs tornado, which comes with JupyterLab; --csv works without", file=sys.stderr)
        return 1
    try:
        sockets = netutil.bind_sockets(port or PORT, "127.0.0.1")
    except OSError as error:
        if port:
            print(
                f"class: port {port} cannot be used ({error.strerror or error}): give another --port, or none",
                file=sys.stderr,
            )
            return 1
        sockets = netutil.bind_sockets(0, "127.0.0.1")
    logging.getLogger("tornado.access").setLevel(logging.CRITICAL)
    token = secrets.token_urlsafe(24)

    async def run():
        HTTPServer(application(board, token)).add_sockets(sockets)
        address = f"http://127.0.0.1:{sockets[0].getsockname()[1]}/{token}/"
        print(f"The class board is ready:\n\n    {address}\n\nStop it here with Ctrl-C.", flush=True)
        await asyncio.Event().wait()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        print()
    return 0
