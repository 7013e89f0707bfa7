"""What the control groups of this process allow it: Slurm and containers set limits there. Standard library only."""

import contextlib
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_limit() -> float | None:
    """Cores that the control groups of this process allow, the tightest on the way up; None if there is no limit."""
    limits = []
    for folder in _groups("cpu"):
        one = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        for quota in (one, _words(folder / "cpu.max")):
            if len(quota) == 2 and quota[0].isdigit():  # "max" and -1 mean no limit
                limits.append(int(quota[0]) / int(quota[1]))
    return min(limits, default=None)


def memory_limits() -> list[tuple[int, int]]:
    """Memory limits of the control groups of this process: (limit, in use) in bytes, cached files not counted."""
    limits = []
    for folder in _groups("memory"):
        one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for limit_name, used_name, cached in (one, ("memory.max", "memory.current", "inactive_file")):
            limit, used = _words(folder / limit_name), _words(folder / used_name)
            if limit and used and limit[0].isdigit():
                stat = _words(folder / "memory.stat")
                pairs = dict(zip(stat[::2], stat[1::2], strict=False))
                limits.append((int(limit[0]), max(0, int(used[0]) - int(pairs.get(cached, 0)))))
    return limits


def _groups(controller: str) -> list[Path]:
    """Folders of this process's control groups, versions 1 and 2, each up to the root: Slurm sets limits half-way."""
    folders = []
    for line in Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for top in (CGROUP / controllers, CGROUP / controller) if controllers else (CGROUP, CGROUP / "unified"):
            here = top / path.lstrip("/")
            folders += [folder for folder in (here, *here.parents) if folder == top or top in folder.parents]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []
