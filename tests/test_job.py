"""launch.job on this machine, without Slurm; what is written for Slurm; the options of a centre."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.launch import starting
from dlojz_tp.launch.jobs import files as job_files
from dlojz_tp.launch.jobs import options as job_options
from dlojz_tp.launch.jobs import slurm as job_slurm
from dlojz_tp.launch.jobs import view as job_view

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    """A state folder and a configuration of its own for each test; no Slurm, and nothing left running."""
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("DLOJZ_SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DLOJZ_SLURM_USE", "no")
    yield
    limit = time.monotonic() + 20
    while left := of_jobs(tmp_path):
        assert time.monotonic() < limit, left
        time.sleep(0.05)


def of_jobs(folder: Path) -> list[str]:
    """Processes that belong to jobs whose folders lie in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(words))
    return found


def config(text: str) -> Path:
    job_options.path().parent.mkdir(parents=True, exist_ok=True)
    job_options.path().write_text(textwrap.dedent(text))
    return job_options.path()


def notebook(source: str) -> dict:
    namespace = {"__name__": "__main__"}
    exec(textwrap.dedent(source), namespace)
    return namespace


def test_a_keeper_that_has_just_started_is_alive(monkeypatch):
    """A process has no command line for a moment after its start."""
    cells = notebook("""
        def train():
            return 1
    """)
    job, whole, asked = launch.job(cells["train"], nodes=1, ranks_per_node=1), psutil.Process.cmdline, []

    def cmdline(process):
        asked.append(process)
        return [] if len(asked) < 3 else whole(process)

    monkeypatch.setattr(psutil.Process, "cmdline", cmdline)
    assert "killed" not in repr(job) and len(asked) >= 3
    monkeypatch.undo()
    job.wait()
    assert job.results() == [1]


def test_results_logs_and_the_table(capsys, tmp_path):
    cells = notebook("""
        import os, subprocess, torch, torch.distributed as dist
        class Pair:
            def __init__(self, a, b):
                self.a, self.b = a, b
        factor = 10
        def train(x, *, shift):
            print("epoch", dist.get_rank())
            subprocess.Popen(["sh", "-c", "sleep 600; :", os.environ["MARK"]], start_new_session=True)
            x = factor * (x + dist.get_rank())
            dist.all_reduce(x)
            place = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR")]
            return Pair(x + shift, (dist.get_backend(), *place))
    """)
    os.environ["MARK"] = str(tmp_path)  # the child that a rank leaves behind is looked for after the test
    job = launch.job(cells["train"], torch.ones(2), nodes=2, ranks_per_node=1, shift=1)
    assert job.name == "train-1" and "2 nodes x 1 rank on this machine" in repr(job)
    job.wait()
    assert "[rank 1] epoch 1" in capsys.readouterr().out
    results = job.results()
    assert [type(r) for r in results] == [cells["Pair"]] * 2
    assert results[1].a.tolist() == [31, 31]
    assert results[1].b == (launch.backend(2), "0", "1", "2", "127.0.0.1")
    assert job.logs(1) == "epoch 1\n" and job.logs() == "[rank 0] epoch 0\n[rank 1] epoch 1\n"
    with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
        job.logs(2)
    assert repr(launch.queue()).splitlines()[1].split()[:2] == ["train-1", "done"]
    assert "train-1" in launch.queue()._repr_html_() and launch.queue()["train-1"].results()[0].a.tolist() == [31, 31]
    with pytest.raises(KeyError, match="there are: train-1"):
        launch.queue()["train-9"]
    job.cancel()  # no effect: it is over
    assert launch.last_job().look().state == "done"
    assert stat.S_IMODE(job.folder.stat().st_mode) == stat.S_IMODE(job.folder.parent.stat().st_mode) == 0o700


def test_the_rank_that_failed_first_is_named():
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("bad shape")
        dist.all_reduce(torch.ones(2))

    job = launch.job(fail, ranks_per_node=2)
    with pytest.raises(launch.RankError) as caught:
        job.results()
    assert str(caught.value).startswith("rank 1 of 2 raised ValueError: bad shape\nTraceback")
    assert (caught.value.rank, type(caught.value.cause)) == (1, ValueError) and "in fail" in caught.value.traceback
    assert job.logs(0) == "lost the connection to another rank\n"
    assert "failed" in repr(job) and "bad shape" in repr(launch.queue())


def test_a_result_that_the_disk_does_not_take_is_named():
    def large():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return bytes(100_000)

    job = launch.job(large, ranks_per_node=1)
    with pytest.raises(launch.RankError, match="returned 100,.* bytes that cannot be stored in .*: File too large"):
        job.results()
    assert not list(job.folder.glob(".rank-0.result*")), "half a result is left"


def test_a_rank_that_waits_too_long_shows_where_all_stand(monkeypatch):
    def hang():
        if dist.get_rank() == 0:
            return
        dist.all_reduce(torch.ones(2))

    monkeypatch.setenv("DLOJZ_SLURM_COLLECTIVE_TIMEOUT", "1")
    with pytest.raises(launch.RankError) as caught:
        launch.job(hang, ranks_per_node=2).results()
    assert caught.value.kind == "hung" and caught.value.rank == 1
    assert "still waiting after 1 s in all_reduce" in str(caught.value)
    assert "a call that rank 0 never made: it had already returned" in str(caught.value)


def test_cancel_and_two_jobs_at_once():
    def sleep():
        time.sleep(600)

    first, second = launch.job(sleep, ranks_per_node=1), launch.job(sleep, ranks_per_node=1)
    assert [job.name for job in launch.queue()] == ["sleep-2", "sleep-1"]
    with pytest.raises(TimeoutError, match="not over after 0.1 s"):
        first.wait(timeout=0.1)
    for job in (first, second):
        job.cancel()
        assert job.look().state == "cancelled"
    with pytest.raises(launch.JobError, match="^sleep-1 was cancelled$"):
        first.results()
    assert [launch.queue()[name].look().state for name in ("sleep-1", "sleep-2")] == ["cancelled"] * 2


def test_a_job_outlives_the_notebook():
    script = """
        import os, time
        from dlojz_tp import launch
        def slow(x):
            print("started", flush=True)
            time.sleep(0.5)
            return x + 1
        launch.job(slow, 1, ranks_per_node=1)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    job = launch.last_job()
    assert job.name == "slow-1" and not job.look().over
    assert job.results() == [2] and job.logs(0) == "started\n"


def test_the_live_view_is_one_display(monkeypatch, tmp_path):
    import IPython.display

    shown = []

    class Handle:
        def update(self, bundle, raw):
            shown.append(bundle)

    def display(bundle, raw, display_id):
        assert not shown and raw and display_id
        shown.append(bundle)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(starting, "in_notebook", lambda: True)
    folder = job_files.create("loss")
    facts = {"name": folder.name, "place": "here", "nodes": 1, "ranks_per_node": 2, "submitted": job_files.now()}
    job_files.write(folder / "job.json", facts | {"id": None, "minutes": 1, "collective_timeout": 1})
    job = launch.Job(folder)
    (folder / "rank-1.log").write_text("\n".join(f"loss <{i}>" for i in range(30)))
    view = job_view.View(job)
    view.show(job_view.Look("running", "", 71.2))
    view.show(job_view.Look("done", "", 72.0, over=True))
    assert len(shown) == 2 and set(shown[0]) == {"text/plain", "text/html"}
    assert "running, 1 min 11 s" in shown[0]["text/plain"] and "[rank 1] loss <29>" in shown[0]["text/plain"]
    assert "loss &lt;29&gt;" in shown[1]["text/html"] and "loss <0>" not in shown[1]["text/plain"]


def test_what_cannot_be_sent_or_asked_is_refused_and_not_remembered(tmp_path, monkeypatch):
    lock = threading.Lock()

    def uses_it():
        return lock

    with pytest.raises(TypeError, match="uses_it cannot be sent to the ranks because of the variable 'lock'"):
        launch.job(uses_it)
    for wrong in ({"nodes": 0}, {"ranks_per_node": 2.5}, {"minutes": -1}, {"minutes": "ten"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            launch.job(abs, -1, **wrong)
    with pytest.raises(launch.JobError, match="65 ranks are too many for this machine"):
        launch.job(abs, -1, nodes=5, ranks_per_node=13)
    assert len(launch.queue()) == 0 and repr(launch.queue()) == "no jobs"
    with pytest.raises(launch.JobError, match="no job has been submitted yet"):
        launch.last_job()
    monkeypatch.setenv("DLOJZ_SLURM_FOLDER", "$DLOJZ_NOWHERE/jobs")
    with pytest.raises(launch.JobError, match="folder '.DLOJZ_NOWHERE/jobs' in .* names a variable that is not set"):
        launch.job(abs, -1)
    monkeypatch.delenv("DLOJZ_SLURM_FOLDER")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "file"))
    with pytest.raises(launch.JobError, match="no folder for jobs in .*file/jobs.* set folder in .*slurm.toml"):
        launch.job(abs, -1)


def test_old_folders_go_and_running_ones_stay(monkeypatch):
    monkeypatch.setattr(job_files, "KEPT", 2)
    for i in range(5):
        folder = job_files.create("f")
        job_files.write(folder / "job.json", {"name": folder.name, "submitted": i})
        if i:
            job_files.write(folder / "over.json", {"state": "ENDED", "at": i})
    job_files.prune()
    assert [folder.name for folder in job_files.known()] == ["f-1", "f-4", "f-5"]
    assert job_files.create("<lambda>").name == "lambda-1" and job_files.create("f").name == "f-6"


def test_options_come_from_the_file_and_the_environment_goes_first(monkeypatch):
    monkeypatch.delenv("DLOJZ_SLURM_USE")
    assert job_options.load().account == ""
    config("""
        account = "abc@v100"
        gpus_per_node = 4
        modules = ["module purge", "module load torch"]
        [environment]
        NCCL_DEBUG = "WARN"
        [sbatch]
        exclusive = true
    """)
    monkeypatch.setenv("DLOJZ_SLURM_ACCOUNT", "xyz@a100")
    monkeypatch.setenv("DLOJZ_SLURM_SBATCH", "hint=nomultithread mem=8G")
    options = job_options.load()
    assert (options.account, options.gpus_per_node) == ("xyz@a100", 4)
    assert options.modules == ("module purge", "module load torch") and options.environment == {"NCCL_DEBUG": "WARN"}
    assert options.sbatch == {"hint": "nomultithread", "mem": "8G"}


def test_without_a_home_there_is_no_file(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert job_options.load().account == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("account = abc", r"slurm.toml cannot be read: Invalid value \(at line 1, column 11\)"),
        ("acount = 'a'", "slurm.toml: there is no option 'acount'; there are: use, account, "),
        ("gpus_per_node = '4'", "slurm.toml: gpus_per_node must be a whole number, 0 or more, not '4'"),
        ("modules = 'a'", "slurm.toml: modules must be a list of shell lines, not 'a'"),
    ],
)
def test_a_bad_file_gives_one_clear_line(text, message):
    config(text)
    with pytest.raises(launch.JobError, match=message) as caught:
        launch.job(abs, -1)
    assert "\n" not in str(caught.value)


def fake_slurm(tmp_path, monkeypatch, sbatch: str, squeue: str = "exit 0") -> Path:
    """Commands that look like Slurm's; sbatch writes down the environment it got. Returns that file."""
    monkeypatch.setenv("DLOJZ_SLURM_USE", "yes")
    tools, seen = tmp_path / "bin", tmp_path / "environment"
    tools.mkdir()
    commands = {"sbatch": f"env > {seen}\n{sbatch}", "squeue": squeue, "srun": "", "scontrol": "", "scancel": ""}
    for name, body in commands.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    job_slurm._seen.clear()
    return seen


def test_what_is_submitted_to_slurm(tmp_path, monkeypatch):
    config("""
        account = "abc@v100"
        constraint = "v100-32g"
        hint = "nomultithread"
        reservation = "course"
        gpus_per_node = 4
        cpus_per_task = 10
        modules = ["module load torch"]
        [environment]
        WORDS = "two words"
        [sbatch]
        exclusive = true
    """)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # a notebook in a job of its own
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    said = "echo 'a warning: your job 5 may wait' >&2; echo 'sbatch: note'; echo Submitted batch job 42"
    seen = fake_slurm(tmp_path, monkeypatch, said, "echo '42|PENDING|Priority|'; echo '41|RUNNING|None|n1'")
    job = launch.job(abs, -1, nodes=2, ranks_per_node=3, minutes=1.5)
    assert "waiting, 0 s (Priority), 2 nodes x 3 ranks on Slurm" in repr(job)
    script = (job.folder / "submitit" / "batch.sh").read_text()
    for line in (
        "account=abc@v100", "constraint=v100-32g", "hint=nomultithread", "reservation=course", "gpus-per-node=3",
        "cpus-per-task=10", "exclusive", "nodes=2", "ntasks-per-node=3", "time=2", "signal=USR2@10", "job-name=abs-1",
    ):  # fmt: skip
        assert f"#SBATCH --{line}\n" in script
    assert "module load torch\n" in script and "export WORDS='two words'\n" in script and "wckey" not in script
    assert f"export PYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1\n" in script
    assert "--kill-on-bad-exit=1 --cpus-per-task=10" in script
    assert "SLURM_JOB_ID" not in seen.read_text() and "SLURM_CPUS_PER_TASK" not in seen.read_text()
    monkeypatch.setattr(job_slurm, "_looked_at", float("-inf"))
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert job.look().state == "unknown" and not job.look().over  # a Slurm that does not answer is no end


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "invalid partition specified: nope; Invalid partition name specified (see partition in ",
        ),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "Job violates accounting"),
        ("", "it gave no reason"),
    ],
)
def test_a_refused_job_gives_its_reason_in_one_line(tmp_path, monkeypatch, capfd, said, reason):
    fake_slurm(tmp_path, monkeypatch, f"printf '%s\\n' \"{said}\" >&2\nexit 1")
    with pytest.raises(launch.JobError, match="^Slurm refused the job: ") as caught:
        launch.job(abs, -1)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert len(launch.queue()) == 0 and capfd.readouterr() == ("", "")


def test_an_sbatch_without_a_slurm_is_none(tmp_path, monkeypatch):
    fake_slurm(tmp_path, monkeypatch, "exit 1")
    monkeypatch.delenv("DLOJZ_SLURM_USE")
    (tmp_path / "bin" / "scontrol").write_text(
        "#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1"
    )
    assert not job_slurm.available(job_options.load())
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at n1 is DOWN'\nexit 1")
    assert job_slurm.available(job_options.load())
