"""The command `check`: slices, verdicts, exit statuses, answers that end the process."""

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import nbformat
import psutil
import pytest

from dlojz_tp.judging.grading import command, keepers, slicing
from dlojz_tp.works import source

RIGHT = """
import torch.distributed as dist
import torch, os

def describe_machine():
    cuda = torch.cuda.is_available()
    return {"device": "cuda" if cuda else "cpu", "gpus": torch.cuda.device_count(),
            "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}

def distributed_sum(values):
    total = share(values).sum()
    dist.all_reduce(total)
    return total

def share(values):
    return values[dist.get_rank()::dist.get_world_size()]
"""


def write(tmp_path, text, name="answers.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def check(*arguments, timeout=120):
    done = subprocess.run(
        [sys.executable, "-m", "dlojz_tp", "check", *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, cwd=source.ROOT,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_right_answers_pass(tmp_path):
    status, out, _ = check("00_welcome", write(tmp_path, RIGHT), "--json")
    rows = json.loads(out)
    assert status == 0 and [row["verdict"] for row in rows] == ["pass", "pass"]
    keys = {"file", "balise", "title", "verdict", "failed", "expected", "got", "where", "hint", "seconds"}
    assert all(set(row) == keys for row in rows)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The exit status of one run over four files, and what it prints of each."""
    folder = tmp_path_factory.mktemp("tables")
    wrong = RIGHT.replace("    dist.all_reduce(total)\n", "").replace("def describe_machine", "def other")
    cells = [
        nbformat.v4.new_code_cell(text) for text in ("import torch", "\n" + RIGHT.replace("[dist", "[missing, dist"))
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "answers.ipynb")
    files = {
        "wrong": write(folder, wrong), "trainee": source.NOTEBOOKS / "00_welcome.ipynb",
        "solution": source.SOLUTIONS / "00_welcome.ipynb", "quoted": folder / "answers.ipynb",
    }  # fmt: skip
    status, out, _ = check("00_welcome", *files.values())
    begins = [out.index(f"{file}\n") for file in files.values()]
    return status, {name: out[a:b] for name, a, b in zip(files, begins, [*begins[1:], None], strict=True)}


def test_a_wrong_and_a_missing_answer(tables):
    status, out = tables[0], tables[1]["wrong"]
    assert status == 1 and "not done" in out and "all_reduce" in out and "0 of 2 passed" in out


def test_trainee_and_solution_notebooks(tables):
    trainee, solution = tables[1]["trainee"], tables[1]["solution"]
    assert trainee.count("not done") == 2 and "0 of 2 passed" in trainee and "2 of 2 passed" in solution


def test_a_rank_that_fails_in_a_notebook_is_quoted_with_its_cell(tables):
    assert "answers.ipynb, code cell 2, line 17: return values[missing, dist.get_rank()" in tables[1]["quoted"]


def test_an_answer_that_ends_the_process_fails(tmp_path):
    """Each of the three, and the next one is judged all the same."""
    endings = "os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(0)"
    texts = [f"import os, sys\ndef describe_machine():\n    {ending}\n" for ending in endings]
    paths = [write(tmp_path, text, f"{number}.py") for number, text in enumerate(texts)]
    status, out, _ = check("00_welcome", *paths, "--balise", "1", "--json")
    rows = json.loads(out)
    assert status == 1 and [(row["file"], row["balise"]) for row in rows] == [(str(path), 1) for path in paths]
    assert all("ended the program" in row["hint"] for row in rows)


def test_an_endless_answer_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(keepers.busy, "factor", lambda: 1.0)  # nothing is kept waiting: it sleeps
    text = "import time\ndef describe_machine():\n    while True:\n        time.sleep(1)\n"
    ((_, found),) = command.run(source.find("00_welcome"), [write(tmp_path, text)], [1], grace=4)
    assert found[0].verdict == "fail" and "Nothing came back" in found[0].hint


def test_lines_that_never_end_fail(tmp_path):
    path = write(tmp_path, "n = 0\nwhile True:\n    n += 1\ndef describe_machine():\n    return n\n")
    found = command.judge_file(source.find("00_welcome"), path, 1, limit=0.3)
    assert found.verdict == "fail" and "Nothing came back" in found.hint


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "GeneratorExit", "SystemExit", "Odd"])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_any_exception_is_a_verdict(tmp_path, error, place):
    odd = "class Odd(BaseException):\n    pass\ndef fail():\n    raise {}\n"
    text = {
        "inside": "def describe_machine():\n    fail()\n",
        "outside": "x = fail()\ndef describe_machine():\n    return x\n",
    }
    path = write(tmp_path, odd.format(error) + text[place])
    found = command.judge_file(source.find("00_welcome"), path, 1)
    assert found.verdict == "fail" and error in found.hint


STARTS = """
import os, subprocess

def run():
    return start

def start(note_kill, file):
    started = [subprocess.Popen(["sleep", "300"], start_new_session=own) for own in (False, True)]
    with open(file, "w") as written:
        print(os.getpid(), os.getppid(), *(p.pid for p in started), file=written)
    while note_kill:
        pass

def describe_machine():
    start(None, FILE)
    os._exit(3)
"""
STOPPED = """
import sys
from dlojz_tp.judging.grading import command, watched
import answers
assert "torch" not in sys.modules  # the command would wait for it twice: in its child, and here
with command._ended_cleanly(), watched.child(answers.run, jobs=[[sys.argv[1]]]) as child:
    while True:
        child.hear(60)
"""


def pids(path):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return [int(pid) for pid in path.read_text().split()]
        time.sleep(0.02)
    raise AssertionError("the answers were not reached")


def gone(pid):
    """Whether a process ends, soon if not yet."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and psutil.pid_exists(pid):
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


@pytest.mark.usefixtures("interruptible")
def test_a_command_that_is_stopped_leaves_no_process(tmp_path):
    write(tmp_path, STARTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source.ROOT), str(tmp_path)])}
    begun = {}
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        words = [sys.executable, "-c", STOPPED, str(tmp_path / f"{number}.pids")]
        begun[number] = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    for number, process in begun.items():
        started = pids(tmp_path / f"{number}.pids")
        process.send_signal(number)
        err = process.communicate(timeout=30)[1]
        assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9, signal.SIGINT: -2}[number], err
        assert len(started) == 4 and all(gone(pid) for pid in started)


WRITES = """
import contextlib, os

def describe_machine():
    for fd in range(3, 400):
        with contextlib.suppress(OSError):
            os.write(fd, BYTES)
"""


def test_what_answers_start_ends_with_them_and_none_writes_into_the_pipe(tmp_path):
    texts = [WRITES.replace("BYTES", repr(said)) for said in (b"\0\0\0\2{}", b"\0\0\0\3[1]")]
    texts.append(STARTS.replace("FILE", repr(str(tmp_path / "pids"))))
    paths = [write(tmp_path, text, f"{number}.py") for number, text in enumerate(texts)]
    *wrote, left = (verdict for _, (verdict,) in command.run(source.find("00_welcome"), paths, [1]))
    assert [verdict.slug for verdict in (*wrote, left)] == ["left"] * 3 and "exit status 3" in left.hint
    assert all("where the verdicts go" in verdict.hint for verdict in wrote)
    assert all(gone(pid) for pid in pids(tmp_path / "pids"))


def test_output_that_cannot_be_written_is_one_line():
    whole = [sys.executable, "-m", "dlojz_tp"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run([*whole, "-h"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=source.ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left" in done.stderr
    reads, writes = os.pipe()
    os.close(reads)  # as `| head` does
    done = subprocess.run([*whole, "-h"], stdout=writes, stderr=subprocess.PIPE, text=True, cwd=source.ROOT)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_source_that_is_no_text_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "00_odd.py").write_bytes(b"# caf\xe9")
    monkeypatch.setattr(source, "SOLUTIONS", tmp_path)
    assert command.main(["00_odd", str(write(tmp_path, "x = 1"))]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "00_odd.py" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("77_nothing", "x.py"), "no practical work is called"),
        (("00_welcome", "missing.py"), "cannot be read"),
        (("00_welcome", "{tmp}/broken.py"), "line 1: does not parse"),
        (("00_welcome", "{tmp}/broken.ipynb"), "is not a notebook"),
        (("00_welcome", "{tmp}/notes.txt"), "give a notebook"),
        (("00_welcome", "{tmp}/fine.py", "--balise", "9"), "has no balise 9"),
        (("00_welcome", "{tmp}/deep.ipynb"), "is not a notebook"),
        (("00_welcome", "{tmp}/deep.py"), "nested too deeply"),
        (("00_welcome", "{tmp}/wide.py"), "is not a text file in UTF-8"),
        (("00_welcome", "{tmp}/pipe.py"), "is not a file"),
        (("00_welcome",), "usage"),
    ],
)
def test_commands_that_cannot_be_understood(tmp_path, arguments, message):
    write(tmp_path, "[" * 100_000, "deep.ipynb")
    write(tmp_path, "-" * 100_000 + "1", "deep.py")
    (tmp_path / "wide.py").write_text("x = 1", encoding="utf-16")
    os.mkfifo(tmp_path / "pipe.py")
    write(tmp_path, "def f(:", "broken.py")
    write(tmp_path, "{}", "broken.ipynb")
    write(tmp_path, "", "notes.txt")
    write(tmp_path, "", "fine.py")
    status, _, err = check(*(a.format(tmp=tmp_path) for a in arguments))
    assert status == 2 and message in err and "Traceback" not in err


def notebook(tmp_path, *cells, name="n.ipynb"):
    """A notebook of code cells, saved as Windows editors do, with a byte order mark."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    path = tmp_path / name
    path.write_text(nbformat.writes(made), encoding="utf-8-sig")
    return path


def bound(nodes):
    return [sorted(slicing.bound_names(node)) for node in nodes]


def test_slices_take_what_is_needed_and_nothing_else(tmp_path):
    text = """
        %matplotlib inline
        N = 3
        M = N + 1
        print(1 / 0)
        big = [0] * 10**12
        def helper(): return M
        def answer(): return helper()
        answer()
    """
    nodes, broken = slicing.statements(notebook(tmp_path, text))
    assert bound(slicing.needed(nodes, {"answer"})) == [["N"], ["M"], ["helper"], ["answer"]] and not broken


def test_cells_are_read_as_ipython_reads_them(tmp_path):
    cells = (
        "%%time\na = 1", "%%capture out\n%%timeit -n 1\n\nb = 1\n%matplotlib inline", "gpu = !nvidia-smi -L", "gpu?",
        "if True:\n    %time c = 1\n    !ls", "%%bash\nd = 1", "%%time\ni = (9 + 1000\n    % 1000)",
        "e = (9 + 1000\n    % 1000)\nf = '''\n%kept\n!kept'''",
        "%ls\ng = (9 + 1000\n    % 1000)\nh = '''\n%kept'''",
    )  # fmt: skip
    nodes, broken = slicing.statements(notebook(tmp_path, *cells))
    assert not broken and {name for names in bound(nodes) for name in names} == {"a", "b", "gpu", *"cefghi"}
    namespace = {}
    for node in slicing.needed(nodes, set("efghi")):
        exec(ast.unparse(node), namespace)
    assert namespace["e"] == namespace["g"] == namespace["i"] == 9
    assert namespace["f"] == "\n%kept\n!kept" and namespace["h"] == "\n%kept"


def test_a_python_file_with_a_byte_order_mark(tmp_path):
    (tmp_path / "bom.py").write_text("x = 1", encoding="utf-8-sig")
    assert bound(slicing.statements(tmp_path / "bom.py")[0]) == [["x"]]


def test_a_cell_that_does_not_parse_costs_only_the_balises_that_need_it(tmp_path):
    work = source.find("00_welcome")
    right, cut = RIGHT.split("def distributed_sum")
    path = notebook(tmp_path, "%%time\n" + right, "def notes(:", "def distributed_sum" + cut, "distributed_sum(")
    assert [command.judge_file(work, path, k).verdict for k in (1, 2)] == ["pass", "pass"]
    path = notebook(tmp_path, right, "x = 1", "def distributed_sum" + cut.replace("()", "("))
    first, second = (command.judge_file(work, path, k) for k in (1, 2))
    assert first.passed and second.verdict == "fail" and "code cell 3, line" in second.hint


def test_local_names_are_not_taken_for_global_ones():
    code = "path = train()\nN = 2\ndef f(path):\n    size = path * N\n    return [x for x in size]\n"
    nodes = slicing._parse("made", code)
    assert slicing.used_names(nodes[2]) == {"N"}
    assert [sorted(slicing.bound_names(node)) for node in slicing.needed(nodes, {"f"})] == [["N"], ["f"]]


def test_loop_variables_of_comprehensions_bind_nothing():
    nodes = slicing._parse("made", "b = 1\nslow = [b for b in train()]\nfrom math import *\ndef f(): return b\n")
    assert slicing.bound_names(nodes[1]) == {"slow"}
    assert [node.lineno for node in slicing.needed(nodes, {"f"})] == [1, 3, 4]
