"""The rules of a source, each refused with file and line, and the punching of its holes."""

import ast
import re
from pathlib import Path

from dlojz_tp.works.cells import names_made_by
from dlojz_tp.works.source import BEGIN, END, HEADING, Cell, checks_in, read, uncomment, without_markers

SLIDE, MORE, MISTAKE = "slide", "slide-more", "slide-mistake="  # tags: see dlojz_tp.authoring.slides
_SLIDE_TAG = re.compile(r'"(slide[^"]*)"')


class SourceError(Exception):
    """A source breaks a rule. The message is "file:line: what is wrong, and what to do"."""

    def __init__(self, path: Path, line: int, message: str):
        super().__init__(f"{path.name}:{line}: {message}")
        self.path, self.line = path, line


def verify(path: Path):
    """Refuse a bad source; return the `source.Work` of a good one.

    Raises SourceError for: markers unclosed, nested, empty, inline or outside a balise's cell; a hole outside a
    function; an unknown tag for slides; a balise number missing, doubled, without heading, hint or check; a cell that
    does not compile; the name of an answer bound again.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise SourceError(path, line, "this is not UTF-8: save the file in that encoding") from None
    except SyntaxError as error:
        raise SourceError(path, error.lineno or 1, f"this is not Python: {error.msg}") from None
    work = read(path)
    regions = find_regions(path, text)
    for cell in work.cells:
        if cell.kind == "code" and "balise" in cell.options and cell.balise is None:
            raise SourceError(path, cell.line - 1, 'a balise tag reads tags=["balise-N"], N a number')
        for tag in _SLIDE_TAG.findall(cell.options):
            if tag not in (SLIDE, MORE) and not (tag.startswith(MISTAKE) and cell.balise is not None):
                message = f'{tag!r}: the tags for slides are "slide", "slide-more"; on a balise, "slide-mistake=SLUG"'
                raise SourceError(path, cell.line - 1, message)
    _verify_holes(path, tree, work.cells, regions)
    _verify_numbers(path, work.cells)
    _verify_names(path, work)
    for cell in work.cells:
        if cell.balise is not None:
            if not any(cell.line <= begin <= _last_line(cell) for begin, _ in regions):
                raise SourceError(path, cell.line, f"balise {cell.balise} has no hole: put {BEGIN} and {END} in it")
            _compile_punched(path, cell)
    return work


def punch(code: str, number: int) -> str:
    """Replace each region between the markers by one line `todo(number)` at the same indentation."""
    kept, inside = [], False
    for line in code.splitlines():
        word = line.strip()
        if word == BEGIN:
            inside = True
            kept.append(line.replace(BEGIN, f"todo({number})"))
        elif word == END:
            inside = False
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def find_regions(path: Path, text: str) -> list[tuple[int, int]]:
    """Lines of the markers, (begin, end) for each region. Raises SourceError where they are not in order."""
    regions, opened, indent, has_code = [], None, "", False
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if word not in (BEGIN, END):
            if BEGIN in line or END in line:
                raise SourceError(path, number, "a marker must stand alone on its line")
            if opened and line.startswith("# %%"):
                raise SourceError(path, opened, f"{BEGIN} is not closed before its cell ends: add {END}")
            has_code |= bool(word) and not word.startswith("#")
        elif word == BEGIN:
            if opened:
                raise SourceError(path, number, f"{BEGIN} inside the region opened on line {opened}: close that first")
            opened, indent, has_code = number, line[: line.index("#")], False
        else:
            if not opened:
                raise SourceError(path, number, f"{END} without {BEGIN}")
            if not has_code:
                raise SourceError(path, opened, "the region between the markers is empty: there is nothing to write")
            if line[: line.index("#")] != indent:
                raise SourceError(path, number, f"{END} is not indented like its {BEGIN} on line {opened}")
            regions.append((opened, number))
            opened = None
    if opened:
        raise SourceError(path, opened, f"{BEGIN} is never closed: add {END}")
    return regions


def _last_line(cell: Cell) -> int:
    return cell.line + len(cell.text.splitlines()) - 1


def _verify_holes(path, tree, cells, regions):
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for begin, end in regions:
        if not any(c.balise is not None and c.line <= begin and end <= _last_line(c) for c in cells):
            raise SourceError(path, begin, 'a hole outside a balise\'s cell: tag the cell with tags=["balise-N"]')
        inside = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and begin < node.lineno < end]
        # body[0], not the def line: a default argument or a decorator runs when the cell runs
        around = [f for f in functions if f.lineno < begin]
        if not any(all(f.body[0].lineno <= node.lineno <= f.end_lineno for node in inside) for f in around):
            raise SourceError(path, begin, "a hole outside a function: a trainee notebook must run from top to bottom")


def _verify_numbers(path, cells):
    headings, holes, checks = {}, {}, {}
    for cell in cells:
        if cell.kind == "markdown":
            prose = uncomment(cell.text)
            for number, *_ in HEADING.findall(prose):
                _once(path, headings, int(number), cell, "heading")
                if "<details>" not in prose:
                    raise SourceError(path, cell.line, f"balise {number} has no folded hint: add <details> to its text")
        else:
            if cell.balise is not None:
                _once(path, holes, cell.balise, cell, "cell")
            for number, answers in checks_in(cell.text).items():
                _once(path, checks, number, cell, "check")
                if not answers:
                    raise SourceError(path, cell.line, f"tp.check({number}) is given no answer: pass its names")
    last = max([*headings, *holes, *checks], default=0)
    for number in range(1, last + 1):
        for what, found in (("cell", holes), ("heading", headings), ("check", checks)):
            if number not in found:
                others = [d[number] for d in (holes, headings, checks) if number in d]
                line = others[0] if others else 1
                raise SourceError(path, line, f"balise {number} has no {what}; numbers run from 1 without a gap")
        if not headings[number] < holes[number] < checks[number]:
            raise SourceError(path, holes[number], f"balise {number}: heading, cell and check come in this order")


def _verify_names(path, work):
    answers = {name: number for number, balise in work.balises.items() for name in balise.answers}
    for cell in work.cells:
        if cell.kind == "code" and cell.balise is None:
            for name in sorted(names_made_by(cell.text) & answers.keys()):
                message = f"{name} is the answer of balise {answers[name]}: give this another name"
                raise SourceError(path, cell.line + _line_binding(cell.text, name), message)


def _line_binding(code: str, name: str) -> int:
    """How many lines of a cell stand before the statement that binds `name`."""
    for node in ast.parse(code).body:
        if name in names_made_by(ast.unparse(node)):
            return node.lineno - 1
    return 0


def _once(path, found, number, cell, what):
    if number in found:
        raise SourceError(path, cell.line, f"balise {number} has a second {what}; the first is on line {found[number]}")
    found[number] = cell.line


def _compile_punched(path, cell):
    for what, code in (("punched", punch(cell.text, cell.balise)), ("whole", without_markers(cell.text))):
        try:
            compile(code, path.name, "exec")
        except SyntaxError as error:
            message = f"balise {cell.balise} does not compile once {what}: {error.msg}"
            raise SourceError(path, cell.line + (error.lineno or 1) - 1, message) from None
