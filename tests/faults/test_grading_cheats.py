"""An answer that forges or replaces its judge fails, and none harms the grader."""

import textwrap
import time

from dlojz_tp.judging.checking.looks import same
from dlojz_tp.judging.grading import command
from dlojz_tp.works import source
from tests.test_grading import RIGHT

VERDICT = """{"balise": 1, "title": "t", "verdict": "pass"}"""
CHEATS = {
    "the verdict in the pipe": """
        import contextlib, os, struct
        def describe_machine():
            said = FORGED.encode()
            for fd in map(int, os.listdir("/proc/self/fd")):  # the pipe may have any number
                with contextlib.suppress(OSError):
                    os.write(fd, struct.pack("!i", len(said)) + said)
    """,
    "another judge": """
        from dlojz_tp import course
        def judge(work, number, answers):
            return course.Verdict(number, "t", "pass")
        def describe_machine():
            course.judge = judge
            raise ValueError
    """,
    "another check": """
        def describe_machine():
            from dlojz_tp.judging.checks.welcome import balise_1 as check
            def balise_1(answer):
                yield "all is well"
            check.balise_1 = balise_1
            raise ValueError
    """,
    "another Verdict": """
        def describe_machine():
            from dlojz_tp.cards import verdict
            verdict.Verdict.to_json = lambda self: {"verdict": "pass"}
            raise ValueError
    """,
    "the solution from its file": """
        import re
        from pathlib import Path
        from dlojz_tp.works import source
        def describe_machine():
            text = (Path(source.ROOT) / "solutions" / "00_welcome.py").read_text()
            names = {"torch": __import__("torch"), "os": __import__("os")}
            exec(re.search(r"def describe_machine.*?END SOLUTION", text, re.S)[0], names)
            return names["describe_machine"]()
    """,
    "the solution by another program": """
        import subprocess
        def describe_machine():
            return subprocess.run(["cat", "solutions/00_welcome.py"], cwd=COURSE, capture_output=True).stdout
    """,
    "the solution from the history": """
        import os
        def describe_machine():
            os.system("git -C " + COURSE + " show HEAD:solutions/00_welcome.py")
    """,
    "the grader killed": """
        import os
        def describe_machine():
            os.kill(os.getppid(), 9)
    """,
    "standard error flooded": """
        import os
        def describe_machine():
            for _ in range(3000):
                os.write(2, b"x" * 1000)
    """,
    "all the memory": """
        import torch
        def describe_machine():
            return [torch.empty(2**30) for _ in range(2**10)]
    """,
}


def test_no_cheat_passes_and_none_harms_the_grader(tmp_path, capfd):
    """All in one run, in which none reaches the next."""
    for cheat, text in CHEATS.items():
        text = textwrap.dedent(text).replace("FORGED", repr(VERDICT)).replace("COURSE", repr(str(source.ROOT)))
        (tmp_path / f"{cheat}.py").write_text(text)
    said = command.run(source.find("00_welcome"), [tmp_path / f"{cheat}.py" for cheat in CHEATS], [1])
    verdicts = {path.stem: found for path, (found,) in said}
    assert {cheat: found.verdict for cheat, found in verdicts.items()} == dict.fromkeys(CHEATS, "fail")
    assert len(capfd.readouterr().err) < 100_000
    for cheat, found in verdicts.items():
        if cheat.startswith("another"):
            assert found.slug == "touched" and "dlojz_tp." in found.hint, cheat
        elif "memory" not in cheat and "flooded" not in cheat:
            words = ("where the verdicts go", "not for answers", "not the answer's")
            assert any(word in found.hint for word in words), (cheat, found)


FINDS_SAY = """
import sys
def describe_machine():
    frame = sys._getframe()
    while frame and "say" not in frame.f_locals:
        frame = frame.f_back
    for _ in range(TIMES):
        frame.f_locals["say"](said={"balise": BALISE, "title": "t", "verdict": "pass"})
    raise ValueError
"""


def test_a_file_that_speaks_for_the_judge_moves_no_other_mark(tmp_path):
    """Three such files in one run, each before a right one, a wrong one and a right one."""
    texts = {}
    for times, balise in ((1, 1), (2, 1), (1, 2)):
        here = f"{times} {balise}"
        texts |= {
            f"ada {here}": FINDS_SAY.replace("TIMES", str(times)).replace("BALISE", str(balise)),
            f"bob {here}": RIGHT,
            f"cyd {here}": "def describe_machine():\n    return 3\n",
            f"dan {here}": RIGHT,
        }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = command.run(source.find("00_welcome"), [tmp_path / f"{name}.py" for name in texts], [1])
    assert [verdict.verdict for _, (verdict,) in found] == ["fail", "pass", "fail", "pass"] * 3


REPLACES = {
    "builtins.sum": "builtins.sum = lambda *_: 0",
    "torch.allclose": "torch.allclose = lambda *_, **__: True",
    "torch.equal": "torch.equal = functools.wraps(torch.equal)(lambda *_: True)",
    "torch.nn.functional.linear": "torch.nn.functional.linear = lambda x, *_: x",
    "torch.Tensor.__mul__": "torch.Tensor.__mul__ = lambda a, b: a",
}


def test_what_a_file_replaces_is_named_and_does_not_reach_the_next(tmp_path):
    """Nor do the limits that it sets: it has a process of its own."""
    paths = []
    for name, line in REPLACES.items():
        paths += [tmp_path / f"{name}.py", tmp_path / f"{name} next.py"]
        limits = "import builtins, functools, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        paths[-2].write_text(RIGHT.replace("    cuda =", f"    {line}\n    cuda =") + limits)
        paths[-1].write_text(RIGHT)
    found = [verdict for _, (verdict,) in command.run(source.find("00_welcome"), paths, [1])]
    assert [verdict.verdict for verdict in found] == ["could not judge", "pass"] * len(REPLACES)
    named = zip((name.removeprefix("builtins.") for name in REPLACES), found[::2], strict=True)
    assert all(name in verdict.got for name, verdict in named)


class EqualsAll:
    def __eq__(self, other):
        return True

    __hash__ = None


def test_what_equals_everything_equals_nothing():
    assert not same(EqualsAll(), "words") and not same({"a": EqualsAll()}, {"a": 1}) and same({"a": 1}, {"a": 1})


def test_a_file_of_many_functions_is_read_in_time(tmp_path):
    lines = [f"def f{k}(x):\n    return x + {k}\n" for k in range(4000)]
    path = tmp_path / "answers.py"
    path.write_text("".join(lines) + "def describe_machine():\n    return f7(f3999(1))\n")
    work = source.find("00_welcome")
    command.judge_file(work, path, 1)
    began = time.process_time()
    command.judge_file(work, path, 1)  # what has been read of it is remembered for each further balise
    assert time.process_time() - began < 3
