"""Balise 8: a batch script for Slurm: read, run with a pretended srun, and tried where there is a Slurm."""

import re
import shlex
import shutil
import subprocess
from types import SimpleNamespace

from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.ddp import script_run
from dlojz_tp.judging.probes.shared_looks import recognised

CASES = (
    {"nodes": 2, "gpus_per_node": 4, "cpus_per_gpu": 10, "minutes": 90, "command": "python train.py --epochs 90"},
    {"nodes": 1, "gpus_per_node": 1, "cpus_per_gpu": 3, "minutes": 5, "command": "python evaluate.py"},
    {"nodes": 16, "gpus_per_node": 8, "cpus_per_gpu": 12, "minutes": 1500, "command": "python -m trainer 'two words'"},
    {"nodes": 1, "gpus_per_node": 4, "cpus_per_gpu": 6, "minutes": 60, "command": 'python train.py --name "a run"'},
    {"nodes": 4, "gpus_per_node": 2, "cpus_per_gpu": 5, "minutes": 2880, "command": "python train.py"},
)


SHEBANG = re.compile(r"#!\s*/\S*\b(bash|sh)\b|#!\s*/usr/bin/env (bash|sh)\b")


def observe(batch_script):
    """What Slurm and bash read in the scripts of five jobs, and what the processes of their srun find."""
    scripts = [batch_script(**case) for case in CASES]
    yield {"script": next((script for script in scripts if not isinstance(script, str)), "")}
    jobs = [read(*job) for job in zip(scripts, CASES, script_run.JOBS)]
    yield {"read": jobs}
    yield {"ran": [run(job) for job in jobs]}
    met = [script_run.meet(job) for job in jobs]
    yield {"met": met, "ports": [job.met.get("MASTER_PORT", "").strip() for job in met]}
    later = run(SimpleNamespace(**vars(jobs[0]) | {"number": script_run.JOBS[1]}))  # the same script as another job
    yield {"again": [job.variables.get("MASTER_PORT") for job in (jobs[0], later)]}


def read(script, case, number):
    """A job: the options of its directives; `odd`: {hint: fields} of what is read otherwise than it is meant."""
    options, commands, odd = {}, 0, {}
    first, *lines = script.splitlines() or [""]
    if not SHEBANG.match(first):
        indented = SHEBANG.match(first.lstrip())
        odd["directive-indented" if indented else "no-shebang"] = {"line": first, "got": first or "an empty script"}
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=10)
    if checked.returncode:
        odd["unreadable"] = {"error": checked.stderr.strip().split("\n")[0]}
    for line in lines:
        if re.match(r"\s*#\s*sbatch\s+-", line, re.IGNORECASE) and not line.startswith("#SBATCH"):
            indented = line.lstrip().startswith("#SBATCH")
            slug = "directive-indented" if indented else "directive-misspelt"
            odd.setdefault(slug, {"line": line if indented else line.strip()})
            line = re.sub(r"(?i)^\s*#\s*sbatch", "#SBATCH", line)
        if line.startswith("#SBATCH"):
            if commands:
                odd.setdefault("directive-after-command", {"line": line})
            if re.search(r"\s-{1,2}[\w-]+(\s+=|=(\s|$))", line.split(" #")[0]):
                odd.setdefault("directive-spaced", {"line": line})
                line = re.sub(r"\s*=\s*", "=", line)
            if "$" in line.split(" #")[0]:
                odd.setdefault("directive-variable", {"line": line})
            options.update(_options(line.removeprefix("#SBATCH")))
        elif line.strip() and not line.lstrip().startswith("#"):
            commands += 1
    nodes, gpus, cores = (case[name] for name in ("nodes", "gpus_per_node", "cpus_per_gpu"))
    where = f"{nodes} nodes with {gpus} GPUs, {cores} cores a GPU"
    return SimpleNamespace(script=script, case=case, number=number, options=options, odd=odd, nodes=nodes, gpus=gpus,
                           cores=cores, where=where)  # fmt: skip


def run(job):
    """The job with its calls of srun, those that start the command, and what is said and found at the first of them."""
    job.calls = script_run.told(job.script, job.case, job.options, job.number)
    job.ours = [call for call in job.calls if _starts(call[0], job.case["command"])]
    job.words, job.variables = [*job.ours, *job.calls[-1:], ([], {})][0]
    job.own = _options(shlex.join(_options_before(job.words)))
    return job


_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "J": "job-name", "o": "output", "G": "gpus"}


def _options(text):
    words, found = shlex.split(text, comments=True), {}
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            short = word.lstrip("-")
            name, value, equals = _SHORT.get(short[:1], short[:1]), short[1:].lstrip("="), short[1:]
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        found[name] = value
    return found


def _number(options, name, default=None):
    value = options.get(name)
    return int(value) if value is not None and value.isdigit() else default


def _count(value):
    """The number in "4", "gpu:4", "gpu:v100:4" or "gpu:4,tmpfs:100"."""
    parts = [part for part in value.split(",") if part.startswith("gpu")] or [value]
    value = parts[0]
    last = value.rsplit(":", 1)[-1]
    return int(last) if last.isdigit() else 1 if value == "gpu" else None


def processes(job):
    """Whether the directives ask for the nodes, and for a process for each GPU."""
    options, nodes, wanted = job.options, job.nodes, job.nodes * job.gpus
    asked = _number({"nodes": re.sub(r"^(\d+)-\1$", r"\1", options.get("nodes", ""))}, "nodes")  # "2-2": from 2 to 2
    if asked != nodes:
        return "nodes-wrong", {"expected": nodes, "got": options.get("nodes", "no --nodes")}
    tasks = _number(options, "ntasks-per-node", _number(options, "tasks-per-node"))
    total = _number(options, "ntasks", tasks * nodes if tasks is not None else None)  # the total takes precedence
    if total is None and "ntasks-per-gpu" in options:
        total = (_number(options, "ntasks-per-gpu") or 0) * wanted
    if total is None and "gpus-per-task" not in options:
        total = nodes
    if total in (None, wanted):
        return None
    return "one-task-a-node", {"expected": f"{wanted} processes", "got": total, "found": total}


def gpus(job):
    options, nodes, each = job.options, job.nodes, None
    for name in ("gres", "gpus-per-node"):
        if name in options and (name != "gres" or re.search(r"(^|,)(gres[/:])?gpu(:|,|$)", options[name])):
            each = _count(options[name])
    if each is None and "gpus" in options:
        each = (_count(options["gpus"]) or 0) / nodes
    if each is None and "gpus-per-task" in options:
        each = (_count(options["gpus-per-task"]) or 0) * job.gpus
    if each is None:
        return "gpus-missing", {}
    told = {"expected": job.gpus, "got": each, "found": f"{each:g}", "nodes": nodes, "wanted": job.gpus}
    return None if each == job.gpus else ("gpus-wrong", told)


def cores(job):
    found = _number(job.options, "cpus-per-task", _number(job.options, "cpus-per-gpu"))
    if found is None:
        return "cores-missing", {}
    told = {"expected": job.cores, "got": found, "found": found, "wanted": job.cores}
    return None if found == job.cores else ("cores-wrong", told)


def limit(job):
    if "time" not in job.options:
        return "no-time", {}
    minutes, wanted = _minutes(job.options["time"]), job.case["minutes"]
    if minutes is not None and abs(minutes - wanted) < 1e-9:
        return None
    found = "nothing" if minutes is None else f"{minutes:g}"
    return "time-wrong", {"expected": f"{wanted} minutes", "got": job.options["time"], "found": found}


def named(job):
    return None if job.options.get("job-name") else ("name-missing", {})


def output(job):
    file = job.options.get("output", "%j")
    return None if re.search(r"%[0-9]*[jJA]", file) else ("output-overwritten", {"got": file})


def _minutes(text):
    """Minutes of a Slurm time: "minutes", "minutes:seconds", "h:m:s", "days-hours", "days-h:m", "days-h:m:s"."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()):
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 1440 + hours * 60 + minutes + seconds / 60
    if len(numbers) == 3:
        return numbers[0] * 60 + numbers[1] + numbers[2] / 60
    return numbers[0] + (numbers[1] / 60 if len(numbers) == 2 else 0)


def ended(job):
    """Whether the script does not end before the srun that it starts."""
    behind = re.search(r"(?m)^[^#\n]*\bsrun\b.*[^&|>]&\s*(#.*)?$", job.script.replace("\\\n", " "))
    waits = re.search(r"(?m)^[^#\n]*(?<![-\w])(wait|fg|kill|jobs)(?![-\w])", job.script)
    return ("not-waited-for", {"got": behind[0].strip()}) if behind and not waits else None


def started(job):
    """Whether srun starts the command."""
    if not job.calls:
        return "no-srun", {}
    if job.ours:
        return None
    command, words, (shell, text) = job.case["command"], job.words, _shell_text(job.words)
    fields = {"expected": f"srun … {command}", "got": shlex.join(words)}
    if shell and "$@" not in text and text != words[-1]:
        return "shell-text-cut", fields | {"shell": shell, "found": text}
    if words[-1] == command and all(word.startswith("-") for word in words[1:-1]):
        return "command-one-word", fields | {"found": command}
    return "command-missing", fields


def unchanged(job):
    """Whether it starts it once, and as it is."""
    words, wanted, got = job.words, shlex.split(job.case["command"]), {"got": shlex.join(job.words)}
    if len(job.ours) > 1:
        return "started-again", {"expected": 1, "got": len(job.ours), "n": len(job.ours)}
    before = [] if _shell_text(words)[0] else words[1 : -len(wanted)]
    twice = before[-len(wanted) :] == wanted
    program = next((word.rsplit("/", 1)[-1] for word in reversed(before) if not word.startswith("-")), "")
    if twice or re.fullmatch(r"python[\d.]*|bash|sh|echo", program):
        return "command-doubled", got | {"found": wanted[0] if twice else program}
    inner = [word for word in words if word in ("torchrun", "torch.distributed.run", "mpirun", "accelerate")]
    return ("launcher-inside", got | {"launcher": inner[0]}) if inner else None


def tasks(job):
    """Whether srun itself asks for no other number of processes."""
    wanted, nodes = job.nodes * job.gpus, _number(job.own, "nodes", job.nodes)
    found = _number(job.own, "ntasks", _number(job.own, "ntasks-per-node", job.gpus) * nodes)
    told = {"expected": f"{wanted} processes", "got": found, "found": found, "wanted": wanted}
    return None if found == wanted else ("srun-starts-others", told)


def cores_told(job):
    """Whether srun knows the cores of a process; --cpus-per-gpu is handed on: SLURM_CPUS_PER_GPU."""
    told = job.own.get("cpus-per-task", job.variables.get("SRUN_CPUS_PER_TASK") or None)
    fields = {"got": shlex.join(job.words), "found": told, "wanted": job.cores}
    if told is None and "cpus-per-task" in job.options:
        return "cores-not-told", fields | {"expected": f"{job.cores} cores"}
    return None if told in (None, str(job.cores)) else ("cores-wrong", fields)


def gpus_seen(job):
    """Whether a process sees all GPUs of its node."""
    for option, found in _hiding(job.own, job.options | job.own, job):
        if found < job.gpus:
            return "gpu-hidden", {"option": option, "found": f"{found:g}", "wanted": job.gpus}
    return None


def _hiding(own, options, job):
    """(an option or a variable, the GPUs that a process sees with it) of all that may hide some."""
    for name, parts in (("gres", 1), ("gpus-per-node", 1), ("gpus", _number(own, "nodes", job.nodes))):
        if name in own:
            yield f"--{name}={own[name]}", (_count(own[name]) or 0) / parts
    bound, seen = options.get("gpu-bind", ""), job.variables.get("CUDA_VISIBLE_DEVICES")
    if re.search(r"\b(single|per_task|map_gpu)\b", bound):
        yield f"--gpu-bind={bound}", 1
    for name in ("gpus-per-task", "ntasks-per-gpu"):  # with either, srun binds each task to its own GPU
        if name in options and not bound:
            yield f"--{name}={options[name]}", 1
    if seen is not None:
        yield f"CUDA_VISIBLE_DEVICES={seen}", len([number for number in seen.split(",") if number])


def _starts(words, command):
    """Whether the line ends in the command, as it is or as a text for a shell."""
    (shell, text), wanted = _shell_text(words), shlex.split(command)
    if shell and "$@" not in text:  # without, the words after the text are lost
        return text == words[-1] and command in text
    return words[-len(wanted) :] == wanted


def _shell_text(words):
    """(the shell that srun starts, the text that it is to run), or (None, None)."""
    for shell, option, text in zip(words, words[1:], words[2:]):
        if shell.rsplit("/", 1)[-1] in ("bash", "sh") and option in ("-c", "-lc", "-ec"):
            return shell, text
    return None, None


def _options_before(words):
    """srun's own options: up to the first word that is neither an option nor the value of one."""
    found, value = [], False  # value: the last option may have one of its own
    for word in words[1:]:
        if word == "--" or (not word.startswith("-") and (not value or shutil.which(word))):
            break
        found.append(word)
        value = word.startswith("-") and "=" not in word and (word.startswith("--") or len(word) == 2)
    return found


def accepted(batch_script):
    """What this machine's Slurm has to say against a script."""
    script = batch_script(nodes=1, gpus_per_node=1, cpus_per_gpu=1, minutes=1, command="true")
    tried = subprocess.run(["sbatch", "--test-only"], input=script, text=True, capture_output=True, timeout=20)
    text = (tried.stderr or tried.stdout).strip().split("\n")[-1]
    # what only this centre knows (account, partition, its GPUs) is not the script's fault
    ours = re.search(r"unrecognized|invalid option|[Bb]atch script|directive|time limit spec", text)
    return {"refused": text if tried.returncode and ours else ""}


def each(find, claim="", key="ran"):
    """A look at all jobs: what find(job) finds; see `recognised`."""

    def first(observed):
        for job in observed[key]:
            if wrong := find(job):
                return wrong[0], {"where": job.where} | wrong[1]
        return None

    return recognised(claim, first)


def odd(slug):
    return each(lambda job: slug in job.odd and (slug, job.odd[slug]), key="read")


def several(ports, _):
    return ports[1] != ports[3] and len({*ports}) > 3  # by small moduli a few may meet


def differ(ports, _):
    return not ports[0] or ports[0] != ports[1]  # it may not be handed on


def commonest(ports, _):
    found = max(ports, key=ports.count)
    return {"expected": "", "got": found, "found": found}


LOOKS = [
    Look("a shell script with its directives at the top", "script", "", "not-text"),
    *map(odd, ("no-shebang", "unreadable", "directive-indented", "directive-misspelt", "directive-after-command",
               "directive-spaced", "directive-variable")),
    each(processes, "nodes, one process for each GPU, with its GPUs and cores", "read"),
    each(gpus, key="read"), each(cores, key="read"),
    each(limit, "a time limit, a name, an output file that the next job does not overwrite", "read"),
    each(named, key="read"), each(output, key="read"),
    each(ended, "srun starts the command, once for each GPU, with its cores"),
    *map(each, (started, unchanged, tasks, cores_told, gpus_seen)),
    each(script_run.own_rank,
         "its processes find where rank 0 waits, MASTER_ADDR and MASTER_PORT, and each its own rank"),
    *(each(find, key="met") for find in (script_run.lost, script_run.missing, script_run.elsewhere, script_run.port)),
    Look("", "ports", None, "port-fixed", holds=several, fields=commonest),
    Look("", "again", None, "port-fixed", holds=differ, fields=commonest),
]  # fmt: skip
ACCEPTED = [Look("this machine's Slurm accepts it", "refused", "", "unreadable", fields="error")]


def balise_8(batch_script):
    """Five jobs: what Slurm and bash would read in their scripts."""
    yield from judged(LOOKS, observe, batch_script)
    if shutil.which("sbatch"):
        yield from judged(ACCEPTED, accepted, batch_script)
