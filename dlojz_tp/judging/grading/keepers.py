"""Judge many answers, several at once: each lane is a keeper that judges answers to one work, one by one.

An answer that never ends costs one failed verdict; what is left of its lane gets a new keeper. Where the machine is at
fault, the answer is judged once more, and then there is no verdict on it.
"""

import collections
import contextlib
import multiprocessing.connection
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dlojz_tp.cards.verdict import BROKEN, DONE, EDGE, Verdict
from dlojz_tp.judging.grading import watched
from dlojz_tp.launch import busy, patience, proc
from dlojz_tp.works.source import Work

START = 120.0  # seconds for the imports
GRACE = 100.0  # seconds for one answer: more than a right answer's lines and its check take
BUDGET = 60.0  # seconds that answers which never end may take of one file; from then on each of its answers has LEAST
LEAST = 15.0
# All are seconds in which the processes could compute. Times MOST, the clock ends them: the machine is at fault.
MOST = patience.MOST
LOOK_S = 2.0
NO_VERDICT = 3  # an exit status
WORDS = (*DONE, "by catch_up", "fail", "not done", BROKEN)
Job = tuple[Path, int]  # a file and a balise


def verdicts(
    judge: Callable, tasks: list[tuple[Work, list[Job]]], lanes: int = 1, grace: float = GRACE
) -> Iterator[tuple[Work, Job, Verdict]]:
    """The verdicts as they come; those of a task in its order.

    judge: `judge(work's name)` imports in the keeper, and returns what judges one job: see watched.child. lanes: how
    many keepers at once. grace: seconds for one answer.
    """
    waiting = collections.deque(tasks)
    running: list[_Lane] = []
    try:
        while waiting or running:
            while waiting and len(running) < lanes:
                running.append(_Lane(judge, *waiting.popleft(), grace))
            left = min(lane.left() for lane in running)
            heard = multiprocessing.connection.wait([lane.child.pipe for lane in running], max(left, 0))
            for lane in list(running):
                if lane.child.pipe in heard or lane.left() <= 0:
                    job = lane.jobs[0]
                    if verdict := lane.hear():
                        yield lane.work, job, verdict
                    if not lane.jobs:
                        running.remove(lane)
    finally:
        for lane in running:
            lane.close()


class _Lane:
    """One task on its way. jobs: what is still to be judged."""

    def __init__(self, judge, work: Work, jobs: list[Job], grace: float):
        self.work, self.jobs = work, jobs
        self._judge, self._grace = judge, grace
        self._tries = 0  # of the first job, in which the machine was at fault
        self._endless: dict[Path, dict[int, float]] = collections.defaultdict(dict)  # balise -> seconds that it took
        self._start()

    def _start(self):
        self._opened = contextlib.ExitStack()
        named = [[str(path), number] for path, number in self.jobs]
        self.child = self._opened.enter_context(watched.child(self._judge, self.work.name, jobs=named))
        self._begun = False
        self._wait(START)

    def _wait(self, given: float):
        self._since, self._given = time.perf_counter(), given
        self._until = self._since + given

    def left(self) -> float:
        """Seconds until somebody must look whether all goes well."""
        return self._until - time.perf_counter()

    def close(self):
        """End the keeper and all below it."""
        self._opened.close()

    def hear(self) -> Verdict | None:
        """What there is to hear, or that it is late: the verdict on the first job, if there is one by now."""
        try:
            news = self.child.hear(0)
        except watched.Ended as end:
            if str(end) == watched.WROTE:
                return self._restarted(self._left(str(end)))
            return self._again(f"the process that starts the answers ended ({end})")
        if news is None:
            return self._late() if self.left() <= 0 else None
        if "job" not in news:
            return None
        if "pid" in news:
            self._begun = True
            spent = sum(self._endless[self.jobs[0][0]].values())
            self._wait(self._grace if spent < BUDGET else min(LEAST, self._grace))
            return None
        return self._done(self._verdict(news))

    def _verdict(self, news: dict) -> Verdict:
        if "said" in news:
            with contextlib.suppress(TypeError):
                found = Verdict(**news["said"])
                texts = found.title, found.slug, found.hint, found.got
                sound = isinstance(found.seconds, int | float) and all(isinstance(text, str) for text in texts)
                if sound and found.balise == self.jobs[0][1] and found.verdict in WORDS:
                    return found
            return self._left(watched.WROTE)
        if news["own"]:
            return self._left(news["lost"])
        return self._broken(f"{news['lost']}, twice, and not by the answer as far as can be seen")

    def _done(self, verdict: Verdict) -> Verdict:
        """The first job is judged."""
        path, number = self.jobs[0]
        if verdict.slug == "endless":
            self._endless[path][number] = time.perf_counter() - self._since
        self.jobs, self._tries = self.jobs[1:], 0
        if self.jobs:
            self._begun = False
            self._wait(START)
        else:
            self.close()
        return verdict

    def _restarted(self, verdict: Verdict) -> Verdict:
        self.close()
        self._done(verdict)
        if self.jobs:
            self._start()
        return verdict

    def _late(self) -> Verdict | None:
        below = _below(self.child.pid)
        sessions = {session for session in below.values() if session != self.child.pid or not self._begun}
        spent = time.perf_counter() - self._since
        had = any(share.used >= self._given for share in patience.shares(sessions).values())
        over = spent >= MOST * self._given
        more = 0.0 if over else patience.more_time(dict.fromkeys(sessions, True), spent, self._given)
        if not had and not over:  # ranks that have ended waited too, which only the load tells
            more = max(more, self._given * busy.factor() - spent)
        if more > 0:
            self._until = time.perf_counter() + min(more, LOOK_S)
            return None
        if any(proc.stopped(pid) for pid in below):
            return self._again("it was stopped by a signal, from outside as far as can be seen")
        if not self._begun:
            return self._again(f"the machine is too busy: after {spent:.0f} s the check was not imported")
        if not had and over:
            return self._again(f"the machine is too busy: in {spent:.0f} s the answer had less than {self._given:.0f}")
        path = self.jobs[0][0]
        if self._given < self._grace:
            others = ", ".join(map(str, self._endless[path]))
            what = f"answers that never end ({others}) took this file's time; {self._given:.0f} s were too few here"
            return self._restarted(self._broken(what, "Mend those answers, then judge this file again."))
        return self._restarted(self._failed("endless", seconds=self._given))

    def _again(self, what: str) -> Verdict | None:
        """The machine was at fault: once more, in a new keeper; then there is no verdict."""
        self._tries += 1
        if self._tries > 1:
            return self._restarted(self._broken(what))
        self.close()
        self._start()
        return None

    def _left(self, how: str) -> Verdict:
        return self._failed("left", error=how)

    def _failed(self, slug, **fields) -> Verdict:
        from dlojz_tp.judging.checking.verdicts import COMMON_HINTS

        return self._made("fail", slug=slug, hint=COMMON_HINTS[slug].format(**fields))

    def _broken(self, what: str, todo: str = "Judge this file again, when the machine does less.") -> Verdict:
        return self._made(BROKEN, got=what, hint=f"This says nothing of the answer. {todo}")

    def _made(self, word, **more) -> Verdict:
        number = self.jobs[0][1]
        return Verdict(number, self.work.balises[number].title, word, time.perf_counter() - self._since, **more)


def _below(top: int) -> dict[int, int]:
    """{process: its session} of a process and of all that descend from it."""
    parents, sessions = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = proc.fields(process)
            parents[int(process.name)], sessions[int(process.name)] = int(fields[1]), int(fields[3])
    found, new = set(), {top}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in found} - found
    return {pid: sessions[pid] for pid in found if pid in sessions}


def status(words: set[str], strict: bool) -> int:
    """The exit status of `check` for these verdicts; strict: robust answers alone pass."""
    left = words - set(("pass",) if strict else DONE)
    return NO_VERDICT if left == {BROKEN} else 1 if left else 0


def counted(verdicts: list) -> str:
    """How many passed, in words: "5 of 7 passed, 1 of them not yet robust, 1 by catch_up"."""
    robust, edge, given = (sum(v.verdict == word for v in verdicts) for word in ("pass", EDGE, "by catch_up"))
    said = f"{robust + edge} of {len(verdicts)} passed" + f", {edge} of them {EDGE}" * bool(edge)
    return said + f", {given} by catch_up" * bool(given)
