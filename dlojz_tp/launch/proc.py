"""What Linux tells of a process or a thread, by its folder in /proc. Source: proc_pid_stat(5), sched-stats (kernel)."""

from pathlib import Path


def fields(task: Path) -> list[str]:
    """What follows the name in `stat`: the state, the parent, the group, the session …

    Errors: OSError where it has ended, or the system is another one.
    """
    return (task / "stat").read_text().rpartition(") ")[2].split()


def rests(state: str) -> bool:
    """Whether who is in this state waits for something; a core, or a disk, are not meant."""
    return state not in "RD"


def children(pid: int, folder: Path = Path("/proc")) -> list[int]:
    """The processes that this one has started and not yet waited for; [] where the system does not tell."""
    found = []
    for process in folder.glob("[0-9]*"):
        try:
            if int(fields(process)[1]) == pid:
                found.append(int(process.name))
        except (OSError, IndexError, ValueError):
            continue  # it has gone meanwhile
    return found


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or held by a debugger; False where the system does not tell."""
    try:
        return fields(Path(f"/proc/{pid}"))[0] in "Tt"
    except (OSError, IndexError):
        return False


def waited(task: Path) -> float:
    """Seconds in which a thread could have run and had no core; 0 where the system does not count them."""
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
