"""In a notebook, an unfinished balise is one calm line, not a traceback, and "Run All" goes on.

A later cell that uses a name which an unfinished cell should have made gets the same line.
Uses two public hooks of IPython: `set_custom_exc` and the event `post_run_cell`.
"""

import symtable

from dlojz_tp.balise import BaliseNotDone

_missing: dict[str, BaliseNotDone] = {}  # names that an unfinished cell would have defined


def install():
    """Set the hooks in the running notebook; does nothing elsewhere, or a second time."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None or getattr(shell, "_dlojz_calm", False):
        return
    shell._dlojz_calm = True
    shell.set_custom_exc((BaliseNotDone, NameError), _handle)
    shell.events.register("post_run_cell", _after_cell)


def behind(error: BaseException, defined: dict) -> BaliseNotDone | None:
    """The unfinished balise that an exception comes from, or None if it is a mistake of another kind."""
    if isinstance(error, BaliseNotDone):
        return error
    if isinstance(error, NameError) and error.name in _missing and error.name not in defined:
        return _missing[error.name]
    return None


def names_made_by(code: str) -> set[str]:
    """The names that a cell binds at its top level, loops and `with` blocks included; functions' inner names not."""
    try:
        table = symtable.symtable(code, "cell", "exec")
    except SyntaxError:
        return set()
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def _handle(shell, kind, error, trace, tb_offset=None):
    cause = behind(error, shell.user_ns)
    if cause is None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        return
    from IPython.display import display

    from dlojz_tp.render import line

    display(line(str(cause)))


def _after_cell(result):
    from IPython import get_ipython

    error = result.error_in_exec
    cause = behind(error, get_ipython().user_ns) if error is not None else None
    if cause is not None:
        cell = getattr(result.info, "raw_cell", "") or ""
        defined = get_ipython().user_ns
        _missing.update({name: cause for name in names_made_by(cell) if name not in defined})
        result.error_in_exec = None  # the cell counts as run, so "Run All" goes on
