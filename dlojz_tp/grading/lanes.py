"""Judge many answers, several at once: each lane is a watched child that judges answers to one work, one by one.

A child that ends or falls silent costs one failed verdict; what is left of its answers gets a new child.
"""

import collections
import contextlib
import multiprocessing.connection
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dlojz_tp.cards.verdict import Verdict
from dlojz_tp.grading import watched
from dlojz_tp.launch import busy
from dlojz_tp.works.source import Work

GRACE = 100.0  # seconds that a child may be silent: more than a right answer's lines and its check take
MOST = 150.0  # also on a busy machine
FRESH = "fresh"  # said in place of a verdict: the next file needs a new process
Job = tuple[Path, int]  # a file and a balise


def verdicts(
    judge: Callable, tasks: list[tuple[Work, list[Job]]], lanes: int = 1, grace: float = GRACE
) -> Iterator[tuple[Work, Job, Verdict]]:
    """The verdicts as they come; those of a task in its order.

    judge: runs in the child, `judge(say, work's name, jobs)`. lanes: children at once. grace: seconds of silence.
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
        self._start()

    def _start(self):
        self._opened = contextlib.ExitStack()
        named = [(str(path), number) for path, number in self.jobs]
        self.child = self._opened.enter_context(watched.child(self._judge, self.work.name, named))
        self._wait()

    def _wait(self):
        self._since, self._limit = time.perf_counter(), min(MOST, self._grace * busy.factor())

    def left(self) -> float:
        """Seconds until the child has been silent for too long."""
        return self._since + self._limit - time.perf_counter()

    def close(self):
        """End the child."""
        self._opened.close()

    def hear(self) -> Verdict | None:
        """What the child says, or that it is silent: the verdict on the first job; None where it only asks to end."""
        verdict, ends = None, True
        try:
            said = self.child.hear(0)
            if said is None:
                verdict = self._lost("endless", {"seconds": self._limit})
            elif said != FRESH:
                verdict, ends = Verdict(**said), False
        except (watched.Ended, TypeError) as end:
            how = str(end) if isinstance(end, watched.Ended) else "it wrote where the verdicts go"
            verdict = self._lost("left", {"error": how})
        if verdict:
            self.jobs = self.jobs[1:]
        if ends or not self.jobs:
            self.close()
            if self.jobs:
                self._start()
        else:
            self._wait()
        return verdict

    def _lost(self, slug, fields) -> Verdict:
        from dlojz_tp.checking.judging import COMMON_HINTS

        number, spent = self.jobs[0][1], time.perf_counter() - self._since
        title = self.work.balises[number].title
        return Verdict(number, title, "fail", spent, slug=slug, hint=COMMON_HINTS[slug].format(**fields))
