"""`python -m dlojz_tp check NAME FILE`: the verdicts on the answers in a file, as a table or as JSON.

The answers run in a process of their own, so an answer that ends it, or never ends, is a verdict like any other.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

from dlojz_tp import source
from dlojz_tp.grading import slicing

GRACE = 90.0  # seconds that the process may be silent; a check has its own, shorter deadline
USAGE = 2


def main(argv: list[str]) -> int:
    """Exit status: 0 if all asked for pass, 1 otherwise, 2 for a command that cannot be understood."""
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp check", description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NN_name", help="the practical work, such as 00_welcome")
    parser.add_argument("file", metavar="FILE", type=Path, help="a notebook (.ipynb) or a Python file (.py)")
    parser.add_argument("--balise", metavar="K", type=int, help="judge this one only")
    parser.add_argument("--json", action="store_true", help="print a list of verdicts as JSON")
    options = parser.parse_args(argv)
    try:
        work = source.find(options.name)
        if options.balise is not None and options.balise not in work.balises:
            raise source.UnknownWork(f"{work.name} has no balise {options.balise}; it has 1 to {max(work.balises)}")
        slicing.statements(options.file)
    except (source.UnknownWork, slicing.Unreadable) as error:
        print(f"check: {error}", file=sys.stderr)
        return USAGE
    numbers = list(work.balises) if options.balise is None else [options.balise]
    verdicts = run(work, options.file, numbers)
    if options.json:
        print(json.dumps([v.to_json() for v in verdicts], indent=1, ensure_ascii=False))
    else:
        print(table(verdicts))
    return 0 if all(v.passed for v in verdicts) else 1


def table(verdicts: list) -> str:
    """One row a balise: number, verdict, seconds, title, and the hint below where it failed."""
    lines = []
    for v in verdicts:
        lines.append(f"{v.balise:>3}  {v.verdict:<8}  {v.seconds:6.2f} s  {v.title}")
        if v.verdict == "fail":
            lines.append(f"{'':24}{v.hint}")
    passed = sum(v.passed for v in verdicts)
    return "\n".join([*lines, f"{passed} of {len(verdicts)} passed"])


def run(work: source.Work, path: Path, numbers: list[int], grace: float = GRACE) -> list:
    """Judge balises `numbers` of the answers in `path`, each verdict from a child process that is watched.

    A child that ends or falls silent for `grace` seconds costs one failed verdict; the others get a new child.
    """
    verdicts: dict[int, object] = {}
    while len(verdicts) < len(numbers):
        rest = [n for n in numbers if n not in verdicts]
        verdicts.update(_one_child(work, path, rest, grace))
    return [verdicts[n] for n in numbers]


def _one_child(work, path, numbers, grace):
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_judge_all, args=(work.name, path, numbers, sender))
    child.start()
    sender.close()
    done, started = {}, time.perf_counter()
    try:
        for number in numbers:
            if not receiver.poll(grace):
                done[number] = _lost(work, number, "endless", {"seconds": grace}, started)
                break
            try:
                done[number] = receiver.recv()
            except EOFError:
                child.join(5)
                ended = {"error": f"exit status {child.exitcode}"}
                done[number] = _lost(work, number, "left", ended, started)
                break
            started = time.perf_counter()
    finally:
        receiver.close()
        if child.is_alive():
            child.join(5 if len(done) == len(numbers) else 0)
        if child.is_alive():
            child.kill()
        child.join()
    return done


def _lost(work, number, slug, fields, started):
    from dlojz_tp.checking.judging import COMMON_HINTS, Verdict

    spent = time.perf_counter() - started
    title = work.balises[number].title
    return Verdict(number, title, "fail", spent, slug=slug, hint=COMMON_HINTS[slug].format(**fields))


def _judge_all(name, path, numbers, sender):
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (what answers print must not mix with the JSON)
    work = source.find(name)
    for number in numbers:
        sender.send(judge_file(work, path, number))


def judge_file(work: source.Work, path: Path, number: int):
    """The verdict on balise `number` of the answers in `path`, in this process."""
    from dlojz_tp import course
    from dlojz_tp.balise import BaliseNotDone, remember_titles
    from dlojz_tp.checking.judging import Verdict, own_lines

    remember_titles({n: b.title for n, b in work.balises.items()})
    title, names = work.balises[number].title, work.balises[number].answers
    start = time.perf_counter()

    def verdict(word, hint, **more):
        return Verdict(number, title, word, time.perf_counter() - start, hint=hint, **more)

    try:
        namespace = slicing.load(path, work, [number])
    except BaliseNotDone as missing:
        return verdict("not done", str(missing))
    except Exception as error:
        hint = f"The lines that define {', '.join(names)} cannot run: {type(error).__name__}: {error}"
        return verdict("fail", hint, slug="raised", details=own_lines(error))
    missing = [name for name in names if name not in namespace]
    if missing:
        return verdict("not done", f"{path.name} does not define {', '.join(missing)}")
    return course.judge(work, number, tuple(namespace[name] for name in names))
