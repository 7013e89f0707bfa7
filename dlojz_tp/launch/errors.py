"""The one error to show when ranks fail: root cause first."""

import os
import pickle
import signal

from dlojz_tp.launch import stacks
from dlojz_tp.launch.stacks import with_cells
from dlojz_tp.launch.started import Rank
from dlojz_tp.works.balise import BaliseNotDone

HINTS = {
    "SIGKILL": " (often the system is out of memory)",
    "SIGSEGV": " (a crash in compiled code)",
    "SIGABRT": " (compiled code gave up)",
}


class RankError(Exception):
    """A function that ran on ranks did not finish on all of them.

    rank: the rank to look at first. world_size: number of ranks.
    kind: "raised" (an exception), "died" (killed by a signal), "exited" (the process ended by itself),
    "hung" (still running at the deadline) or "unsendable" (its result cannot be pickled).
    summary: one line. traceback: the user's own lines on that rank, as text.
    stacks: for "hung", rank -> stack as text. cause: for "raised", the exception where it can be pickled, else None.
    """

    def __init__(self, rank, world_size, kind, summary, traceback="", stacks=None, cause=None):
        super().__init__(rank, world_size, kind, summary, traceback, stacks, cause)
        self.rank, self.world_size, self.kind = rank, world_size, kind
        self.summary, self.traceback = summary, with_cells(traceback)
        self.stacks = stacks or {}
        self.cause = cause

    def __str__(self):
        return f"{self.summary}\n{self.traceback}" if self.traceback else self.summary

    def in_words(self) -> str:
        """The summary and, for an exception or a crash, the line of the user's where it came."""
        lines = stacks.QUOTED_LINE.findall(self.traceback) if self.kind in ("raised", "died") else []
        return self.summary + "".join(
            f"\n{file.rpartition(os.sep)[2]}, line {line}: {text}" for file, line, text in lines[-1:]
        )

    def _render_traceback_(self):
        # IPython shows this instead of the frames of the launcher, which say nothing to the user.
        return [f"RankError: {self}"]


def name_ranks(numbers: list[int]) -> str:
    """ "rank 3", "ranks 0, 1, 2"."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def root_cause(ranks: list[Rank]) -> Exception:
    """Choose the failure that explains the others, and make an exception of it.

    A missing balise comes first. Then what happened first, but a lost connection only where nothing else happened:
    it is the neighbour's view of a rank that died.
    """
    failed = sorted((r for r in ranks if r.failed), key=lambda r: r.failed_at)
    for r in failed:
        if r.report.get("balise"):
            return BaliseNotDone(*r.report["balise"])
    first = min(failed, key=lambda r: r.report.get("lost_peer", False))
    # Ranks that fail alike do so within a moment: name the lowest.
    alike = sorted(r.rank for r in failed if r.report["summary"] == first.report["summary"])
    first = ranks[alike[0]]
    others = f" (and so did {name_ranks(alike[1:])})" if alike[1:] else ""
    report, n = first.report, len(ranks)
    return RankError(
        first.rank,
        n,
        report["kind"],
        f"rank {first.rank} of {n} {report['summary']}{others}",
        report.get("text", ""),
        cause=_load(report.get("cause")),
    )


def _load(cause: bytes | None) -> BaseException | None:
    try:
        return pickle.loads(cause) if cause else None
    except Exception:
        return None  # it loads on the rank alone; its text is shown anyway


def ended_early(code: int, dump: str) -> dict:
    """The report of a rank that ended without one. `code`: exit code, negative for a signal; `dump`: its stack file."""
    if code >= 0:
        return {"kind": "exited", "summary": f"ended with exit code {code} before the function returned"}
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    text = stacks.show(stacks.parse(dump))
    return {"kind": "died", "summary": f"was killed by {name}{HINTS.get(name, '')}", "text": text}


def hung(ranks: list[Rank], dumps: dict[int, str], seconds: float) -> RankError:
    """Say why ranks still run at the deadline: who waits where, and for whom.

    Arguments: ranks, all of them; dumps, hung rank -> its stack file; seconds, the time they had.
    """
    n = len(ranks)
    frames = {rank: stacks.parse(dump) for rank, dump in dumps.items()}
    stands = {rank: stacks.stand(f) for rank, f in frames.items()}
    returned = [r.rank for r in ranks if r.state == "returned"]
    groups: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        groups.setdefault(str(stand), []).append(rank)
    # A rank busy in the user's own code keeps the others waiting: it comes first.
    order = sorted(groups.values(), key=lambda group: (stands[group[0]].waits_in is not None, group))
    first, rest = order[0], order[1:]
    summary = f"{name_ranks(first)} of {n} hung: {_where(stands[first[0]], first, n, seconds)}"
    if rest:
        others = [f"{name_ranks(g)} {_verb(g, 'wait')} {stands[g[0]]}" for g in rest]
        summary += f", while {', '.join(others)}"
        if stands[first[0]].waits_in:
            summary += ": the ranks must make the same calls in the same order"
    if returned:
        if rest or not stands[first[0]].waits_in:
            summary += f"{', and' if rest else ' while'} {name_ranks(returned)} had already returned"
        else:
            they = "they" if returned[1:] else "it"
            summary += f", a call that {name_ranks(returned)} never made: {they} had already returned"
    texts = {rank: stacks.show(f) or "  (its stack could not be read)" for rank, f in frames.items()}
    parts = [f"{name_ranks(g)} {_verb(g, 'stand')} here:\n{texts[g[0]]}" for g in order]
    return RankError(first[0], n, "hung", summary, "\n".join(parts), texts)


def _verb(group: list[int], verb: str) -> str:
    return verb + "s" * (len(group) == 1)


def _where(stand: stacks.Stand, group: list[int], n: int, seconds: float) -> str:
    if stand.waits_in:
        all_of_them = "all " if 1 < len(group) == n else ""
        return f"{all_of_them}still waiting after {seconds:g} s {stand}"
    return f"still running after {seconds:g} s {stand}"


def never_started(ranks: list[Rank], seconds: float) -> RankError:
    """The error for ranks that are not up after `seconds`."""
    late = [r.rank for r in ranks if r.state == "starting"]
    summary = f"{name_ranks(late)} of {len(ranks)} hung: not ready after {seconds:g} s (a slow import in the function?)"
    return RankError(late[0], len(ranks), "hung", summary)
