"""The one error to show when ranks fail: root cause first."""

import os
import signal

from dlojz_tp.launch import loading, proc, stacks
from dlojz_tp.launch.stacks import with_cells
from dlojz_tp.launch.started import Rank
from dlojz_tp.works.balise import BaliseNotDone

HINTS = {
    "SIGKILL": " (often the system is out of memory)",
    "SIGSEGV": " (a crash in compiled code)",
    "SIGABRT": " (compiled code gave up)",
}
STOPPED = "was stopped by a signal (SIGSTOP, as Ctrl-Z and debuggers send it) and did nothing more"


# What compiled code and a function's own timers end a rank with; every other signal is sent by somebody.
# SIGABRT reaches a rank from inside only: see rank.tell_signals.
FROM_INSIDE = (
    "SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXFSZ",
)  # fmt: skip


class LaunchError(RuntimeError):
    """The machine, not the function, kept ranks from running. One line: what happened, and what to do."""

    todo = "`python -m dlojz_tp doctor` says what this machine lacks."  # if it happens again

    def _render_traceback_(self):
        return _shown(self)


class TooBusy(LaunchError):
    """The ranks have not had their seconds of the machine."""

    todo = "end other programs, or check again when the machine is quieter."


class Killed(LaunchError):
    """Somebody else than the function ended or stopped a rank."""

    todo = "too little memory is the usual reason (python -m dlojz_tp doctor); else ask who ends programs here."


class RankError(Exception):
    """A function that ran on ranks did not finish on all of them.

    rank: the rank to look at first. world_size: number of ranks. alike: other ranks that failed in the same way.
    kind: "raised" (an exception), "died" (killed by a signal), "exited" (the process ended by itself),
    "hung" (still running at the deadline, or all wait for each other), "unjoined" (it could not join the other ranks)
    or "unsendable" (its result cannot be pickled, or loaded in time).
    what: what became of the rank, the end of a sentence: "raised KeyError: 'x'". Empty where `stands` tell more.
    traceback: the user's own lines on that rank, as text. cause: for "raised", the exception where it can be pickled,
    else None. signal: for "died", its name. A rank that somebody else has killed is Killed, no RankError.
    stands: for "hung", rank -> the line where it stands and the call that it waits in. returned: the ranks that were
    through by then. seconds: the time they had. still: where they were ended before it was over, for how many seconds
    nothing had moved; else 0. stacks: rank -> stack as text.
    """

    def __init__(
        self, rank, world_size, kind, what, traceback="", *, alike=(), cause=None, signal="",
        stands=None, returned=(), seconds=0.0, still=0.0, stacks=None,
    ):  # fmt: skip
        super().__init__(rank, world_size, kind, what, traceback)
        self.rank, self.world_size, self.kind, self.what = rank, world_size, kind, what
        self.traceback, self.alike, self.cause, self.signal = with_cells(traceback), list(alike), cause, signal
        self.stands, self.returned, self.seconds = stands or {}, list(returned), seconds
        self.still, self.stacks = still, stacks or {}

    @property
    def waits(self) -> dict[int, str | None]:
        """For "hung", rank -> the function of torch that it waits in; None for one in the user's own code."""
        return {rank: stand.waits_in for rank, stand in self.stands.items()}

    @property
    def summary(self) -> str:
        """One line."""
        if self.stands:
            return _who_waits(self)
        others = f" (and so did {name_ranks(self.alike)})" if self.alike else ""
        return f"rank {self.rank} of {self.world_size} {self.what}{others}"

    def __str__(self):
        return f"{self.summary}\n{self.traceback}" if self.traceback else self.summary

    def in_words(self) -> str:
        """The summary and, for an exception or a crash, the line of the user's where it came."""
        lines = stacks.QUOTED_LINE.findall(self.traceback) if self.kind in ("raised", "died") else []
        return self.summary + "".join(
            f"\n{file.rpartition(os.sep)[2]}, line {line}: {text}" for file, line, text in lines[-1:]
        )

    def in_part(self, ranks: list[int], through: list[int]) -> "RankError":
        """The same failure as some of the ranks see it, who count themselves from 0.

        Arguments: ranks, the failed one among them; through, those of them that had nothing to do any more.
        """
        number = {rank: k for k, rank in enumerate(ranks)}
        if self.stands:
            inside = [rank for rank in ranks if rank in self.stands and rank not in through]
            return _hung(
                len(ranks), {number[rank]: self.stands[rank] for rank in inside},
                {number[rank]: self.stacks[rank] for rank in inside},
                [number[rank] for rank in ranks if rank not in inside], self.seconds, self.still,
            )  # fmt: skip
        return RankError(
            number[self.rank], len(ranks), self.kind, self.what, self.traceback,
            alike=[number[rank] for rank in self.alike if rank in number], cause=self.cause, signal=self.signal,
        )  # fmt: skip

    def _render_traceback_(self):
        # IPython shows this instead of the frames of the launcher, which say nothing to the user.
        return _shown(self)


def _shown(error: Exception) -> list[str]:
    return ["\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])]


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
    report = first.report
    return RankError(
        first.rank, len(ranks), report["kind"], report["summary"], report.get("text", ""),
        alike=alike[1:], cause=_load(report.get("cause")), signal=report.get("signal", ""),
    )  # fmt: skip


def from_outside(ranks: list[Rank]) -> Killed | None:
    """The error where a rank was ended or stopped by a signal that no rank's function has sent; else None."""
    sent = {pid for r in ranks for pid in r.sent}
    for r in ranks:
        signal_sent = r.report.get("signal", "")
        stopped = not r.done and proc.stopped(r.pid)
        if (stopped or (signal_sent and signal_sent not in FROM_INSIDE)) and r.report.get("pid", r.pid) not in sent:
            what = STOPPED if stopped else r.report["summary"]
            return Killed(f"rank {r.rank} of {len(ranks)} {what}; the function has not sent that signal")
    return None


def _load(cause: bytes | None) -> BaseException | None:
    try:
        found = loading.load(cause, loading.CAUSE_S) if cause else None
        return found if isinstance(found, BaseException) else None
    except loading.Unloadable:
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
    return {"kind": "died", "signal": name, "summary": f"was killed by {name}{HINTS.get(name, '')}", "text": text}


def hung(ranks: list[Rank], dumps: dict[int, str], seconds: float, still: float = 0.0) -> RankError:
    """Say why ranks still run at the deadline, or would never end: which rank waits where, and for which other.

    Arguments: ranks, all of them; dumps, hung rank -> its stack file; seconds, the time they had; still, for how many
    seconds nothing had moved when they were ended before.
    """
    frames = {rank: stacks.parse(dump) for rank, dump in dumps.items()}
    stands = {rank: stacks.stand(f) for rank, f in frames.items()}
    texts = {rank: stacks.show(f) or "  (its stack could not be read)" for rank, f in frames.items()}
    if stopped := [r.rank for r in ranks if not r.done and proc.stopped(r.pid)]:
        return RankError(stopped[0], len(ranks), "hung", STOPPED, alike=stopped[1:], seconds=seconds, stacks=texts)
    return _hung(len(ranks), stands, texts, [r.rank for r in ranks if r.state == "returned"], seconds, still)


def _hung(n: int, stands: dict[int, stacks.Stand], texts: dict[int, str], returned: list[int], seconds, still):
    order = _side_by_side(stands)
    parts = [f"{name_ranks(g)} {_verb(g, 'stand')} here:\n{texts[g[0]]}" for g in order]
    first = order[0][0]
    return RankError(
        first, n, "hung", "", "\n".join(parts), stands=stands, returned=returned, seconds=seconds, still=still,
        stacks=texts,
    )  # fmt: skip


def _side_by_side(stands: dict[int, stacks.Stand]) -> list[list[int]]:
    """Ranks at the same place, together; first one busy in the user's own code: it keeps others waiting."""
    groups: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        groups.setdefault(str(stand), []).append(rank)
    return sorted(groups.values(), key=lambda group: (stands[group[0]].waits_in is not None, group))


def _who_waits(error: RankError) -> str:
    """Ranks that hung, in a sentence: where they stand, and for whom they wait."""
    n, stands, returned = error.world_size, error.stands, error.returned
    first, *rest = _side_by_side(stands)
    summary = f"{name_ranks(first)} of {n} hung: {_where(stands[first[0]], first, error)}"
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
    return summary


def _verb(group: list[int], verb: str) -> str:
    return verb + "s" * (len(group) == 1)


def _where(stand: stacks.Stand, group: list[int], error: RankError) -> str:
    after = f"after {error.still:g} s in which nothing moved," if error.still else f"after {error.seconds:g} s"
    if stand.waits_in:
        all_of_them = "all " if 1 < len(group) == error.world_size else ""
        return f"{all_of_them}still waiting {after} {stand}"
    return f"still {'waiting' if error.still else 'running'} {after} {stand}"


def starved(ranks: list[Rank], spent: float, given: float) -> TooBusy:
    """The error for ranks that have not had the `given` seconds of a core after `spent`."""
    late = f"{name_ranks([r.rank for r in ranks if not r.done])} of {len(ranks)}"
    return TooBusy(f"the machine is too busy: in {spent:.0f} s {late} had less than {given:g} s of a core")


def unready(ranks: list[Rank], spent: float) -> TooBusy:
    """The error for ranks that are not up after `spent` seconds, in which they have computed little."""
    late = f"{name_ranks([r.rank for r in ranks if r.state == 'starting'])} of {len(ranks)}"
    return TooBusy(f"{late} did not start within {spent:.0f} s: the machine is too busy, or a disk is slow")


def never_started(ranks: list[Rank], seconds: float) -> RankError:
    """The error for ranks that have computed for `seconds` and are not up."""
    late = [r.rank for r in ranks if r.state == "starting"]
    what = f"hung: not ready after {seconds:g} s (a slow import in the function?)"
    return RankError(late[0], len(ranks), "hung", what, alike=late[1:])
