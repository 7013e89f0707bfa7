"""What a test depends on, as one short text: it changes whenever any of that does.

What a module needs is read from the text of its imports, at its top or inside of functions, and from names of modules
in strings, all the way down. In doubt something is taken in: a test too many is run, never one too few.
"""

import ast
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dlojz_tp.judging import checks
from dlojz_tp.works import source

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dlojz_tp"
CHECKS = PACKAGE / "judging" / "checks"
# a test that says one of these may look at the files of any work; others name their works, or see none
ANY_WORK = re.compile(r"""\b(SOLUTIONS|NOTEBOOKS|PACKAGE|source\.names\(\))|["'/](solutions|notebooks)\b""")
MODULE = re.compile(r"dlojz_tp(\.\w+)*\.?")  # a text that names one, or the beginning of one
BEGUN = re.compile(r"\bfrom (dlojz_tp[\w.]*) import (\w+)")  # in the text of a program that is started
# what conftest.py sets, or what no verdict depends on
NO_MATTER = ("DLOJZ_STATE", "DLOJZ_STRICT", "DLOJZ_BRIEF")


def of(parts: Iterable[str], files: frozenset[Path]) -> str:
    """The fingerprint of texts and files, on this machine: 32 hexadecimal digits."""
    found = hashlib.sha256("\0".join([machine(), _digest(files), *parts]).encode())
    return found.hexdigest()[:32]


@functools.cache
def machine() -> str:
    """Processor, versions of everything that is installed, programs, data sets and settings: one text."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    driver = Path("/proc/driver/nvidia/version")
    places = [Path(folder) for folder in (ROOT / "data", os.environ.get("DLOJZ_DATA")) if folder]
    sets = sorted(path for place in places for path in place.glob("*/manifest.json"))
    parts = [
        [platform.platform(), platform.python_version(), len(os.sched_getaffinity(0)), *processor],
        [driver.read_text()] if driver.exists() else [],
        sorted({f"{each.name}=={each.version}" for each in metadata.distributions()}),
        [shutil.which("sbatch"), *map(_version, ("cc", "g++"))],
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in sets],
        sorted(
            f"{name}={value}"
            for name, value in os.environ.items()
            if re.match(r"DLOJZ_|ONEDNN_|DNNL_|OMP_|MKL_|CUDA_|TORCH|GLOO_|NCCL_|PYTHONHASH", name)
            and name not in NO_MATTER
        ),
    ]
    return json.dumps(parts)


def _version(program: str) -> str | None:
    """What a program says of its version; None where there is no such program."""
    path = shutil.which(program)
    return path and subprocess.run([path, "--version"], capture_output=True, text=True).stdout


# ---------------------------------------------------------------- modules


@functools.cache
def file_of(module: str) -> Path | None:
    """The file of a module of the package or of the tests; None for all others."""
    if module.split(".")[0] not in ("dlojz_tp", "tests", "conftest"):
        return None
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


@functools.cache
def imported(path: Path, *, lazily: bool = True) -> frozenset[str]:
    """The names of modules that a file may import; without `lazily` those of its top alone."""
    tree = ast.parse(path.read_bytes())
    inside = path.relative_to(ROOT).parent.parts
    return _imported_by(list(ast.walk(tree) if lazily else tree.body), inside, texts=path != PACKAGE / "__init__.py")


def _imported_by(nodes: list[ast.AST], inside: tuple[str, ...] = (), texts: bool = True) -> frozenset[str]:
    """inside: the packages that relative imports begin from. texts: whether modules named in strings count."""
    found, said = set(), set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*inside[: len(inside) - node.level + 1], node.module] if node.level else [node.module]
            base = ".".join(part for part in base if part)
            names = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if file_of(name) else base for name in names} if file_of(base) else {base, *names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dlojz_tp":
            found.add(f"dlojz_tp.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and texts:
            said.add(node.value)
    if {"-m", "dlojz_tp"} <= said:
        found.add("dlojz_tp.__main__")
    found |= {text.rstrip(".") for text in said if MODULE.fullmatch(text)}
    begun = [(f"{base}.{name}", base) for text in said for base, name in BEGUN.findall(text)]
    found |= {name if file_of(name) else base for name, base in begun}
    rooms = {name for name in found if name.startswith("dlojz_tp.") and name.count(".") == 1 and not file_of(name)}
    return frozenset(found | {other for name in rooms for other in _called(name.split(".")[1])})


@functools.cache
def _called(name: str) -> list[str]:
    """Every module of this name: `from dlojz_tp import recorded` finds one that lives in a room."""
    paths = [*PACKAGE.rglob(f"{name}.py"), *(path.parent for path in PACKAGE.rglob(f"{name}/__init__.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


@functools.cache
def closure(modules: frozenset[str]) -> frozenset[Path]:
    """The files that modules need, their own and those of the packages that they lie in among them."""
    waiting, seen, files = set(modules), set(), set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            path = file_of(part)
            if path:
                files.add(path)
                waiting |= imported(path) - seen
    return frozenset(files)


@functools.cache
def _digest(files: frozenset[Path]) -> str:
    return hashlib.sha256("".join(f"{path}{_hash(path)}" for path in sorted(files)).encode()).hexdigest()


@functools.cache
def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def below(*folders: Path) -> frozenset[Path]:
    """All files of folders but what Python keeps there."""
    paths = (path for folder in folders for path in folder.rglob("*"))
    return frozenset(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


# ---------------------------------------------------------------- answers


@functools.cache
def _judged(work: str, number: int) -> frozenset[Path]:
    """What gives the verdict on an answer to a balise, its check and the probes among it."""
    course, folder = PACKAGE / "course.py", CHECKS / work.split("_", 1)[1]
    needed = {f"dlojz_tp.judging.checks.{folder.name}.balise_{number}", "tests.answers.bank", "conftest"}
    here = {course, PACKAGE / "authoring" / "records.py", ROOT / "tests" / "test_answers.py"}
    here |= {folder / "mistakes" / f"{number}.json"}
    others = {path for path in below(folder) if path.suffix != ".py" and path.parent.name != "mistakes"}
    files = closure(frozenset(needed) | imported(course, lazily=False))
    return files | others | {path for path in here if path.is_file()}


@functools.cache
def _hints(work: str) -> dict[str, str]:
    """Texts of hints by slug, of all modules of a work's checks: the check that gives one may not need its module."""
    found = {}
    for path in (each for each in below(CHECKS / work.split("_", 1)[1]) if each.suffix == ".py"):
        text = path.read_text(encoding="utf-8")
        given = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
        given = (one for node in given if ast.unparse(node.targets[0]) == "HINTS" for one in ast.walk(node.value))
        for hints in (one for one in given if isinstance(one, ast.Dict)):
            values = zip(hints.keys, hints.values)
            found |= {
                ast.unparse(key): getattr(value, "value", text) for key, value in values
            }  # of f"…" the whole file
    return found


def answer(one, lines: dict[str, set[int]]) -> tuple[list[str], frozenset[Path]]:
    """The texts and the files that the verdict on an answer depends on; lines: of all answers to its work, by file."""
    bank = Path(one.file) if one.file else None
    if bank is None or not bank.is_relative_to(ROOT):  # who knows which lines made it
        modules, texts = _banks(one.work), []
    else:
        rows = _slice(bank, one.line, frozenset(lines[one.file]))
        texts = [row.text for row in rows]
        modules = frozenset().union(*(row.imports for row in rows))
    files = closure(modules)
    asked = modules.union(
        *(imported(path) for path in files if ROOT / "tests" / "answers" in path.parents and path.name != "bank.py")
    )
    if any(name.startswith("dlojz_tp.works.source") for name in asked):  # it reads the solutions by itself
        files |= {ROOT / "solutions" / f"{one.work}.py"}
    texts = [one.work, str(one.balise), str(one.slug), _hints(one.work).get(repr(one.slug), ""), one.code, *texts]
    return texts, files | _judged(one.work, one.balise)


def _banks(work: str) -> frozenset[str]:
    folder = ROOT / "tests" / "answers" / work.split("_", 1)[1]
    return frozenset(f"tests.answers.{folder.name}.{path.stem}" for path in folder.glob("*.py"))


@dataclass(frozen=True)
class Row:
    """A statement at the top of a bank. binds, uses: names. collects: it gathers the answers of other banks."""

    lines: range
    text: str
    binds: frozenset[str]
    uses: frozenset[str]
    imports: frozenset[str]
    collects: bool


@functools.cache
def _rows(path: Path) -> list[Row]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    return [_row(node, lines) for node in ast.parse(text).body]


def _row(node, lines) -> Row:
    inside = list(ast.walk(node))
    names = [each for each in inside if isinstance(each, ast.Name)]
    defs = ast.FunctionDef | ast.ClassDef
    if isinstance(node, defs):
        binds = {node.name}
    elif isinstance(node, ast.Import | ast.ImportFrom):
        binds = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    else:
        binds = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        binds |= {each.name for each in inside if isinstance(each, defs)}
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return Row(
        range(first, node.end_lineno + 1),
        "\n".join(lines[first - 1 : node.end_lineno]),
        frozenset(binds),
        frozenset(each.id for each in names),
        _imported_by(inside),
        any(isinstance(each, ast.Attribute) and each.attr == "answers" for each in inside),
    )


def _slice(path: Path, line: int, answers: frozenset[int]) -> list[Row]:
    """The statements of a bank that the answer on a line is made of: its own, and those that bind what these use.

    A statement that binds nothing may do something to anything: it counts, unless it only gives or collects answers.
    """
    rows = _rows(path)
    gives = {n for n, row in enumerate(rows) if not answers.isdisjoint(row.lines)}
    kept = {n for n, row in enumerate(rows) if line in row.lines or not (row.binds or row.collects or n in gives)}
    grown = kept
    while grown:
        wanted = frozenset().union(*(rows[n].uses for n in grown))
        grown = {n for n, row in enumerate(rows) if n not in kept and row.binds & wanted}
        kept = kept | grown
    return [rows[n] for n in sorted(kept)]


# ---------------------------------------------------------------- notebooks and other tests


@functools.cache
def notebook(path: Path) -> tuple[list[str], frozenset[Path]]:
    """The texts and the files that running a notebook depends on: its prose is not among them."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    texts = [json.dumps(["".join(cell["source"]), cell["metadata"]]) for cell in cells]
    written = ROOT / "solutions" / f"{path.stem}.py"
    if not written.is_file():
        return texts, below(PACKAGE)
    work = source.read(written)
    texts += [cell.options + cell.text for cell in work.cells if cell.kind == "code"]
    texts += [balise.title for balise in work.balises.values()]
    files = closure(imported(written) | set(checks.names(work.module)) | {"dlojz_tp.course", "conftest"})
    beside = (each for each in below(PACKAGE) if each.suffix != ".py" and CHECKS not in each.parents)
    own = below(CHECKS / work.module) | below(ROOT / "solutions" / "recorded")
    return texts, files.union(beside, own)


@functools.cache
def unit(path: Path, works: frozenset[str]) -> frozenset[Path]:
    """The files that a test in the file `path` depends on; works: those that it is given."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    files = closure(frozenset({module, "conftest"}))
    if not works:
        text = "".join(each.read_text(encoding="utf-8") for each in files if ROOT / "tests" in each.parents)
        every = ANY_WORK.search(text)
        works = [name for name in source.names() if every or name in text or f"checks.{name[3:]}" in text]
    return files.union(_common(), *(_of_work(work, module) for work in works))


@functools.cache
def _common() -> frozenset[Path]:
    """The package without what belongs to a single work, and whatever lies beside it."""
    package = (each for each in below(PACKAGE) if CHECKS not in each.parents)
    folders = "tools", "docs", "deploy", "data_scripts", "benchmarks", ".ci"
    beside = below(*(ROOT / name for name in folders), *(ROOT / "tests" / name for name in ("slurm", "browser", "hub")))
    return beside.union(package, (each for each in ROOT.iterdir() if each.is_file() and each.name != ".git"))


@functools.cache
def _of_work(name: str, module: str) -> frozenset[Path]:
    files = closure(frozenset(checks.names(name[3:]))) | below(CHECKS / name[3:])
    if module == "tests.test_answers":
        files |= closure(_banks(name))
    paths = (
        ROOT / "solutions" / f"{name}.py",
        ROOT / "solutions" / f"{name}.ipynb",
        ROOT / "notebooks" / f"{name}.ipynb",
    )
    return files.union(path for path in paths if path.is_file())
