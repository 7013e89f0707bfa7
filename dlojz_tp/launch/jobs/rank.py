"""What happens inside a rank of a job: join the others, run the function, leave its result in the job's folder."""

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from dlojz_tp.launch import lanes, place, server
from dlojz_tp.launch.jobs import files, outcome

MEET_S = 300.0  # for all ranks to be there: the nodes of a job do not start at the same moment
LEAVE_S = 0.1
WAITED = "timed out"  # what the backends say when a collective takes longer than the group's time-out


def main() -> None:
    """Run one rank and end the process, with status 0 when the function returned and its result is stored.

    Arguments, of the command line: the job's folder; the process id of the shepherd.
    """
    status = 1
    try:
        status = _run(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:  # a disk so full that no report fits, say
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # No interpreter shutdown: the destructors of a process group can abort there.
        os._exit(status)


def _run(folder: Path, parent: int) -> int:
    server.prctl(server.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    os.environ.pop("PYTHONSAFEPATH", None)
    rank = int(os.environ["RANK"])
    from dlojz_tp.launch import rank as inside

    inside.prepare_stack_dump(folder / f"rank-{rank}.stack")
    me, doing = os.getpid(), " while it loaded the function"
    try:
        facts = files.read(folder / "job.json")
        with files.own(folder / "task") as file:
            inside.adopt(pickle.load(file))
            fn, args, kwargs = pickle.load(file)
        doing = " while it joined the other ranks"
        store = _join(rank, folder, facts)
        (folder / f"rank-{rank}.up").touch()
        doing = ""
        value = fn(*args, **kwargs)
        _synchronize()
    except BaseException as error:
        if os.getpid() == me:
            _fail(rank, folder, error, doing)
        return 1
    if os.getpid() != me:
        return 0  # the function forked and both came back: only the rank itself reports
    inside.flush()
    try:
        data = _packed(value)
    except Exception as error:
        outcome.write_report(folder, rank, inside.unsendable(value, error))
        return 1
    try:
        files.write(folder / f"rank-{rank}.result", data)
    except OSError as error:
        what = f"returned {data.nbytes:,} bytes that cannot be stored in {folder}: {error.strerror}"
        outcome.write_report(folder, rank, {"kind": "unsendable", "summary": what, "text": what})
        return 1
    _leave(store, rank)
    return 0


def _packed(value) -> memoryview:
    from dlojz_tp.launch import wire

    return wire.pack(value)


def _join(rank: int, folder: Path, facts: dict):
    """Initialise torch.distributed. Returns the store in which the ranks met."""
    import torch
    import torch.distributed as dist

    from dlojz_tp.launch.joining import join_group

    n, per_node, local = int(os.environ["WORLD_SIZE"]), facts["ranks_per_node"], int(os.environ["LOCAL_RANK"])
    here = facts["place"] == "here"
    with contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(None):  # said once
        backend = place.backend(n if here else per_node)
    gpu = torch.device("cuda", rank if here else local) if backend == "nccl" else None
    os.environ |= {place.INSIDE: "rank", place.DEVICE: str(gpu or "cpu")}
    _set_threads(per_node * (facts["nodes"] if here else 1))
    joins = place.joins(backend)
    if joins == "nccl":
        torch.cuda.set_device(gpu)
    meet = timedelta(seconds=MEET_S)
    if here:
        store = dist.FileStore(str(folder / "store"), n)
    else:
        # Beside MASTER_PORT, which stays free for code that calls init_process_group again.
        port = int(os.environ["MASTER_PORT"]) - 1
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, n, is_master=rank == 0, timeout=meet)
    store.set_timeout(meet)
    # First all are there, then the group is made: its short time-out is not for ranks that start late.
    store.set(f"here-{rank}", "")
    store.wait([f"here-{r}" for r in range(n)], meet)
    patience = timedelta(seconds=facts["collective_timeout"])
    group_store = dist.PrefixStore("group", store)
    by_nccl = gpu if joins == "nccl" else None
    join_group(joins, store=group_store, rank=rank, world_size=n, timeout=patience, device_id=by_nccl)
    if joins == "nccl":
        lanes.open_lanes()
    place.pretend(backend)
    return store


def _set_threads(ranks: int) -> None:
    """Share the cores of the node between its ranks, where nobody chose a number of threads."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        own = int(os.environ.get("SLURM_CPUS_PER_TASK") or 0)  # then the cores seen here are this rank's alone
        os.environ["OMP_NUM_THREADS"] = str(own or max(1, mine // ranks))
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _synchronize() -> None:
    import torch

    if os.environ[place.DEVICE] != "cpu":
        torch.cuda.synchronize()  # an error of the GPU shows here, not when the result is copied


def _fail(rank: int, folder: Path, error: BaseException, doing: str) -> None:
    """Store how this rank failed."""
    from dlojz_tp.launch import rank as inside
    from dlojz_tp.launch.jobs.shepherd import HALT

    report = inside.describe(error, doing)
    report["at"] = files.now()
    if isinstance(error, RuntimeError) and not doing and WAITED in str(error).lower():
        # It waited too long for another rank: where all of them stand says more than its exception.
        report["waited"] = True
        _write_stand(folder / f"rank-{rank}.stack", error)
        (folder / HALT).touch()
    outcome.write_report(folder, rank, report)
    lost = report["lost_peer"]  # what a neighbour of the rank that failed sees: noise in the log
    print("lost the connection to another rank" if lost else report["text"], file=sys.stderr)
    inside.flush()


def _write_stand(path: Path, error: BaseException) -> None:
    """Write where an exception was raised, in the form of a stack dump."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.insert(0, f'  File "{code.co_filename}", line {trace.tb_lineno} in {code.co_name}')
        trace = trace.tb_next
    main = path.read_text().partition("\n")[0].removeprefix("main ")
    with path.open("a") as file:
        print(f"Thread {main} (most recent call first):", *lines, sep="\n", file=file)


def _leave(store, rank: int) -> None:
    """Stay until all ranks have returned: one that leaves early breaks its neighbours' collectives."""
    import torch.distributed as dist

    n = int(os.environ["WORLD_SIZE"])
    with contextlib.suppress(Exception):  # a store that is gone: the job is over
        store.set(f"returned-{rank}", "")
        while not store.check([f"returned-{r}" for r in range(n)]):
            time.sleep(LEAVE_S)
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.destroy_process_group()
        store.set(f"left-{rank}", "")
        limit = time.monotonic() + 5
        while rank == 0 and time.monotonic() < limit and not store.check([f"left-{r}" for r in range(n)]):
            time.sleep(LEAVE_S)  # rank 0 keeps the store
