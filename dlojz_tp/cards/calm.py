"""In a notebook, an unfinished balise is one calm line, not a traceback, and "Run All" goes on.

A later cell that uses a name which an unfinished cell should have made gets the same line. A name whose cell has failed
since is not judged: it would be an older one. Uses public hooks of IPython: `set_custom_exc` and the events of a cell.
"""

import traceback
from pathlib import Path

from dlojz_tp.cards.render import line
from dlojz_tp.cards.verdict import NOT_RUN, Verdict
from dlojz_tp.works.balise import BaliseNotDone, _titles
from dlojz_tp.works.cells import holes_in, names_in, names_made_by

_missing: dict[str, BaliseNotDone] = {}  # names that an unfinished cell would have defined
_stale: dict[str, tuple[object, str]] = {}  # names whose cell failed before it bound them: their old values, why
_fill = None  # what fills the hole of a balise, given its number
_before: dict[str, object] = {}  # what the names of the running cell were when it began


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
    shell.set_custom_exc((BaliseNotDone, NameError, KeyboardInterrupt), _handle)
    shell.events.register("pre_run_cell", _before_cell)
    shell.events.register("post_run_cell", _after_cell)


def fill_holes(fill):
    """From now on call `fill(number)` after each cell in which `todo(number)` still stands."""
    global _fill
    _fill = fill


def not_run(balise, answers: tuple):
    """The verdict where the cell that should bind an answer failed since: an older one would be judged."""
    for name, answer in zip(balise.answers, answers, strict=True):
        if name in _stale and _stale[name][0] is answer:
            hint = NOT_RUN.format(name=name, error=_stale[name][1])
            return Verdict(balise.number, balise.title, "fail", slug="not-run", hint=hint)
    return None


def behind(error: BaseException, defined: dict) -> BaliseNotDone | None:
    """The unfinished balise that an exception comes from, or None if it is a mistake of another kind."""
    if isinstance(error, BaliseNotDone):
        return error
    if isinstance(error, NameError) and error.name in _missing and error.name not in defined:
        return _missing[error.name]
    return None


def _handle(shell, kind, error, trace, tb_offset=None):
    cause = behind(error, shell.user_ns)
    said = str(cause) if cause else _interrupted(error)
    if isinstance(error, NameError) and not cause:
        if not _titles:  # no practical work is open
            said = f"{error.name} is not defined: run the first cells of this notebook, they open the practical work"
        elif _of_a_cell_that_failed(error):
            said = f"{error.name} is not defined: the cell that should define it did not run ({_stale[error.name][1]})"
    if said is None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        return
    from IPython.display import display

    display(line(". ".join([said, *getattr(error, "__notes__", ())])))


def _of_a_cell_that_failed(error) -> bool:
    """Whether a name is missing because the cell that should bind it failed: that cell has told what is wrong."""
    return isinstance(error, NameError) and error.name in _stale


def _interrupted(error) -> str | None:
    """What the stop button has stopped, where that is the course's: its own frames say nothing to the trainee."""
    if not isinstance(error, KeyboardInterrupt):
        return None
    places = {Path(frame.filename).parts[-2:] for frame in traceback.extract_tb(error.__traceback__)}
    if ("dlojz_tp", "course.py") in places:
        return "interrupted: the balise was not judged"
    if ("launch", "staying.py") in places:
        return f"interrupted: {error or 'no ranks were started'}"
    return "interrupted: the ranks were ended" if ("launch", "run.py") in places else None


def _before_cell(info):
    from IPython import get_ipython

    namespace = get_ipython().user_ns
    names = names_made_by(_text(info))
    _before.clear()
    _before.update({name: namespace[name] for name in names if callable(namespace.get(name))})
    for name in names:
        _stale.pop(name, None)


def _after_cell(result):
    from IPython import get_ipython

    namespace, code = get_ipython().user_ns, _text(result.info)
    error = result.error_in_exec
    cause = behind(error, namespace) if error is not None else None
    if cause is not None:
        _missing.update({name: cause for name in names_made_by(code) if name not in namespace})
    if cause is not None or _of_a_cell_that_failed(error):
        result.error_in_exec = None  # the cell counts as run, so "Run All" goes on
    failed = result.error_before_exec or (error if cause is None else None)
    if isinstance(failed, SyntaxError):
        how = f"SyntaxError in line {failed.lineno}"
        _stale.update({name: (namespace.get(name), how) for name in names_in(code)})
    elif failed:
        kind = type(failed).__name__
        _stale.update({name: (old, kind) for name, old in _before.items() if namespace.get(name) is old})
    elif _fill:
        for number in holes_in(code):
            _fill(number)


def _text(info) -> str:
    return getattr(info, "raw_cell", "") or ""
