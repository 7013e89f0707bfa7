"""How the ranks of a job ended, read from its folder, and the one error to show, root cause first."""

import base64
import math
import signal
from dataclasses import dataclass, field
from pathlib import Path

from dlojz_tp.launch import errors
from dlojz_tp.launch.jobs import files
from dlojz_tp.launch.jobs.options import JobError

LAST_LINES = 8
REASONS = {
    "KILLED": "was ended from outside: the process that kept it was killed",
    "NOT SUBMITTED": "was never submitted: the process that did so ended before it was done",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "was ended by Slurm at its time limit: ask for more with minutes=",
    "OUT_OF_MEMORY": "was ended by Slurm: out of memory",
    "NODE_FAIL": "was ended by Slurm: a node failed",
    "PREEMPTED": "was ended by Slurm to make room for another job",
}
FAILED = ("ENDED", "FAILED", "COMPLETED", "GONE")  # ends for which a rank's sudden death is the reason


@dataclass
class Member:
    """What the folder tells of one rank."""

    rank: int
    state: str = "starting"  # then "running", then "returned" or "failed"
    report: dict = field(default_factory=dict)
    failed_at: float = math.inf  # seconds since the epoch
    late: bool = False  # it was ended at the job's own limit
    terminated: bool = False  # by the signal with which Slurm ends a job
    stack: str = ""
    pid: int = -1  # it may have run on another machine, and is over: no process to look at

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    @property
    def done(self) -> bool:
        return self.state in ("returned", "failed")


def members(folder: Path, n: int, over: bool) -> list[Member]:
    """Read how the `n` ranks of a job are. `over`: the job has ended, so that a rank without an end was killed."""
    return [_member(folder, rank, over) for rank in range(n)]


def returned(folder: Path, n: int) -> bool:
    """Whether all ranks have stored their results."""
    return all((folder / f"rank-{rank}.result").exists() for rank in range(n))


def left(folder: Path, n: int) -> bool:
    """Whether all ranks have returned, and nothing of them runs any more."""
    ends = (files.read(folder / f"rank-{rank}.end") for rank in range(n))
    return all(end.get("why") == "returned" for end in ends)


def failed(folder: Path, n: int) -> bool:
    """Whether a rank has ended otherwise than by returning."""
    ends = (files.read(folder / f"rank-{rank}.end") for rank in range(n))
    return any(end.get("why", "returned") != "returned" for end in ends)


def _member(folder: Path, rank: int, over: bool) -> Member:
    def file(kind: str) -> Path:
        return folder / f"rank-{rank}.{kind}"

    end = files.read(file("end"))
    m = Member(rank, state="running" if file("up").exists() else "starting", late=end.get("why") == "late")
    if file("stack").exists():
        m.stack = file("stack").read_text(errors="replace")
    if file("result").exists():
        m.state = "returned"
    elif file("report").exists():
        m.report = _report(file("report"))
        if not m.report.get("waited"):  # one that waited too long is not at fault: it counts as hung
            m.state, m.failed_at = "failed", m.report.get("at", end.get("at", math.inf))
    elif end.get("why") == "ended":
        m.state, m.report, m.failed_at = "failed", errors.ended_early(end["code"], m.stack), end["at"]
        m.terminated = end["code"] == -signal.SIGTERM
    elif over and not end and file("log").exists():
        summary = "ended without a word: it was killed from outside, or its node failed"
        m.state, m.report = "failed", {"kind": "died", "summary": summary}
    return m


def write_report(folder: Path, rank: int, report: dict) -> None:
    """Store how a rank failed. The exception itself is the one part that has to be pickled."""
    cause = report.get("cause")
    files.write(folder / f"rank-{rank}.report", report | {"cause": cause and base64.b64encode(cause).decode()})


def _report(path: Path) -> dict:
    report = files.read(path)
    if "kind" not in report or "summary" not in report:
        return {"kind": "died", "summary": "failed, and its report cannot be read"}
    return report | {"cause": base64.b64decode(report["cause"]) if report.get("cause") else None}


def error(folder: Path, facts: dict, state: str) -> Exception | None:
    """The error to raise for a job that is over, or None when all its ranks returned.

    Arguments: folder, the job's; facts, of job.json; state, how the job ended ("ENDED" or a state of Slurm's).
    """
    n = facts["nodes"] * facts["ranks_per_node"]
    if returned(folder, n):
        return None
    ranks = members(folder, n, over=True)
    silent = [m for m in ranks if m.failed and math.isinf(m.failed_at)]
    told = [m for m in ranks if m.failed and m not in silent]
    hung = any(m.late or m.report.get("waited") for m in ranks)
    at_fault = [m for m in told if not m.report.get("lost_peer") and not (m.terminated and state != "ENDED")]
    if state.startswith("CANCELLED") and not at_fault and not hung:
        return JobError(f"{facts['name']} was cancelled")
    if hung and not at_fault:
        for m in told + silent:
            m.state = "running"  # ended because of the ranks that hung
        return _hung(ranks, facts)
    if at_fault:
        for m in silent:
            m.state = "running"  # killed with the job: no cause
    if at_fault or (told and not state.startswith(tuple(REASONS))) or (silent and state in FAILED):
        return errors.root_cause(ranks)
    return JobError(_without_word(folder, facts, state))


def _hung(ranks: list[Member], facts: dict) -> Exception:
    limit = facts["minutes"] * 60
    waited = any(m.report.get("waited") for m in ranks)
    if not waited and any(m.state == "starting" for m in ranks):
        return OutOfTime(errors.never_started(ranks, limit), facts["minutes"])
    dumps = {m.rank: m.stack for m in ranks if not m.done}
    error = errors.hung(ranks, dumps, facts["collective_timeout"] if waited else limit)
    at_work = not waited and None in error.waits.values()  # slow, or stuck: nobody can tell
    return OutOfTime(error, facts["minutes"]) if at_work else error


class OutOfTime(errors.RankError):
    """The job's time was over while a rank started or was at work; else like the error that it is made of."""

    def __init__(self, error: errors.RankError, minutes: float):
        Exception.__init__(self, *error.args)
        vars(self).update(vars(error), minutes=minutes)

    @property
    def summary(self) -> str:
        """One line."""
        said = super().summary.replace(" hung: ", ": ", 1)
        return f"{said}; its {self.minutes:g} min were over: if it only needs longer, ask for more with minutes="


def _without_word(folder: Path, facts: dict, state: str) -> str:
    """One line for a job of which no rank could tell anything, then the last lines of its batch log."""
    word = state.split(" ")[0]
    reason = REASONS.get(word, f"ended before its ranks could run ({word.lower()})")
    lines = files.tail(folder / "batch.log", LAST_LINES)
    return "\n".join([f"{facts['name']} {reason}", *(f"  {line}" for line in lines)])
