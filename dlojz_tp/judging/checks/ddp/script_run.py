"""Balise 8, second part: the batch script run here, with a pretended srun that writes down what its processes would find."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.wrong import fails

FIRST, ADDRESS, JOBS = "node07", "10.0.0.7", (64999, 240089, 1240 * 65536, 599999, 65534)
MEETING = "MASTER_ADDR", "MASTER_PORT"
RANK_NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}

# What a script may call. srun: write down its arguments and variables, then start the command once, as the last rank of the first node;
# `hostname` once a node, the last one first, for tasks write in any order.
# python: started by srun, write down the variables once more (an `env` or a shell between the two may have set some).
PROGRAMS = {
    "srun": r"""
        call=$(mktemp -d "$TOLD/call-XXXXXX")
        printf '%s\0' srun "$@" >"$call/arguments"
        for word; do
          case $word in --export=*) IFS=, read -ra pairs <<<"${word#--export=}"
            for name in MASTER_ADDR MASTER_PORT; do [[ ,${word#*=}, =~ ,(ALL|$name), ]] || unset "$name"; done
            for pair in "${pairs[@]}"; do [[ $pair != *=* ]] || export "${pair?}"; done ;; esac
        done
        one='(-n|-N|--ntasks|--nodes)[= ]?1 ' NODES=node07
        [[ $* != *hostname* || "$* " =~ $one ]] || NODES="$(scontrol show hostnames | tac) $(scontrol show hostnames | tail -1)"
        export SLURM_PROCID=$((SLURM_GPUS_ON_NODE - 1)) SLURM_LOCALID=$((SLURM_GPUS_ON_NODE - 1))
        env -0 >"$call/variables"
        while (($#)) && ! type -P -- "$1" >/dev/null; do shift; done
        for NODE in $NODES; do NODE=$NODE CALL=$call "$@" 2>/dev/null </dev/null || true; done""",
    "python": r"""[[ -z ${CALL:-} ]] || env -0 >"$CALL/variables"; [[ $1 != -c ]] || exec "$REAL" "$@" """,
    "scontrol": r"""for k in $(seq 7 $((6 + SLURM_NNODES))); do printf 'node%02d\n' "$k"; done""",
    "hostname": rf"""node=${{NODE:-{FIRST}}}
        case ${{1:-}} in -[iI]|--ip*|--all-ip*) echo {ADDRESS[:-1]}$((10#${{node#node}})) ;; *) echo "$node" ;; esac""",
    **dict.fromkeys(("module", "sbatch", "scancel", "sleep", "nvidia-smi", "torchrun", "mpirun"), ":"),
}


def told(script: str, case: dict, options: dict, job: int) -> list[tuple[list[str], dict[str, str]]]:
    """Run a batch script as on a job's first node. Returns the words of each srun and the variables of its processes."""
    with tempfile.TemporaryDirectory(prefix="dlojz-script-") as name:
        folder = Path(name)
        for program, text in PROGRAMS.items():
            (folder / program).write_text(f"#!/bin/bash\n{text}\n")
            (folder / program).chmod(0o755)
        # what only the centre has may fail here, and must not stop the script
        ours = re.sub(r"^\s*set [-+](?!o allexport|-)(?!\w*a)\w+( \w+)*\s*$", "", script, flags=re.MULTILINE)
        ours = re.sub(r"(?<![\w.])/[\w./-]*/(srun|scontrol|hostname)\b", r"\1", ours)
        done = subprocess.run(
            ["bash", "-c", ours, "slurm_script"],
            env=_variables(folder, case, options, job),
            cwd=folder,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=10,
        )
        if octal := re.search(
            r'value too great for base \(error token is "(\w+)|printf: (\w+): invalid octal', done.stderr
        ):
            wrong = Wrong("number-octal", got=octal[0], found=octal[1] or octal[2], job=job)
            if job not in JOBS:
                raise wrong
            fails(wrong)
            return told(script, case, options, job + 1111)  # digits of this number that begin with 0 have no 8 and no 9
        calls = sorted(folder.glob("call-*"), key=lambda call: call.stat().st_ctime_ns)
        if not calls and done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise Wrong("script-stopped", error=lines[-1][:160])
        return [(_zero_ended(call / "arguments"), _pairs(call / "variables")) for call in calls]


def _zero_ended(file):
    return file.read_text().split("\0")[:-1]


def _pairs(file):
    return dict(entry.split("=", 1) for entry in _zero_ended(file))


def _variables(folder, case, options, job):
    """What a batch script finds. Source: man sbatch, output environment variables."""
    ours = ("SLURM", "SRUN", "MASTER_", "SBATCH", "CUDA_VISIBLE_DEVICES", *RANK_NAMES)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    nodes, tasks = case["nodes"], case["gpus_per_node"]
    found = {
        "PATH": f"{folder}:{kept.get('PATH', '/usr/bin:/bin')}",
        "LC_ALL": "C",
        "TOLD": str(folder),
        "REAL": sys.executable,
        "HOSTNAME": FIRST,
        "SLURMD_NODENAME": FIRST,
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_GPUS_ON_NODE": str(tasks),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(tasks))),
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), str(job)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(nodes * tasks)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes)),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), FIRST if nodes == 1 else f"node[07-{6 + nodes:02}]"),
    }
    for option, variable in (("cpus-per-task", "SLURM_CPUS_PER_TASK"), ("ntasks-per-node", "SLURM_NTASKS_PER_NODE")):
        if option in options:
            found[variable] = options[option]
    return kept | found


def meet(job):
    """The job with what its processes find, with nothing that keeps a variable from them, and with all that does."""
    script, job.met, job.lost = job.script, job.variables, []
    job.where = f"job {job.number} on {job.nodes} nodes, from {FIRST} on"
    for name in MEETING:
        option = re.search(r"(?m)^\s*export\b.*" + name + r"(?s:.*)\bsrun\b.*(--export=(?!ALL)\S+)", script)
        if option and not job.met.get(name):
            job.lost.append({"name": name, "option": option[1]})
            script = script.replace(option[1], "")
            job.met = told(script, job.case, {}, job.number)[-1][1]
    return job


def own_rank(job):
    """Whether a process that finds torchrun's variables, too, finds its own numbers in them."""
    for name, slurm in RANK_NAMES.items():
        found, wanted = job.variables.get(name), job.variables[slurm]
        if found and found != wanted:
            return "rank-for-all", {"name": name, "slurm": slurm, "wanted": wanted, "found": found}
    return None


def lost(job):
    return job.lost and ("not-handed-on", job.lost[0])


def missing(job):
    name = next((name for name in MEETING if not job.met.get(name)), None)
    return name and ("master-missing", {"name": name})


def elsewhere(job):
    """Whether rank 0 waits on the first node."""
    found, machine = job.met["MASTER_ADDR"].strip(), os.uname().nodename
    here = (FIRST, ADDRESS, machine, *(("localhost", "127.0.0.1") if job.nodes == 1 else ()))
    if found in here or found.split(".")[0] in (FIRST, machine.split(".")[0]):
        return None
    any_order = re.search(r"\bsrun\b[^|&;)]*\bhostname\b", job.script)
    told = {"expected": FIRST, "got": found, "found": found, "wanted": FIRST}
    return "master-any-order" if any_order else "master-elsewhere", told


def port(job):
    found = job.met["MASTER_PORT"].strip()
    right = found.isdecimal() and 1024 <= int(found) <= 65535
    return None if right else ("port-out-of-range", {"got": found, "found": found, "job": job.number})
