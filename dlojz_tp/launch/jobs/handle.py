"""Job: what the user holds of a job, in this kernel or after a restart. All it knows is in the job's folder."""

import math
import os
import time
from pathlib import Path

from dlojz_tp.launch import loading
from dlojz_tp.launch.errors import RankError
from dlojz_tp.launch.jobs import files, here, outcome, slurm, view
from dlojz_tp.launch.jobs.options import JobError

POLL_S = 0.5
FILES_S = 6.0  # for a network file system to show the last files of a job that is over
SUBMIT_S = 120.0  # for sbatch to answer; a submission that was killed half-way leaves no id
LOADING_S = 30.0  # for a result, beside what a large one takes
FAILED_S = 8.0  # for Slurm to end the other ranks of a job that failed


class Job:
    """A job, submitted by `launch.job` or found again by `launch.last_job` and `launch.queue`.

    name: how it is remembered. folder: its private folder.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.name = self.folder.name
        self._facts = files.read(self.folder / "job.json")
        self._failed_at: float | None = None
        if self.folder.exists() and (why := files.refused(self.folder)):
            raise JobError(why)
        if not self._facts:
            raise JobError(f"there is no job {self.name}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._facts["nodes"] * self._facts["ranks_per_node"]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the job is over, and show how it goes: its state, the time, the last lines of its logs.

        An interrupt ends the waiting, not the job. Argument: timeout, seconds to wait at most (None: no limit).
        Errors: TimeoutError when the job is not over by then.
        """
        begin = time.monotonic()
        shown = view.View(self)
        while True:
            look = self.look()  # first, or the last lines of the log are lost
            shown.show(look)
            if look.over:
                return
            if timeout is not None and time.monotonic() - begin >= timeout:
                raise TimeoutError(f"{self.name} is not over after {timeout:g} s ({look.state}); it goes on")
            time.sleep(POLL_S)

    def results(self) -> list:
        """Wait for the job and return what its function returned, in rank order.

        Errors: RankError with the rank that failed first and its own traceback; BaliseNotDone where the function needs
        a balise that is not written; JobError for a job that was cancelled or never ran.
        """
        if not (look := self.look()).over:
            self.wait()
            look = self.look()
        if look.error:
            raise look.error from None
        return [self._result(rank) for rank in range(self.world_size)]

    def logs(self, rank: int | None = None) -> str:
        """What the ranks have printed so far.

        Argument: rank, the one to read (None: all, each line after "[rank 1] ", and first what the batch script said).
        Returns text. Errors: ValueError for a rank that the job does not have.
        """
        if rank is None:
            batch = _text(self.folder / "batch.log")
            parts = [_text(self.folder / f"rank-{r}.log") for r in range(self.world_size)]
            labelled = ["".join(f"[rank {r}] {line}\n" for line in text.splitlines()) for r, text in enumerate(parts)]
            return batch + "".join(labelled)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(f"{self.name} has the ranks 0 to {self.world_size - 1}, not {rank!r}")
        return _text(self.folder / f"rank-{rank}.log")

    def cancel(self) -> None:
        """End the job, waiting or running, and return when nothing of it is left; no effect on one that is over.

        Errors: JobError where Slurm does not allow it, or where the job runs on another machine.
        """
        if self.look(now=True).over:
            return
        (slurm if self._facts["place"] == "slurm" else here).cancel(self.folder, self._facts)
        if not self._is(now=True)[0]:
            raise JobError(f"{self.name} was told to end, and still does: look again in a minute with launch.queue()")
        if not (self.folder / "over.json").exists():
            self._remember("CANCELLED")

    def look(self, now: bool = False) -> "view.Look":
        """How the job is, without waiting. Argument: now, ask Slurm even if its last answer is fresh."""
        final = files.read(self.folder / "over.json")
        if not final:
            ended, state, reason = self._is(now)
            if not ended:
                return view.Look(state, reason, self._seconds(files.now()))
            final = self._remember(ended)
        ended = final["state"]
        error = outcome.error(self.folder, self._facts, ended)
        state = "cancelled" if ended.startswith("CANCELLED") and isinstance(error, JobError) else "failed"
        reason = str(error).partition("\n")[0] if error and state == "failed" else ""
        if not error and (self.folder / "alone").exists():
            reason = "Slurm's own process was killed: the job ended its allocation itself"
        seconds = self._seconds(final["at"])
        return view.Look(state if error else "done", reason, seconds, over=True, error=error)

    def _remember(self, ended: str) -> dict:
        """Write down how the job ended, once: Slurm forgets its jobs."""
        path = self.folder / "over.json"
        if not path.exists():
            files.write(path, {"state": ended, "at": files.now()})
        return files.read(path)

    def _is(self, now: bool) -> tuple[str, str, str]:
        """How the job ended ("" while it has not), its state in a word, and why it waits or where it runs."""
        facts, folder = self._facts, self.folder
        if facts.get("id") is None:
            young = files.now() - facts.get("submitted", 0) < SUBMIT_S
            return ("", "waiting", "being submitted") if young else ("NOT SUBMITTED", "", "")
        if facts["place"] == "here":
            running = here.alive(facts)
            return "" if running is not False else "KILLED", self._up(), f"on {facts['host']}" * (running is None)
        files.refresh(folder)
        if outcome.left(folder, self.world_size):
            return "COMPLETED", "", ""
        failed = outcome.failed(folder, self.world_size)
        state, reason, nodes = slurm.look([facts["id"]], now or failed)[facts["id"]]
        if slurm.over(state):
            self._await_files()
            return state, "", ""
        if failed:
            self._make_sure_it_ends()
        words = {"PENDING": ("waiting", reason), "RUNNING": (self._up(), nodes), "UNKNOWN": ("unknown", reason)}
        return "", *words.get(state, (state.lower(), nodes))

    def _make_sure_it_ends(self) -> None:
        """Cancel a job of which a rank has failed, should Slurm not end the others by itself."""
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > FAILED_S:
            self._failed_at = math.inf  # once
            slurm.cancel(self.folder, self._facts)

    def _await_files(self) -> None:
        limit = time.monotonic() + FILES_S
        any_up = any((self.folder / f"rank-{r}.log").exists() for r in range(self.world_size))
        while any_up and time.monotonic() < limit:
            if outcome.returned(self.folder, self.world_size) or outcome.failed(self.folder, self.world_size):
                return
            time.sleep(POLL_S)
            files.refresh(self.folder)

    def _up(self) -> str:
        up = all((self.folder / f"rank-{r}.up").exists() for r in range(self.world_size))
        return "running" if up else "starting"

    def _seconds(self, until: float) -> float:
        return max(0.0, until - self._facts.get("submitted", until))

    def _result(self, rank: int):
        try:
            with files.own(self.folder / f"rank-{rank}.result") as file:
                return loading.load(file, LOADING_S + os.fstat(file.fileno()).st_size / loading.SLOWEST)
        except loading.Unloadable as error:
            what, text = f"returned a value that {error.what}", error.text
        except Exception as error:
            what, text = "returned a value that cannot be loaded here", f"{type(error).__name__}: {error}"
        raise RankError(rank, self.world_size, "unsendable", what, text)

    def where(self) -> str:
        """The place and size, in words."""
        f = self._facts
        nodes = (
            f"{f['nodes']} node{'s' * (f['nodes'] > 1)} x {f['ranks_per_node']} rank{'s' * (f['ranks_per_node'] > 1)}"
        )
        return f"{nodes} {'on Slurm' if f['place'] == 'slurm' else 'on this machine'}"

    def __repr__(self):
        look = self.look()
        methods = ".results(), .logs()" if look.over else ".wait(), .results(), .logs(), .cancel()"
        return f"Job {self.name}: {look.words()}, {self.where()}  [{methods}]"

    def _repr_html_(self):
        return view.page(self, self.look(), [])


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
