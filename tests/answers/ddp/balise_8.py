"""Answers to balise 8 of 09_ddp: the batch script."""

from tests.answers.bank import Bank

bank = Bank("09_ddp", 8)

# balise 8
LAST = "#SBATCH --output=%x-%j.out\n"

bank.slip("nothing-returned", ('return f"""', 'text = f"""'))

bank.hint("not-text", "Return the script as one string.")
bank.slip("not-text", ('srun {command}\n"""', 'srun {command}\n""".splitlines()'))
bank.slip("not-text", ('srun {command}\n"""', 'srun {command}\n""".encode()'), variant=True)

bank.hint("no-shebang", "The first line says which program runs the script: #!/bin/bash")
bank.slip("no-shebang", ("#!/bin/bash\n", ""))
bank.slip("no-shebang", ("#!/bin/bash\n", "\n#!/bin/bash\n"), variant=True)

bank.hint("unreadable", "The script cannot be read: {error}")
bank.slip("unreadable", ("srun {command}", "if true; then\nsrun {command}"))
bank.slip("unreadable", ("srun {command}", "srun {command} (on all GPUs)"), variant=True)

bank.hint("directive-after-command", "Slurm reads #SBATCH lines only up to the first command, but {line} comes after "
          "it.", edge=True)  # fmt: skip
bank.slip("directive-after-command", (LAST, "export OMP_NUM_THREADS=1\n" + LAST))

bank.hint("directive-misspelt", "Directives start with #SBATCH, in capitals and "
          "without a space after the hash: {line}", edge=True)  # fmt: skip
bank.slip("directive-misspelt", ("#SBATCH --time", "# SBATCH --time"))

bank.hint("nodes-wrong", "The number of nodes you ask for is not `nodes`, or you ask for none. Write --nodes= with "
          "the argument's value.")  # fmt: skip
bank.slip("nodes-wrong", ("#SBATCH --nodes", "##SBATCH --nodes"))

bank.slip("nodes-wrong", ("#SBATCH --nodes={nodes}\n", ""))

bank.slip("nodes-wrong", ("#SBATCH --nodes={nodes}\n", "#SBATCH --nodes={nodes * gpus_per_node}\n"))

bank.hint("one-task-a-node", "You start {found} processes. Each GPU needs one: set ntasks-per-node to the number of "
          "GPUs of a node.")  # fmt: skip
bank.slip("one-task-a-node", ("ntasks-per-node={gpus_per_node}", "ntasks-per-node=1"))

bank.slip("one-task-a-node", ("#SBATCH --ntasks-per-node={gpus_per_node}\n", ""))

bank.hint("gpus-missing", "You ask for no GPUs, so the node's GPUs would not be visible to the job.")
bank.slip("gpus-missing", ("#SBATCH --gres=gpu:{gpus_per_node}\n", ""))

bank.hint("gpus-wrong", "GPUs are requested per node. You request {found} on each of {nodes} nodes, but {wanted} are "
          "needed.")  # fmt: skip
bank.slip("gpus-wrong", ("gres=gpu:{gpus_per_node}", "gres=gpu:{gpus_per_node * nodes}"))
bank.slip("gpus-wrong", ("--gres=gpu:", "--gpus="), variant=True)

bank.hint("cores-missing", "Without --cpus-per-task a process has one core, which its loader's workers must share.")
bank.slip("cores-missing", ("#SBATCH --cpus-per-task={cpus_per_gpu}\n", ""))
bank.slip("cores-missing", ("--cpus-per-task=", "--mincpus="), variant=True)

bank.hint("cores-wrong", "A process needs {wanted} cores, but you ask for {found}.")
bank.slip("cores-wrong", ("cpus-per-task={cpus_per_gpu}", "cpus-per-task={cpus_per_gpu * gpus_per_node}"))

bank.hint("no-time", "There is no time limit, so the partition's default applies, and the job waits longer or ends "
          "too early.")  # fmt: skip
bank.slip("no-time", ("#SBATCH --time={minutes}\n", ""))
bank.slip("no-time", ("--time=", "--deadline="), variant=True)

bank.hint("time-wrong", "Slurm reads your time limit as {found} minutes. Write minutes, or hours:minutes:seconds.")
bank.slip("time-wrong", ("--time={minutes}", "--time=00:{minutes}:00 "), ("{minutes}:00 ", "{minutes * 60}:00"))

bank.slip("time-wrong", ("--time={minutes}", "--time={minutes // 60}:{minutes % 60}"), variant=True)

bank.hint("no-srun", "Start the command with srun. Otherwise it runs once, on the first node.")
bank.slip("no-srun", ("srun {command}", "{command}"))

bank.slip("no-srun", ("srun {command}", "torchrun {command}"))

bank.hint("command-missing", "srun does not start the command.")
bank.slip("command-missing", ("srun {command}", "srun python train.py"))

bank.hint("output-overwritten", "The output file has no job number in its name (%j), "
          "so the next job overwrites it.", edge=True)  # fmt: skip
bank.slip("output-overwritten", ("%x-%j.out", "train.out"))
bank.slip("output-overwritten", ("%x-%j.out", "%x.out"), variant=True)

bank.hint("name-missing", "Name the job with --job-name, so that you can find it in the queue.", edge=True)
bank.slip("name-missing", ("#SBATCH --job-name=train\n", ""))
bank.slip("name-missing", ("--job-name=", "--comment="), variant=True)


@bank.right()
def batch_script(nodes, gpus_per_node, cpus_per_gpu, minutes, command):
    """Short options, all tasks counted, the time in hours, a long command line."""
    hours, rest = divmod(minutes, 60)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# a training",
            f"#SBATCH -J train -N {nodes} -n {nodes * gpus_per_node}",
            f"#SBATCH -c {cpus_per_gpu}  # for the loader",
            f"#SBATCH --gpus-per-node={gpus_per_node}",
            f"#SBATCH -t {hours:02}:{rest:02}:00",
            "",
            "set -e",
            "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK",
            "export MASTER_ADDR=$(hostname) MASTER_PORT=$((12000 + 10#${SLURM_JOB_ID: -4}))",
            "srun --kill-on-bad-exit=1 -c $SLURM_CPUS_PER_TASK \\",
            f"  {command}",
        ]
    )


@bank.right()
def batch_script(nodes, gpus_per_node, cpus_per_gpu, minutes, command):
    """GPUs in all, days in the time limit."""
    days, rest = divmod(minutes, 24 * 60)
    options = {
        "job-name": "train",
        "nodes": nodes,
        "ntasks-per-node": gpus_per_node,
        "gpus": nodes * gpus_per_node,
        "cpus-per-task": cpus_per_gpu,
        "time": f"{days}-{rest // 60:02}:{rest % 60:02}",
        "output": "logs/%j.txt",
        "hint": "nomultithread",
    }
    lines = [f"#SBATCH --{name} {value}" for name, value in options.items()]
    meet = "--export=ALL,MASTER_ADDR=$SLURMD_NODENAME,MASTER_PORT=$(shuf -i 20000-30000 -n 1)"
    return "#!/bin/bash\n" + "\n".join(lines) + f"\nmkdir -p logs\nsrun -c{cpus_per_gpu} {meet} {command}\n"


bank.slip(None, (LAST, ""), ("--gres=gpu:{gpus_per_node}", "--gpus={gpus_per_node * nodes}"))

bank.slip(
    None,
    ("srun {command}", "srun bash -c {shlex.quote(command)}"),
    ("    return f", "    import shlex\n\n    return f"),
)

bank.slip(None, ("#SBATCH --nodes", "##SBATCH --partition=debug\n#SBATCH --nodes"))

# srun's own options, comments, what only looks like a start
bank.hint("srun-starts-others", "You tell srun to start {found} processes, but {wanted} are needed. Without its own "
          "--ntasks, it uses the directives.")  # fmt: skip
bank.slip("srun-starts-others", ("srun {command}", "srun --ntasks=1 {command}"))

bank.slip("srun-starts-others", ("srun {command}", "srun -N1 -n1 {command}"))

bank.slip("srun-starts-others", ("srun {command}", "srun -n {nodes} {command}"), variant=True)

bank.slip("cores-wrong", ("srun {command}", "srun -c 1 {command}"))

bank.slip("no-srun", ("srun {command}", "{command}  # srun {command}"))

bank.slip("no-srun", ("srun {command}", "echo srun {command}"))

bank.slip("no-srun", ("srun {command}", "# srun {command}"))

bank.slip("command-missing", ("srun {command}", "srun hostname; {command}"))

bank.slip("command-missing", ("srun {command}", "srun  # {command}"), variant=True)

bank.slip("directive-after-command", ("#SBATCH --nodes", "cd ~/train\n#SBATCH --nodes"))

bank.slip("directive-after-command", (LAST, "set -e\n\n# the log\n" + LAST), variant=True)

bank.slip("directive-misspelt", ("#SBATCH --nodes", "#sbatch --nodes"), variant=True)

bank.hint("directive-indented", "Slurm reads a line only if it begins with #SBATCH, and bash reads the first line "
          "only if it begins with #!. There are spaces before it in {line!r}.", edge=True)  # fmt: skip
bank.slip("directive-indented", ("#SBATCH --nodes", "  #SBATCH --nodes"))

bank.slip("nodes-wrong", ("#SBATCH --nodes={nodes}", "#SBATCH --job-name=train  # --nodes={nodes}"))

bank.slip(
    None,
    ("#SBATCH --ntasks-per-node={gpus_per_node}\n", "#SBATCH --ntasks={gpus_per_node * nodes}\n"),
    ("--gres=gpu:{gpus_per_node}", "--gres=gpu:{gpus_per_node},tmpfs:100"),
    ("srun {command}", "time srun --label --cpus-per-task={cpus_per_gpu} {command} > train.log 2>&1"),
)

bank.slip(
    None,
    (
        "srun {command}",
        "srun --ntasks {nodes * gpus_per_node} -c {cpus_per_gpu} --cpu-bind cores numactl -N 0 {command} & wait",
    ),
)

bank.slip(
    None,
    ("srun {command}", 'COMMAND={shlex.quote(command)}\nif ! srun -K bash -c "$COMMAND"; then exit 1; fi  # once'),
    ("    return f", "    import shlex\n\n    return f"),
)

bank.slip(
    None,
    (
        "srun {command}",
        "set -euo pipefail\nmodule purge\nsource /site/profile.sh\n"
        "OMP_NUM_THREADS=1 /usr/bin/srun --kill-on-bad-exit --export=ALL \\\n    {command} | tee log.txt",
    ),
)

bank.hint("launcher-inside", "srun already starts a process for each GPU, and {launcher} in each of them would start "
          "more.")  # fmt: skip
bank.slip("launcher-inside", ("srun {command}", "srun torchrun --nproc-per-node={gpus_per_node} {command}"))
bank.slip("launcher-inside", ("srun {command}", "srun python -m torch.distributed.run {command}"), variant=True)

bank.slip("no-srun", ("srun {command}", "cat <<EOF\nsrun {command}\nEOF"), variant=True)

bank.slip(
    None,
    ("--ntasks-per-node=", "--tasks-per-node="),
    ("--nodes={nodes}", "--nodes={nodes}-{nodes}"),
    (
        "srun {command}",
        "cat > hosts.txt <<EOF\nhosts: $SLURM_JOB_NODELIST\nEOF\nmkdir -p logs && srun --wait 60 -- {command}",
    ),
)

# what srun's processes find: their cores, and where to meet
ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'

PORT = "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))\n"

CORES = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n"

bank.hint("cores-not-told", "The job has {wanted} cores per process, but srun doesn't know: since Slurm 22.05 it uses "
          "one. Pass --cpus-per-task to srun too, or export SRUN_CPUS_PER_TASK.", edge=True)  # fmt: skip
bank.slip("cores-not-told", (CORES, ""))

bank.slip("cores-not-told", (CORES, CORES.replace("SRUN", "OMP")))

bank.slip("cores-not-told", (CORES, CORES.removeprefix("export ")), variant=True)

bank.slip("cores-wrong", (CORES, "export SRUN_CPUS_PER_TASK=1\n"), variant=True)

bank.hint("master-missing", "srun's processes don't find {name}. Ranks meet at MASTER_ADDR:MASTER_PORT, and Slurm "
          "sets neither: export both before srun.")  # fmt: skip
bank.slip("master-missing", (ADDRESS, ""), (PORT, ""))

bank.slip("master-missing", (PORT, ""))

bank.slip("master-missing", ("export MASTER", "MASTER"))

bank.slip("master-missing", (ADDRESS, ""), ("srun {command}", "srun {command}\n" + ADDRESS))

bank.hint("master-elsewhere", "MASTER_ADDR is {found!r}, but rank 0 waits for the others on the job's first node, "
          "{wanted}. scontrol show hostnames lists the nodes of $SLURM_JOB_NODELIST.")  # fmt: skip
bank.slip("master-elsewhere", (ADDRESS, "export MASTER_ADDR=localhost\n"))

bank.slip("master-elsewhere", (ADDRESS, "export MASTER_ADDR=$SLURM_JOB_NODELIST\n"))

bank.slip("master-elsewhere", ("head -n 1", "tail -n 1"))

bank.slip("master-elsewhere", (" | head -n 1", ""))

bank.hint("port-out-of-range", "MASTER_PORT is {found!r} in job {job}, but a port must be a number from 1024 to "
          "65535. Take the remainder of a division, and add an offset that keeps "
          "every remainder in this range.", edge=True)  # fmt: skip
bank.slip("port-out-of-range", ("$((10000 + SLURM_JOB_ID % 20000))", "$((10000 + SLURM_JOB_ID))"))

bank.slip("port-out-of-range", ("$((10000 + SLURM_JOB_ID % 20000))", "$((SLURM_JOB_ID % 1000))"))

bank.slip(
    "master-elsewhere",
    ("head -n 1", "tail -n 1"),
    ("10000 + SLURM_JOB_ID % 20000", "12000 + ${{SLURM_JOB_ID: -4}}"),
    variant=True,
)

bank.hint("number-octal", "In job {job} the script stops at {found}. In bash, a number that begins with 0 is octal "
          "and can't contain 8 or 9. The prefix 10# makes it decimal: "
          "$((10#${{SLURM_JOB_ID: -4}})).", edge=True)  # fmt: skip
bank.slip("number-octal", ("10000 + SLURM_JOB_ID % 20000", "12000 + ${{SLURM_JOB_ID: -4}}"))

bank.slip(
    "number-octal", ("$((10000 + SLURM_JOB_ID % 20000))", '$(printf "1%04d" "${{SLURM_JOB_ID: -4}}")'), variant=True
)

bank.hint("port-fixed", "MASTER_PORT is {found} in several jobs. Two jobs on the same node would use the same port: "
          "compute it from the job's whole number.")  # fmt: skip
bank.slip("port-fixed", ("$((10000 + SLURM_JOB_ID % 20000))", "29500"))

bank.slip("port-fixed", ("SLURM_JOB_ID % 20000", "SLURM_JOB_NUM_NODES"))

bank.slip("port-fixed", ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 3"))

bank.slip("port-out-of-range", ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 65000"))

bank.slip(None, ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 1000"))

bank.hint("started-again", "You start the command {n} times. One srun starts it once for each process, on all nodes.")
bank.slip("started-again", ("srun {command}", "srun {command}\nsrun {command}"))

bank.slip(
    "started-again",
    ("srun {command}", "for epoch in 1 2 3; do\n  srun --kill-on-bad-exit {command}\ndone"),
    variant=True,
)

bank.slip("nodes-wrong", ("--nodes={nodes}", "--nodes=2"), variant=True)

bank.hint("script-stopped", "Run here with a simulated srun, the script ended before it reached srun: {error}")
bank.slip("script-stopped", (ADDRESS, "cd /no/such/folder || exit 1\n" + ADDRESS))
bank.slip("script-stopped", ("srun {command}", "exit 3\nsrun {command}"), variant=True)

bank.slip(
    None,
    (CORES, ""),
    ("--cpus-per-task=", "--cpus-per-gpu="),
    ("head -n 1", "sed 1q"),
    ("srun {command}", "srun env OMP_NUM_THREADS=2 {command}"),
)

bank.slip(None,
    (ADDRESS + PORT, ""),
    ("srun {command}", "nodes=($(scontrol show hostnames))\nMASTER_ADDR=${{nodes[0]}} MASTER_PORT=1${{SLURM_JOB_ID: -4}} srun {command}"),
)  # fmt: skip

bank.hint("directive-spaced", "An option and its value are one word, --nodes=2, or two, --nodes 2, but there are "
          "spaces around the = in {line!r}.", edge=True)  # fmt: skip
bank.slip("directive-spaced", ("--nodes={nodes}", "--nodes = {nodes}"))

bank.slip("directive-spaced", ("--time={minutes}", "--time= {minutes}"), variant=True)

bank.slip(
    "directive-indented",
    ('return f"""#!/bin/bash\n', 'return f"""    #!/bin/bash\n'),
    ("#SBATCH", "    #SBATCH"),
    variant=True,
)

# each process has its own rank; the batch shell has one
bank.hint("rank-for-all", "The process with {slurm} {wanted} finds {name} {found!r}. The batch shell inserts the "
          "value once, before srun, so all processes get the same. Each has its own SLURM_PROCID and SLURM_LOCALID, "
          "and join_world reads these.")  # fmt: skip
bank.slip(
    "rank-for-all", (CORES, CORES + "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\n")
)

bank.slip("rank-for-all", ("srun {command}", "LOCAL_RANK=$SLURM_LOCALID srun {command}"))

bank.slip("rank-for-all", ("srun {command}", "srun --export=ALL,RANK=$SLURM_PROCID {command}"))

bank.slip("rank-for-all", (CORES, CORES + "export WORLD_SIZE=$SLURM_NNODES\n"), variant=True)

bank.slip(
    None,
    (CORES, CORES + "export WORLD_SIZE=$SLURM_NTASKS\n"),
    ("srun {command}", "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec \"$@\"' each {command}"),
)

# ports that some job's number leads out of the range
bank.slip("port-out-of-range", ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 60000"))

bank.slip("port-out-of-range", ("10000 + SLURM_JOB_ID % 20000", "20000 + SLURM_JOB_ID % 50000"))

bank.slip("port-out-of-range", ("10000 + SLURM_JOB_ID % 20000", "1024 + SLURM_JOB_ID % 65535"))

bank.slip("port-out-of-range", ("10000 + SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 65536"), variant=True)

bank.slip(None, ("10000 + SLURM_JOB_ID % 20000", "1024 + SLURM_JOB_ID % 64512"))

# the command's own quotes
bank.hint("shell-text-cut", "{shell} -c runs one word, here {found!r}, and the rest is lost. shlex.quote(command) "
          "writes the whole command as one word, whatever quotes it contains.", edge=True)  # fmt: skip
bank.slip("shell-text-cut", ("srun {command}", "srun bash -c '{command}'"))

bank.slip("shell-text-cut", ("srun {command}", 'srun bash -c "{command}"'))

bank.slip("shell-text-cut", ("srun {command}", "srun sh -c {command}"), variant=True)

bank.hint("command-doubled", "srun starts {found!r} here, with the words of the command as arguments. The command "
          "itself says which program it runs: pass it on unchanged.")  # fmt: skip
bank.slip("command-doubled", ("srun {command}", "srun python {command}"))

bank.slip("command-doubled", ("srun {command}", "srun bash {command}"), variant=True)

bank.slip("command-doubled", ("srun {command}", "srun {command} {command}"))

bank.hint("command-one-word", "srun takes {found!r} as the name of one program. Write the words of the command as "
          "separate words.", edge=True)  # fmt: skip
bank.slip("command-one-word", ("srun {command}", 'srun "{command}"'))

bank.slip("command-one-word", ("srun {command}", "srun --kill-on-bad-exit=1 '{command}'"), variant=True)

bank.slip(
    None,
    ("srun {command}", 'srun bash -c {shlex.quote("ulimit -c 0; " + command)}'),
    ("    return f", "    import shlex\n\n    return f"),
)

# what a process sees of its node and of the script's variables, a job that ends too early, the first node told by a task
START, SCONTROL = "srun {command}", 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'

bank.hint("gpu-hidden", "With {option}, a process sees {found} of the {wanted} GPUs of its node. join_world takes the "
          "GPU whose number is the local rank, which is then missing. Request GPUs per node, and leave this option "
          "out.", edge=True)  # fmt: skip
bank.slip("gpu-hidden", (START, "srun --gpu-bind=verbose,per_task:1 {command}"))

bank.slip("gpu-hidden", (LAST, LAST + "#SBATCH --gpu-bind=single:1\n"))

bank.slip("gpu-hidden", ("--gres=gpu:{gpus_per_node}", "--gpus-per-task=1"))  # Slurm binds each task to its one

bank.slip("gpu-hidden", ("--ntasks-per-node={gpus_per_node}", "--ntasks-per-gpu=1"))

bank.slip("gpu-hidden", (START, "srun --gpus-per-task=1 {command}"))

bank.slip(None, ("--gres=gpu:{gpus_per_node}", "--gpus-per-task=1"), (START, "srun --gpu-bind=none {command}"))

bank.slip("gpu-hidden", (START, "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\nsrun {command}"))

bank.slip(None, (START, "srun --gpu-bind=none {command}"))

bank.slip(None, (START, "export CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))\nsrun --gpu-bind=closest {command}")
)  # fmt: skip

bank.hint("not-waited-for", "The job ends with its script, and srun and its processes end with the job. Here srun "
          "runs in the background (&): leave out the &, or end the script with wait.")  # fmt: skip
bank.slip("not-waited-for", (START, "srun {command} &  # the shell is free meanwhile"))

bank.slip("not-waited-for", (START, "srun --kill-on-bad-exit \\\\\n  {command} &\necho started"))

bank.slip(None, (START, "srun {command} &\nwait $!"))

bank.slip(
    "master-missing",
    (PORT, ""),
    (START, "srun --export=PATH,HOME {command}"),
    variant=True,
)  # one without, the other not handed on

bank.slip("port-fixed", ("SLURM_JOB_ID % 20000", "1"), (START, "srun --export=PATH,HOME {command}"))

bank.hint("not-handed-on", "With {option}, srun's processes find no {name}: they get the variables it lists, and no "
          "others that the script exported. Leave the option out, or begin the list with ALL.", edge=True)  # fmt: skip
bank.slip("not-handed-on", (START, "srun --export=PATH,HOME {command}"))
bank.slip("not-handed-on", (START, "srun --export=NONE {command}"), variant=True)

bank.slip(None, (START, "srun --export=PATH,MASTER_ADDR,MASTER_PORT {command}"))

bank.hint("master-any-order", "The tasks of srun write in any order, so the first line of `srun hostname` may come "
          "from any node, here from {found}. Rank 0 waits on the first one, {wanted}. Let one task write, srun "
          "--nodes=1 --ntasks=1, or use scontrol show hostnames.", edge=True)  # fmt: skip
bank.slip("master-any-order", (SCONTROL, "srun hostname -s | sed -n 1p"))
bank.slip("master-any-order", (SCONTROL, "srun --ntasks-per-node=1 hostname | head -1"), variant=True)

bank.slip(None, (SCONTROL, "srun -N1 -n 1 hostname -s"))

bank.slip(None, (SCONTROL, "srun hostname -s | sort -u | head -n 1"))

bank.hint("directive-variable", "sbatch reads the directives before any shell does, and doesn't replace variables: "
          "{line!r}. Let Python write the number there, in {{…}} of the f-string.")  # fmt: skip
bank.slip("directive-variable", ("--cpus-per-task={cpus_per_gpu}", "--cpus-per-task=$CPUS"))
bank.slip("directive-variable", ("--nodes={nodes}", "--nodes=$NODES"), variant=True)

bank.slip("command-doubled", ("srun {command}", "srun python -u {command}"))

bank.slip("command-doubled", ("srun {command}", "srun /usr/bin/python3.11 {command}"))

bank.slip("not-waited-for", ("srun {command}", "nohup srun {command} &"), variant=True)

bank.slip(
    "one-task-a-node",
    ("#SBATCH --nodes={nodes}", "#SBATCH --nodes={nodes}\n#SBATCH --ntasks={gpus_per_node}"),
    variant=True,
)

bank.slip(None, ("#SBATCH --nodes={nodes}", "#SBATCH --nodes={nodes}\n#SBATCH --ntasks={nodes * gpus_per_node}"))

bank.slip("gpu-hidden", ("srun {command}", "srun --gres=gpu:1 {command}"), variant=True)

bank.slip("gpus-missing", ("--gres=gpu:{gpus_per_node}", "--gres=gpus:{gpus_per_node}"), variant=True)

bank.slip(None, (CORES, CORES + "set -a\n"))

bank.slip(
    None,
    ("srun {command}", "srun bash -c {shlex.quote(command + '; exit $?')}"),
    ("def batch", "import shlex\n\n\ndef batch"),
)

bank.slip("port-fixed", ("$((10000 + SLURM_JOB_ID % 20000))", "{10000 + minutes}"))

bank.slip(
    "port-fixed", ("$((10000 + SLURM_JOB_ID % 20000))", "{10000 + nodes * gpus_per_node * 100 + minutes}"), variant=True
)
