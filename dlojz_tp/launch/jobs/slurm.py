"""Jobs on Slurm: submission through submitit, state from squeue, end by scancel."""

import math
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from dlojz_tp.launch.jobs import files, here, options
from dlojz_tp.launch.jobs.options import JobError, Options

SIGNAL_LEAD_S = 10
PING_S = 15.0  # for the controller to say that it is there
COMMAND_S = 60.0  # for sbatch and scancel; a busy controller makes them wait
LOOK_S = 2.0  # squeue is asked no more often, whoever waits for how many jobs
CANCEL_S = 45.0  # Slurm gives processes some seconds (KillWait) before it kills them
OVER = {
    "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "PREEMPTED", "DEADLINE",
    "REVOKED",
}  # fmt: skip
# What a message of sbatch is about, and the option that is to be changed then.
ABOUT = ("partition", "account", "constraint", "qos", "reservation", "gpu", "feature")
UNREACHED = ("Unable to contact slurm", "Socket timed out", "Connection refused", "Zero Bytes were transmitted")
# Why a job waits, where waiting does not help.
SILENT = "Slurm does not answer, and nothing was submitted; try again in some minutes"
NEVER = (
    "PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints", "DependencyNeverSatisfied",
    "AccountNotAllowed", "QOSNotAllowed", "InvalidAccount", "InvalidQOS", "AssocMaxNodePerJobLimit",
    "AssocMaxWallDurationPerJobLimit", "QOSMaxNodePerJobLimit", "QOSMaxWallDurationPerJobLimit",
)  # fmt: skip

_seen: dict[str, tuple[str, str, str]] = {}  # job id -> state, reason, nodes
_looked_at = -math.inf


def available(centre: Options) -> str:
    """The path of sbatch where jobs go to Slurm: it is there, and knows a Slurm (installed alone, it does not).

    Returns an empty text where jobs run on this machine.
    """
    sbatch = shutil.which("sbatch") or ""
    if centre.use is not None:
        return (sbatch or "sbatch") if centre.use else ""
    if not sbatch:
        return ""
    return "" if "configuration source" in _ping() else sbatch  # one that does not answer now: submitting will say so


def _ping() -> str:
    """What Slurm says of its controllers: at once, where sinfo and sbatch try for 9 s and more."""
    try:
        done = _run(["scontrol", "ping"], seconds=PING_S)
    except JobError:
        return ""
    return done.stdout + done.stderr


def submit(folder: Path, facts: dict, centre: Options) -> None:
    """Submit the job; adds `id` to the facts and stores them.

    Errors: JobError with Slurm's own reason in one line.
    """
    import submitit

    said = _ping()
    if " is DOWN" in said and " is UP" not in said:
        raise JobError(f"{SILENT}: its controller is down")

    from dlojz_tp.launch.jobs import shepherd

    class Executor(submitit.SlurmExecutor):
        """submitit's own prints sbatch's errors as they are, and passes on what a surrounding job left behind."""

        def _submit_command(self, command: str):
            script = self.folder / "batch.sh"
            script.write_text(self._make_submission_file_text(command, ""))
            done = _run(["sbatch", str(script)], env=here.without_job(os.environ))
            found = re.search(r"^Submitted batch job (\d+)", done.stdout, re.MULTILINE)
            if done.returncode or not found:
                raise JobError(refusal(done.stderr or done.stdout))
            facts["id"] = found[1]
            files.write(folder / "job.json", facts)
            return submitit.SlurmJob(folder=self.folder, job_id=found[1], tasks=list(range(self._num_tasks())))

    facts["id"] = None
    try:
        files.write(folder / "job.json", facts)
        executor = Executor(folder / "submitit")
        executor.update_parameters(**_parameters(folder, facts, centre))
        executor.submit(shepherd.watch, str(folder))
    except (OSError, RuntimeError) as error:
        raise JobError(f"the job cannot be submitted: {' '.join(str(error).split())}") from None


def _parameters(folder: Path, facts: dict, centre: Options) -> dict:
    """What submitit writes into the batch script."""
    srun = ["--kill-on-bad-exit=1"]  # one rank that fails ends all
    given: dict = {"wckey": None}
    for name in ("account", "partition", "constraint", "qos"):
        if value := getattr(centre, name):
            given[name] = value
    if centre.gpus_per_node:
        given["gpus_per_node"] = min(centre.gpus_per_node, facts["ranks_per_node"])
    if centre.cpus_per_task:
        given["cpus_per_task"] = centre.cpus_per_task
        srun.append(f"--cpus-per-task={centre.cpus_per_task}")  # since 22.05 srun does not inherit it
    more = {name: value for name in ("reservation", "hint") if (value := getattr(centre, name))}
    more |= {"output": folder / "batch.log", "no-requeue": True} | centre.sbatch
    alone = f'[ -d /proc/$PPID ] || {{ touch {shlex.quote(str(folder / "alone"))}; scancel "$SLURM_JOB_ID"; }}'
    # In front of what the modules have set, not in its place.
    path = shlex.quote(here.package_folder()) + "${PYTHONPATH:+:$PYTHONPATH}"
    return given | {
        "job_name": facts["name"],
        "nodes": facts["nodes"],
        "ntasks_per_node": facts["ranks_per_node"],
        "time": max(1, math.ceil(facts["minutes"])),
        "signal_delay_s": SIGNAL_LEAD_S,
        "stderr_to_stdout": True,
        # A module that cannot be loaded ends the job, with its message in batch.log.
        "setup": [
            # Slurm's process beside this script is gone: nobody else would end the allocation.
            f"trap {shlex.quote(alone)} EXIT",
            "set -e",
            *centre.modules,
            *(f"export {name}={shlex.quote(value)}" for name, value in centre.environment.items()),
            f"export PYTHONPATH={path} PYTHONSAFEPATH=1",
            "set +e",
        ],
        "srun_args": srun,
        "additional_parameters": {name: value for name, value in more.items() if value is not False},
    }


def refusal(said: str) -> str:
    """Slurm's reason in one line, with the option to look at."""
    lines = [
        re.sub(r"^(sbatch|srun|scancel|squeue): ((error|fatal): )?", "", line).strip() for line in said.splitlines()
    ]
    lines = [line.replace("Batch job submission failed: ", "") for line in lines if line]
    reason = "; ".join(dict.fromkeys(lines))[:300] or "it gave no reason"
    if any(words in reason for words in UNREACHED):
        return f"{SILENT}: {reason}"
    about = next((word for word in ABOUT if word in reason.lower()), "")
    option = {"gpu": "gpus_per_node", "feature": "constraint"}.get(about, about)
    hint = f" (see {option} in {options.path()})" if option else ""
    return f"Slurm refused the job: {reason}{hint}"


def look(ids: list[str], now: bool = False) -> dict[str, tuple[str, str, str]]:
    """Ask for the states of jobs, all at once and seldom.

    Arguments: ids; now, ask even if the last answer is fresh.
    Returns id -> (state, reason, nodes); a job that Slurm has forgotten has the state "GONE", and "UNKNOWN" stands
    where Slurm does not answer.
    """
    global _looked_at
    if now or time.monotonic() - _looked_at > LOOK_S or any(i not in _seen for i in ids):
        try:
            # -t all: without accounting, a finished job shows here only. No single id: one that is gone is an error.
            who = ["--user", str(os.getuid()), "--states", "all"]
            done = _run(["squeue", "--noheader", *who, "--format", "%i|%T|%r|%N"])
        except JobError:
            done = None
        _looked_at = time.monotonic()
        if done is None or done.returncode:
            return dict.fromkeys(ids, ("UNKNOWN", "Slurm does not answer", ""))
        _seen.clear()
        for line in done.stdout.splitlines():
            job, _, rest = line.strip().partition("|")
            if rest.count("|") >= 2:
                state, reason, nodes = rest.split("|", 2)
                reason = "" if reason in ("None", "(null)") else reason
                _seen[job] = (state, reason + ": it can never start, cancel it" * (reason in NEVER), nodes)
        for i in ids:
            _seen.setdefault(i, ("GONE", "", ""))
    return {i: _seen[i] for i in ids}


def over(state: str) -> bool:
    """Whether a job in this state is at its end."""
    return state == "GONE" or state.split(" ")[0] in OVER


def cancel(folder: Path, facts: dict) -> None:
    """Cancel the job and wait until Slurm has ended it.

    Errors: JobError with Slurm's reason in one line.
    """
    if not facts.get("id"):
        return
    done = _run(["scancel", facts["id"]])
    if done.returncode and "already" not in done.stderr and "Invalid job id" not in done.stderr:
        said = refusal(done.stderr).replace("refused the job", "did not cancel the job")
        raise JobError(said.replace("nothing was submitted", "the job was not cancelled"))
    limit = time.monotonic() + CANCEL_S
    while not over(look([facts["id"]], now=True)[facts["id"]][0]) and time.monotonic() < limit:
        time.sleep(0.3)


def _run(command: list[str], env: dict | None = None, seconds: float = COMMAND_S) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, env=env)
    except subprocess.TimeoutExpired:
        raise JobError(f"{command[0]} did not answer within {seconds:g} s") from None
    except OSError as error:
        raise JobError(f"{command[0]} cannot be run: {error.strerror}") from None
