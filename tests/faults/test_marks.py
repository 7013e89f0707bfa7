"""A mark is the trainee's own: whatever the machine does, no right answer fails and no wrong one passes."""

import errno
import functools
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from dlojz_tp import course, launch
from dlojz_tp.commands import doctor
from dlojz_tp.judging.checking import Wrong, verdict_of
from dlojz_tp.judging.checks.compile import c_probe
from dlojz_tp.judging.probes import gpus
from dlojz_tp.judging.probes.gpus import on_gpus, on_one_gpu
from dlojz_tp.judging.probes.ranks import died, hung, killed_by, on_ranks
from dlojz_tp.launch import busy, client, collect, patience, rest
from dlojz_tp.works import source
from tests.answers.bank import before

HINTS = {"wrong-sum": "That is not the sum.", "by-signal": "It died or hung."}
PACKAGE = Path(course.__file__).parent
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no rank imports the tests


def on_rank(answer):
    """A moment in which a rank can be hurt, then the answer."""
    time.sleep(0.4)
    return answer(float(dist.get_rank() + 1))


def over_ranks(answer):
    yield "a sum over ranks"
    known = [(sign, "by-signal") for sign in (died, hung, killed_by("SIGABRT"))]
    if on_ranks(on_rank, answer, sizes=(2,), timeout=3, known=known)[2] != [3.0, 3.0]:
        raise Wrong("wrong-sum")


def here(answer):
    yield "one and two"
    if answer(1.0) != 3.0:
        raise Wrong("wrong-sum")


def right(x):
    x = torch.tensor(x)
    dist.all_reduce(x)
    return x.item()


def wrong(x):
    return x


def judged(check, answer, **more):
    return verdict_of(check, (answer,), number=1, title="Try", hints=HINTS, **more)


def hold(found, answer, lost="could not judge"):
    """What must hold of a verdict; lost: what a right answer gets, where that is certain."""
    assert found.verdict in ((lost,) if answer is right else ("fail", "could not judge")), found


@pytest.fixture
def hurt(monkeypatch):
    """hurt(number, times): from outside, rank 1 gets the signal once it is up, as often as said."""
    launch.ranks(abs, 1)

    def set_up(number, times):
        left = [times]

        def listen(r, real=collect.listen):
            was, more = r.state, real(r)
            if (was, r.state, r.rank) == ("starting", "running", 1) and left[0]:
                left[0] -= 1
                os.kill(r.pid, number)
            return more

        monkeypatch.setattr(collect, "listen", listen)

    return set_up


NUMBERS = signal.SIGKILL, signal.SIGTERM, signal.SIGBUS, signal.SIGINT, signal.SIGSTOP, signal.SIGABRT


@pytest.mark.parametrize("answer", [right, wrong])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_rank_that_is_killed_once_from_outside(hurt, number, answer):
    hurt(number, 1)
    hold(judged(over_ranks, answer), answer, "pass")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_rank_that_is_killed_again_and_again(hurt, number):
    hurt(number, 9)
    found = judged(over_ranks, right)
    hold(found, right, "pass" if number == signal.SIGABRT else "could not judge")  # which nobody can send a rank
    assert found.passed or "the function has not sent that signal" in found.got


def own_kill(number):
    return lambda x: os.kill(os.getpid(), number) or right(x)


def raises_signal(x):
    return signal.raise_signal(signal.SIGTERM) or right(x)


def aborts(x):
    return os.abort() or right(x)


def kills_the_other(x):
    """Each tells the others its process; the second ends the first."""
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    return (x == 2 and os.kill(pids[0], signal.SIGKILL)) or right(x)


def other_sizes(x):
    """gloo gives up in a thread of its own."""
    return dist.all_reduce(torch.ones(2 if x == 1 else 100_000)) or right(x)


OWN = [own_kill(number) for number in NUMBERS if number != signal.SIGINT]


@pytest.mark.parametrize("answer", [*OWN, raises_signal, aborts, kills_the_other, other_sizes])
def test_who_ends_its_own_ranks_fails_with_its_hint(answer):
    found = judged(over_ranks, answer)
    assert (found.verdict, found.slug) == ("fail", "by-signal"), found


NO_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes."
WORKER = "DataLoader worker (pid 7) is killed by signal: {}. "
ERRORS = [
    MemoryError(), RuntimeError(NO_MEMORY.format(4096)), OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error"),
    OSError(errno.ETIMEDOUT, "Connection timed out"), RuntimeError(WORKER.format("Killed")),
    OSError("x.so: failed to map segment from shared object"),
]  # fmt: skip


@pytest.mark.parametrize("answer", [right, wrong])
@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize("check", [here, over_ranks])
def test_an_error_of_the_machine_inside_an_answer(error, answer, check):
    def meets_it(x):
        if x == 1.0:
            raise error
        return answer(x)

    found = judged(check, meets_it)
    assert found.verdict == "could not judge" and str(error)[:30] in found.got, found


def asks_for_a_lot(_):
    return torch.empty(2**50)


def asks_for_it_in_numpy(_):
    return torch.zeros(1).numpy().repeat(2**48)


def crashes_its_worker(_):
    raise RuntimeError(WORKER.format("Segmentation fault"))


@pytest.mark.parametrize("check", [here, over_ranks])
@pytest.mark.parametrize("answer", [asks_for_a_lot, asks_for_it_in_numpy, crashes_its_worker])
def test_what_an_answer_asks_for_itself_is_its_own(answer, check):
    assert judged(check, answer).verdict == "fail"


class Dying(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGKILL)  # as the memory killer does


def test_a_loader_worker_that_the_memory_killer_takes():
    def loads(_):
        return list(torch.utils.data.DataLoader(Dying(), num_workers=1))

    found = judged(here, loads)
    assert found.verdict == "could not judge" and "memory" in found.hint, found


def test_who_fills_the_memory_fails():
    """In a process of its own, which has a limit that is soon reached."""
    script = """
        import resource, torch
        from dlojz_tp.judging.checking import breakage, verdict_of
        def check(answer):
            yield "something"
            answer()
        def fills():
            return [torch.empty(2**26) for _ in range(2**20)]
        most = breakage.peak() + 2**33
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        breakage.ABSURD = 2**32 / most  # what torch itself has mapped is not the answer's
        print(verdict_of(check, (fills,), number=1, title="Try", hints={}).verdict)
    """
    assert run(script) == "fail"


def run(script, package=PACKAGE):
    """What a program of its own prints on its last line."""
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=package.parent, capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()[-1]


@pytest.mark.parametrize("answer", [right, wrong])
def test_ranks_that_never_get_a_core_are_not_judged(monkeypatch, answer):
    launch.ranks(abs, 1)
    starved = patience.Share(used=0.1, waited=60.0, wants=True)
    monkeypatch.setattr(patience, "shares", lambda pids: dict.fromkeys(pids, starved))
    monkeypatch.setattr(patience, "MOST", 0.05)  # of the three seconds that they have

    def waits(x):
        time.sleep(9)
        return answer(x)

    def check(answer):
        yield "a sum"
        known = [(hung, "by-signal")]
        if on_ranks(answer, 1.0, sizes=(2,), timeout=1, known=known)[2] != [2.0, 2.0]:
            raise Wrong("wrong-sum")

    found = judged(check, waits)
    assert found.verdict == "could not judge" and "too busy" in found.got and "quieter" in found.hint, found


class Loads:
    """An answer that takes its time, or all the processor's, while a rank loads it."""

    def __init__(self, computes):
        self.computes = computes

    def __reduce__(self):
        return Loads.loaded, (self.computes,)

    @staticmethod
    def loaded(computes):
        while computes:
            pass
        time.sleep(60)


@pytest.mark.parametrize(("computes", "verdict"), [(False, "could not judge"), (True, "fail")])
def test_ranks_that_do_not_start_are_the_machines_unless_they_compute(monkeypatch, computes, verdict):
    launch.ranks(abs, 1)
    monkeypatch.setattr(collect, "START_LIMIT_S", 1.0)

    def check(answer):
        yield "something"
        launch.ranks(abs, answer, n=1)

    found = judged(check, Loads(computes))
    assert found.verdict == verdict and ("did not start" in found.got or "not ready" in found.hint), found


def test_a_server_that_takes_longer_to_start_than_the_check_has(monkeypatch):
    client.close()
    monkeypatch.setattr(client, "BOOT", "import time; time.sleep(60)")  # as where the disk does not answer
    found = judged(over_ranks, right, deadline=1.5)
    client.close()
    assert found.verdict == "could not judge" and "did not start" in found.got, found


def test_a_check_whose_time_is_over_on_a_busy_machine_is_not_judged(monkeypatch):
    tries = []

    def waits(_):
        tries.append(1)
        time.sleep(30)

    assert judged(here, waits, deadline=0.3).slug == "endless"
    monkeypatch.setattr(busy, "load", lambda: 50.0)
    found = judged(here, waits, deadline=0.3)
    assert found.verdict == "could not judge" and "too busy" in found.got, found
    assert len(tries) == 2  # no further one would have more


def test_who_has_computed_all_its_seconds_is_endless_on_a_busy_machine_too(monkeypatch):
    monkeypatch.setattr(busy, "load", lambda: 50.0)

    def computes(_):
        while True:
            pass

    assert judged(here, computes, deadline=0.3).slug == "endless"


def test_a_kernel_that_was_stopped_begins_its_time_anew(monkeypatch):
    clock, now = busy.Clock(), time.monotonic()
    monkeypatch.setattr(busy, "load", lambda: 1.0)
    for spent, over in ((600, False), (630, False), (661, True)):  # stopped for ten minutes in the first one
        monkeypatch.setattr(time, "monotonic", lambda spent=spent: now + spent)
        assert clock.passed(60) == over, spent


def test_ranks_that_were_stopped_with_their_kernel_have_not_used_their_time(monkeypatch):
    launch.ranks(abs, 1)
    monkeypatch.setattr(busy, "LATE_S", 1.0)
    pids = []

    class Stopped(selectors.DefaultSelector):
        def select(self, timeout=None):
            if not pids and (found := [pid for pid in up if pid]):
                pids.extend(found)
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(3)
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            return super().select(timeout)

    up = []
    real = collect.listen
    monkeypatch.setattr(collect, "listen", lambda r: [real(r), up.append(r.pid)][0])
    monkeypatch.setattr(collect.selectors, "DefaultSelector", Stopped)
    assert launch.ranks(time.sleep, 1.0, n=1, timeout=2) == [None] and pids


def stop_here():
    raise RuntimeError("the pretended GPU cannot do this")


@pytest.mark.parametrize("probe", [on_gpus, on_one_gpu])
def test_a_probe_that_ends_without_a_word_is_no_pass(monkeypatch, probe, hurt):
    more = {"known": ()} if probe is on_gpus else {}

    def check(act):
        yield "on a GPU"
        probe(lambda *_: act(), **more)

    def waits():
        time.sleep(60)

    monkeypatch.setattr(gpus, "on_ranks", functools.partial(on_ranks, timeout=1))
    found = judged(check, waits)
    assert found.verdict == "could not judge" and "did not end" in found.got, found
    assert judged(check, stop_here).passed
    if probe is on_gpus:
        hurt(signal.SIGKILL, 9)
        assert judged(check, lambda: time.sleep(1)).verdict == "could not judge"


def test_the_course_is_updated_under_a_running_kernel(tmp_path):
    package = tmp_path.resolve() / "dlojz_tp"
    package.mkdir()
    for part in PACKAGE.iterdir():
        if part.name not in ("launch", "__pycache__"):
            (package / part.name).symlink_to(part)
    shutil.copytree(PACKAGE / "launch", package / "launch")
    script = """
        import pathlib
        from dlojz_tp import launch
        from dlojz_tp.judging.checking import verdict_of
        from dlojz_tp.launch import wire
        file = pathlib.Path(wire.__file__)
        assert file.is_relative_to(pathlib.Path.cwd())  # the copy
        text = file.read_text()
        assert text.count('"!cQ"') == 1
        file.write_text(text.replace('"!cQ"', '"!cQI"'))
        def check(answer):
            yield "something"
            assert launch.ranks(answer, -1, n=1) == [1]
        found = verdict_of(check, (abs,), number=1, title="Try", hints={})
        print(found.verdict, "|", found.got, "|", found.hint)
    """
    verdict, got, hint = run(script, package).split(" | ")
    assert verdict == "could not judge" and "was updated" in got and "Restart the kernel" in hint


def test_who_fails_by_new_files_is_not_judged(monkeypatch):
    assert judged(here, wrong).verdict == "fail"
    monkeypatch.setattr(client, "_FILES", set())
    assert judged(here, wrong).verdict == "could not judge"
    assert judged(here, lambda x: 3.0).passed


@pytest.fixture
def noexec(tmp_path, monkeypatch):
    """A temporary folder from which no program runs."""
    folder = tmp_path / "noexec"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root can mount")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    c_probe._built.cache_clear()
    yield folder
    c_probe._built.cache_clear()
    subprocess.run(["umount", "-l", folder], check=True)


def test_where_no_program_runs_from_the_temporary_folder(noexec):
    work = source.find("06_compile")
    names = before(work.name, 2)
    found = course.judge(work, 1, tuple(names[name] for name in work.balises[1].answers))
    assert found.verdict == "could not judge" and "TMPDIR" in found.hint, found
    (row,) = (row for row in doctor.examine() if row.name == "temporary folder")
    assert row.mark == "gap" and "TMPDIR" in row.todo and str(noexec) in row.value


HELPERS = """
from datetime import timedelta
import torch.distributed as dist
def patient():
    return dist.new_group(timeout=timedelta(seconds=1))
"""
JOB = """
import torch
import torch.distributed as dist
import my_groups
def job():
    group = my_groups.patient()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)
"""


def test_a_limit_of_a_group_that_an_imported_helper_makes(monkeypatch, tmp_path):
    """Looks are so soon that ranks without a limit would be said to wait for each other."""
    (tmp_path / "my_groups.py").write_text(HELPERS)
    (tmp_path / "my_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    import my_job

    monkeypatch.setattr(rest, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(rest, "LOOK_S", 0.05)
    with pytest.raises(launch.RankError) as caught:
        launch.ranks(my_job.job, n=2, timeout=60)
    assert (caught.value.kind, caught.value.rank) == ("raised", 0)
