"""The process beside each rank of a job: starts it, watches it, says how it ended, and leaves nothing behind.

submitit runs `watch` once a rank, on Slurm and on this machine alike. It needs no torch, so it is up at once and stays
awake when the rank hangs in compiled code.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from dlojz_tp.launch import server, stacks
from dlojz_tp.launch.jobs import files

RANK = "from dlojz_tp.launch.jobs import rank; rank.main()"
TICK_S = 0.25
DUMP_S = 1.0  # for a hung rank to write its stack
SLURM_LEAD_S = 5.0  # before Slurm's own limit, which leaves no time to say where the ranks stand
SCANCEL_S = 60.0
ALONE = "alone"  # this file tells that the job ended its allocation itself
HALT = "halt"  # once this file is there, all ranks say where they stand: one of them waited too long

_stop = False


def watch(folder: str) -> None:
    """Run one rank until it ends. Raises SystemExit(1) unless the rank's function returned.

    Argument: folder, the job's.
    """
    import submitit

    signal.signal(signal.SIGTERM, _asked_to_stop)
    signal.signal(signal.SIGINT, _asked_to_stop)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning before its limit: our own limit comes first
    server.prctl(server.PR_SET_CHILD_SUBREAPER, 1)  # what the rank leaves behind becomes this process's child
    place, folder, parent = submitit.JobEnvironment(), Path(folder), os.getppid()
    rank, facts = place.global_rank, files.read(folder / "job.json")
    here = facts["place"] == "here"
    if here:  # not on Slurm, where the signal would come when a thread of the parent ends
        server.prctl(server.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ["DLOJZ_JOB_KEEPER"]):
            raise SystemExit(1)
    seconds = facts["minutes"] * 60
    limit = time.monotonic() + (seconds if here or seconds <= 60 else seconds - SLURM_LEAD_S)
    child = _start(place, folder, facts, rank)
    why = _wait(child, folder, rank, limit)
    _sweep(child)
    done = (folder / f"rank-{rank}.result").exists()
    end = {"why": "returned" if done else why, "code": child.returncode, "at": files.now()}
    alone = not here and os.getppid() != parent
    if alone:
        (folder / ALONE).touch()
    files.write(folder / f"rank-{rank}.end", end)
    if alone or (folder / HALT).exists():
        time.sleep(DUMP_S)  # the other ranks still say where they stand, or that they are done
    if alone:  # Slurm's process is gone that would tell of the end: the allocation would stay until its time is over
        subprocess.run(["scancel", place.job_id], timeout=SCANCEL_S, check=False)
    if not done:
        raise SystemExit(1)


def _asked_to_stop(*_) -> None:
    global _stop
    _stop = True


def _start(place, folder: Path, facts: dict, rank: int) -> subprocess.Popen:
    env = dict(os.environ)
    env |= {"RANK": str(rank), "LOCAL_RANK": str(place.local_rank), "WORLD_SIZE": str(place.num_tasks)}
    env["LOCAL_WORLD_SIZE"] = str(facts["ranks_per_node"])
    env |= _meeting_point(place, facts)
    with (folder / f"rank-{rank}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", RANK, str(folder), str(os.getpid())],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a group of its own, to be killed with all that it starts
        )


def _meeting_point(place, facts: dict) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT. The ranks themselves meet elsewhere: this port is for code that calls init again."""
    if facts["place"] == "here":
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(facts["port"])}
    # Two ports of its own for each job, below those that the system hands out by itself.
    return {"MASTER_ADDR": _address(place.hostnames[0]), "MASTER_PORT": str(15001 + 2 * (int(place.job_id) % 8000))}


def _address(node: str) -> str:
    """The address of a node: its name where it resolves, else the one that Slurm knows."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        show = subprocess.run(["scontrol", "show", "node", "-o", node], capture_output=True, text=True, timeout=20)
        for word in show.stdout.split():
            if word.startswith("NodeAddr="):
                return word.removeprefix("NodeAddr=")
    return node


def _wait(child: subprocess.Popen, folder: Path, rank: int, limit: float) -> str:
    """Wait for the rank. Returns "ended", or "late" or "stopped" for one that was killed here."""
    asked = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if child.wait(timeout=TICK_S) == -signal.SIGTERM:
                time.sleep(TICK_S)  # Slurm signals the rank and this process together
            return "stopped" if _stop else "ended"
        if not asked and (folder / HALT).exists():
            asked = True
            _dump(child, folder, rank)
        why = "stopped" if _stop else "late" if time.monotonic() > limit else ""
        if why:
            if why == "late":
                (folder / HALT).touch()
            if not asked:
                _dump(child, folder, rank)
            if why == "late":
                time.sleep(DUMP_S)  # the other ranks say where they stand while this one still is there
            return why


def _dump(child: subprocess.Popen, folder: Path, rank: int) -> None:
    """Make the rank write its stack, and wait until it is written."""
    path = folder / f"rank-{rank}.stack"
    if not path.exists():
        return  # not far enough to understand the signal
    child.send_signal(stacks.STACK_SIGNAL)
    limit, size = time.monotonic() + DUMP_S, -1
    while time.monotonic() < limit and child.poll() is None:
        before, size = size, path.stat().st_size
        if size == before and "most recent" in path.read_text(errors="replace"):
            return
        time.sleep(0.05)


def _sweep(child: subprocess.Popen) -> None:
    """Kill the rank with its group, and all that it left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    server.kill_children()
