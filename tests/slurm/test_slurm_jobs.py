"""launch.job on a real Slurm with two emulated nodes: results, faults, cancelling, waiting, refusals, time-outs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.launch.jobs import slurm as job_slurm
from tests.slurm.conftest import in_queue, processes

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parent.parent.parent


def until(condition, seconds: float = 90.0) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


def failure(job, within: float) -> launch.RankError:
    """The error of a job, and that it comes in time after all ranks are up."""
    until(lambda: job.look().state == "running" or job.look().over)
    begin = time.monotonic()
    with pytest.raises(launch.RankError) as caught:
        job.results()
    assert time.monotonic() - begin < within
    return caught.value


def test_two_nodes_add_up_what_their_ranks_hold(capsys):
    cells = {"__name__": "__main__"}
    source = """
        import os, torch, torch.distributed as dist
        class Answer:
            def __init__(self, *values):
                self.values = values
        def total(x, *, shift):
            print("epoch 1 on rank", dist.get_rank(), flush=True)
            x = x * (dist.get_rank() + 1)
            dist.all_reduce(x)
            names = ("SLURM_NODEID", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
            return Answer(x + shift, [os.environ[name] for name in names], os.environ["MASTER_PORT"])
    """
    exec(textwrap.dedent(source), cells)
    job = launch.job(cells["total"], torch.ones(3), nodes=2, ranks_per_node=2, minutes=2, shift=0.5)
    assert "2 nodes x 2 ranks on Slurm" in repr(job)
    job.wait()
    shown = capsys.readouterr().out
    assert "Job total-1: waiting" in shown and "[rank 3] epoch 1 on rank 3" in shown and "done" in shown
    answers = job.results()
    assert [type(a) for a in answers] == [cells["Answer"]] * 4
    assert all(a.values[0].tolist() == [10.5] * 3 for a in answers)
    assert [a.values[1] for a in answers] == [[str(r // 2), str(r % 2), "2", "4", "0,1"] for r in range(4)]
    assert job.logs(2) == "epoch 1 on rank 2\n" and "[rank 1] epoch 1 on rank 1\n" in job.logs()
    assert launch.last_job().results()[0].values[0].tolist() == [10.5] * 3
    assert [(j.name, j.look().state) for j in launch.queue()] == [("total-1", "done")]


def test_two_jobs_at_once_do_not_meet():
    def mine(x):
        y = torch.tensor([x])
        dist.all_reduce(y)
        return y.item(), os.environ["MASTER_PORT"]

    jobs = [launch.job(mine, x, nodes=2, ranks_per_node=1, minutes=2) for x in (1, 10)]
    results = [job.results() for job in jobs]
    assert [[value for value, _ in r] for r in results] == [[2, 2], [20, 20]]
    assert results[0][0][1] != results[1][0][1]


def test_the_rank_that_failed_first_comes_first_with_its_own_error():
    def fail():
        if dist.get_rank() == 2:
            raise ValueError("bad shape")
        dist.all_reduce(torch.ones(2))

    job = launch.job(fail, nodes=2, ranks_per_node=2, minutes=2)
    error = failure(job, within=60)
    assert str(error).startswith("rank 2 of 4 raised ValueError: bad shape\nTraceback")
    assert isinstance(error.cause, ValueError) and "ValueError: bad shape" in job.logs(2)
    assert "bad shape" in repr(launch.queue())


def test_a_killed_rank_is_told_within_15_seconds():
    def die():
        if dist.get_rank() == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(2))

    error = failure(launch.job(die, nodes=2, ranks_per_node=2, minutes=2), within=60)
    assert str(error).startswith("rank 1 of 4 was killed by SIGKILL (often the system is out of memory)")


def test_a_rank_killed_with_the_process_beside_it_is_told_too():
    def die():
        if dist.get_rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    error = failure(launch.job(die, nodes=2, ranks_per_node=1, minutes=2), within=60)
    assert str(error).startswith("rank 1 of 2 ended without a word")


def kill_beside(job, batch: bool) -> None:
    """Kill Slurm's own process beside the batch script or beside a rank."""
    until(lambda: job.look().state == "running")
    beside = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith("slurmstepd:")]
    chosen = [p for p in beside if any("slurm_script" in " ".join(c.cmdline()) for c in p.children()) == batch]
    chosen[0].kill()


@pytest.mark.parametrize("batch", [True, False])
def test_slurms_own_process_is_killed_and_the_allocation_ends_all_the_same(batch):
    def slow():
        time.sleep(3)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    job = launch.job(slow, nodes=2, ranks_per_node=1, minutes=3)
    kill_beside(job, batch)
    assert job.results() == [2, 2]
    until(lambda: in_queue() == [], 15)
    assert "done" in repr(job) and "ended its allocation itself" in repr(launch.queue()[job.name])


def test_a_controller_that_is_down_is_no_refusal():
    where = Path(os.environ["SLURM_CONF"]).parent
    pid = int((where / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    until(lambda: not psutil.pid_exists(pid), 15)
    try:
        begin = time.monotonic()
        with pytest.raises(launch.JobError, match="^Slurm does not answer, and nothing was submitted; try again"):
            launch.job(abs, -1)
        assert time.monotonic() - begin < 5 and len(launch.queue()) == 0
    finally:
        subprocess.run(
            ["slurmctld"], check=True, timeout=30, env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
        )
    until(lambda: "idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout, 60)


def test_a_hung_rank_ends_at_the_limit_and_all_say_where_they_stand():
    def hang():
        if dist.get_rank() == 3:
            time.sleep(600)
        dist.all_reduce(torch.ones(2))

    error = failure(launch.job(hang, nodes=2, ranks_per_node=2, minutes=0.5), within=60)
    assert str(error).startswith("rank 3 of 4: still running after 30 s at line")
    assert "; its 0.5 min were over: if it only needs longer, ask for more with minutes=" in str(error)
    assert "while ranks 0, 1, 2 wait in all_reduce" in str(error)


def test_a_collective_that_not_all_ranks_call_ends_after_its_own_time(monkeypatch):
    def leave():
        if dist.get_rank() == 0:
            return
        dist.all_reduce(torch.ones(2))

    monkeypatch.setenv("DLOJZ_SLURM_COLLECTIVE_TIMEOUT", "2")
    error = failure(launch.job(leave, nodes=2, ranks_per_node=1, minutes=5), within=60)
    assert str(error).startswith("rank 1 of 2 hung: still waiting after 2 s in all_reduce")
    assert "rank 0 never made: it had already returned" in str(error)


def test_cancel_a_running_job_and_one_that_waits(tmp_path):
    def sleep():
        print("asleep", flush=True)
        time.sleep(600)

    def never():
        raise AssertionError

    running = launch.job(sleep, nodes=2, ranks_per_node=2, minutes=2)
    until(lambda: running.look().state == "running")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLOJZ_SLURM_SBATCH", "exclusive")  # all cores of a node that is partly taken
        waiting = launch.job(never, nodes=2, ranks_per_node=1, minutes=2)
    until(lambda: "Resources" in waiting.look(now=True).reason)
    assert waiting.look().state == "waiting"
    assert [(j.name, j.look().state) for j in launch.queue()] == [("never-1", "waiting"), ("sleep-1", "running")]
    begin = time.monotonic()
    waiting.cancel()
    assert waiting.look().state == "cancelled" and time.monotonic() - begin < 5
    with pytest.raises(launch.JobError, match="^never-1 was cancelled$"):
        waiting.results()
    running.cancel()
    assert time.monotonic() - begin < 20 and in_queue() == []
    assert running.look().state == "cancelled" and running.logs(3) == "asleep\n"
    until(lambda: processes(tmp_path) == [], 3)


def test_cancelled_from_a_shell():
    job = launch.job(time.sleep, 600, nodes=2, ranks_per_node=1, minutes=2)
    until(lambda: job.look().state == "running")
    subprocess.run(["scancel", "--name", job.name], check=True, timeout=30)
    with pytest.raises(launch.JobError, match="^sleep-1 was cancelled$"):
        job.results()


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("DLOJZ_SLURM_PARTITION", "nope", "invalid partition specified: nope"),
        ("DLOJZ_SLURM_CONSTRAINT", "v100", "Invalid feature specification"),
        ("DLOJZ_SLURM_SBATCH", "nonsense=1", "unrecognized option '--nonsense=1'"),
    ],
)
def test_a_refused_job_gives_its_reason_in_one_line(monkeypatch, capfd, variable, value, reason):
    monkeypatch.setenv(variable, value)
    with pytest.raises(launch.JobError) as caught:
        launch.job(abs, -1)
    assert str(caught.value).startswith("Slurm refused the job: ") and reason in str(caught.value)
    assert "\n" not in str(caught.value) and capfd.readouterr() == ("", "")
    assert len(launch.queue()) == 0


def test_a_job_that_can_never_start_says_so():
    job = launch.job(abs, -1, nodes=3)  # this Slurm accepts it though it has two
    until(lambda: "PartitionNodeLimit: it can never start, cancel it" in repr(job))
    job.cancel()


def test_a_module_that_does_not_load_is_told(monkeypatch):
    monkeypatch.setenv("DLOJZ_SLURM_MODULES", "echo no such module: torch/9 >&2; false")
    job = launch.job(abs, -1, minutes=1)
    with pytest.raises(launch.JobError, match=r"abs-1 ended before its ranks could run \(failed\)\n  no such module"):
        job.results()


def test_a_job_outlives_the_notebook_and_slurms_memory(monkeypatch):
    script = """
        import os, time
        from dlojz_tp import launch
        def slow(x):
            time.sleep(1)
            return x + 1
        launch.job(slow, 1, nodes=2, ranks_per_node=1, minutes=2)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    job = launch.queue()["slow-1"]
    assert job.results() == [2, 2]
    (job.folder / "over.json").unlink()
    monkeypatch.setattr(job_slurm, "look", lambda ids, now=False: dict.fromkeys(ids, ("GONE", "", "")))
    assert launch.last_job().results() == [2, 2]
