"""Judge the answers in the bank of a practical work: which are misjudged, or judged otherwise than at a commit?"""

import argparse
import ast
import collections
import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlojz_tp.authoring import reached
from dlojz_tp.cards.verdict import BROKEN, EDGE
from dlojz_tp.data import places
from dlojz_tp.judging.checking import breakage
from dlojz_tp.works import source
from dlojz_tp.works.columns import aligned

PROGRAM = Path(__file__).with_name("judged_bank.py")
NOT_INSTALLED = "not-installed"


class Refused(Exception):
    """What is asked for cannot be had; the message says why."""


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp answers 04 2`; 0 if all is as it must be, 1 if not, 2 for what can't be understood."""
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp answers", description=__doc__)
    what = "a work (two digits, or its name), and after it balises of it (one digit); default: all of its balises"
    parser.add_argument("words", metavar="WORK [BALISE ...]", nargs="+", help=what)
    what = "compare with the bank and the checks of this commit: verdict, slug, and the words that fill the hint"
    parser.add_argument("--against", metavar="REV", help=what)
    parser.add_argument("--records", action="store_true", help="write the records of known mistakes before, where old")
    options = parser.parse_args(argv)
    try:
        asked = wanted(options.words)
        if options.records:
            _refresh(asked)
        if not options.against:
            return max([_report(work, balises) for work, balises in asked])
        with tree_of(options.against) as tree:
            return max([_compare(work, balises, tree, options.against) for work, balises in asked])
    except (Refused, source.UnknownWork, breakage.HintMissing) as error:
        print(f"answers: {error}", file=sys.stderr)
        return 2


def wanted(words: list[str]) -> list[tuple[source.Work, list[int]]]:
    """The works that the words of the command name, each with its balises. Raises Refused, source.UnknownWork."""
    found: list[tuple[source.Work, list[int]]] = []
    for word in words:
        name, _, number = word.rpartition(".")
        if name and number.isdecimal():  # 17.10
            found.append((source.find(source.full_name(name)), [int(number)]))
            if int(number) not in found[-1][0].balises:
                raise Refused(f"{found[-1][0].name} has no balise {number}.")
        elif not (len(word) == 1 and word.isdecimal()):
            found.append((source.find(source.full_name(word)), []))
        elif not found or int(word) not in found[-1][0].balises:
            where = f"{found[-1][0].name} has no balise {word}." if found else f"{word} is a balise: of which work?"
            raise Refused(f"{where} A work is two digits, such as 0{word}.")
        else:
            found[-1][1].append(int(word))
    return [(work, balises or list(work.balises)) for work, balises in found]


def judged(root: Path, work: str, balises: list[int], only: list[int] | None = None) -> list[dict]:
    """The verdicts on the answers of a bank, by the package and with the bank of the tree `root`; see `judged_bank`."""
    if not (root / source.SOLUTIONS.name / f"{work}.py").is_file():  # a commit before it
        return []
    with tempfile.TemporaryDirectory(prefix="dlojz-") as folder:
        target = Path(folder, "found")
        environ = {"OMP_NUM_THREADS": "1", "DLOJZ_DATA": str(places.data_root())} | os.environ
        environ |= {"DLOJZ_STATE": folder, "DLOJZ_STRICT": "1", "DLOJZ_BRIEF": "0"}
        environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [environ.get("PYTHONPATH")])])
        environ.pop("DLOJZ_CLASS", None)
        job = json.dumps({"work": work, "balises": balises, "only": only})
        command = [sys.executable, "-P", str(PROGRAM), str(target)]
        done = subprocess.run(command, input=job, text=True, cwd=root, env=environ, stderr=subprocess.PIPE)
        if done.returncode:
            _, fault, said = done.stderr.rpartition(f"{breakage.HintMissing.__qualname__}: ")
            if fault:
                raise Refused(f"{work}: {said.strip()}")
            print(done.stderr, file=sys.stderr)
            raise Refused(f"{work}: its bank could not be judged, see above")
        return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """The files of a commit, in a temporary folder. Raises Refused."""
    done = subprocess.run(["git", "archive", revision], cwd=source.ROOT, capture_output=True)
    if done.returncode:
        raise Refused(f"git has no files of {revision!r}: {done.stderr.decode(errors='replace').strip()}")
    with tempfile.TemporaryDirectory(prefix="dlojz-tree-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def misjudged(one: dict) -> bool:
    """Whether an answer got another verdict, or another hint, than its bank says."""
    word = "pass" if one["due"] is None else EDGE if one["edge"] else "fail"
    if one["due"] == "not done":
        word = "not done"
    return (one["slug"] or one["verdict"], one["verdict"]) != (one["due"] or "pass", word) and not _left_out(one)


def pairs(before: list[dict], now: list[dict]) -> tuple[list[tuple[dict, dict]], list[dict], list[dict]]:
    """(both, lost, new): answers that are in two banks, whatever their layout and order, and those in one alone."""
    old, new = _by_text(before), _by_text(now)
    both = [(old[key], new[key]) for key in new if key in old]
    return both, [old[key] for key in old if key not in new], [new[key] for key in new if key not in old]


def differ(before: list[dict], now: list[dict]) -> bool:
    """Whether the verdicts on an answer are others: another word, another slug, or other words that fill the hint.

    before, now: one verdict or several. Of words that differ between several, such as seconds, their number counts.
    """
    return any(_known(before, key) != _known(now, key) for key in ("verdict", "slug", "words"))


def _known(found: list[dict], key: str) -> list:
    """What several verdicts have in common."""
    several = [one[key] if key == "words" else [one[key]] for one in found]
    return [words[0] if len({*words}) == 1 else ... for words in itertools.zip_longest(*several)]


def _by_text(found: list[dict]) -> dict:
    """Of a text that is there several times, the first, the second, … ; without a text the slug says which it is."""
    seen, named = collections.Counter(), {}
    for one in found:
        try:
            text = repr(reached.tree(ast.parse(one["text"]))) if one["text"] else f"answer with {one['due']}"
        except SyntaxError:  # an answer may be one
            text = one["text"]
        seen[one["balise"], text] += 1
        named[one["balise"], text, seen[one["balise"], text]] = one
    return named


def _report(work: source.Work, balises: list[int]) -> int:
    from dlojz_tp.authoring import records

    found = judged(source.ROOT, work.name, balises)
    bad = [one for one in found if misjudged(one)]
    for one in bad:
        due = f"must be {one['due'] or 'a pass'}{', at the edge' * one['edge']}"
        print(f"{_name(one)}: {due}; is {one['verdict']} {one['slug']} ({one['seconds']:.2f} s)")
        for key in ("hint", "expected", "got", "details"):
            if one[key]:
                print(f"    {key}: {one[key]}")
    good = [one for one in found if not misjudged(one)]
    rows = [[_name(one), one["verdict"], f"{one['seconds']:.2f} s", one["hint"].replace("\n", " ")] for one in good]
    width = shutil.get_terminal_size((160, 24)).columns
    for line in aligned(rows, right={2}) if rows else []:
        print(line[:width].rstrip())
    left = sum(map(_left_out, found))
    old = [number for number in records.numbers(work) if number in balises and not records.is_fresh(work, number)]
    for number in old:
        print(f"the records of balise {number} are old: --records writes them anew")
    missing = f", {left} not judged: a library is missing" * bool(left)
    total = sum(one["seconds"] for one in found)
    print(f"{work.name}: {len(found)} answers, {len(bad)} misjudged{missing}, {total:.0f} s", flush=True)
    return int(bool(bad or old))


def _compare(work: source.Work, balises: list[int], tree: Path, revision: str) -> int:
    def in_both(*places):
        with ThreadPoolExecutor(2) as pool:
            roots = (tree, source.ROOT)
            return pool.map(judged, roots, [work.name] * 2, [balises] * 2, places or [None] * 2)

    both, lost, new = pairs(*in_both())
    other = [([before], [now]) for before, now in both if differ([before], [now])]
    if other:  # what differs from run to run shows in a second one
        again, _, _ = pairs(*in_both(*([one["place"] for (one,) in side] for side in zip(*other))))
        other = [([*old, before], [*here, now]) for (old, here), (before, now) in zip(other, again)]
        other = [pair for pair in other if differ(*pair)]
    for before, now in other:
        print(f"{_name(now[0])}\n    {revision}: {_said(before[0])}\n    here: {_said(now[0])}")
    for one in lost:
        print(f"{_name(one)}: in the bank of {revision} alone")
    counts = f"{len(both) - len(other)} as at {revision}, {len(other)} differ, {len(lost)} lost, {len(new)} new"
    print(f"{work.name}: {len(both) + len(new)} answers, {counts}", flush=True)
    return int(bool(other or lost))


def _refresh(asked):
    from dlojz_tp.authoring import records

    for work, balises in asked:
        for said in records.refresh(work, balises):
            print(said, flush=True)


def _left_out(one: dict) -> bool:
    return (one["verdict"], one["slug"]) == (BROKEN, NOT_INSTALLED)


def _name(one: dict) -> str:
    """Balise, slug and line, as in the name of its test."""
    return one["name"].partition("-")[2]


def _said(one: dict) -> str:
    return f"{one['verdict']} {one['slug']} {one['words'] or ''} {one['hint']}"
