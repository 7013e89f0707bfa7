"""Balise 8, second part: the batch script run here, with a pretended srun that writes down what its processes would find."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dlojz_tp.checking import Wrong

HINTS = {
    "script-stopped": "Run here with a simulated srun, the script ended before it reached srun: {error}",
    "master-missing": "srun's processes don't find {name}. Ranks meet at MASTER_ADDR:MASTER_PORT, and Slurm sets "
                      "neither: export both before srun.",
    "master-elsewhere": "MASTER_ADDR is {found!r}, but rank 0 waits for the others on the job's first node, "
                        "{wanted}. scontrol show hostnames lists the nodes of $SLURM_JOB_NODELIST.",
    "master-any-order": "The tasks of srun write in any order, so the first line of `srun hostname` may come from "
                        "any node, here from {found}. Rank 0 waits on the first one, {wanted}. Let one task write, "
                        "srun --nodes=1 --ntasks=1, or use scontrol show hostnames.",
    "not-handed-on": "With {option}, srun's processes find no {name}: they get the variables it lists, and no "
                     "others that the script exported. Leave the option out, or begin the list with ALL.",
    "gpu-hidden": "With {option}, a process sees {found} of the {wanted} GPUs of its node. join_world takes the "
                  "GPU whose number is the local rank, which is then missing. Request GPUs per node, and leave "
                  "this option out.",
    "port-out-of-range": "MASTER_PORT is {found!r} in job {job}, but a port must be a number from 1024 to 65535. "
                         "Take the remainder of a division, and add an offset that keeps every remainder in this "
                         "range.",
    "number-octal": "In job {job} the script stops at {found}. In bash, a number that begins with 0 is octal and "
                    "can't contain 8 or 9. The prefix 10# makes it decimal: $((10#${{SLURM_JOB_ID: -4}})).",
    "port-fixed": "MASTER_PORT is {found} in several jobs. Two jobs on the same node would use the same port: "
                  "compute it from the job's whole number.",
    "rank-for-all": "The process with {slurm} {wanted} finds {name} {found!r}. The batch shell inserts the value "
                    "once, before srun, so all processes get the same. Each has its own SLURM_PROCID and "
                    "SLURM_LOCALID, and join_world reads these.",
    "cores-not-told": "The job has {wanted} cores per process, but srun doesn't know: since Slurm 22.05 it uses "
                      "one. Pass --cpus-per-task to srun too, or export SRUN_CPUS_PER_TASK.",
}

FIRST, ADDRESS, JOBS = "node07", "10.0.0.7", (64999, 240089, 1240 * 65536, 599999, 65534)
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
            raise Wrong("number-octal", got=octal[0], found=octal[1] or octal[2], job=job)
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


def right_gpus(case: dict, options: dict, variables: dict[str, str]) -> None:
    """Each process must see all GPUs of its node. options: the directives' and srun's own; variables: what its processes find."""
    seen, bound = variables.get("CUDA_VISIBLE_DEVICES"), options.get("gpu-bind", "")
    wanted, where = case["gpus_per_node"], f"{case['nodes']} nodes with {case['gpus_per_node']} GPUs"
    if re.search(r"\b(single|per_task|map_gpu)\b", bound) and wanted > 1:
        raise Wrong("gpu-hidden", where=where, option=f"--gpu-bind={bound}", found=1, wanted=wanted)
    for name in ("gpus-per-task", "ntasks-per-gpu"):  # with either, srun binds each task to its own GPU
        if name in options and not bound and wanted > 1:
            raise Wrong("gpu-hidden", where=where, option=f"--{name}={options[name]}", found=1, wanted=wanted)
    if seen is not None and (found := len([number for number in seen.split(",") if number])) < wanted:
        raise Wrong("gpu-hidden", where=where, option=f"CUDA_VISIBLE_DEVICES={seen}", found=found, wanted=wanted)


def right_ranks(cases, found: list[dict[str, str]]) -> None:
    """A process that finds torchrun's variables, too, must find its own numbers in them; found: as below."""
    for job, case, variables in zip(JOBS, cases, found):
        for name, slurm in RANK_NAMES.items():
            value, wanted = variables.get(name), variables[slurm]
            if value and value != wanted:
                where = f"job {job} on {case['nodes']} nodes"
                raise Wrong("rank-for-all", where=where, name=name, slurm=slurm, wanted=wanted, found=value)


def other_port(first: dict[str, str], second: dict[str, str]) -> None:
    """Two jobs of one script must not meet."""
    if first["MASTER_PORT"] == second["MASTER_PORT"]:
        raise Wrong("port-fixed", got=first["MASTER_PORT"], found=first["MASTER_PORT"])


def right_meeting(cases, found: list[dict[str, str]], scripts: list[str]) -> None:
    """Where the ranks of the jobs would meet; found: the variables of the processes of each."""
    ports = []
    for job, case, variables, script in zip(JOBS, cases, found, scripts):
        where = f"job {job} on {case['nodes']} nodes, from {FIRST} on"
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not variables.get(name):
                option = re.search(r"(?m)^\s*export\b.*" + name + r"(?s:.*)\bsrun\b.*(--export=(?!ALL)\S+)", script)
                if option:
                    raise Wrong("not-handed-on", where=where, name=name, option=option[1])
                raise Wrong("master-missing", where=where, name=name)
        address, port = variables["MASTER_ADDR"].strip(), variables["MASTER_PORT"].strip()
        here = (FIRST, ADDRESS, os.uname().nodename, *(("localhost", "127.0.0.1") if case["nodes"] == 1 else ()))
        if address not in here and address.split(".")[0] not in (FIRST, os.uname().nodename.split(".")[0]):
            slug = "master-any-order" if re.search(r"\bsrun\b[^|&;)]*\bhostname\b", script) else "master-elsewhere"
            raise Wrong(slug, expected=FIRST, got=address, where=where, found=address, wanted=FIRST)
        if not port.isdecimal() or not 1024 <= int(port) <= 65535:
            raise Wrong("port-out-of-range", got=port, where=where, found=port, job=job)
        ports.append(port)
    if ports[1] == ports[3] or len(set(ports)) < 4:  # by small moduli a few may meet
        found = max(ports, key=ports.count)
        raise Wrong("port-fixed", got=found, found=found)
