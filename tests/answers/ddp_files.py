"""Answers to balises 6, 7 and 8 of 09_ddp: equal work, checkpoints, the batch script."""

import contextlib
import heapq
import io
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("09_ddp")


# balise 6
@bank.wrong(6, "not-lists")
def balance(lengths, world_size):
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [i % world_size for i in order]


@bank.wrong(6, "not-lists")
def balance(lengths, world_size):
    shares = [list(range(len(lengths)))[i : i + world_size] for i in range(0, len(lengths), world_size)]
    return shares * 2


@bank.wrong(6, "sequence-lost")
def balance(lengths, world_size):
    n = len(lengths) // world_size
    return [list(range(rank * n, (rank + 1) * n)) for rank in range(world_size)]


@bank.wrong(6, "sequence-twice")
def balance(lengths, world_size):
    return [list(range(len(lengths))) for _ in range(world_size)]


@bank.wrong(6, "equal-counts")
def balance(lengths, world_size):
    return [list(range(rank, len(lengths), world_size)) for rank in range(world_size)]


@bank.wrong(6, "equal-counts")
def balance(lengths, world_size):
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds = [order[i : i + world_size] for i in range(0, len(order), world_size)]
    rounds = [r if k % 2 == 0 else [None] * (world_size - len(r)) + r[::-1] for k, r in enumerate(rounds)]
    return [[r[rank] for r in rounds if rank < len(r) and r[rank] is not None] for rank in range(world_size)]


@bank.wrong(6, "unbalanced")
def balance(lengths, world_size):
    shares = [[] for _ in range(world_size)]
    for place in range(len(lengths)):
        shares[place if place < world_size else 0].append(place)
    return shares


@bank.wrong(6, "not-the-same-everywhere")
def balance(lengths, world_size):
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], random.random()))
    random.shuffle(order)
    order.sort(key=lambda i: -lengths[i])
    shares, loads = [[] for _ in range(world_size)], [0] * world_size
    ranks = list(range(world_size))
    for place in order:
        random.shuffle(ranks)
        rank = min(ranks, key=loads.__getitem__)
        shares[rank].append(place)
        loads[rank] += lengths[place]
    return shares


@bank.wrong(6, "not-level")
def balance(lengths, world_size):
    """Cut in the order given, where the tokens so far pass a rank's part of all."""
    shares, so_far = [[] for _ in range(world_size)], 0
    for place, length in enumerate(lengths):
        shares[so_far * world_size // sum(lengths)].append(place)
        so_far += length
    return shares


bank.slip(6, "nothing-returned", ("    return shares\n", ""))
bank.slip(6, "not-numbers", ("shares[rank].append(place)", "shares[rank].append(lengths[place])"))
bank.slip(6, "longest-first", ("sorted(range(len(lengths)), key=lambda i: -lengths[i])", "range(len(lengths))"))
bank.slip(6, "shortest-first", ("key=lambda i: -lengths[i]", "key=lambda i: lengths[i]"))
bank.slip(6, "shortest-first", ("sorted(range(len(lengths)), key=lambda i: -lengths[i])", "sorted(range(len(lengths)), key=lambda i: (lengths[i], i))"))  # fmt: skip
bank.slip(6, "numbered-from-one", ("shares[rank].append(place)", "shares[rank].append(place + 1)"))
bank.slip(6, "equal-counts", ("tokens + lengths[place]", "tokens + 1"))
bank.slip(
    6,
    "rank-without-work",
    (
        "loads = [(0, rank) for rank in range(world_size)]",
        "loads = [(0, rank) for rank in range(max(1, world_size - 1))]",
    ),
)
bank.slip(6, "lengths-changed", ("    return shares", "    lengths.sort()\n    return shares"))


@bank.right(6)
def balance(lengths, world_size):
    """No heap: the least loaded rank by looking at all."""
    loads, shares = torch.zeros(world_size, dtype=torch.long), [[] for _ in range(world_size)]
    for place in torch.tensor(lengths).argsort(descending=True, stable=True).tolist():
        rank = int(loads.argmin())
        shares[rank].append(place)
        loads[rank] += lengths[place]
    return tuple(shares)


@bank.right(6)
def balance(lengths, world_size):
    """Longest first, then exchanges between the fullest and the emptiest while they help."""
    shares = [[] for _ in range(world_size)]

    def load(share):
        return sum(lengths[i] for i in share)

    loads = [0] * world_size
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += lengths[place]
    full, empty = max(shares, key=load), min(shares, key=load)
    for place in list(full):
        if len(full) > 1 and load(empty) + lengths[place] < load(full):
            full.remove(place)
            empty.append(place)
    return shares


# balise 7
WRITE = "            torch.save(state, partial)\n            partial.replace(path)  # atomic: readers see the old file or the new one\n"
STATE = '{"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}'
TRY = "        try:\n" + WRITE + "        except (OSError, RuntimeError) as error:\n            outcome = [error]\n"
TELL = (
    "    dist.broadcast_object_list(outcome)  # the others wait for the file here, and learn of a failure\n"
    "    if outcome[0] is not None:\n        raise outcome[0]\n"
)
PLAIN = WRITE.replace("            ", "        ")  # nothing caught
bank.slip(7, "nothing-saved", (WRITE, "            torch.save(state, partial)\n"))
bank.slip(
    7,
    "all-ranks-write",
    ("if dist.get_rank() == 0:", "if True:"),
    ('Path(f"{path}.partial")', 'Path(f"{path}.partial{dist.get_rank()}")'),
)
ZERO = "    if dist.get_rank() == 0:\n"
bank.slip(7, "no-barrier", (TELL, ""), (TRY, PLAIN))
bank.slip(7, "no-barrier", (TELL, ""), (TRY, PLAIN), (ZERO, "    dist.barrier()\n" + ZERO))
bank.slip(7, "no-barrier", (TELL, "    dist.barrier(async_op=True)\n"), (TRY, PLAIN))
bank.slip(7, "others-left-waiting", (TELL, "    dist.barrier()\n"), (TRY, PLAIN))
bank.slip(7, "others-left-waiting", (TELL, "    dist.all_reduce(torch.ones(1))\n"), (TRY, PLAIN))
bank.slip(7, "others-left-waiting", ("            outcome = [error]", "            raise error"))
bank.slip(7, None, (TELL, ""), (TRY, "        try:\n" + WRITE + "        finally:\n            dist.barrier()\n    else:\n        dist.barrier()\n"))  # fmt: skip
bank.slip(7, "whole-module-pickled", ("network.state_dict()", "network"))
bank.slip(7, "old-file-lost", (WRITE, "            torch.save(state, path)\n"))
bank.slip(7, "old-file-lost", (WRITE, "            Path(path).unlink(missing_ok=True)\n" + WRITE))
bank.slip(
    7,
    "copied-into-place",
    ("        partial.replace(path)", "        shutil.copyfile(partial, path)"),
    ("def save_checkpoint", "import shutil\n\n\ndef save_checkpoint"),
)
bank.slip(
    7, "copied-into-place", ("        partial.replace(path)", "        Path(path).write_bytes(partial.read_bytes())")
)
bank.slip(
    7,
    "failure-hidden",
    ("            outcome = [error]", "            print(error)"),
)
bank.slip(
    7,
    "module-prefix",
    ("network = model.module if isinstance(model, DDP) else model\n        state", "network = model\n        state"),
)
bank.slip(7, "epoch-forgotten", ('    return state["epoch"]', '    return state["epoch"] + 1'))
bank.slip(7, "epoch-forgotten", ('    return state["epoch"]', "    return 2"))
bank.slip(7, "loaded-onto-other", ("map_location=device, ", ""))
bank.slip(7, "loaded-onto-other", ("map_location=device", "map_location=torch.device('cuda', 0) if torch.cuda.is_available() else device"))  # fmt: skip
bank.slip(7, "unsafe-load", ("weights_only=True", "weights_only=False"))
bank.slip(7, "optimizer-forgotten", ('    optimizer.load_state_dict(state["optimizer"])\n', ""))
bank.slip(7, "parameters-replaced", ('network.load_state_dict(state["model"])', 'network.load_state_dict(state["model"], assign=True)'))
bank.slip(
    7,
    "optimizer-forgotten",
    (STATE, '{"model": network.state_dict(), "epoch": epoch}'),
    ('    optimizer.load_state_dict(state["optimizer"])\n', ""),
)
bank.slip(
    7,
    "buffers-forgotten",
    (STATE, '{"model": dict(network.named_parameters()), "optimizer": optimizer.state_dict(), "epoch": epoch}'),
    ('network.load_state_dict(state["model"])', 'network.load_state_dict(state["model"], strict=False)'),
)
bank.slip(7, "weights-forgotten", ('    network.load_state_dict(state["model"])\n', ""))
bank.slip(
    7,
    "ranks-resume-apart",
    (
        "    if not Path(path).exists():",
        "    if dist.is_initialized() and dist.get_rank() > 0:\n        return 2\n    if not Path(path).exists():",
    ),
)
bank.slip(7, "no-file-no-zero", ("    if not Path(path).exists():\n        return 0\n", ""))
bank.slip(7, "no-file-no-zero", ("        return 0\n", "        return None\n"))
bank.slip(
    7,
    "resume-wrong",
    (
        '    optimizer.load_state_dict(state["optimizer"])\n',
        '    optimizer.load_state_dict(state["optimizer"])\n    optimizer.param_groups[0]["lr"] /= dist.get_world_size() + 1 if dist.is_initialized() else 1\n    model.register_forward_hook(lambda m, _, out: out * 1.01)\n',
    ),
)


def save_checkpoint(path, model, optimizer, epoch):
    """One flat dictionary of tensors, synced to the disk, moved into place; then a message instead of a barrier."""
    module = getattr(model, "module", model)
    done = torch.zeros(1)
    try:
        if dist.get_rank() == 0:
            temporary = f"{os.fspath(path)}.{os.getpid()}"
            with open(temporary, "wb") as file:
                torch.save([epoch, module.state_dict(), optimizer.state_dict()], file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)  # noqa: PTH104
            done += 1
    finally:
        dist.broadcast(done, src=0)
    if not done:
        raise OSError(f"rank 0 could not write {path}")


def load_checkpoint(path, model, optimizer):
    module = getattr(model, "module", model)
    try:
        epoch, weights, moments = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return 0
    module.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    return epoch


bank.several(7, None, save_checkpoint, load_checkpoint)
bank.slip(
    7,
    None,
    ('Path(f"{path}.partial")', 'Path(path).with_suffix(".new")'),
    ('"epoch": epoch}', '"epoch": torch.tensor(epoch)}'),
    ('return state["epoch"]', 'return int(state["epoch"])'),
)

# balise 8
LAST = "#SBATCH --output=%x-%j.out\n"
bank.slip(8, "nothing-returned", ('return f"""', 'text = f"""'))
bank.slip(8, "not-text", ('srun {command}\n"""', 'srun {command}\n""".splitlines()'))
bank.slip(8, "no-shebang", ("#!/bin/bash\n", ""))
bank.slip(8, "unreadable", ("srun {command}", "if true; then\nsrun {command}"))
bank.slip(8, "directive-after-command", (LAST, "export OMP_NUM_THREADS=1\n" + LAST))
bank.slip(8, "directive-misspelt", ("#SBATCH --time", "# SBATCH --time"))
bank.slip(8, "nodes-wrong", ("#SBATCH --nodes", "##SBATCH --nodes"))
bank.slip(8, "nodes-wrong", ("#SBATCH --nodes={nodes}\n", ""))
bank.slip(8, "nodes-wrong", ("#SBATCH --nodes={nodes}\n", "#SBATCH --nodes={nodes * gpus_per_node}\n"))
bank.slip(8, "one-task-a-node", ("ntasks-per-node={gpus_per_node}", "ntasks-per-node=1"))
bank.slip(8, "one-task-a-node", ("#SBATCH --ntasks-per-node={gpus_per_node}\n", ""))
bank.slip(8, "gpus-missing", ("#SBATCH --gres=gpu:{gpus_per_node}\n", ""))
bank.slip(8, "gpus-wrong", ("gres=gpu:{gpus_per_node}", "gres=gpu:{gpus_per_node * nodes}"))
bank.slip(8, "cores-missing", ("#SBATCH --cpus-per-task={cpus_per_gpu}\n", ""))
bank.slip(8, "cores-wrong", ("cpus-per-task={cpus_per_gpu}", "cpus-per-task={cpus_per_gpu * gpus_per_node}"))
bank.slip(8, "no-time", ("#SBATCH --time={minutes}\n", ""))
bank.slip(8, "time-wrong", ("--time={minutes}", "--time=00:{minutes}:00 "), ("{minutes}:00 ", "{minutes * 60}:00"))
bank.slip(8, "time-wrong", ("--time={minutes}", "--time={minutes // 60}:{minutes % 60}"))
bank.slip(8, "no-srun", ("srun {command}", "{command}"))
bank.slip(8, "no-srun", ("srun {command}", "torchrun {command}"))
bank.slip(8, "command-missing", ("srun {command}", "srun python train.py"))
bank.slip(8, "output-overwritten", ("%x-%j.out", "train.out"))
bank.slip(8, "name-missing", ("#SBATCH --job-name=train\n", ""))


@bank.right(8)
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


@bank.right(8)
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


bank.slip(8, None, (LAST, ""), ("--gres=gpu:{gpus_per_node}", "--gpus={gpus_per_node * nodes}"))


bank.slip(7, None, ("    if not Path(path).exists():", "    dist.barrier()\n    if not Path(path).exists():"))
bank.slip(
    7,
    "rank-failed",
    ("network = model.module if isinstance(model, DDP) else model\n    device", "network = model\n    device"),
)
bank.slip(
    8,
    None,
    ("srun {command}", "srun bash -c {shlex.quote(command)}"),
    ("    return f", "    import shlex\n\n    return f"),
)
bank.slip(8, None, ("#SBATCH --nodes", "##SBATCH --partition=debug\n#SBATCH --nodes"))


# srun's own options, comments, what only looks like a start
bank.slip(8, "srun-starts-others", ("srun {command}", "srun --ntasks=1 {command}"))
bank.slip(8, "srun-starts-others", ("srun {command}", "srun -N1 -n1 {command}"))
bank.slip(8, "srun-starts-others", ("srun {command}", "srun -n {nodes} {command}"))
bank.slip(8, "cores-wrong", ("srun {command}", "srun -c 1 {command}"))
bank.slip(8, "no-srun", ("srun {command}", "{command}  # srun {command}"))
bank.slip(8, "no-srun", ("srun {command}", "echo srun {command}"))
bank.slip(8, "no-srun", ("srun {command}", "# srun {command}"))
bank.slip(8, "command-missing", ("srun {command}", "srun hostname; {command}"))
bank.slip(8, "command-missing", ("srun {command}", "srun  # {command}"))
bank.slip(8, "directive-after-command", ("#SBATCH --nodes", "cd ~/train\n#SBATCH --nodes"))
bank.slip(8, "directive-after-command", (LAST, "set -e\n\n# the log\n" + LAST))
bank.slip(8, "directive-misspelt", ("#SBATCH --nodes", "#sbatch --nodes"))
bank.slip(8, "directive-indented", ("#SBATCH --nodes", "  #SBATCH --nodes"))
bank.slip(8, "nodes-wrong", ("#SBATCH --nodes={nodes}", "#SBATCH --job-name=train  # --nodes={nodes}"))
bank.slip(
    8,
    None,
    ("#SBATCH --ntasks-per-node={gpus_per_node}\n", "#SBATCH --ntasks={gpus_per_node * nodes}\n"),
    ("--gres=gpu:{gpus_per_node}", "--gres=gpu:{gpus_per_node},tmpfs:100"),
    ("srun {command}", "time srun --label --cpus-per-task={cpus_per_gpu} {command} > train.log 2>&1"),
)
bank.slip(
    8,
    None,
    (
        "srun {command}",
        "srun --ntasks {nodes * gpus_per_node} -c {cpus_per_gpu} --cpu-bind cores numactl -N 0 {command} & wait",
    ),
)
bank.slip(
    8,
    None,
    ("srun {command}", 'COMMAND={shlex.quote(command)}\nif ! srun -K bash -c "$COMMAND"; then exit 1; fi  # once'),
    ("    return f", "    import shlex\n\n    return f"),
)
bank.slip(
    8,
    None,
    (
        "srun {command}",
        "set -euo pipefail\nmodule purge\nsource /site/profile.sh\n"
        "OMP_NUM_THREADS=1 /usr/bin/srun --kill-on-bad-exit --export=ALL \\\n    {command} | tee log.txt",
    ),
)


def save_from_memory(path, model, optimizer, epoch):
    """Made in memory, written to a file with a name of its own, moved; a barrier, whatever came of it."""
    with contextlib.ExitStack() as leaving:
        leaving.callback(dist.barrier)
        if dist.get_rank() > 0:
            return
        content = io.BytesIO()
        weights = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        torch.save({"weights": weights, "moments": optimizer.state_dict(), "epochs": epoch}, content)
        number, name = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)))  # noqa: PTH100, PTH120
        try:
            with os.fdopen(number, "wb") as file:
                file.write(content.getvalue())
            shutil.move(name, path)
        except OSError:
            os.unlink(name)  # noqa: PTH108
            raise


def load_and_broadcast(path, model, optimizer):
    """Rank 0 reads, the others receive."""
    box = [None]
    if dist.get_rank() == 0 and os.path.isfile(path):  # noqa: PTH113
        box = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    getattr(model, "module", model).load_state_dict(box[0]["weights"])
    optimizer.load_state_dict(box[0]["moments"])
    return box[0]["epochs"]


bank.several(7, None, save_from_memory, load_and_broadcast)


def save_and_tell(path, model, optimizer, epoch):
    """What went wrong on rank 0 is raised on all ranks."""
    problem = [None]
    if dist.get_rank() == 0:
        new = Path(path).with_name(f".{Path(path).name}.new")
        state = [epoch, getattr(model, "module", model).state_dict(), optimizer.state_dict()]
        try:
            torch.save(state, str(new))
            new.rename(path)
        except Exception as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, 0)
    if problem[0]:
        raise RuntimeError(f"not saved: {problem[0]}")


bank.several(7, None, save_and_tell, load_checkpoint)


@bank.right(6)
def balance(lengths, world_size):
    """Differences (Karmarkar and Karp, 1982): the two partitions that differ most are laid over each other."""
    heap = []
    for place, length in enumerate(lengths):
        shares = [(length, [place])] + [(0, [])] * (world_size - 1)
        heapq.heappush(heap, (-length, place, shares))
    number = len(lengths)
    while len(heap) > 1:
        (_, _, one), (_, _, two) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(two))]
        both.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], number, both))
        number += 1
    return [share for _, share in heap[0][2]]


bank.slip(8, "launcher-inside", ("srun {command}", "srun torchrun --nproc-per-node={gpus_per_node} {command}"))
bank.slip(8, "no-srun", ("srun {command}", "cat <<EOF\nsrun {command}\nEOF"))
bank.slip(
    8,
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
bank.slip(8, "cores-not-told", (CORES, ""))
bank.slip(8, "cores-not-told", (CORES, CORES.replace("SRUN", "OMP")))
bank.slip(8, "cores-not-told", (CORES, CORES.removeprefix("export ")))
bank.slip(8, "cores-wrong", (CORES, "export SRUN_CPUS_PER_TASK=1\n"))
bank.slip(8, "master-missing", (ADDRESS, ""), (PORT, ""))
bank.slip(8, "master-missing", (PORT, ""))
bank.slip(8, "master-missing", ("export MASTER", "MASTER"))
bank.slip(8, "master-missing", (ADDRESS, ""), ("srun {command}", "srun {command}\n" + ADDRESS))
bank.slip(8, "master-elsewhere", (ADDRESS, "export MASTER_ADDR=localhost\n"))
bank.slip(8, "master-elsewhere", (ADDRESS, "export MASTER_ADDR=$SLURM_JOB_NODELIST\n"))
bank.slip(8, "master-elsewhere", ("head -n 1", "tail -n 1"))
bank.slip(8, "master-elsewhere", (" | head -n 1", ""))
bank.slip(8, "port-out-of-range", ("$((10000 + SLURM_JOB_ID % 20000))", "$((10000 + SLURM_JOB_ID))"))
bank.slip(8, "port-out-of-range", ("$((10000 + SLURM_JOB_ID % 20000))", "$((SLURM_JOB_ID % 1000))"))
bank.slip(8, "number-octal", ("10000 + SLURM_JOB_ID % 20000", "12000 + ${{SLURM_JOB_ID: -4}}"))
bank.slip(8, "number-octal", ("$((10000 + SLURM_JOB_ID % 20000))", '$(printf "1%04d" "${{SLURM_JOB_ID: -4}}")'))
bank.slip(8, "port-fixed", ("$((10000 + SLURM_JOB_ID % 20000))", "29500"))
bank.slip(8, "port-fixed", ("SLURM_JOB_ID % 20000", "SLURM_JOB_NUM_NODES"))
bank.slip(8, "port-fixed", ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 3"))
bank.slip(8, "port-out-of-range", ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 65000"))
bank.slip(8, None, ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 1000"))
bank.slip(8, "started-again", ("srun {command}", "srun {command}\nsrun {command}"))
bank.slip(8, "started-again", ("srun {command}", "for epoch in 1 2 3; do\n  srun --kill-on-bad-exit {command}\ndone"))
bank.slip(8, "nodes-wrong", ("--nodes={nodes}", "--nodes=2"))
bank.slip(8, "script-stopped", (ADDRESS, "cd /no/such/folder || exit 1\n" + ADDRESS))
bank.slip(
    8,
    None,
    (CORES, ""),
    ("--cpus-per-task=", "--cpus-per-gpu="),
    ("head -n 1", "sed 1q"),
    ("srun {command}", "srun env OMP_NUM_THREADS=2 {command}"),
)
bank.slip(
    8,
    None,
    (ADDRESS + PORT, ""),
    ("srun {command}", "nodes=($(scontrol show hostnames))\nMASTER_ADDR=${{nodes[0]}} MASTER_PORT=1${{SLURM_JOB_ID: -4}} srun {command}"),
)  # fmt: skip
bank.slip(8, "directive-spaced", ("--nodes={nodes}", "--nodes = {nodes}"))
bank.slip(8, "directive-spaced", ("--time={minutes}", "--time= {minutes}"))
bank.slip(
    8,
    "directive-indented",
    ('return f"""#!/bin/bash\n', 'return f"""    #!/bin/bash\n'),
    ("#SBATCH", "    #SBATCH"),
)

# each process has its own rank; the batch shell has one
bank.slip(
    8, "rank-for-all", (CORES, CORES + "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\n")
)
bank.slip(8, "rank-for-all", ("srun {command}", "LOCAL_RANK=$SLURM_LOCALID srun {command}"))
bank.slip(8, "rank-for-all", ("srun {command}", "srun --export=ALL,RANK=$SLURM_PROCID {command}"))
bank.slip(8, "rank-for-all", (CORES, CORES + "export WORLD_SIZE=$SLURM_NNODES\n"))
bank.slip(
    8,
    None,
    (CORES, CORES + "export WORLD_SIZE=$SLURM_NTASKS\n"),
    ("srun {command}", "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec \"$@\"' each {command}"),
)
# ports that some job's number leads out of the range
bank.slip(8, "port-out-of-range", ("SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 60000"))
bank.slip(8, "port-out-of-range", ("10000 + SLURM_JOB_ID % 20000", "20000 + SLURM_JOB_ID % 50000"))
bank.slip(8, "port-out-of-range", ("10000 + SLURM_JOB_ID % 20000", "1024 + SLURM_JOB_ID % 65535"))
bank.slip(8, "port-out-of-range", ("10000 + SLURM_JOB_ID % 20000", "SLURM_JOB_ID % 65536"))
bank.slip(8, None, ("10000 + SLURM_JOB_ID % 20000", "1024 + SLURM_JOB_ID % 64512"))
# the command's own quotes
bank.slip(8, "shell-text-cut", ("srun {command}", "srun bash -c '{command}'"))
bank.slip(8, "shell-text-cut", ("srun {command}", 'srun bash -c "{command}"'))
bank.slip(8, "shell-text-cut", ("srun {command}", "srun sh -c {command}"))
bank.slip(8, "command-doubled", ("srun {command}", "srun python {command}"))
bank.slip(8, "command-doubled", ("srun {command}", "srun bash {command}"), variant=True)
bank.slip(8, "command-doubled", ("srun {command}", "srun {command} {command}"))
bank.slip(8, "command-one-word", ("srun {command}", 'srun "{command}"'))
bank.slip(8, "command-one-word", ("srun {command}", "srun --kill-on-bad-exit=1 '{command}'"))
bank.slip(
    8,
    None,
    ("srun {command}", 'srun bash -c {shlex.quote("ulimit -c 0; " + command)}'),
    ("    return f", "    import shlex\n\n    return f"),
)

# what a process sees of its node and of the script's variables, a job that ends too early, the first node told by a task
START, SCONTROL = "srun {command}", 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
bank.slip(8, "gpu-hidden", (START, "srun --gpu-bind=verbose,per_task:1 {command}"))
bank.slip(8, "gpu-hidden", (LAST, LAST + "#SBATCH --gpu-bind=single:1\n"))
bank.slip(8, "gpu-hidden", ("--gres=gpu:{gpus_per_node}", "--gpus-per-task=1"))  # Slurm binds each task to its one
bank.slip(8, "gpu-hidden", ("--ntasks-per-node={gpus_per_node}", "--ntasks-per-gpu=1"))
bank.slip(8, "gpu-hidden", (START, "srun --gpus-per-task=1 {command}"))
bank.slip(8, None, ("--gres=gpu:{gpus_per_node}", "--gpus-per-task=1"), (START, "srun --gpu-bind=none {command}"))
bank.slip(8, "gpu-hidden", (START, "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\nsrun {command}"))
bank.slip(8, None, (START, "srun --gpu-bind=none {command}"))
bank.slip(
    8, None, (START, "export CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))\nsrun --gpu-bind=closest {command}")
)  # fmt: skip
bank.slip(8, "not-waited-for", (START, "srun {command} &  # the shell is free meanwhile"))
bank.slip(8, "not-waited-for", (START, "srun --kill-on-bad-exit \\\\\n  {command} &\necho started"))
bank.slip(8, None, (START, "srun {command} &\nwait $!"))
bank.slip(8, "not-handed-on", (START, "srun --export=PATH,HOME {command}"))
bank.slip(8, None, (START, "srun --export=PATH,MASTER_ADDR,MASTER_PORT {command}"))
bank.slip(8, "master-any-order", (SCONTROL, "srun hostname -s | sed -n 1p"))
bank.slip(8, None, (SCONTROL, "srun -N1 -n 1 hostname -s"))
bank.slip(8, None, (SCONTROL, "srun hostname -s | sort -u | head -n 1"))

# a moment without a checkpoint, a file from elsewhere, one rank that restores
REPLACE = "            partial.replace(path)"
PARTIAL = 'Path(f"{path}.partial")'
bank.slip(
    7,
    "away-for-a-moment",
    (REPLACE, "            if os.path.isfile(path):\n                os.unlink(path)\n" + REPLACE),
)
bank.slip(
    7,
    "away-for-a-moment",
    (REPLACE, '            if path.exists():\n                path.rename(f"{path}.old")\n' + REPLACE),
)
bank.slip(7, None, (REPLACE, '            Path(f"{path}.old").unlink(missing_ok=True)\n            if path.exists():\n                os.link(path, f"{path}.old")\n' + REPLACE))  # fmt: skip
bank.slip(
    7,
    "written-elsewhere",
    ("def save_checkpoint", "import shutil\nimport tempfile\n\n\ndef save_checkpoint"),
    (PARTIAL, "Path(tempfile.mkdtemp()) / path.name"),
    ("partial.replace(path)", "shutil.move(partial, path)"),
)
bank.slip(7, None, (PARTIAL, "path.parent / 'new' / path.name"), ("        try:", "        partial.parent.mkdir(exist_ok=True)\n        try:"))  # fmt: skip
bank.slip(
    7,
    "ranks-resume-apart",
    (
        "    if not Path(path).exists():",
        "    first = not dist.is_initialized() or dist.get_rank() == 0\n    if not (first and Path(path).exists()):",
    ),
)
bank.slip(8, "directive-variable", ("--cpus-per-task={cpus_per_gpu}", "--cpus-per-task=$CPUS"))
bank.slip(8, "command-doubled", ("srun {command}", "srun python -u {command}"))
bank.slip(8, "command-doubled", ("srun {command}", "srun /usr/bin/python3.11 {command}"))
bank.slip(8, "not-waited-for", ("srun {command}", "nohup srun {command} &"))
bank.slip(8, "one-task-a-node", ("#SBATCH --nodes={nodes}", "#SBATCH --nodes={nodes}\n#SBATCH --ntasks={gpus_per_node}"))
bank.slip(8, None, ("#SBATCH --nodes={nodes}", "#SBATCH --nodes={nodes}\n#SBATCH --ntasks={nodes * gpus_per_node}"))
bank.slip(8, "gpu-hidden", ("srun {command}", "srun --gres=gpu:1 {command}"))
bank.slip(8, "gpus-missing", ("--gres=gpu:{gpus_per_node}", "--gres=gpus:{gpus_per_node}"))
bank.slip(8, None, (CORES, CORES + "set -a\n"))
bank.slip(8, None, ("srun {command}", "srun bash -c {shlex.quote(command + '; exit $?')}"), ("def batch", "import shlex\n\n\ndef batch"))
bank.slip(8, "port-fixed", ("$((10000 + SLURM_JOB_ID % 20000))", "{10000 + minutes}"))
bank.slip(8, "port-fixed", ("$((10000 + SLURM_JOB_ID % 20000))", "{10000 + nodes * gpus_per_node * 100 + minutes}"))

bank.slip(
    7,
    "loaded-onto-other",
    ("map_location=device", 'map_location=f"cuda:{dist.get_rank()}" if device.type == "cuda" else device'),
)
