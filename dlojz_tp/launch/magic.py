"""`%%ranks 4`: a cell of a notebook that runs on ranks which live until the notebook ends."""

import re
import sys
import traceback

from dlojz_tp.cards import render
from dlojz_tp.launch import client, run, stacks, staying
from dlojz_tp.launch.errors import RankError, name_ranks

_ranks: staying.Stay | None = None
NOT_DEFINED = re.compile(r"raised NameError: name '(\w+)' is not defined")


def install() -> None:
    """Register `%%ranks` in the running notebook; does nothing elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return
    from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

    @magic_arguments()
    @argument("n", nargs="?", type=int, help="how many ranks; without it, or with their number, those that live")
    @argument("--timeout", type=float, default=30, help="seconds that the cell may take (default: 30)")
    @argument("--take", default="", help="names of the notebook whose values the ranks get: model,x")
    @argument("--give", default="", help="a name of the ranks: the notebook gets a list of its values, by rank")
    @argument("--fails", action="store_true", help="an error of the cell is meant: it is printed, and no more")
    def ranks(line, cell):
        """Run the cell on ranks that live until the notebook ends, and keep their variables."""
        chosen = parse_argstring(ranks, line)
        try:
            _run(shell, chosen, "\n" + cell)  # the magic's own line counts, as in JupyterLab
        except RankError as error:
            if not chosen.fails:
                raise
            print(error, *error.__notes__, sep="\n")

    shell.register_magic_function(ranks, "cell", "ranks")


def _run(shell, chosen, text):
    from IPython.core.error import UsageError

    taken = [name.strip() for name in chosen.take.split(",") if name.strip()]
    if missing := [name for name in taken if name not in shell.user_ns]:
        raise UsageError(f"--take: the notebook has no {missing[0]}")
    if chosen.n is None and (_ranks is None or not _ranks.alive):
        raise UsageError("no ranks live here: begin with %%ranks 4")
    # the name that IPython gives the lines of a cell, so that errors say "Cell In[3]"
    file = shell.compile.cache(text, _number(shell), text)
    try:
        compile(text, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = stacks.with_cells("".join(traceback.format_exception_only(error)))
        raise UsageError(f"the ranks did not get this cell:\n{where}") from None
    try:
        ranks = _alive(chosen.n)
        if taken:
            ranks.put(**{name: shell.user_ns[name] for name in taken})
        show(ranks.run(text, chosen.timeout, file))
        if chosen.give:
            shell.user_ns[chosen.give] = ranks.get(chosen.give)
    except (TypeError, ValueError) as error:  # of the line's own: what a cell raises is a RankError
        raise UsageError(str(error)) from None
    except RankError as error:
        if (found := NOT_DEFINED.search(error.what)) and found[1] in shell.user_ns:
            error.add_note(
                f"{found[1]} is a variable of the notebook: `%%ranks --take {found[1]}` sends it to the ranks"
            )
        raise
    finally:
        if _ranks is not None:
            client.warm(*_ranks.server.modules)  # the ranks have taken the server of launches


def _number(shell) -> int:
    """The number of the cell that runs; versions of IPython count on before it or after it."""
    frame = sys._getframe()
    while frame is not None:
        if named := shell.compile.format_code_name(frame.f_code.co_filename):
            return int(re.search(r"\d+", named[1])[0])
        frame = frame.f_back
    return shell.execution_count


def _alive(n: int | None) -> staying.Stay:
    """The ranks that live, where there are `n` of them; else new ones."""
    global _ranks
    old = _ranks if _ranks is not None and _ranks.alive else None
    if old and n in (None, old.n):
        return old
    run.count(n, "the number after %%ranks")
    if old:
        old.close()
    _ranks = staying.stay(n)
    if old:
        render.show(render.line(f"the {old.n} ranks were ended, and their variables are gone; {n} new ones live now"))
    return _ranks


def show(values: list[str | None]) -> None:
    """Print values in rank order, and those that are the same once."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    for value, ranks in groups.items():
        head = "all ranks: " if 1 < len(ranks) == len(values) else f"{name_ranks(ranks)}: "
        print(head + value.replace("\n", "\n" + " " * len(head)))
