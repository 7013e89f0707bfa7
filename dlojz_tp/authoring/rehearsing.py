"""Dress rehearsal: all cells of the solutions, checks included, in kernels that have pretended GPUs."""

import argparse
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import nbformat
from ipykernel.compiler import get_file_name

from dlojz_tp.authoring import notebooks
from dlojz_tp.launch import place
from dlojz_tp.works import source
from dlojz_tp.works.columns import aligned

MOST_GPUS = 64
# Works that CI rehearses, with their GPUs: one on a single GPU, one over ranks; two minutes of two cores.
IN_CI = {12: 1, 8: 4}
CARD, SIZES, LONGEST = "H100", (40e9, 80e9), 600  # at full size: bytes of cards; seconds
NOTE = "from dlojz_tp.judging.pretend_gpu import rehearsed\n\nrehearsed.note()\nassert rehearsed.machines"
_CHECK = re.compile(r"^tp\.(check|race)\(.*$", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"Cell In\[(\d+)\], line (\d+)")


class Failure(NamedTuple):
    """A cell that failed. where: file and line of the source; text: that line; words: of the error."""

    where: str
    text: str
    words: str


class Rehearsal(NamedTuple):
    """One work with some number of GPUs. cells: of code, that ran; seconds: of all.

    At full size: held, most bytes on a GPU; clock, seconds on it; decided, lines whose condition is a value, as text.
    """

    work: str
    gpus: int
    cells: int
    failures: list[Failure]
    seconds: float
    held: float = 0.0
    clock: float = 0.0
    decided: tuple = ()


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp rehearse [NAME ...]`, options: see --help. 0 if every cell passed, 2 for an unknown name.

    Small sizes, real numbers: see pretend_gpu for what a pretended GPU is and is not. Nothing is recorded.
    --full: full sizes without values, as modelled_gpu has them; memory and seconds are those of the modelled card.
    """
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp rehearse", description=__doc__)
    parser.add_argument("names", nargs="*", help="practical works (default: all)")
    parser.add_argument("--gpus", type=_numbers, default=[1, 2, 4, 8], help="numbers of GPUs (default: 1,2,4,8)")
    parser.add_argument("--minutes", type=float, default=7, help="that one work may take (default: 7)")
    parser.add_argument("--workers", type=int, default=1, help="works at the same time (default: 1)")
    parser.add_argument("--once", action="store_true", help="the works that CI has time for, each with 1 GPU or 4")
    parser.add_argument("--full", action="store_true", help=f"at full size on a {CARD}, by shape, without checks")
    options = parser.parse_args(argv)
    paths, begin = notebooks.chosen(options.names), time.monotonic()
    if paths is None:
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        threads = max(1, (os.cpu_count() or 1) // options.workers)
        more = 60 * options.minutes, folder, threads, options.full
        asked = [(path, gpus, *more) for gpus in options.gpus for path in paths]
        asked = [one for one in asked if not options.once or one[1] == usual(one[0])]
        if not options.names:  # others see no difference
            asked = [one for one in asked if one[1] == options.gpus[0] or _over_ranks(one[0])]
        done = [_told(each) for each in pool.map(lambda one: rehearse(*one), asked)]
    print("\n".join(aligned([("", *(_gpus(n) for n in options.gpus)), *_rows(done, options.gpus)])), flush=True)
    for each in done:  # once more: the end is all that a shortened log keeps
        for where, text, words in each.failures:
            print(": ".join(filter(None, (f"{where}, {_gpus(each.gpus)}", text, words))), flush=True)
    failed, cells = sum(len(each.failures) for each in done), sum(each.cells for each in done)
    print(f"rehearsed {len(done)} notebooks: {failed} of {cells} cells failed, {time.monotonic() - begin:.0f} s")
    return int(failed > 0)


def _over_ranks(path: Path) -> bool:
    """Whether a work launches ranks: then the number of GPUs decides where they are, and how many."""
    return "launch.ranks(" in path.read_text(encoding="utf-8")


def usual(path: Path) -> int:
    """The GPUs with which CI rehearses a work; 0 for one that it has no time for."""
    return IN_CI.get(int(path.stem[:2]), 0)


def rehearse(path: Path, gpus: int, seconds: float, folder: str, threads: int = 1, full: bool = False) -> Rehearsal:
    """Run a solution with pretended GPUs. folder: of this run, for its state; threads: of its kernel.

    full: at full size, where tensors have shapes and no values, and a check could judge nothing.
    """
    begin = time.monotonic()
    variables = {place.PRETENDED: str(gpus), "DLOJZ_SCALE": "small", "DLOJZ_BRIEF": "1", "MPLBACKEND": "agg"}
    variables |= {"DLOJZ_STATE": str(Path(folder, str(gpus))), "OMP_NUM_THREADS": str(threads)}
    notebook, lost, notes = notebooks.solution(path), [], Path(folder, f"{path.stem}-{gpus}")
    notes.touch()
    variables["DLOJZ_REHEARSED"] = str(notes)
    if full:
        variables |= {"DLOJZ_SCALE": "full", place.CARD: CARD}
        for cell in notebook.cells:
            cell.source = _CHECK.sub("pass", cell.source) if cell.cell_type == "code" else ""
    notebook.cells.append(nbformat.v4.new_code_cell(NOTE))
    try:
        left = lambda _: max(1.0, begin + seconds - time.monotonic())  # noqa: E731
        notebooks.execute(notebook, variables, allow_errors=True, timeout_func=left)
    except Exception as error:  # a kernel that died, or took too long
        begun = [ours.line for ours, cell in _cells(path, notebook) if cell.get("execution_count")]
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        lost = [Failure(f"{path.name}:{max(begun, default=1)}", "", words)]
    code = [cell for cell in notebook.cells[:-1] if cell.get("execution_count")]
    noted = [line.split() for line in notes.read_text().splitlines()]
    decided = _decided(path, notebook, {tuple(line[1:]) for line in noted if line[0] == "decides"})
    noted = [line for line in noted if line[0] != "decides"]
    if not lost and any(output["output_type"] == "error" for output in notebook.cells[-1].outputs):
        lost = [Failure(path.name, "", "the kernel had no pretended GPU")]
    failures = _failures(path, notebook) + lost
    held, clock = (max((float(each[i]) for each in noted), default=0.0) for i in range(2))
    return Rehearsal(path.stem, gpus, len(code), failures, time.monotonic() - begin, held, clock, decided)


def _cells(path: Path, notebook) -> list[tuple]:
    """Each cell of the source, with the one that ran."""
    return list(zip(source.split_cells(path.read_text(encoding="utf-8")), notebook.cells))


def _failures(path: Path, notebook) -> list[Failure]:
    """What failed, at the innermost line of the notebook's own."""
    cells = _cells(path, notebook)
    numbered = {cell.get("execution_count"): (ours, cell) for ours, cell in cells}
    found = []
    for output, here in ((output, cell) for _, cell in cells for output in cell.get("outputs", [])):
        if output["output_type"] == "error":
            frames = _FRAME.findall(_COLOURS.sub("", "\n".join(output["traceback"])))
            of, number = (int(n) for n in frames[-1]) if frames else (here["execution_count"], 1)
            ours, cell = numbered[of]
            words = output["evalue"].strip().splitlines() or [""]
            found.append(Failure(*_place(path, ours, cell, number), f"{output['ename']}: {words[0]}"))
    return found


def _place(path: Path, ours, cell, number: int) -> tuple[str, str]:
    """File and line of the source, and the text, of a line of a cell that ran."""
    text = cell.source.splitlines()[number - 1]
    # markers of solutions are in the source alone
    below = [n for n, line in enumerate(ours.text.splitlines()) if line == text and n >= number - 1]
    return f"{path.name}:{ours.line + (below or [number - 1])[0]}", text.strip()


def _decided(path: Path, notebook, noted: set[tuple]) -> tuple[tuple, ...]:
    """Where a condition is a value, and the text there. noted: (name of the file that ipykernel gives a cell, line)."""
    named = {Path(get_file_name(cell.source)).name: (ours, cell) for ours, cell in _cells(path, notebook)}
    return tuple(sorted(_place(path, *named[name], int(line)) for name, line in noted if name in named))


def _told(done: Rehearsal) -> Rehearsal:
    print(f"{done.work}, {_gpus(done.gpus)}: {_word(done)}", flush=True)
    for failure in done.failures:
        print(f"  {failure.where}: {failure.text}\n    {failure.words}", flush=True)
    for where, text in done.decided:
        print(f"  {where}: {text}\n    a condition on a value, which is not there: taken as False", flush=True)
    return done


def _rows(done: list[Rehearsal], gpus: list[int]) -> list[tuple]:
    found = {(each.work, each.gpus): _word(each) for each in done}
    return [(work, *(found.get((work, n), "") for n in gpus)) for work in dict.fromkeys(each.work for each in done)]


def _word(done: Rehearsal) -> str:
    failed = f"{len(done.failures)} failed of {done.cells} cells" if done.failures else f"{done.cells} cells"
    late = ", TOO LONG" if done.clock > LONGEST else ""
    over = "".join(f", over {size / 1e9:.0f} GB" for size in SIZES if done.held > size)
    by_shape = f"; on the card {done.clock:.0f} s{late}, {done.held / 1e9:.1f} GB{over}" if done.clock else ""
    return f"{failed}, {done.seconds:.0f} s{by_shape}"


def _gpus(n: int) -> str:
    return f"{n} GPU{'s' * (n > 1)}"


def _numbers(text: str) -> list[int]:
    """Numbers of GPUs, such as "1,4" or "1 4"."""
    found = [int(each) if each.isdecimal() else 0 for each in re.split(r"[ ,]+", text.strip())]
    if not all(0 < n <= MOST_GPUS for n in found):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of GPUs from 1 to {MOST_GPUS}, such as 1,4")
    return found
