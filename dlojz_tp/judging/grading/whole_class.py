"""`python -m dlojz_tp check all FOLDER`: the notebooks of a class, all works in one run, several at once."""

import collections
import csv
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dlojz_tp.cards.plain import one_line, plain
from dlojz_tp.cards.verdict import BROKEN, DONE, EDGE, Verdict
from dlojz_tp.judging.grading import alike, keepers, slicing
from dlojz_tp.works import source, whole_file

AT_ONCE = 10  # notebooks of one work that a child judges: more, and the last lane would run alone for long
MOST_LANES = 8
HINTS_SHOWN = 15
PAIRS_SHOWN = 20
OPENS = re.compile(r"course\.open\(\s*(?:\\?[\"'](\w+)|(\w+)\s*\))")  # in Python, and in JSON's quotes
SAVED_EVERY = 20.0  # seconds: also a run that is killed leaves its table
COLUMNS = ("trainee", "file", "work", "balise", "title", "verdict", "hint", "seconds", "content")
# where the downloads of nbgrader, Moodle and Canvas have the name of a trainee, and the number that the system gives
LAYOUTS = {
    "nbgrader's submitted/NAME/ASSIGNMENT": re.compile(r"(?s).*/submitted/([^/]+)()/[^/]+/.+$"),
    "Moodle's NAME_NUMBER_assignsubmission_file_": re.compile(r"(?s).*/([^/]+?)_(\d+)_assignsubmission_[^/]*/"),
    "Canvas's NAME_NUMBER_NUMBER_FILE": re.compile(r"(?s).*/([^/_]+)_(?:LATE_)?(\d+)_\d+_[^/]+$"),
}
EXAMPLE = "such as --trainee '([^/]+)/[^/]*$' for the folder of each file"


class Unclear(Exception):
    """Whose the files are cannot be told from their paths; the message is one line."""


def found(paths: list[Path]) -> tuple[dict[Path, str], list[str]]:
    """{notebook or file: its work} below these paths, and a line for each that cannot be judged."""
    works, problems, names = {}, [], set(source.names())
    for path in paths:
        inside = _notebooks(path)
        for file in inside or [path]:
            try:
                named = _opened(slicing.read(file), names)
            except slicing.Unreadable as error:
                nothing = not inside and path.is_dir()
                problems.append(f"{path}: no notebook in this folder" if nothing else str(error))
                continue
            if len(named) == 1:
                works[file] = named.pop()
            elif not inside or named:
                problems.append(f"{file}: opens {'several works' if named else 'no practical work'}")
        if inside and not works.keys() & set(inside):
            problems.append(f"{path}: no notebook in this folder opens a practical work")
    return works, problems


def _notebooks(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.ipynb")) if folder.is_dir() else []
    return [path for path in found if ".ipynb_checkpoints" not in path.parts and not path.is_dir()]


def _opened(text: str, names: set[str]) -> set[str]:
    """Those of the works `names` that the text of a notebook or a file opens; not parsed, for there are many."""
    found = set()
    for name, variable in set(OPENS.findall(text)):
        found |= {name} if name else set(re.findall(rf"\b{variable}\s*=\s*\\?[\"'](\w+)", text))
    return found & names


def trainees(works: dict[Path, str], named: re.Pattern | None = None) -> tuple[dict[Path, str], str]:
    """Whose each file is, and the rule that says so, in words. Raises Unclear.

    works: {file: its work}. named: the first group that it finds in a path is the trainee; a layout that is known, or
    the first folder in which the files differ, where it is None.
    """
    # links are not followed: one trainee's link to another place would change everybody's common folder
    files = {path: Path(os.path.abspath(path)) for path in works}  # noqa: PTH100  without `..`
    if named:
        found = {path: named.search(str(path)) for path in works}
        for path, match in found.items():
            if not (match and match[1]):
                raise Unclear(f"--trainee finds nobody in {path}")
        return {path: match[1] for path, match in found.items()}, f"--trainee {named.pattern}"
    for rule, layout in LAYOUTS.items():
        matches = {path: layout.match(str(file)) for path, file in files.items()}
        if not matches or not all(matches.values()):
            continue
        numbers, places = collections.defaultdict(set), collections.defaultdict(set)
        for path, match in matches.items():
            numbers[match[1]].add(match[2])  # two trainees may have one name
            places[match[1], match[2], works[path]].add(files[path].parent)
        if max(map(len, places.values())) == 1:  # else there are many trainees below what we took for a name
            return {p: f"{m[1]} {m[2]}" if len(numbers[m[1]]) > 1 else m[1] for p, m in matches.items()}, rule
    return _by_folders(works, files)


def _by_folders(works, files):
    top = Path(os.path.commonpath([file.parent for file in files.values()])) if files else Path()
    below = {path: file.relative_to(top).parts for path, file in files.items()}
    flat = collections.Counter(works[path] for path, parts in below.items() if len(parts) == 1)
    of_work = {path: _names_work(parts[0], works[path]) for path, parts in below.items() if len(parts) > 1}
    if of_work and len(of_work) == len(files) and all(of_work.values()):
        if all(len(parts) == 2 and _names_work(Path(parts[1]).stem, works[path]) for path, parts in below.items()):
            return dict.fromkeys(works, top.name), "all of one: folders and files have the names of works"
        inside = {path: parts[1] if len(parts) > 2 else Path(parts[1]).stem for path, parts in below.items()}
        return inside, "what is in the folders of the works"
    copies = collections.defaultdict(collections.Counter)
    for path, parts in below.items():
        if len(parts) > 1:
            copies[parts[0]][works[path]] += 1
    if copies and not flat and all(max(count.values()) > 1 for count in copies.values()):
        folder = next(iter(copies))
        raise Unclear(
            f"{top / folder} and all folders beside it hold several notebooks of one work: does a folder belong "
            f"to one trainee, or to many? Say so with --trainee REGEX, {EXAMPLE}"
        )
    shared = max(flat.values(), default=0) > 1  # two copies of a work: they are not one trainee's
    if shared and len(flat) > 1:
        raise Unclear(
            f"{top} holds several notebooks of several works: whose are they? Say it: --trainee REGEX, "
            "such as --trainee '([^/_]+)_[^/]*$' for files that begin with the name and _"
        )
    whose = {
        path: parts[0] if len(parts) > 1 else files[path].stem if shared else top.name for path, parts in below.items()
    }
    return whose, "each file" if shared else "the first folder in which the files differ"


def _names_work(name: str, work: str) -> bool:
    """Whether a folder or a file has the name of the work, or its number."""
    return re.fullmatch(rf"(tp)?[\W_]*({work[:2]}|{work}(\W.*)?)", name, re.IGNORECASE) is not None


def grade(judge: Callable, works: dict[Path, str], at_once: int):
    """Judge all balises of these files; yields (file, work, verdicts) as they come. judge: as in keepers.verdicts."""
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
    for work, (path, _), verdict in keepers.verdicts(judge, tasks, at_once):
        said[path].append(verdict)
        if len(said[path]) == len(work.balises):
            yield path, work, said.pop(path)


def main(
    judge: Callable,
    paths: list[Path],
    table: Path | None,
    as_json: bool,
    at_once: int | None,
    named: re.Pattern | None = None,
    resume: bool = False,
    strict: bool = False,
) -> int:
    """Grade, and show: a line a notebook, who passed what, hints, equal answers. Returns the status of `check`.

    named: as in `trainees`. resume: keep what `table` says of files that are as they were.
    strict: robust answers alone pass.
    """
    works, problems = found(paths)
    for problem in problems:
        print(f"check: {one_line(problem)}", file=sys.stderr)
    if table and not os.access(table.absolute().parent, os.W_OK):
        print(f"check: {one_line(table)} cannot be written: choose a folder that is there, and yours", file=sys.stderr)
        return 2
    contents = {path: _content(path) if table else "" for path in works}
    try:
        whose, rule = trainees(works, named)
        rows = _kept(table, works, contents, whose) if resume else []
    except (Unclear, slicing.Unreadable) as error:
        print(f"check: {one_line(error)}", file=sys.stderr)
        return 2
    kept = {row["file"] for row in rows}
    left = {path: work for path, work in works.items() if str(path) not in kept}
    if not as_json:
        count = len(set(whose.values()))
        print(f"{count} trainee{'s' * (count != 1)}: {one_line(rule)}", flush=True)
        if resume:
            print(f"kept from {one_line(table)}: {len(kept)}; to judge: {len(left)}", flush=True)
    at_once = at_once or min(MOST_LANES, len(os.sched_getaffinity(0)))
    if at_once > 1:  # as many threads as there are cores, together
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // at_once)))
    texts: dict[tuple[str, int, str], str] = {}
    marks: dict = {}
    for path in works.keys() - left.keys():
        said = {row["balise"]: row["verdict"] for row in rows if row["file"] == str(path)}
        marks |= _marks(whose[path], path, source.find(works[path]), said)
    start = saved = time.monotonic()
    done = 0
    try:
        for path, work, verdicts in grade(judge, left, at_once):
            content = contents[path] if table and _content(path) == contents[path] else ""  # it changed meanwhile
            rows += [_row(whose[path], path, work.name, content, v) for v in verdicts]
            texts |= {(work.name, v.balise, v.slug): v.hint for v in verdicts if v.verdict in ("fail", EDGE)}
            marks |= _marks(whose[path], path, work, {v.balise: v.verdict for v in verdicts})
            done += 1
            if not as_json:
                print(line(path, verdicts), flush=True)
            if table and time.monotonic() - saved > SAVED_EVERY:
                _save(table, rows)
                saved = time.monotonic()
    except (KeyboardInterrupt, SystemExit):
        again = f"the same command with --resume goes on from {one_line(table)}" if table else "--csv TABLE keeps them"
        print(f"\ncheck: interrupted: {done} of {len(left)} notebooks are judged; {again}", file=sys.stderr)
        raise
    finally:  # what is judged by then is kept
        if table and rows and (why := _save(table, rows)):
            problems.append(f"{table} cannot be written: {why}")
            print(f"check: {one_line(problems[-1])}", file=sys.stderr)
    summary = {"hints": hints(rows, texts), "equal": alike.groups(marks)}
    if as_json:
        print(plain(json.dumps({"trainees": rule, "verdicts": rows} | summary, indent=1, ensure_ascii=False)))
    else:
        print(*map(plain, shown(rows, summary)), sep="\n")
        print(f"\n{len(works)} notebooks in {time.monotonic() - start:.0f} s")
    if problems:
        return 2
    return keepers.status({row["verdict"] for row in rows}, strict)


def _content(path: Path) -> str:
    """What a file has in common with one of the same content."""
    try:
        return hashlib.sha256(slicing.read(path).encode()).hexdigest()[:16]
    except slicing.Unreadable:  # it went away meanwhile: a verdict says so
        return ""


def _save(table: Path, rows: list[dict]) -> str:
    """Write the table; returns why it cannot be written, or nothing."""
    rows.sort(key=lambda row: (row["trainee"], row["work"], row["file"], row["balise"]))
    try:
        whole_file.replace(table, f".{table.name}-", as_csv(rows).encode(errors="backslashreplace"))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _kept(table: Path, works: dict[Path, str], contents: dict[Path, str], whose: dict[Path, str]) -> list[dict]:
    """The rows that an earlier run wrote to the table, of those files that it judged whole and that are as they were.

    Where the machine broke, no verdict was had: such a file is judged again. Raises Unreadable for another table.
    """
    if not table.exists():
        return []
    before = collections.defaultdict(list)
    try:
        lines = csv.DictReader(io.StringIO(slicing.read(table), newline=""))
        if tuple(lines.fieldnames or ()) != COLUMNS:
            raise ValueError
        for row in lines:
            if None in (*row, *row.values()) or row["verdict"] not in ORDER:
                raise ValueError
            row |= {"balise": int(row["balise"]), "seconds": float(row["seconds"])}
            before[row["file"], row["work"], row["content"]].append(row)
    except (ValueError, TypeError, csv.Error):
        raise slicing.Unreadable(f"{table}: is not a table that --csv has written: give another name") from None
    kept = []
    for path, work in works.items():
        rows = before[_no_formula(str(path)), work, contents[path]]
        whole = [row["balise"] for row in rows] == sorted(source.find(work).balises)
        if contents[path] and whole and not any(row["verdict"] == BROKEN for row in rows):
            kept += [row | {"file": str(path), "trainee": whose[path]} for row in rows]
    return kept


def _row(trainee: str, path: Path, work: str, content: str, v: Verdict) -> dict:
    known = (trainee, str(path), work, v.balise, v.title, v.verdict, v.slug, round(v.seconds, 3), content)
    return dict(zip(COLUMNS, known, strict=True))


def _marks(trainee, path, work, said: dict[int, str]) -> dict:
    """The marks of what this trainee has written: holes and the course's own answers have none. said: the verdicts."""
    try:
        nodes = slicing.statements(path)[0]
    except slicing.Unreadable:
        return {}
    own = [number for number, word in said.items() if word in (*DONE, "fail")]
    return {(trainee, work.name, number): alike.mark(nodes, work, number) for number in own}


def line(path: Path, verdicts: list[Verdict]) -> str:
    """One notebook in one line: how many passed, and the others."""
    others = [f"{v.balise} {v.slug or v.verdict}" for v in verdicts if v.verdict not in ("pass", "by catch_up")]
    return f"{one_line(path)}: {keepers.counted(verdicts)}" + "".join(f"; {other}" for other in others)


def hints(rows: list[dict], texts: dict) -> list[dict]:
    """The hints that were given, those of most trainees first."""
    met = collections.defaultdict(set)
    for row in rows:
        if row["verdict"] in ("fail", EDGE):
            met[row["work"], row["balise"], row["hint"]].add(row["trainee"])
    order = sorted(met, key=lambda key: (-len(met[key]), key))
    return [
        {"work": key[0], "balise": key[1], "hint": key[2], "trainees": len(met[key]), "text": texts.get(key, "")}
        for key in order
    ]


def shown(rows: list[dict], summary: dict):
    """The lines below the notebooks."""
    yield f"\npassed  {EDGE}  by catch_up  failed  not done  trainee"
    words = collections.defaultdict(dict)  # the best of a balise counts: a trainee may hand in two copies
    for row in rows:
        before = words[row["trainee"]].get((row["work"], row["balise"]), BROKEN)
        words[row["trainee"]][row["work"], row["balise"]] = min(before, row["verdict"], key=ORDER.index)
    for trainee, balises in sorted(words.items()):
        count = collections.Counter(balises.values())
        numbers = f"{count['pass']:6}{count[EDGE]:16}{count['by catch_up']:13}{count['fail']:8}{count['not done']:10}"
        yield f"{numbers}  {one_line(trainee)}"
    if summary["hints"]:
        yield "\ntrainees  hints most met"
    for one in summary["hints"][:HINTS_SHOWN]:
        text = one["text"].split("\n")[0]
        short = text if len(text) <= 90 else text[:89] + "…"
        yield f"{one['trainees']:8}  {one['work'][:2]}.{one['balise']} {one['hint']}{': ' * bool(short)}{short}"
    if summary["equal"]:
        yield "\nequal answers, names, comments and layout aside (short ones are left out)"
    pairs = collections.Counter()
    for one in summary["equal"]:
        yield f"  {one['work'][:2]}.{one['balise']}, {one['nodes']} nodes: {', '.join(one['trainees'])}"
        pairs.update((a, b) for k, a in enumerate(one["trainees"]) for b in one["trainees"][k + 1 :])
    often = [f"  {a} and {b}: {n} equal answers" for (a, b), n in pairs.most_common(PAIRS_SHOWN) if n > 1]
    yield from often


ORDER = keepers.WORDS  # the best of a balise first


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
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") else name
