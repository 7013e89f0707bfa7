"""From one source to two notebooks: the trainee's, with holes, and the solution, executed."""

import base64
import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jupytext
import nbformat
from PIL import Image

from dlojz_tp.authoring import rules
from dlojz_tp.launch import place
from dlojz_tp.works import source
from dlojz_tp.works.source import NOTEBOOKS, SOLUTIONS, split_cells, without_markers

CELL_TIMEOUT = 180  # seconds; a cell of a solution that takes longer is a fault
FURTHER = """# The core is enough: {} further. Until you write them, the course's answers stand in.
tp.catch_up("further")"""
# leaves no name behind
ENTER = "__import__('importlib').import_module('dlojz_tp.judging.pretend_gpu.rehearsed').enter()"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def trainee(path: Path) -> nbformat.NotebookNode:
    """The trainee notebook of a source: solutions cut out, no outputs. Raises rules.SourceError."""
    notebook = _convert(path, rules.punch, "trainee")
    for cell in notebook.cells:
        cell.metadata = _without_slides(cell.metadata)
    for cell in notebook.cells:  # where an answer does not parse, "Run All" goes on, and its check says so
        if any(tag.startswith("balise-") for tag in cell.metadata.get("tags", [])):
            cell.metadata["tags"] = [*cell.metadata["tags"], "raises-exception"]
    further = [str(number) for number, balise in source.read(path).balises.items() if balise.further]
    if further:
        said = f"balise{'s' * (len(further) > 1)} {', '.join(further)} {'are' if len(further) > 1 else 'is'}"
        cell = nbformat.v4.new_code_cell(FURTHER.format(said), id="further")
        opened = next(i for i, each in enumerate(notebook.cells) if "course.open(" in each.source)
        notebook.cells.insert(opened + 1, cell)
    return notebook


def solution(path: Path) -> nbformat.NotebookNode:
    """The solution notebook of a source, not yet executed. Raises rules.SourceError."""
    notebook = _convert(path, lambda code, _: without_markers(code), "solution")
    notebook.metadata["dlojz_tp"]["source_sha256"] = source_hash(path)
    return notebook


def source_hash(path: Path) -> str:
    """sha256 of a source, kept in the solution notebook that was executed from it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_from(notebook: nbformat.NotebookNode, path: Path) -> bool:
    """Whether a solution notebook was executed from the source as it is now."""
    return notebook.metadata.get("dlojz_tp", {}).get("source_sha256") == source_hash(path)


def executed(name: str) -> nbformat.NotebookNode:
    """The executed solution of a work; a line says so if its source has changed since. Raises OSError, ValueError."""
    notebook = nbformat.read(SOLUTIONS / f"{name}.ipynb", as_version=4)
    if not is_from(notebook, SOLUTIONS / f"{name}.py"):
        print(f"{name}: the notebook is older than its source: make solutions", file=sys.stderr)
    return notebook


def _convert(path, edit, kind):
    work = rules.verify(path)
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    cells = split_cells(path.read_text(encoding="utf-8"))
    if len(cells) != len(notebook.cells):
        raise rules.SourceError(path, 1, f"{len(cells)} cells read here, {len(notebook.cells)} by jupytext")
    seen: dict[str, int] = {}
    for ours, cell in zip(cells, notebook.cells, strict=True):
        if ours.balise is not None:
            cell.source = edit(cell.source, ours.balise)
        cell.metadata = {key: cell.metadata[key] for key in ("jupyter", "tags") if cell.metadata.get(key)}
        # ids from the content: a rebuild changes only what changed
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}, "dlojz_tp": {"name": work.name, "kind": kind}}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _without_slides(metadata: dict) -> dict:
    """The metadata of a cell without its tags for slides: trainees don't need them, and no output depends on them."""
    kept = {"tags": [tag for tag in metadata.get("tags", []) if not tag.startswith(rules.SLIDE)]}
    return nbformat.from_dict({k: v for k, v in (metadata | kept).items() if v})


def build_trainee(path: Path, folder: Path = NOTEBOOKS) -> Path:
    """Write the trainee notebook of `path` into `folder`; unchanged files are left alone."""
    return write(trainee(path), folder / f"{path.stem}.ipynb")


def build_solution(path: Path, folder: Path = SOLUTIONS, force: bool = False) -> Path | None:
    """Execute the solution of `path` and write it; None where its source has not changed since.

    Where only prose has changed, the outputs stay as they are.

    Raises nbclient's CellExecutionError when a cell fails, RuntimeError when a balise is left undone.
    """
    target = folder / f"{path.stem}.ipynb"
    old = None
    if not force and target.exists():
        with contextlib.suppress(ValueError):  # a damaged one is made anew
            old = nbformat.read(target, as_version=4)
    if old and is_from(old, path):
        return None
    notebook = solution(path)
    if old and _outputs_from(old, notebook):
        return write(notebook, target)
    with environment(DLOJZ_RECORD_MODELLED="1"):
        execute(notebook)
    _in_few_colours(notebook)
    return write(notebook, target)


def _outputs_from(old, notebook) -> bool:
    """Take what an executed notebook shows over into a new one that has the same code and the same titles."""
    cells = [[cell for cell in each.cells if cell.cell_type == "code"] for each in (old, notebook)]
    texts = [[(cell.source, _without_slides(cell.metadata)) for cell in each] for each in cells]
    titles = [source.HEADING.findall("\n".join(cell.source for cell in each.cells)) for each in (old, notebook)]
    if texts[0] != texts[1] or [t[:2] for t in titles[0]] != [t[:2] for t in titles[1]]:
        return False
    for before, now in zip(*cells):
        now.outputs, now.execution_count = before.outputs, before.execution_count
    return True


def execute(notebook: nbformat.NotebookNode, variables: Mapping[str, str] = MappingProxyType({}), **options):
    """Run a solution notebook in place in a fresh kernel; a verdict that is not a pass is an error.

    variables: of the kernel's environment, beside those of this process; in a rehearsal the kernel pretends its GPUs.
    options: of nbclient's NotebookClient.
    """
    from nbclient import NotebookClient

    environ = os.environ | {"DLOJZ_STRICT": "1"} | variables
    resources = {"metadata": {"path": str(SOLUTIONS)}}
    options = {"timeout": CELL_TIMEOUT, "kernel_name": "python3", "record_timing": False} | options
    if place.PRETENDED in environ:
        options["extra_arguments"] = ["--log-level=ERROR", f"--IPKernelApp.exec_lines={ENTER}"]
    NotebookClient(notebook, resources=resources, **options).execute(env=environ)
    for cell in notebook.cells:
        _in_one_piece(cell.get("outputs", []))
        for output in cell.get("outputs", []):
            if "is not done yet" in str(output.get("text", "")) + str(output.get("data", "")):
                raise RuntimeError(f"the solution leaves a balise undone:\n{cell.source}")
    notebook.metadata["language_info"] = {"name": "python"}  # the kernel's own entry changes with every version
    notebook.metadata.pop("widgets", None)


def _in_one_piece(outputs: list):
    """Join what a cell printed in several pieces, in place: between two pieces, viewers leave a gap."""
    for k in range(len(outputs) - 1, 0, -1):
        before, output = outputs[k - 1], outputs[k]
        if output["output_type"] == before["output_type"] == "stream" and output["name"] == before["name"]:
            before["text"] += outputs.pop(k)["text"]


def _in_few_colours(notebook):
    """Give figures a palette of 256: a notebook stays small, and nobody sees the difference."""
    for data in (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])):
        if png := data.get("image/png"):
            small = io.BytesIO()
            image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
            image.quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
            if small.tell() < len(base64.b64decode(png)):
                data["image/png"] = base64.b64encode(small.getvalue()).decode()


@contextlib.contextmanager
def environment(**values):
    """Inside, these variables of the environment; afterwards the old ones again."""
    old = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in old.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def write(notebook: nbformat.NotebookNode, target: Path) -> Path:
    """Write a notebook in one go; a file that would not change is left alone."""
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, version=4) + "\n"
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    return target


def chosen(names: list[str]) -> list[Path] | None:
    """The sources of these works, names or numbers, in order; all for none; None, and one line said, for an unknown."""
    paths = sorted(SOLUTIONS.glob("[0-9][0-9]_*.py"))
    names = [source.full_name(name) for name in names]
    unknown = set(names) - {path.stem for path in paths}
    if unknown:
        print(f"no such practical work: {', '.join(sorted(unknown))}", file=sys.stderr)
        return None
    return [path for path in paths if not names or path.stem in names]


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp build [--solutions] [--force] [NAME ...]`: write the notebooks; 0 if all went well.

    Without --solutions: the minutes in headings and README, trainees' notebooks, the records of known mistakes.
    """
    import argparse

    from dlojz_tp.authoring import minutes, records

    what = "Write minutes and notebooks from the sources, and the records of known mistakes from the bank of answers."
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp build", description=what)
    parser.add_argument("names", nargs="*", help="practical works (default: all)")
    parser.add_argument("--solutions", action="store_true", help="execute the solutions whose source changed")
    parser.add_argument("--force", action="store_true", help="where nothing changed, too: execute, or make the records")
    options = parser.parse_args(argv)
    paths = chosen(options.names)
    if paths is None:
        return 2
    if not options.solutions:
        minutes.write(paths)
    failed = 0
    for path in paths:
        try:
            if options.solutions:
                done = build_solution(path, force=options.force)
                print(f"{path.stem}: {'up to date' if done else 'unchanged'}", flush=True)
            else:
                print(f"{path.stem}: written to notebooks/{build_trainee(path).name}")
                work = source.read(path)
                for said in records.refresh(work, work.balises, force=options.force):
                    print(said, flush=True)
        except Exception as error:  # one bad source does not hide the state of the others
            kind = "" if isinstance(error, rules.SourceError) else f"{path.stem}: {type(error).__name__}: "
            print(f"{kind}{error}", file=sys.stderr)
            failed = 1
    return failed
