"""Jobs on this machine: a keeper process runs the ranks of all "nodes", outlives the notebook, and ends them."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from dlojz_tp.launch import server
from dlojz_tp.launch.jobs import files
from dlojz_tp.launch.jobs.options import JobError
from dlojz_tp.launch.run import LOOPBACK, MOST_RANKS

TICK_S = 0.05
WRITTEN_S = 60.0  # for the notebook to note who keeps the job
STARTING_S = 1.0  # for a process to get its command line, on a machine that has other things to do
GRACE_S = 0.3  # after a failure: ranks that fail alike end within this time
STOP_S = 4.0  # for the shepherds to end their ranks
CANCEL_S = 8.0  # for the keeper to end
SPARE_S = 15.0  # after the job's time: the shepherds end their ranks at the limit, the keeper only makes sure
ELSEWHERE_S = 120.0  # after its time a job on another machine is over, whatever became of it

# Also tells a keeper from a process that has got its number since.
KEEPER = "from dlojz_tp.launch.jobs import here; here.main()"
_keepers: list[subprocess.Popen] = []  # of this process, to be reaped


def submit(folder: Path, facts: dict) -> None:
    """Start the job; adds `id`, `port` and `host` to the facts and stores them.

    Errors: JobError.
    """
    import submitit

    from dlojz_tp.launch.jobs import shepherd

    n = facts["nodes"] * facts["ranks_per_node"]
    if n > MOST_RANKS:
        raise JobError(f"{n} ranks are too many for this machine (at most {MOST_RANKS})")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        facts["port"] = probe.getsockname()[1]
    facts["host"] = socket.gethostname()

    class Executor(submitit.LocalExecutor):
        """submitit's own runs one node only, ends with the notebook's kernel, and goes on when a rank fails."""

        def _submit_command(self, command: str):
            _keepers[:] = [keeper for keeper in _keepers if keeper.poll() is None]
            env = without_job(os.environ) | dict.fromkeys(INTERFACES, LOOPBACK) | python_path()
            env |= {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": str(n)}
            env["SUBMITIT_LOCAL_JOB_NUM_NODES"] = str(facts["nodes"])
            with (folder / "batch.log").open("ab") as log:
                keeper = subprocess.Popen(
                    [sys.executable, "-c", KEEPER, str(folder), command],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # an interrupt or the end of the notebook is not for the job
                )
            _keepers.append(keeper)
            facts["id"] = str(keeper.pid)
            try:
                files.write(folder / "job.json", facts)
            except BaseException:
                keeper.kill()  # nobody could find it
                raise
            return submitit.LocalJob(folder=self.folder, job_id=facts["id"], tasks=list(range(n)))

    facts["id"] = None
    try:
        files.write(folder / "job.json", facts)
        Executor(folder / "submitit").submit(shepherd.watch, str(folder))
    except OSError as error:
        raise JobError(f"the job cannot be started: {error}") from None


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_", "DLOJZ_LAUNCH_", "DLOJZ_JOB_")
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def without_job(env) -> dict[str, str]:
    """An environment without what a surrounding job or launch left in it, which would confuse a new job."""
    kept = {key: value for key, value in env.items() if not key.startswith(OF_A_JOB) and key not in OF_RANKS}
    return kept | ({"SLURM_CONF": env["SLURM_CONF"]} if "SLURM_CONF" in env else {})


def package_folder() -> str:
    """The folder that has to be in the import path for this package."""
    import dlojz_tp

    return str(Path(dlojz_tp.__file__).resolve().parent.parent)


def python_path() -> dict[str, str]:
    """Variables with which this package is found, and no module of the current folder in place of a real one."""
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != package_folder()]
    return {"PYTHONPATH": os.pathsep.join([package_folder(), *rest]), "PYTHONSAFEPATH": "1"}


def alive(facts: dict) -> bool | None:
    """Whether the keeper of a job still runs; None where it may run on another machine, which cannot be asked."""
    if facts.get("host") != socket.gethostname():
        left = facts["submitted"] + facts["minutes"] * 60 + ELSEWHERE_S - files.now()
        return None if left > 0 else False
    import psutil

    for keeper in _keepers:
        keeper.poll()  # so that it does not stay as a zombie
    try:
        keeper = psutil.Process(int(facts["id"]))
        limit = time.monotonic() + STARTING_S
        while keeper.status() != psutil.STATUS_ZOMBIE:
            # For a moment after its start a process has no command line.
            if (words := keeper.cmdline()) or time.monotonic() > limit:
                return KEEPER in words
            time.sleep(0.01)
        return False
    except (psutil.Error, TypeError, ValueError):
        return False


def cancel(folder: Path, facts: dict) -> None:
    """End the job and wait until nothing of it is left.

    Errors: JobError where it runs on another machine.
    """
    running = alive(facts)
    if running is None:
        raise JobError(f"{facts['name']} runs on {facts['host']}: cancel it there")
    if running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(facts["id"]), signal.SIGTERM)
        limit = time.monotonic() + CANCEL_S
        while alive(facts) and time.monotonic() < limit:
            time.sleep(TICK_S)
        if alive(facts):
            _kill_all(folder)


def _kill_all(folder: Path) -> None:
    """Kill every process of a job whose keeper does not do it: each has the job's folder on its command line."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(word == str(folder) or word.startswith(f"{folder}/") for word in process.info["cmdline"] or []):
            found.append(process)
            with contextlib.suppress(psutil.Error):
                process.kill()
    psutil.wait_procs(found, timeout=STOP_S)


def main() -> None:
    """Keep a job: start its ranks, end all when one fails or the time is over.

    Arguments, of the command line: the job's folder; what submitit runs for each rank.
    """
    folder, command = Path(sys.argv[1]), sys.argv[2]
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server.prctl(server.PR_SET_CHILD_SUBREAPER, 1)
    parent, limit = os.getppid(), time.monotonic() + WRITTEN_S
    while (facts := files.read(folder / "job.json")).get("id") != str(os.getpid()):
        time.sleep(0.01)  # the notebook still writes it
        if facts.get("id") is None and (os.getppid() != parent or time.monotonic() > limit):
            return  # it ended before it could
    n, per_node = facts["nodes"] * facts["ranks_per_node"], facts["ranks_per_node"]
    limit = time.monotonic() + facts["minutes"] * 60 + SPARE_S
    shepherds: list[subprocess.Popen] = []
    try:
        for rank in range(n):
            env = os.environ | {"SUBMITIT_LOCAL_JOB_ID": facts["id"], "SUBMITIT_LOCAL_GLOBALID": str(rank)}
            env |= {"SUBMITIT_LOCAL_LOCALID": str(rank % per_node), "SUBMITIT_LOCAL_NODEID": str(rank // per_node)}
            env["DLOJZ_JOB_KEEPER"] = facts["id"]
            with (folder / "submitit" / f"rank-{rank}.log").open("ab") as log:
                own = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                shepherds.append(subprocess.Popen(shlex.split(command), env=env, **own))
        while not stop and time.monotonic() < limit:
            codes = [s.poll() for s in shepherds]
            if all(code is not None for code in codes):
                break
            if any(codes):
                time.sleep(GRACE_S)
                break
            time.sleep(TICK_S)
    finally:
        _end(shepherds)
        server.kill_children()
        files.write(folder / "over.json", {"state": "CANCELLED" if stop else "ENDED", "at": files.now()})


def _end(shepherds: list[subprocess.Popen]) -> None:
    """Ask the shepherds to end their ranks, and wait for it."""
    for s in shepherds:
        if s.poll() is None:
            s.terminate()
    limit = time.monotonic() + STOP_S
    while any(s.poll() is None for s in shepherds) and time.monotonic() < limit:
        time.sleep(TICK_S)
