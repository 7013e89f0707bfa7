"""Ranks that stay: launch.stay, `%%ranks`, and the sources and notebooks that have such cells."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import nbformat
import psutil
import pytest
import torch

from dlojz_tp import launch
from dlojz_tp.authoring import minutes, notebooks, rules
from dlojz_tp.judging.grading import slicing
from dlojz_tp.launch import magic, patience, staying
from dlojz_tp.works import cells, source
from dlojz_tp.works.balise import BaliseNotDone
from tests.test_course import run_cells

LIVE_ON, GONE = "ranks live on, with their variables", "were ended, and their variables are gone"


@pytest.fixture
def two():
    with launch.stay(2) as ranks:
        yield ranks


def pids(ranks) -> list[int]:
    return [int(pid) for pid in ranks.run("import os; os.getpid()")]


def failed(ranks, text, **more) -> tuple[Exception, str]:
    """What a cell raises, and what became of the ranks."""
    with pytest.raises((launch.RankError, launch.LaunchError, BaliseNotDone)) as caught:
        ranks.run(text, **more)
    return caught.value, caught.value.__notes__[0]


def test_ranks_keep_their_variables(two):
    assert two.run("x = torch.tensor([1.0, 2.0]) * (rank + 1)") == [None, None]
    assert two.run("mine = x[rank]; mine") == ["tensor(1.)", "tensor(4.)"]
    assert two.run("dist.all_reduce(mine)\nmine.item(), world_size, dist.get_rank()") == ["(5.0, 2, 0)", "(5.0, 2, 1)"]
    assert two.run("mine;") == [None, None]
    assert two.run("def f(a):\n    return a + rank") == [None, None] and two.run("f(1)") == ["1", "2"]


def test_values_come_and_go_by_value(two):
    x = torch.ones(2)
    two.put(x=x, twice=lambda a: 2 * a)
    two.run("x += rank; y = twice(x)")
    assert x.tolist() == [1, 1] and [y.tolist() for y in two.get("y")] == [[2, 2], [4, 4]]
    with pytest.raises(TypeError, match="the ranks cannot take door, a _thread.lock"):
        two.put(door=threading.Lock())
    with pytest.raises(launch.RankError, match="name 'z' is not defined"):
        two.get("z")
    two.run("g = (i for i in x)")
    with pytest.raises(launch.RankError, match="cannot be sent back: result, a generator"):
        two.get("g")
    assert two.run("twice(3)") == ["6", "6"]


def test_what_is_printed_has_its_rank(two, capfd):
    two.run("print('whole'); print('half', end='')")
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[rank {r}] {w}" for r in (0, 1) for w in ("half", "whole")]


def test_equal_values_are_shown_once(capsys):
    magic.show(["1", "1", "1"])
    magic.show(["a\nb", None, "c", "a\nb"])
    assert capsys.readouterr().out == "all ranks: 1\nranks 0, 3: a\n            b\nrank 2: c\n"


def test_an_exception_leaves_the_ranks(two):
    two.run("x = 5")
    error, note = failed(
        two, "def f(a):\n    return a / 0\nif rank == 1:\n    f(x)\nelse:\n    while True:\n        x = 6"
    )
    assert (error.rank, error.kind) == (1, "raised") and "line 2, in f\n    return a / 0" in str(error)
    assert note == f"rank 0 was interrupted; the 2 {LIVE_ON}"
    assert two.run("x") == ["6", "5"]
    for text, kind in (("import sys; sys.exit(3)", "exited"), ("1 +", "raised")):
        error, note = failed(two, text)
        assert error.kind == kind and error.alike == [1] and note == f"the 2 {LIVE_ON}"
    error, note = failed(two, "from dlojz_tp import todo\ntodo(1)")
    assert isinstance(error, BaliseNotDone) and note == f"the 2 {LIVE_ON}"


def test_an_exception_while_others_wait_for_the_rank_ends_all(two, monkeypatch):
    monkeypatch.setattr(staying, "OBEY_S", 0.3)
    alive = pids(two)
    error, note = failed(two, "if rank == 0:\n    raise KeyError('x')\ndist.barrier()")
    assert error.rank == 0 and "KeyError: 'x'" in error.summary
    assert note == f"the 2 ranks {GONE}: launch.stay(2) starts new ones"
    assert not any(map(psutil.pid_exists, alive))
    with pytest.raises(launch.LaunchError, match="were ended"):
        two.run("1")


@pytest.mark.parametrize("wait", ["dist.recv(torch.ones(1), src=1)", "while True: pass"])
def test_a_hung_rank_is_told_with_its_line(two, wait):
    alive = pids(two)
    error, note = failed(two, f"x = 1\nif rank == 0:\n    {wait}", timeout=2.5)
    assert error.kind == "hung" and error.returned == [1] and "line 3 of the cell" in error.summary, error
    assert error.waits == {0: "recv" if "recv" in wait else None} and GONE in note
    assert not any(map(psutil.pid_exists, alive))


def test_a_dead_rank_is_told(two):
    error, note = failed(two, "import os\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()")
    assert (error.rank, error.signal) == (1, "SIGKILL") and GONE in note


def test_a_rank_that_died_between_two_cells_is_told(two):
    os.kill(pids(two)[1], signal.SIGKILL)
    error, note = failed(two, "rank")
    assert isinstance(error, launch.LaunchError) and "rank 1 of 2 was killed by SIGKILL" in str(error) and GONE in note


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt(two, waits, monkeypatch):
    monkeypatch.setattr(staying, "OBEY_S", 0.3 if waits else 30)
    wait = "dist.recv(torch.ones(1), src=1 - rank)" if waits else "time.sleep(60)"
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    two.run("import time; x = 7")
    timer.start()
    with pytest.raises(KeyboardInterrupt, match=GONE if waits else LIVE_ON):
        two.run(f"x = 8\n{wait}")
    if not waits:
        assert two.run("x") == ["8", "8"]


def test_seconds_and_numbers_are_checked(two):
    with pytest.raises(ValueError, match="positive number of seconds"):
        two.run("1", timeout=0)
    with pytest.raises(ValueError, match="at most 1200 s"):
        two.run("1", timeout=3600)
    with pytest.raises(ValueError, match="from 1 to 64"):
        launch.stay(0)
    with pytest.raises(launch.RankError, match="cannot be nested"):
        two.run("launch.stay(2)")


def test_what_earlier_cells_had_of_the_machine_is_not_counted(monkeypatch):
    now, before = {1: patience.Share(used=5.5, waited=3, wants=True)}, {1: patience.Share(used=5, waited=3)}
    monkeypatch.setattr(patience, "shares", lambda _pids: {pid: dataclasses.replace(s) for pid, s in now.items()})
    assert patience.more_time({1: True}, spent=1, given=1) == 0
    assert patience.more_time({1: True}, spent=1, given=1, before=before) == patience.LOOK_AGAIN_S


def test_launches_go_on_beside_it(two):
    two.run("x = rank")
    alive = pids(two)
    assert launch.ranks(os.getpid, n=2) != alive and launch.worlds(abs, -1, sizes=(1, 2)) == {1: [1], 2: [1, 1]}
    with launch.stay(1) as third:
        assert third.run("world_size") == ["1"] and two.run("x") == ["0", "1"]
    assert pids(two) == alive


def test_idle_ranks_compute_nothing(two):
    two.run("torch.ones(600, 600) @ torch.ones(600, 600);")
    processes = [psutil.Process(pid) for pid in pids(two)]
    before = [sum(p.cpu_times()[:2]) for p in processes]
    time.sleep(1)
    assert all(sum(p.cpu_times()[:2]) - b < 0.5 for p, b in zip(processes, before))


def test_nothing_is_left_when_the_notebook_is_killed():
    script = (
        "import os\nfrom dlojz_tp import launch\nfrom dlojz_tp.launch import client\nranks = launch.stay(2)\n"
        "found = ranks.run('import os; os.getpid()')\nprint(*found, ranks.server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [int(pid) for pid in done.stdout.split()]
    assert len(left) == 3
    limit = time.monotonic() + 30
    while any(map(psutil.pid_exists, left)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, left))


STOP = "import os, signal, threading\nthreading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()"


@pytest.mark.usefixtures("interruptible")
def test_in_a_notebook(tmp_path):
    texts, notebook = run_cells(
        tmp_path,
        "import torch\nfrom dlojz_tp import launch\nget_ipython().find_cell_magic('ranks')",
        "from dlojz_tp import course\ntp = course.open('00_welcome')\nx = torch.arange(4.0)\ny = 3",
        "%%ranks\n1",
        "%%ranks 2 --take x --give mine\nmine = x.chunk(world_size)[rank]\nmine",
        "[m.tolist() for m in mine]",
        "%%ranks\nif rank:\n    y",
        "%%ranks 2\nmine.numel()",
        STOP,
        "%%ranks\nimport time\ntime.sleep(60)",
        "%%ranks 3\nrank % 2",
        "%%ranks\n1 +",
        "%%ranks 99\n1",
        "%%ranks --take nothing\n1",
        "%%ranks --fails\nif rank:\n    dist.barrier()",
        errors=True,
    )
    assert texts[0] == ""
    assert "begin with %%ranks 4" in texts[2]
    assert texts[3].endswith("rank 0: tensor([0., 1.])\nrank 1: tensor([2., 3.])\n")
    assert texts[4] == "[[0.0, 1.0], [2.0, 3.0]]"
    [error] = ["\n".join(o.traceback) for o in notebook.cells[5].outputs]
    number = notebook.cells[5].execution_count
    assert f"Cell In[{number}], line 3, in <module>\n    y\n" in error and "%%ranks --take y` sends it" in error
    assert texts[6] == "all ranks: 2\n"
    assert texts[8] == f"… interrupted: the 2 {LIVE_ON}"
    assert (
        texts[9]
        == "… the 2 ranks were ended, and their variables are gone; 3 new ones live nowranks 0, 2: 0\nrank 1: 1\n"
    )
    assert "line 2" in texts[10] and "SyntaxError" in texts[10] and "from 1 to 64" in texts[11]
    assert "the notebook has no nothing" in texts[12]
    assert texts[13].startswith("ranks 1, 2 of 3 hung: ") and texts[13].endswith("%%ranks 3 starts new ones\n")


SOURCE = """# %% [markdown]
# # Try
#
# ### Balise 1 · One
#
# <details>hint</details>

# %% tags=["balise-1"]
def one():
    # BEGIN SOLUTION
    return 1
    # END SOLUTION

# %%
tp.check(1, one)

# %% tags=["raises-exception"]
# %%ranks 4 --give seen
one = rank
import unheard_of
"""


def test_a_source_with_cells_of_ranks(tmp_path):
    path = tmp_path / "30_try.py"
    path.write_text(SOURCE)
    work = rules.verify(path)
    assert [cell.kind for cell in work.cells] == ["markdown", "code", "code", "ranks"]
    for notebook in (notebooks.trainee(path), notebooks.solution(path)):
        assert notebook.cells[-1].source == "%%ranks 4 --give seen\none = rank\nimport unheard_of"
        assert notebook.cells[-1].metadata.tags == ["raises-exception"]
    text = nbformat.writes(notebooks.trainee(path))
    assert [cell.kind for cell in source.of_notebook("30_try", text).cells][-1] == "ranks"
    assert sum(section.given for section in minutes.sections(SOURCE)) == 1 + 1 + 3


def test_grading_skips_the_names_of_ranks(tmp_path):
    path = tmp_path / "30_try.ipynb"
    texts = [
        "def one():\n    return 1",
        "%%ranks 4 --give seen\none = rank",
        "\n%%time\none.seen = 2",
        "%%ranks\nodd =",
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts]), path)
    nodes, broken = slicing.statements(path)
    assert list(map(slicing.bound_names, nodes)) == [{"one"}, set()] and not broken
    (tmp_path / "try.py").write_text(SOURCE)
    assert not [n for n in slicing._given(source.read(tmp_path / "try.py").cells) if "unheard_of" in slicing._text(n)]


def test_names_of_ranks_are_not_the_notebooks():
    assert (
        cells.names_made_by("%%ranks 4 --give seen\none = 1") == {"seen"} == cells.names_in("%%ranks --give seen\no =")
    )
    assert cells.names_made_by("%%ranks\none = 1") == set() and cells.names_made_by("ranks = 1") == {"ranks"}
