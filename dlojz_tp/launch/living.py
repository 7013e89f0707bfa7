"""On a rank that stays: what it does with one cell after another, all in one namespace."""

import ast
import linecache
import os
import pickle
import signal
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from dlojz_tp.launch import rank, wire

LONGEST = 20_000  # characters of a value that is shown
_busy = False  # a cell runs, and may be interrupted


def live() -> None:
    """Serve until the process is killed. Each line that comes is the path of a request: its name, then arguments."""
    names, me, requests = _namespace(), os.getpid(), rank.parent().makefile("rb")
    signal.signal(signal.SIGINT, _interrupt)
    wire.send(rank.parent(), wire.RETURNED)  # it is up
    for path in requests:
        tag, data = _answer(names, Path(os.fsdecode(path.strip())))
        if os.getpid() != me:
            os._exit(0)  # the cell forked and both came back: only the rank itself reports
        rank.flush()
        if tag == wire.RETURNED:
            wire.send(rank.parent(), wire.THROUGH)  # from here on the time goes into sending
        wire.send(rank.parent(), tag, data)


def _namespace() -> dict:
    launch = sys.modules["dlojz_tp.launch"]
    # a module, so that what a cell defines can be pickled
    sys.modules["__main__"] = main = ModuleType("__main__")
    vars(main).update(torch=torch, dist=dist, launch=launch, rank=dist.get_rank(), world_size=dist.get_world_size())
    return vars(main)


def _interrupt(_signal, _frame):
    """The Stop button is for the cell: between two cells nothing is interrupted."""
    global _busy
    if _busy:
        _busy = False
        raise KeyboardInterrupt


def _answer(names: dict, request: Path) -> tuple[bytes, bytes]:
    """The message that tells how a request ended."""
    global _busy
    try:
        try:
            _busy = True
            what, *args = pickle.loads(request.read_bytes())
            value = {"run": _run, "put": dict.update, "get": _get}[what](names, *args)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # what hangs or fails on a GPU does it in this cell
        finally:
            _busy = False
    except BaseException as error:
        return wire.FAILED, pickle.dumps(rank.describe(error, ""))
    try:
        return wire.RETURNED, wire.pack(value)
    except Exception as error:
        return wire.FAILED, pickle.dumps(rank.unsendable(value, error))


def _run(names: dict, text: str, file: str) -> str | None:
    """Run a cell. Returns its last expression's value as text; None where it has none, or ends with a semicolon."""
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    body = ast.parse(text, file).body
    shown = body and isinstance(body[-1], ast.Expr) and not text.rstrip().endswith(";")
    last = body.pop() if shown else None
    exec(compile(ast.Module(body, type_ignores=[]), file, "exec", dont_inherit=True), names)
    value = eval(compile(ast.Expression(last.value), file, "eval", dont_inherit=True), names) if last else None
    return None if value is None else repr(value)[:LONGEST]


def _get(names: dict, name: str):
    if name not in names:
        raise NameError(f"name {name!r} is not defined")
    return names[name]
