"""A job that another user has put there is never read: what is pickled in it would run."""

import os
import pickle

import pytest

from dlojz_tp import launch
from dlojz_tp.launch.jobs import files

SOMEBODY = 65534  # nobody, on most machines
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make a file of another user")


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The folder of the jobs, with one of them in it that is over and has a payload as its report and its result."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DLOJZ_SLURM_FOLDER", str(tmp_path / "jobs"))
    monkeypatch.setenv("DLOJZ_SLURM_USE", "no")
    folder = files.create("train")
    facts = {"name": "train-1", "place": "here", "nodes": 1, "ranks_per_node": 1, "id": "1", "host": "x"}
    files.write(folder / "job.json", facts | {"minutes": 1, "collective_timeout": 1, "submitted": files.now()})
    files.write(folder / "over.json", {"state": "ENDED", "at": files.now()})
    payload = pickle.dumps(Payload(tmp_path / "ran"))
    files.write(folder / "rank-0.result", payload)
    yield tmp_path / "jobs"
    assert not (tmp_path / "ran").exists()


def refuses(call, *words):
    with pytest.raises(launch.JobError) as caught:
        call()
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_of_jobs_that_others_can_write_is_refused(root, mode):
    root.chmod(mode)
    for call in (launch.queue, launch.last_job, lambda: launch.job(abs, -1)):
        refuses(call, "can be written by other users", f"chmod go-w {root}")
    root.chmod(0o755)
    assert [job.name for job in launch.queue()] == ["train-1"]


@as_root
def test_a_folder_of_jobs_of_another_user_is_refused(root):
    os.chown(root, SOMEBODY, SOMEBODY)
    for call in (launch.queue, launch.last_job, lambda: launch.job(abs, -1)):
        refuses(call, "belongs to another user", "set folder in ")


@pytest.mark.parametrize("kind", ["open", pytest.param("foreign", marks=as_root), pytest.param("link", marks=as_root)])
def test_a_job_that_is_not_the_users_own_is_named_and_left_alone(root, kind, capsys, tmp_path):
    folder = root / "train-1"
    if kind == "open":
        folder.chmod(0o777)
    if kind == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    if kind in ("foreign", "link"):
        os.chown(folder, SOMEBODY, SOMEBODY)
    assert len(launch.queue()) == 0
    assert capsys.readouterr().err.startswith(f"{folder} ")
    refuses(lambda: launch.Job(folder), "left alone")
    files.prune()
    assert folder.exists()


@as_root
def test_a_file_of_another_user_in_a_job_of_ones_own_is_not_unpickled(root, tmp_path):
    os.chown(root / "train-1" / "rank-0.result", SOMEBODY, SOMEBODY)
    with pytest.raises(launch.RankError, match="rank-0.result belongs to another user"):
        launch.last_job().results()


def test_a_report_is_data_and_one_that_cannot_be_read_is_said(root, tmp_path):
    (root / "train-1" / "rank-0.result").rename(root / "train-1" / "rank-0.report")
    assert "rank 0 of 1 failed, and its report cannot be read" in repr(launch.queue()["train-1"])
