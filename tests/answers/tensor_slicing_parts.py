"""What the answers to 17_tensor_slicing share: slips in a solution that needs earlier ones."""

import functools

from dlojz_tp.works import source
from dlojz_tp.works.source import without_markers

WORK = "17_tensor_slicing"


@functools.cache
def solved(before: int) -> dict:
    """Names of the notebook: its setup cells and the solutions of the balises before `before`."""
    work = source.find(WORK)
    names = {"__name__": "__main__"}  # functions of __main__ go to ranks by value
    for cell in work.cells:
        if "setup" in cell.options or (cell.balise is not None and cell.balise < before):
            exec(compile(cell.text, work.name, "exec"), names)
    return names


def slip(bank, balise: int, slug: str | None, *changes: tuple[str, str]) -> None:
    """The solution of `balise` with some of its text changed, (old, new) each; slug None where it stays right."""
    work = source.find(WORK)
    code = without_markers(work.balises[balise].code)
    for old, new in changes:
        assert code.count(old) >= 1, f"the solution of balise {balise} has no {old!r}"
        code = code.replace(old, new)
    names = dict(solved(balise))
    exec(compile(code, f"<slip in balise {balise}>", "exec"), names)
    bank.several(balise, slug, *(names[name] for name in work.balises[balise].answers))
