"""`python -m dlojz_tp check all FOLDER`: the notebooks of a class, all works in one run, several at once."""

import collections
import csv
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dlojz_tp.cards.verdict import BROKEN, Verdict
from dlojz_tp.grading import alike, lanes, slicing
from dlojz_tp.works import source, whole_file

AT_ONCE = 10  # notebooks of one work that a child judges: more, and the last lane would run alone for long
MOST_LANES = 8
HINTS_SHOWN = 15
PAIRS_SHOWN = 20
OPENS = re.compile(r"course\.open\(\s*(?:\\?[\"'](\w+)|(\w+)\s*\))")  # in Python, and in JSON's quotes
COLUMNS = ("trainee", "file", "work", "balise", "title", "verdict", "hint", "seconds")


def found(paths: list[Path]) -> tuple[dict[Path, str], list[str]]:
    """{notebook or file: its work} below these paths, and a line for each that cannot be judged."""
    works, problems = {}, []
    for path in paths:
        inside = sorted(path.rglob("*.ipynb")) if path.is_dir() else []
        for file in [p for p in inside if ".ipynb_checkpoints" not in p.parts] or [path]:
            try:
                named = _opened(file.read_text(encoding="utf-8-sig"))
            except OSError as error:
                why = "no notebook in this folder" if path.is_dir() else f"cannot be read ({error.strerror})"
                problems.append(f"{file}: {why}")
                continue
            except UnicodeDecodeError:
                problems.append(f"{file}: is not a text file in UTF-8")
                continue
            if len(named) == 1:
                works[file] = named.pop()
            elif not inside or named:
                problems.append(f"{file}: opens {'several works' if named else 'no practical work'}")
    return works, problems


def _opened(text: str) -> set[str]:
    """The works that the text of a notebook or a file opens; not parsed, for there are many."""
    names = set()
    for name, variable in OPENS.findall(text):
        names |= {name} if name else set(re.findall(rf"\b{variable}\s*=\s*\\?[\"'](\w+)", text))
    return names & set(source.names())


def trainees(works: dict[Path, str]) -> dict[Path, str]:
    """Whose each file is: the first folder in which the files differ, or the file's own name where they share one."""
    files = {path: path.resolve() for path in works}
    parents = [file.parent for file in files.values()]
    top = Path(os.path.commonpath(parents)) if parents else Path()
    at_top = collections.Counter(works[path] for path, file in files.items() if file.parent == top)
    shared = max(at_top.values(), default=0) > 1  # two copies of a work: they are not one trainee's

    def owner(file):
        if file.parent != top:
            return file.relative_to(top).parts[0]
        return file.stem if shared else top.name

    return {path: owner(file) for path, file in files.items()}


def grade(judge: Callable, works: dict[Path, str], at_once: int):
    """Judge all balises of these files; yields (file, work, verdicts) as they come. judge: as in lanes.verdicts."""
    by_work = collections.defaultdict(list)
    for path, name in works.items():
        by_work[name].append(path)
    tasks = []
    for name, files in by_work.items():
        work = source.find(name)
        for start in range(0, len(files), AT_ONCE):
            tasks.append((work, [(path, n) for path in files[start : start + AT_ONCE] for n in work.balises]))
    tasks.sort(key=lambda task: -len(task[1]))  # the longest first, so that the lanes end together
    said = collections.defaultdict(list)
    for work, (path, _), verdict in lanes.verdicts(judge, tasks, at_once):
        said[path].append(verdict)
        if len(said[path]) == len(work.balises):
            yield path, work, said.pop(path)


def main(judge: Callable, paths: list[Path], table: Path | None, as_json: bool, at_once: int | None) -> int:
    """Grade, and show: a line a notebook, who passed what, hints, equal answers. Returns the status of `check`."""
    works, problems = found(paths)
    for problem in problems:
        print(f"check: {problem}", file=sys.stderr)
    if table and not os.access(table.absolute().parent, os.W_OK):
        print(f"check: {table} cannot be written: choose a folder that is there, and yours", file=sys.stderr)
        return 2
    whose = trainees(works)
    at_once = at_once or min(MOST_LANES, len(os.sched_getaffinity(0)))
    if at_once > 1:  # as many threads as there are cores, together
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // at_once)))
    rows: list[dict] = []
    texts: dict[tuple[str, int, str], str] = {}
    marks: dict = {}
    start = time.monotonic()
    try:
        for path, work, verdicts in grade(judge, works, at_once):
            rows += [_row(whose[path], path, work.name, v) for v in verdicts]
            texts |= {(work.name, v.balise, v.slug): v.hint for v in verdicts if v.verdict == "fail"}
            marks |= _marks(whose[path], path, work, verdicts)
            if not as_json:
                print(line(path, verdicts), flush=True)
    finally:  # what is judged by then is kept
        rows.sort(key=lambda row: (row["trainee"], row["work"], row["file"], row["balise"]))
        if table and rows:
            try:
                whole_file.replace(table, f".{table.name}-", as_csv(rows).encode())
            except OSError as error:
                problems.append(f"{table} cannot be written: {error.strerror}")
                print(f"check: {problems[-1]}", file=sys.stderr)
    summary = {"hints": hints(rows, texts), "equal": alike.groups(marks)}
    if as_json:
        print(json.dumps({"verdicts": rows} | summary, indent=1, ensure_ascii=False))
    else:
        print(*shown(rows, summary), f"\n{len(works)} notebooks in {time.monotonic() - start:.0f} s", sep="\n")
    if problems:
        return 2
    words = {row["verdict"] for row in rows} - {"pass"}
    return 3 if words == {BROKEN} else 1 if words else 0


def _row(trainee: str, path: Path, work: str, v: Verdict) -> dict:
    known = (trainee, str(path), work, v.balise, v.title, v.verdict, v.slug, round(v.seconds, 3))
    return dict(zip(COLUMNS, known, strict=True))


def _marks(trainee, path, work, verdicts) -> dict:
    """The marks of what this trainee has written: holes and the course's own answers have none."""
    try:
        nodes = slicing.statements(path)[0]
    except slicing.Unreadable:
        return {}
    own = [v.balise for v in verdicts if v.verdict in ("pass", "fail")]
    return {(trainee, work.name, number): alike.mark(nodes, work, number) for number in own}


def line(path: Path, verdicts: list[Verdict]) -> str:
    """One notebook in one line: how many passed, and the others."""
    others = [f"{v.balise} {v.slug or v.verdict}" for v in verdicts if v.verdict not in ("pass", "by catch_up")]
    passed, given = (sum(v.verdict == word for v in verdicts) for word in ("pass", "by catch_up"))
    return (
        f"{path}: {passed} of {len(verdicts)} passed"
        + f", {given} by catch_up" * bool(given)
        + "".join(f"; {other}" for other in others)
    )


def hints(rows: list[dict], texts: dict) -> list[dict]:
    """The hints that were given, those of most trainees first."""
    met = collections.defaultdict(set)
    for row in rows:
        if row["verdict"] == "fail":
            met[row["work"], row["balise"], row["hint"]].add(row["trainee"])
    order = sorted(met, key=lambda key: (-len(met[key]), key))
    return [
        {"work": key[0], "balise": key[1], "hint": key[2], "trainees": len(met[key]), "text": texts[key]}
        for key in order
    ]


def shown(rows: list[dict], summary: dict):
    """The lines below the notebooks."""
    yield "\npassed  by catch_up  failed  not done  trainee"
    words = collections.defaultdict(dict)  # the best of a balise counts: a trainee may hand in two copies
    for row in rows:
        before = words[row["trainee"]].get((row["work"], row["balise"]), BROKEN)
        words[row["trainee"]][row["work"], row["balise"]] = min(before, row["verdict"], key=ORDER.index)
    for trainee, balises in sorted(words.items()):
        count = collections.Counter(balises.values())
        yield f"{count['pass']:6}{count['by catch_up']:13}{count['fail']:8}{count['not done']:10}  {trainee}"
    if summary["hints"]:
        yield "\ntrainees  hints most met"
    for one in summary["hints"][:HINTS_SHOWN]:
        text = one["text"].split("\n")[0]
        short = text if len(text) <= 90 else text[:89] + "…"
        yield f"{one['trainees']:8}  {one['work'][:2]}.{one['balise']} {one['hint']}: {short}"
    if summary["equal"]:
        yield "\nequal answers, names, comments and layout aside (short ones are left out)"
    pairs = collections.Counter()
    for one in summary["equal"]:
        yield f"  {one['work'][:2]}.{one['balise']}, {one['nodes']} nodes: {', '.join(one['trainees'])}"
        pairs.update((a, b) for k, a in enumerate(one["trainees"]) for b in one["trainees"][k + 1 :])
    often = [f"  {a} and {b}: {n} equal answers" for (a, b), n in pairs.most_common(PAIRS_SHOWN) if n > 1]
    yield from often


ORDER = ("pass", "by catch_up", "fail", "not done", BROKEN)


def as_csv(rows: list[dict]) -> str:
    """A line for each balise of each notebook."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    writer.writerows(
        {key: _no_formula(value) if key in ("trainee", "file") else value for key, value in row.items()} for row in rows
    )
    return out.getvalue()


def _no_formula(name: str) -> str:
    """A spreadsheet takes what begins so for a formula; a trainee chooses the names of his or her files."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@") else name
