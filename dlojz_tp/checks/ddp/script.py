"""Balise 8: a batch script for Slurm: parsed, run with a pretended srun, and tried where there is a Slurm."""

import re
import shlex
import shutil
import subprocess

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.ddp import script_run

HINTS = {
    "not-text": "Return the script as one string.",
    "no-shebang": "The first line says which program runs the script: #!/bin/bash",
    "unreadable": "The script cannot be read: {error}",
    "directive-after-command": "Slurm reads #SBATCH lines only up to the first command, but {line} comes after it.",
    "directive-misspelt": "Directives start with #SBATCH, in capitals and without a space after the hash: {line}",
    "directive-indented": "Slurm reads a line only if it begins with #SBATCH, and bash reads the first line only "
                          "if it begins with #!. There are spaces before it in {line!r}.",
    "directive-spaced": "An option and its value are one word, --nodes=2, or two, --nodes 2, but there are spaces "
                        "around the = in {line!r}.",
    "directive-variable": "sbatch reads the directives before any shell does, and doesn't replace variables: "
                          "{line!r}. Let Python write the number there, in {{…}} of the f-string.",
    "nodes-wrong": "The number of nodes you ask for is not `nodes`, or you ask for none. Write --nodes= with the "
                   "argument's value.",
    "one-task-a-node": "You start {found} processes. Each GPU needs one: set ntasks-per-node to the number of GPUs "
                       "of a node.",
    "gpus-missing": "You ask for no GPUs, so the node's GPUs would not be visible to the job.",
    "gpus-wrong": "GPUs are requested per node. You request {found} on each of {nodes} nodes, but {wanted} are needed.",
    "launcher-inside": "srun already starts a process for each GPU, and {launcher} in each of them would start more.",
    "cores-missing": "Without --cpus-per-task a process has one core, which its loader's workers must share.",
    "cores-wrong": "A process needs {wanted} cores, but you ask for {found}.",
    "no-time": "There is no time limit, so the partition's default applies, and the job waits longer or ends too "
               "early.",
    "time-wrong": "Slurm reads your time limit as {found} minutes. Write minutes, or hours:minutes:seconds.",
    "no-srun": "Start the command with srun. Otherwise it runs once, on the first node.",
    "started-again": "You start the command {n} times. One srun starts it once for each process, on all nodes.",
    "command-missing": "srun does not start the command.",
    "command-doubled": "srun starts {found!r} here, with the words of the command as arguments. The command itself "
                       "says which program it runs: pass it on unchanged.",
    "command-one-word": "srun takes {found!r} as the name of one program. Write the words of the command as "
                        "separate words.",
    "shell-text-cut": "{shell} -c runs one word, here {found!r}, and the rest is lost. shlex.quote(command) writes "
                      "the whole command as one word, whatever quotes it contains.",
    "not-waited-for": "The job ends with its script, and srun and its processes end with the job. Here srun runs "
                      "in the background (&): leave out the &, or end the script with wait.",
    "srun-starts-others": "You tell srun to start {found} processes, but {wanted} are needed. Without its own "
                          "--ntasks, it uses the directives.",
    "output-overwritten": "The output file has no job number in its name (%j), so the next job overwrites it.",
    "name-missing": "Name the job with --job-name, so that you can find it in the queue.",
}

CASES = (
    {"nodes": 2, "gpus_per_node": 4, "cpus_per_gpu": 10, "minutes": 90, "command": "python train.py --epochs 90"},
    {"nodes": 1, "gpus_per_node": 1, "cpus_per_gpu": 3, "minutes": 5, "command": "python evaluate.py"},
    {"nodes": 16, "gpus_per_node": 8, "cpus_per_gpu": 12, "minutes": 1500, "command": "python -m trainer 'two words'"},
    {"nodes": 1, "gpus_per_node": 4, "cpus_per_gpu": 6, "minutes": 60, "command": 'python train.py --name "a run"'},
    {"nodes": 4, "gpus_per_node": 2, "cpus_per_gpu": 5, "minutes": 2880, "command": "python train.py"},
)


def balise_8(batch_script):
    """Five jobs: what Slurm and bash would read in their scripts."""
    scripts = [batch_script(**case) for case in CASES]
    yield "a shell script with its directives at the top"
    parsed = [_parse(script) for script in scripts]
    yield "nodes, one process for each GPU, with its GPUs and cores"
    for case, (options, _) in zip(CASES, parsed):
        _right_resources(case, options)
    yield "a time limit, a name, an output file that the next job does not overwrite"
    for case, (options, _) in zip(CASES, parsed):
        _right_frame(case, options)
    yield "srun starts the command, once for each GPU, with its cores"
    ran = [script_run.told(*job) for job in zip(scripts, CASES, [o for o, _ in parsed], script_run.JOBS)]
    for script in scripts:
        _right_end(script)
    variables = [_right_step(case, options, calls) for case, (options, _), calls in zip(CASES, parsed, ran)]
    yield "its processes find where rank 0 waits, MASTER_ADDR and MASTER_PORT, and each its own rank"
    script_run.right_ranks(CASES, variables)
    script_run.right_meeting(CASES, variables, scripts)
    later = script_run.told(scripts[0], CASES[0], parsed[0][0], script_run.JOBS[1])  # the same script as another job
    script_run.other_port(variables[0], _right_step(CASES[0], parsed[0][0], later))
    if shutil.which("sbatch"):
        yield "this machine's Slurm accepts it"
        _accepted(batch_script)


def _parse(script):
    """(options of the directives, lines of commands) of a script."""
    if script is None:
        raise Wrong("nothing-returned")
    if not isinstance(script, str):
        raise Wrong("not-text", got=script)
    lines = script.splitlines()
    shebang = re.compile(r"#!\s*/\S*\b(bash|sh)\b|#!\s*/usr/bin/env (bash|sh)\b")
    if lines and shebang.match(lines[0].lstrip()) and lines[0][0].isspace():
        raise Wrong("directive-indented", line=lines[0])
    if not lines or not shebang.match(lines[0]):
        raise Wrong("no-shebang", got=lines[0] if lines else "an empty script")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=10)
    if checked.returncode:
        raise Wrong("unreadable", error=checked.stderr.strip().split("\n")[0])
    options, commands = {}, []
    for line in lines[1:]:
        if line.startswith("#SBATCH"):
            if commands:
                raise Wrong("directive-after-command", line=line)
            if re.search(r"\s-{1,2}[\w-]+(\s+=|=(\s|$))", line.split(" #")[0]):
                raise Wrong("directive-spaced", line=line)
            if "$" in line.split(" #")[0]:
                raise Wrong("directive-variable", line=line)
            options.update(_options(line.removeprefix("#SBATCH")))
        elif line.lstrip().startswith("#SBATCH"):
            raise Wrong("directive-indented", line=line)
        elif re.match(r"\s*#\s*sbatch\b", line, re.IGNORECASE):
            raise Wrong("directive-misspelt", line=line.strip())
        elif line.strip() and not line.lstrip().startswith("#"):
            commands.append(line)
    return options, commands


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


def _right_resources(case, options):
    nodes, gpus, cores = case["nodes"], case["gpus_per_node"], case["cpus_per_gpu"]
    where = f"{nodes} nodes with {gpus} GPUs, {cores} cores a GPU"
    asked = _number({"nodes": re.sub(r"^(\d+)-\1$", r"\1", options.get("nodes", ""))}, "nodes")  # "2-2": from 2 to 2
    if asked != nodes:
        raise Wrong("nodes-wrong", expected=nodes, got=options.get("nodes", "no --nodes"), where=where)
    tasks = _number(options, "ntasks-per-node", _number(options, "tasks-per-node"))
    total = _number(options, "ntasks", tasks * nodes if tasks is not None else None)  # the total takes precedence
    if total is None and "ntasks-per-gpu" in options:
        total = (_number(options, "ntasks-per-gpu") or 0) * nodes * gpus
    if total is None and "gpus-per-task" not in options:
        total = nodes
    if total is not None and total != nodes * gpus:
        raise Wrong("one-task-a-node", expected=f"{nodes * gpus} processes", got=total, where=where, found=total)
    _right_gpus(options, nodes, gpus, total, where)
    found = _number(options, "cpus-per-task")
    if found is None and "cpus-per-gpu" in options:
        found = _number(options, "cpus-per-gpu")
    if found is None:
        raise Wrong("cores-missing", where=where)
    if found != cores:
        raise Wrong("cores-wrong", expected=cores, got=found, where=where, found=found, wanted=cores)


def _right_gpus(options, nodes, gpus, tasks, where):
    each = None
    for name in ("gres", "gpus-per-node"):
        if name in options and (name != "gres" or re.search(r"(^|,)(gres[/:])?gpu(:|,|$)", options[name])):
            each = _count(options[name])
    if each is None and "gpus" in options:
        each = (_count(options["gpus"]) or 0) / nodes
    if each is None and "gpus-per-task" in options:
        each = (_count(options["gpus-per-task"]) or 0) * (tasks or nodes * gpus) / nodes
    if each is None:
        raise Wrong("gpus-missing", where=where)
    if each != gpus:
        raise Wrong("gpus-wrong", expected=gpus, got=each, where=where, found=f"{each:g}", nodes=nodes, wanted=gpus)


def _right_frame(case, options):
    if "time" not in options:
        raise Wrong("no-time")
    minutes = _minutes(options["time"])
    if minutes is None or abs(minutes - case["minutes"]) > 1e-9:
        found = "nothing" if minutes is None else f"{minutes:g}"
        raise Wrong("time-wrong", expected=f"{case['minutes']} minutes", got=options["time"], found=found)
    if not options.get("job-name"):
        raise Wrong("name-missing")
    if "output" in options and not re.search(r"%[0-9]*[jJA]", options["output"]):
        raise Wrong("output-overwritten", got=options["output"])


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


def _right_step(case, options, calls):
    """The call of srun that starts the command: with its processes, and their cores. Returns the processes' variables."""
    wanted = shlex.split(case["command"])
    if not calls:
        raise Wrong("no-srun")
    ours = [(words, variables) for words, variables in calls if _starts(words, case["command"], wanted)]
    if not ours:
        slug, fields = _not_started(calls[-1][0], case["command"])
        raise Wrong(slug, expected=f"srun … {case['command']}", got=shlex.join(calls[-1][0]), **fields)
    if len(ours) > 1:
        raise Wrong("started-again", expected=1, got=len(ours), n=len(ours))
    words, variables = ours[0]
    before = [] if _shell_text(words)[0] else words[1 : -len(wanted)]
    twice = before[-len(wanted) :] == wanted
    program = next((word.rsplit("/", 1)[-1] for word in reversed(before) if not word.startswith("-")), "")
    if twice or re.fullmatch(r"python[\d.]*|bash|sh|echo", program):
        raise Wrong("command-doubled", got=shlex.join(words), found=wanted[0] if twice else program)
    inner = [word for word in words if word in ("torchrun", "torch.distributed.run", "mpirun", "accelerate")]
    if inner:
        raise Wrong("launcher-inside", got=shlex.join(words), launcher=inner[0])
    own = _options(shlex.join(_options_before(words)))
    tasks, cores = case["nodes"] * case["gpus_per_node"], case["cpus_per_gpu"]
    nodes = _number(own, "nodes", case["nodes"])
    found = _number(own, "ntasks", _number(own, "ntasks-per-node", case["gpus_per_node"]) * nodes)
    if found != tasks:
        raise Wrong("srun-starts-others", expected=f"{tasks} processes", got=found, found=found, wanted=tasks)
    told = own.get("cpus-per-task", variables.get("SRUN_CPUS_PER_TASK") or None)
    if told is None and "cpus-per-task" in options:  # --cpus-per-gpu is handed on: SLURM_CPUS_PER_GPU
        raise Wrong("cores-not-told", expected=f"{cores} cores", got=shlex.join(words), wanted=cores)
    if told is not None and told != str(cores):
        raise Wrong("cores-wrong", got=shlex.join(words), found=told, wanted=cores)
    for name, parts in (("gres", 1), ("gpus-per-node", 1), ("gpus", nodes)):
        if name in own and (seen := (_count(own[name]) or 0) / parts) < case["gpus_per_node"]:
            raise Wrong("gpu-hidden", got=shlex.join(words), option=f"--{name}={own[name]}", found=f"{seen:g}",
                        wanted=case["gpus_per_node"])  # fmt: skip
    script_run.right_gpus(case, options | own, variables)
    return variables


def _right_end(script):
    """The script must not end before the srun that it starts."""
    behind = re.search(r"(?m)^[^#\n]*\bsrun\b.*[^&|>]&\s*(#.*)?$", script.replace("\\\n", " "))
    if behind and not re.search(r"(?m)^[^#\n]*(?<![-\w])(wait|fg|kill|jobs)(?![-\w])", script):
        raise Wrong("not-waited-for", got=behind[0].strip())


def _starts(words, command, wanted):
    """Whether the line ends in the command, as it is or as a text for a shell."""
    shell, text = _shell_text(words)
    if shell and "$@" not in text:  # without, the words after the text are lost
        return text == words[-1] and command in text
    return words[-len(wanted) :] == wanted


def _shell_text(words):
    """(the shell that srun starts, the text that it is to run), or (None, None)."""
    for shell, option, text in zip(words, words[1:], words[2:]):
        if shell.rsplit("/", 1)[-1] in ("bash", "sh") and option in ("-c", "-lc", "-ec"):
            return shell, text
    return None, None


def _not_started(words, command):
    """(slug, fields) for a call of srun that does not start the command."""
    shell, text = _shell_text(words)
    if shell and "$@" not in text and text != words[-1]:
        return "shell-text-cut", {"shell": shell, "found": text}
    if words[-1] == command and all(word.startswith("-") for word in words[1:-1]):
        return "command-one-word", {"found": command}
    return "command-missing", {}


def _options_before(words):
    """srun's own options: up to the first word that is neither an option nor the value of one."""
    found, value = [], False  # value: the last option may have one of its own
    for word in words[1:]:
        if word == "--" or (not word.startswith("-") and (not value or shutil.which(word))):
            break
        found.append(word)
        value = word.startswith("-") and "=" not in word and (word.startswith("--") or len(word) == 2)
    return found


def _accepted(batch_script):
    script = batch_script(nodes=1, gpus_per_node=1, cpus_per_gpu=1, minutes=1, command="true")
    tried = subprocess.run(["sbatch", "--test-only"], input=script, text=True, capture_output=True, timeout=20)
    text = (tried.stderr or tried.stdout).strip().split("\n")[-1]
    # what only this centre knows (account, partition, its GPUs) is not the script's fault
    if tried.returncode and re.search(r"unrecognized|invalid option|[Bb]atch script|directive|time limit spec", text):
        raise Wrong("unreadable", error=text)
