"""A trainee's side: each verdict becomes one small file in the class folder that DLOJZ_CLASS names; no code goes there.

Nobody waits for the folder: a thread writes. Where it cannot, that is said once, the verdicts wait in this process, and
are written when it can again.
"""

import atexit
import collections
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from dlojz_tp.cards.verdict import DONE
from dlojz_tp.classroom import drop
from dlojz_tp.works import whole_file

OPENED = "opened"  # the word of a work that was opened; its number is 0
RACED = "raced"  # the word of a race: no verdict, and no attempt
JUDGED = (*DONE, "fail")  # what counts as an attempt
PATIENCE = 0.25  # seconds that a verdict waits to hear of a fault
SLOW = 5.0  # seconds without an answer after which no verdict waits, and that is said
LAST = 3.0  # seconds for what still waits when the process ends
AGAIN = 30.0  # seconds until the next try of a folder that failed
MOST = 1000  # verdicts that wait; more are lost, newest first

_tellers: dict[tuple[str, int], "_Teller"] = {}
_said: set[str] = set()


def tell(work: str, number: int, word: str, hint: str = "", **result: float):
    """Put a verdict where the instructor sees it, if DLOJZ_CLASS is set. Never raises, never waits for long.

    hint: its name, such as "wrong-unit"; the words of a hint may quote code. result: of a race, its ratio and noise.
    """
    shared = os.environ.get(drop.VARIABLE)
    if not shared:
        return
    try:
        teller = _tellers.setdefault((shared, os.getpid()), _Teller(shared))  # threads do not outlive a fork
        said = {"work": work, "balise": number, "verdict": word, "hint": hint, "time": round(time.time(), 3)}
        teller.add(said | result)
        if teller.problem:
            _say(
                f"the class folder {shared} cannot be used ({teller.problem}). Your verdicts count as before; "
                "only the instructor's board does not show them."
            )
    except RuntimeError as error:  # no home, or no more threads
        _say(f"the class folder {shared} cannot be used ({error}): only the instructor's board misses your verdicts")


class _Teller:
    """Writes to one class folder. problem: why it could not the last time; empty where all is well."""

    def __init__(self, shared: str):
        self.problem = ""
        self._shared = shared
        self._folder: Path | None = None
        self._attempts: collections.Counter[tuple[str, int]] = collections.Counter()
        self._waiting: collections.deque[dict] = collections.deque()
        self._lock, self._there, self._tried = threading.Lock(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, verdict: dict):
        """Hand over a verdict."""
        with self._lock:
            if len(self._waiting) >= MOST:
                return
            late = bool(self._waiting) and verdict["time"] - self._waiting[0]["time"] > SLOW
            self._waiting.append(verdict)
            self._tried.clear()
        self._there.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dlojz class", daemon=True)
            self._thread.start()
            atexit.register(self._tried.wait, LAST)
        if late:
            self.problem = self.problem or "it does not answer"
        else:
            self._tried.wait(PATIENCE)  # a folder that is missing or full is named at once

    def _run(self):
        while True:
            self._there.wait(AGAIN if self._waiting else None)
            self._there.clear()
            problem = ""
            try:
                while self._waiting:
                    self._write(self._waiting[0])
                    self._waiting.popleft()
            except (OSError, RuntimeError) as error:
                problem = getattr(error, "strerror", None) or str(error)
                self._folder = None
            self.problem = problem
            with self._lock:
                if problem or not self._waiting:
                    self._tried.set()

    def _write(self, verdict: dict):
        if self._folder is None:
            folder = drop.own(Path(self._shared).expanduser().absolute())
            for path in folder.iterdir():
                with contextlib.suppress(ValueError):
                    work, number, attempts, _ = path.name.removesuffix(".json").split(".")
                    key = work, int(number)
                    self._attempts[key] = max(self._attempts[key], int(attempts))
            self._folder = folder
        key = verdict["work"], verdict["balise"]
        if "attempts" not in verdict:
            self._attempts[key] += verdict["verdict"] in JUDGED
            verdict["attempts"] = self._attempts[key]
        name = f"{key[0]}.{key[1]}.{verdict['attempts']}.{time.time_ns()}.json"
        whole_file.replace(self._folder / name, ".", json.dumps(verdict).encode(), 0o644)


def _say(line: str):
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr)
