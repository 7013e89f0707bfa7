"""What a practical work asks for: words to read, lines to write, and minutes, by one formula.

An author marks a heading of a source with " · further", and this module writes the minutes after it. The core of a work
is everything that isn't marked. A section is further itself if all its balises are.
"""

import argparse
import re
from dataclasses import dataclass

from dlojz_tp.works import source
from dlojz_tp.works.source import BEGIN, END, ROOT, SOLUTIONS, checks_in, split_cells, uncomment

# all constants of the formula
WORDS_A_MINUTE = 100  # read and thought about, hints included
GIVEN_A_MINUTE = 30  # lines of given code: two seconds each; nobody reads a cell that is collapsed
MINUTES_A_LINE = 1.0  # to write
MINUTES_A_VERDICT = 1.5 * 3  # one to three answers fail before one passes, and each costs three minutes
OPENING = 2.0  # minutes to open a work and to run its first cells

# all limits
OF_A_WORK, CORE_OF_A_WORK = 130, 60  # minutes
PLANS_OF_DAYS = {"Two days": 7 * 60, "Four days": 14 * 60, "Five days": 17.5 * 60}  # minutes
WORDS_OF_ALL = 42_000  # in sight, in all works
WORDS_A_LINE, GIVEN_A_LINE = 55, 7  # in the cores, for each line to write
WORDS_OF_A_TASK = 150  # between the heading of a balise and its cell

README, INSTRUCTOR = ROOT / "README.md", ROOT / "docs" / "instructor.md"
_HEADING = re.compile(r"^# (#{1,3}) (.+?)( · further)?(?: · about \d+ min(?:, core \d+)?)?$")
_ROW = re.compile(r"^\| (\d\d_\w+) \| (.*) \| \d+(?: •)? \| \d+ \|$", re.MULTILINE)
_SLOT = re.compile(r"^\| (\d) \| (\d\d) \| [\d, ]* \| \d+ \|$", re.MULTILINE)
_SUM = re.compile(r"((?:^\| \d \| \d\d \| .*\n)+)^\| \| \| sum \| \d+ \|$", re.MULTILINE)
_ALL = re.compile(r"^In all, .* hours.*$", re.MULTILINE)


@dataclass
class Section:
    """What is below a heading, up to the next one.

    line: the heading's, from 0. balise: its number, or None. words: all; sight: those that aren't folded;
    task: those in sight before a balise's cell. given, written: lines of code. verdicts: checks that are called.
    """

    line: int
    level: int
    title: str
    balise: int | None
    marked: bool
    further: bool
    words: int = 0
    sight: int = 0
    task: int = 0
    given: int = 0
    written: int = 0
    verdicts: int = 0

    @property
    def minutes(self) -> float:
        """The formula."""
        reading = self.words / WORDS_A_MINUTE + self.given / GIVEN_A_MINUTE
        answering = self.written * MINUTES_A_LINE + self.verdicts * MINUTES_A_VERDICT
        return OPENING * (self.level == 1) + reading + answering


def sections(text: str) -> list[Section]:
    """The sections of a source, counted; the first begins at the title."""
    found, fenced, folded = [], False, False
    for cell in split_cells(text):
        for number, line in enumerate(cell.text.splitlines(), cell.line - 1):
            if cell.kind != "markdown":
                break
            fenced ^= line.startswith("# ```")
            if (heading := _HEADING.match(line)) and not fenced:
                level, title, further = len(heading[1]), heading[2], bool(heading[3])
                balise = re.match(r"Balise (\d+) ", title)
                found.append(Section(number, level, title, balise and int(balise[1]), further, further))
            elif found:
                folded |= "<details>" in line
                _count_words(len(uncomment(line).split()), folded, found[-1])
                folded &= "</details>" not in line
        if cell.kind != "markdown" and found:
            _count_code(cell, found[-1])
    for i, section in enumerate(found):
        if section.balise:
            continue
        if section.level == 3:  # it goes on with what stands before it
            section.further |= found[i - 1].further
        below = found[i + 1 : next((k for k in range(i + 1, len(found)) if found[k].level < 3), None)]
        if section.level == 2 and any(s.balise for s in below):
            section.further |= all(s.further for s in below if s.balise)
    return found


def _count_words(count, folded, section):
    section.words += count
    if not folded:
        section.sight += count
        section.task += count * (section.balise is not None and not section.written)


def _count_code(cell, section):
    inside = False
    for line in map(str.strip, cell.text.splitlines()):
        if line in (BEGIN, END):
            inside = line == BEGIN
        elif re.search(r"\w", line):  # a bracket alone takes no time
            section.written += inside and not line.startswith("#")
            section.given += not inside and "source_hidden" not in cell.options
    section.verdicts += len(checks_in(cell.text))


def of_work(found: list[Section]) -> tuple[float, float]:
    """Minutes of a whole work, and of its core."""
    return sum(s.minutes for s in found), sum(s.minutes for s in found if not s.further)


def about(minutes: float) -> int:
    """Minutes of a work as they are said: a word more or less changes nothing."""
    return 5 * max(1, round(minutes / 5))


def with_minutes(text: str) -> str:
    """A source with the minutes in its headings."""
    lines, found = text.splitlines(keepends=True), sections(text)
    whole, core = map(about, of_work(found))
    for section in found:
        said = f" · about {max(1, round(section.minutes))} min" if section.balise else ""
        if section.level == 1:
            said = f" · about {whole} min" + f", core {core}" * any(s.further for s in found)
        marked = " · further" * section.marked
        lines[section.line] = f"# {'#' * section.level} {section.title}{marked}{said}\n"
    return "".join(lines)


def plans(text: str, works: dict[str, list[Section]]) -> str:
    """The instructor's plans with the balises of each core, its minutes, and their sum."""
    by_number = {name[:2]: found for name, found in works.items()}

    def row(slot):
        found = by_number[slot[2]]
        core = ", ".join(str(s.balise) for s in found if s.balise and not s.further)
        return f"| {slot[1]} | {slot[2]} | {core} | {about(of_work(found)[1])} |"

    def total(plan):
        return f"{plan[1]}| | | sum | {sum(int(line.split()[-2]) for line in plan[1].splitlines())} |"

    return _SUM.sub(total, _SLOT.sub(row, text))


def readme(text: str, works: dict[str, list[Section]], two_days: set[str]) -> str:
    """README with the minutes in its table, and the sums below it. two_days: numbers of works."""

    def row(found):
        whole, core = map(about, of_work(works[found[1]]))
        return f"| {found[1]} | {found[2]} | {core}{' •' * (found[1][:2] in two_days)} | {whole} |"

    whole, core = (sum(each) / 60 for each in zip(*map(of_work, works.values())))
    chosen = sum(about(of_work(found)[1]) for name, found in works.items() if name[:2] in two_days) / 60
    line = f"In all, {whole:.0f} hours; the core {core:.1f}; the core of the works with a • {chosen:.1f}."
    return _ALL.sub(line, _ROW.sub(row, text))


def you_write(text: str) -> dict[str, str]:
    """{work: what a trainee writes in it}, from the table of README."""
    return dict(_ROW.findall(text))


def of_plan(days: str) -> set[str]:
    """The numbers of the works in a plan: "Two days", "Four days" or "Five days"."""
    plan = INSTRUCTOR.read_text(encoding="utf-8").split(f"## {days}")[1].split("\n## ")[0]
    return {number for _, number in _SLOT.findall(plan)}


def all_works() -> dict[str, list[Section]]:
    """The sections of every work, by its name."""
    return {name: sections((SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")) for name in source.names()}


def write(paths) -> None:
    """Bring the minutes in the headings of these sources, in README and in the plans up to date."""
    for path in paths:
        _write(path, with_minutes(path.read_text(encoding="utf-8")))
    works = all_works()
    _write(INSTRUCTOR, plans(INSTRUCTOR.read_text(encoding="utf-8"), works))
    _write(README, readme(README.read_text(encoding="utf-8"), works, of_plan("Two days")))


def _write(path, text):
    if path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def in_cores(works: dict[str, list[Section]]) -> tuple[float, float]:
    """Words in sight, and given lines, for each line to write in the cores of these works."""
    core = [s for found in works.values() for s in found if not s.further]
    lines = max(1, sum(s.written for s in core))
    return sum(s.sight for s in core) / lines, sum(s.given for s in core) / lines


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp minutes`: print what is counted, by work and section, and `write` all minutes."""
    argparse.ArgumentParser(prog="python -m dlojz_tp minutes", description=main.__doc__).parse_args(argv)
    works = all_works()
    heads = ("minutes", "core", "sight", "folded", "given", "write", "checks", "words a line", "given a line")
    print(" ".join(f"{head:>7}" for head in heads))
    for name, found in works.items():
        _print_row(found, name)
        _print_row([s for s in found if not s.further], "    core")
        for s in found:
            _print_row([s], f"        {s.title}{' · further' * s.further}")
    _print_row([s for found in works.values() for s in found], "all works")
    _print_row([s for found in works.values() for s in found if not s.further], "all cores")
    whole, core = (sum(each) / 60 for each in zip(*map(of_work, works.values())))
    print(f"in all {whole:.1f} hours, core {core:.1f}; sight and folded are words, given and write are lines of code")
    write(SOLUTIONS / f"{name}.py" for name in works)
    return 0


def _print_row(found, name):
    whole, core = of_work(found)
    sight, words, given, written, verdicts = (
        sum(getattr(s, what) for s in found) for what in ("sight", "words", "given", "written", "verdicts")
    )
    ratios = (f"{sight / written:>12.0f} {given / written:>12.1f}") if written else " " * 25
    print(f"{whole:7.1f} {core:7.1f} {sight:7} {words - sight:7} {given:7} {written:7} {verdicts:7} {ratios}  {name}")
