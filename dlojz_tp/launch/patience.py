"""Late ranks: do they wait without end, or has a busy machine kept them from running?

The seconds that ranks are given are meant for ranks that have a core when they want one. Where other programs take
the cores, the clock runs on and the ranks do not: so what a rank has waited for a core does not count, nor does the
time in which it could run and has not yet had its seconds. Ranks that all wait for each other want no core; one in an
endless loop has soon had its seconds: both are found on time.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dlojz_tp.launch import busy, proc

MOST = 8  # times the seconds that were given: ranks that have not had them by then are not judged
LOOK_AGAIN_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass
class Share:
    """What a rank, with all processes that it started, has had of the machine. wants: it would run just now."""

    used: float = 0.0  # seconds of CPU
    waited: float = 0.0  # seconds in which it could have run and had no core
    wants: bool = False


def more_time(pids: dict[int, bool], spent: float, given: float, before: dict[int, "Share"] | None = None) -> float:
    """Seconds that the ranks may go on; 0 where they have had their time.

    pids: process of each rank -> whether it is still at work. spent: seconds since it began. given: what they have.
    before: their shares when it began, where they lived then.
    """
    found = shares(pids)
    for pid, share in (before or {}).items():
        if pid in found:
            found[pid].used -= share.used
            found[pid].waited -= share.waited
    if not found:  # no Linux: the load of the last minute has to do
        return max(0.0, given * busy.load() - spent)
    working = [share for pid, share in found.items() if pids[pid]]
    if any(share.used >= given for share in working):
        return 0.0
    owed = given + sum(share.waited for share in found.values()) - spent
    return max(owed, LOOK_AGAIN_S * any(share.wants for share in working), 0.0)


def shares(pids: Iterable[int], folder: Path = Path("/proc")) -> dict[int, Share]:
    """The share of each rank that lives, each the leader of its session; {} where the system does not tell."""
    found: dict[int, Share] = {}
    for process in folder.glob("[0-9]*"):
        try:
            session = int(proc.fields(process)[3])
            if session not in pids:
                continue
            share = found.setdefault(session, Share())
            for thread in (process / "task").iterdir():
                state, *_ = fields = proc.fields(thread)
                share.used += (int(fields[11]) + int(fields[12])) / TICKS
                share.waited += proc.waited(thread)
                share.wants |= not proc.rests(state)
        except (OSError, IndexError, ValueError):
            continue  # it has gone meanwhile
    return found
