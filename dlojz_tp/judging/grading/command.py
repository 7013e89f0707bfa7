"""`python -m dlojz_tp check NAME FILE ...`: the verdicts on the answers in files, as a table or as JSON.

Each answer runs in a separate process, so an answer that ends it, or never ends, is a verdict like any other, and
no answer finds what another has left.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

from dlojz_tp.cards.plain import one_line, plain
from dlojz_tp.cards.verdict import BROKEN, EDGE
from dlojz_tp.judging.grading import forked_ranks, guard, keepers, slicing, watched
from dlojz_tp.works import source

AT_ONCE = 50  # files that one keeper is told: an argument of a program has 128 KiB at most
LOAD_LIMIT = 60.0  # seconds for the lines that define an answer
USAGE = 2


def main(argv: list[str]) -> int:
    """Exit status: 0 if all asked for pass, 1 otherwise, 2 for a command or a file that cannot be understood.

    3 where no verdict on some balise could be had, because the machine or the course broke, and the others pass.
    """
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp check", description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NN_name", help="the practical work, such as 00_welcome or 00; all: every work")
    what = "notebooks (.ipynb), Python files (.py), or folders with notebooks of the work"
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help=what)
    parser.add_argument("--balise", metavar="K", type=int, help="judge this one only")
    what = f"count robust answers alone: one that is {EDGE} does not pass"
    parser.add_argument("--strict", action="store_true", help=what)
    parser.add_argument("--json", action="store_true", help="print a list of verdicts as JSON")
    what = "of a wrong value, name the three nearest known mistakes (for authors of checks)"
    parser.add_argument("--explain", action="store_true", help=what)
    what = "with all: also write a line for each balise of each notebook to this file"
    parser.add_argument("--csv", metavar="TABLE", type=Path, help=what)
    what = "with all and --csv: keep what TABLE says of notebooks that have not changed since, and judge the others"
    parser.add_argument("--resume", action="store_true", help=what)
    what = "with all: whose a notebook is: what the first group of this regular expression finds in its path"
    parser.add_argument("--trainee", metavar="REGEX", type=_with_a_group, help=what)
    parser.add_argument(
        "--jobs", metavar="N", type=int, choices=range(1, 65), help="with all: how many at once [cores]"
    )
    options = parser.parse_args(argv)
    if options.name == "all":
        if options.balise is not None or options.explain:
            parser.error("--balise and --explain are for one work")
        if options.resume and not options.csv:
            parser.error("--resume goes on from a table: give --csv TABLE too")
        from dlojz_tp.judging.grading import whole_class

        how = options.csv, options.json, options.jobs, options.trainee, options.resume, options.strict
        with _ended_cleanly():
            return whole_class.main(judge_all, options.files, *how)
    if options.csv or options.jobs or options.trainee or options.resume:
        parser.error("--csv, --jobs, --trainee and --resume are for all works: check all ...")
    options.name = source.full_name(options.name)
    try:
        work = source.find(options.name)
        if options.balise is not None and options.balise not in work.balises:
            raise source.UnknownWork(f"{work.name} has no balise {options.balise}; it has 1 to {max(work.balises)}")
    except source.UnknownWork as error:
        print(f"check: {error}", file=sys.stderr)
        return USAGE
    except UnicodeDecodeError:
        print(f"check: solutions/{options.name}.py is not a text file in UTF-8: get it again", file=sys.stderr)
        return USAGE
    files, problems = chosen(options.files, work.name)
    for problem in problems:
        print(f"check: {one_line(problem)}", file=sys.stderr)
    numbers = list(work.balises) if options.balise is None else [options.balise]
    every = []
    with _ended_cleanly():
        for path, verdicts in run(work, files, numbers):
            every += [(path, v) for v in verdicts]
            if not options.json:
                shown = table(verdicts, options.explain)
                print(*[one_line(path)] * (len(files) > 1), shown, sep="\n" if len(files) > 1 else "", flush=True)
    if options.json:
        rows = [{"file": str(path)} | v.to_json() for path, v in every]
        print(plain(json.dumps(rows, indent=1, ensure_ascii=False)))
    if problems:
        return USAGE
    return keepers.status({v.verdict for _, v in every}, options.strict)


def _with_a_group(text: str) -> re.Pattern:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"is no regular expression ({error})") from None
    if not pattern.groups:
        raise argparse.ArgumentTypeError("needs a group, in brackets, that is the trainee's name")
    return pattern


def chosen(paths: list[Path], name: str) -> tuple[list[Path], list[str]]:
    """The files to judge, and one line for each path that cannot be. A folder stands for the work's notebooks in it."""
    files, problems = [], []
    for path in paths:
        inside = (
            [p for p in sorted(path.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts] if path.is_dir() else []
        )
        found = []
        for file in inside or [path]:
            try:
                opened = slicing.opened(slicing.statements(file)[0])
            except slicing.Unreadable as error:
                problems.append(str(error))
                continue
            if opened in (name, None) and not (inside and opened is None):
                found.append(file)
            elif not inside:
                problems.append(f"{file}: is a notebook of {opened}, not of {name}")
        if path.is_dir() and not found:
            problems.append(f"{path}: no notebook of {name} in this folder")
        files += found
    return list(dict.fromkeys(files)), problems


@contextlib.contextmanager
def _ended_cleanly():
    """A signal that asks this process to end raises, so that it ends its child first."""

    def end(number, _frame):
        raise SystemExit(128 + number)

    asked = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]  # not under nohup
    for number in asked:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


def table(verdicts: list, explain: bool = False) -> str:
    """One row a balise: number, verdict, seconds, title, and the hint below where it failed.

    explain: below a hint, the known mistakes that are nearest to the answer.
    """
    lines = []
    for v in verdicts:
        lines.append(f"{v.balise:>3}  {v.verdict:<15}  {v.seconds:6.2f} s  {v.title}")
        if v.verdict == BROKEN:
            lines.append(textwrap.indent(f"{v.got}\n{v.hint}", " " * 31))
        if v.verdict in ("fail", EDGE):
            lines.append(textwrap.indent(v.hint, " " * 31))
            if explain:
                lines.append(textwrap.indent(explained(v), " " * 31))
    return plain("\n".join([*lines, keepers.counted(verdicts)]))


def explained(verdict) -> str:
    """Why a failed verdict has its hint: the look, and the three nearest known mistakes with their distances."""
    if not verdict.evidence:
        return f"[{verdict.slug}: the check's own hint, at “{verdict.failed}”]"
    near = ", ".join(f"{slug} {far:.2f}" for slug, far in verdict.near[:3]) or "none on record"
    return (
        f"[{verdict.slug}: at “{verdict.failed}”; nearest known mistakes: {near}; 0 is the same, 1 as far as the truth]"
    )


def run(work: source.Work, files: list[Path], numbers: list[int], grace: float = keepers.GRACE):
    """Judge balises `numbers` of each file, in a child process that is watched; yields (file, verdicts)."""
    parts = [files[k : k + AT_ONCE] for k in range(0, len(files), AT_ONCE)]
    tasks = [(work, [(path, number) for path in part for number in numbers]) for part in parts if numbers]
    said = keepers.verdicts(judge_all, tasks, grace=grace)
    for path in files:
        yield path, [next(said)[2] for _ in numbers]


TOUCHED = "This file changes the course's own {what}: what is judged then says nothing. Leave the course as it is."


def judge_all(name: str):
    """In the keeper: import all that judges the work; returns what gives the verdict on a job, as a dict, in a fork."""
    threads = _import_calmly(name)
    from dlojz_tp.cards.verdict import Verdict

    work = source.find(name)
    with_ranks = _uses_ranks(work)
    if with_ranks:
        forked_ranks.prepare()

    def judge(note_kill, path: str, number: int) -> dict:
        import torch

        guard.limit_memory()  # first: the ranks inherit it
        if with_ranks:
            forked_ranks.start()
        torch.set_num_threads(threads)
        keepers, changed = watched.keepers(), guard.watch()
        guard.shut([source.SOLUTIONS, source.ROOT / "tests" / "answers"], [Path(path)], keepers, note_kill)
        found = judge_file(work, Path(path), number)
        if what := changed():
            title, hint = work.balises[number].title, TOUCHED.format(what=what)
            found = Verdict(number, title, "fail", found.seconds, slug="touched", hint=hint)
        return dataclasses.asdict(found)

    return judge


def _import_calmly(name: str) -> int:
    """Import the checks of a work as a process that forks must, one thread and no GPU. Returns the usual threads."""
    from dlojz_tp.launch import client

    before = dict(os.environ)
    os.environ.update({key: value for key, value in client.CALM.items() if key != "OMP_NUM_THREADS"})
    try:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        from dlojz_tp import course  # noqa: F401 - the guard watches what is imported before an answer
        from dlojz_tp.judging import checks

        checks.modules(source.find(name).module)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return threads


def _uses_ranks(work: source.Work) -> bool:
    checks = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(f"dlojz_tp.judging.checks.{work.module}")
    ]
    return "dlojz_tp.judging.probes.ranks" in sys.modules or any(hasattr(module, "launch") for module in checks)


def judge_file(work: source.Work, path: Path, number: int, limit: float = LOAD_LIMIT):
    """The verdict on balise `number` of the answers in `path`, in this process; never raises for what they do.

    limit: seconds for the lines that define the answers; a check has its own deadline.
    """
    from dlojz_tp.cards.verdict import Verdict

    title, names = work.balises[number].title, work.balises[number].answers
    try:
        written, broken = slicing.statements(path)
    except slicing.Gone as error:  # it was there when the run began
        return Verdict(number, title, BROKEN, got=str(error), hint="Put the file back, then judge it again.")
    except slicing.Unreadable as error:
        return Verdict(number, title, "fail", hint=str(error), slug="raised")
    nodes = slicing.caught_up(written, work, number)
    seen = slicing.seen_by_check(nodes, number)
    given = Verdict(number, title, "by catch_up", hint="the course's own code, from tp.catch_up")
    if slicing.by_course(seen, names):
        return given
    found = _judge(work, path, seen, broken, number, limit)
    if found.verdict == "not done" and slicing.caught_up_below(nodes, seen):  # and the check then ran again
        return given if slicing.by_course(nodes, names) else _judge(work, path, nodes, broken, number, limit)
    return found


def _judge(work, path, nodes, broken, number, limit):
    from dlojz_tp import course
    from dlojz_tp.judging.checking import breakage, verdicts
    from dlojz_tp.launch import busy
    from dlojz_tp.works.balise import BaliseNotDone, remember_titles

    remember_titles({n: b.title for n, b in work.balises.items()})
    title, names = work.balises[number].title, work.balises[number].answers
    start = time.perf_counter()

    def verdict(word, hint, **more):
        return verdicts.Verdict(number, title, word, time.perf_counter() - start, hint=hint, **more)

    def common(slug, **fields):
        return verdict("fail", verdicts.COMMON_HINTS[slug].format(**fields), slug=slug)

    if slicing.untouched(nodes, work, number):
        return verdict("not done", str(BaliseNotDone(number, title)))
    clock = busy.Clock()
    doing = f"The lines that define {', '.join(names)} cannot run: "
    try:
        with slicing.modules_beside(path):
            with verdicts.deadline_of(limit, clock):
                namespace = slicing.load(nodes, broken, work, number)
            missing = [name for name in names if name not in namespace]
            if missing:
                return verdict("not done", f"{path.name} does not define {', '.join(missing)}")
            doing = "Your code raised "
            return course.judge(work, number, tuple(namespace[name] for name in names))
    except BaliseNotDone as missing:
        return verdict("not done", str(missing))
    except slicing.Unreadable as error:
        return verdict("fail", str(error), slug="raised")
    except verdicts.Overdue:
        if not clock.had(limit):
            return verdict(BROKEN, "Judge this file again, when the machine does less.", got="the machine is too busy")
        return common("endless", seconds=limit)
    except SystemExit as error:
        return common("left", error=f"SystemExit({error.code!r})")
    except BaseException as error:  # KeyboardInterrupt too: nobody else interrupts this process
        if missing := verdicts.undone(error):
            return verdict("not done", str(missing))
        if what := breakage.broken(error, True):
            return verdict(BROKEN, what[1], got=what[0])
        return verdict("fail", f"{doing}{_said(error)}", slug="raised")


def _said(error: BaseException) -> str:
    with contextlib.suppress(Exception):  # its own __str__ may raise
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return type(error).__name__
