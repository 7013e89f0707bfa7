"""Balise 3: a dispatch mode that finds waits, tried on a page of code that stands for a notebook's cell."""

import _thread
import linecache
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.seeded import seeded

HINTS = {
    "no-mode": "Inside `with WaitFinder() as finder:`, the finder must be a TorchDispatchMode with a list `found`: "
               "{error}",
    "result-lost": "An operator inside returned None: whatever __torch_dispatch__ returns is the operator's result.",
    "result-changed": "The results inside differ from those outside. Call the operator unchanged, once: "
                      "func(*args, **kwargs).",
    "arguments-lost": "An operator lost its keyword arguments: {error}. Pass on **kwargs.",
    "all-operators": "You listed {n} operators, but only {wanted} of them wait. makes_wait(func, args, kwargs) "
                     "tells you which ones.",
    "waits-missed": "There were {wanted} waits and you listed {n}. The same line may wait twice: that makes two.",
    "listed-again": "You listed {n} waits, but there were {wanted}. List each of them once.",
    "no-pairs": "The list consists of pairs (operator, line): two strings, in this order.",
    "not-the-packet": "{got} is one variant of the operator. To get its name without the variant, use "
                      "str(func.overloadpacket).",
    "other-spelling": "{got} is the right operator, but it isn't spelt as str(func.overloadpacket).",
    "wrong-operator": "The operators that you listed are not those that waited.",
    "line-number": "The second entry of the pair is the text of the line. In a notebook, a line number says little.",
    "more-than-line": "The second entry of the pair is the text of the line alone, without spaces around it, file "
                      "name or number.",
    "torch-by-name": "You take one of your own files for PyTorch's: it is in a folder called torch_course. "
                     "PyTorch's files are those in torch.__path__[0].",
    "own-line": "This is not the line that waits. It is the line in which your finder looks at the stack, an empty "
                "one, or something of a frame other than its `line`. Leave out the finder's own frames.",
    "torch-line": "The wait happened inside a function of PyTorch, and you listed PyTorch's line. Go outwards to "
                  "the line that called it.",
    "outer-line": "You listed a line that called the line to blame. The innermost frame is the last one of "
                  "extract_stack().",
    "wrong-line-of-source": "This is not the line that waited.",
    "no-line-at-all": "In one of PyTorch's own threads, such as the one of a GPU's backward pass, no line of the "
                      "stack is yours: {error}. List an empty string as the line.",
    "finds-shared": "A second finder starts with what the first one found. Create the list in __init__, on self.",
}

PAGE = '''
def four(x):
    y = (x * 2).sum()
    if y > 0:
        y = y + 1
    chosen = x[x > 0]
    where = x.nonzero()
    return y.item()

def none(x):
    y = torch.full((3,), 2.0, dtype=torch.float64)
    return (x.sum(dim=0, keepdim=True).double() * y).relu()

def state(x):
    y = x.clone()
    y.add_(1)
    return y + torch.rand(3)

def again(x):
    return [value.item() for value in x[0]]

def inner(x):
    return x.max().item()

def outer(x):
    return inner(x) + 1

def library(x):
    p = torch.nn.Parameter(x.clone())
    p.grad = x.clone()
    return torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)

def hook(gradient):
    if gradient.isnan().any():
        raise ValueError("not a number")
    return gradient

def backward(x):
    x = x.clone().requires_grad_()
    x.register_hook(hook)
    x.square().sum().backward()
    return x.grad
'''  # fmt: skip
FILE = "/tmp/torch_course/ipykernel_4242/1234567890.py"  # what a cell of a notebook is called
ELSEWHERE = "/tmp/ipykernel_4242/1234567890.py"
ITEM, MASK, NONZERO = "aten._local_scalar_dense", "aten.index", "aten.nonzero"


def balise_3(WaitFinder):  # noqa: N803  (the answer is a class)
    """Waits of several kinds, none at all, in functions, in PyTorch, in the backward pass; a second finder."""
    page = _page()
    x = torch.arange(-3.0, 3.0).reshape(2, 3)[:, [0, 1, 2]]
    yield "inside, everything is computed as outside"
    got, _ = _found(WaitFinder, page["none"], x)
    if got is None:
        raise Wrong("result-lost")
    expected = page["none"](x)
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise Wrong("arguments-lost", error=f"{got.dtype}, shape {tuple(got.shape)}", expected=expected, got=got)
    if not close(got, expected):
        raise Wrong("result-changed", expected=expected, got=got)
    with seeded(1):
        expected = page["state"](x)
        torch.manual_seed(1)
        got, _ = _found(WaitFinder, page["state"], x)
    if not close(got, expected):
        raise Wrong("result-changed", expected=expected, got=got)
    yield "the operators that wait are listed in order, and no others"
    _, found = _found(WaitFinder, page["four"], x.abs())
    wanted = [
        (ITEM, "if y > 0:"),
        (MASK, "chosen = x[x > 0]"),
        (NONZERO, "where = x.nonzero()"),
        (ITEM, "return y.item()"),
    ]
    _right_operators(found, wanted)
    _, nothing = _found(WaitFinder, page["none"], x)
    if nothing:
        raise Wrong("finds-shared" if len(nothing) > 3 else "all-operators", n=len(nothing), wanted=0, got=str(nothing))
    _right_operators(_found(WaitFinder, page["again"], x)[1], [(ITEM, "")] * 3)
    yield "each with its line"
    try:
        _right_lines(found, wanted, "own-line")
    except Wrong:
        if [line for _, line in _found(WaitFinder, _page(ELSEWHERE)["four"], x.abs())[1]] == [
            line for _, line in wanted
        ]:
            raise Wrong("torch-by-name", expected=wanted[0][1], got=found[0][1] or "a line without text") from None
        if _lists_the_outermost(lambda: _found(WaitFinder, page["four"], x.abs())[1]):
            raise Wrong("outer-line", expected=wanted[0][1], got=found[0][1] or "a line without text") from None
        raise
    yield "the innermost line, even in a function called by a function, and in the backward pass"
    _right_lines(_found(WaitFinder, page["outer"], x)[1], [(ITEM, "return x.max().item()")], "outer-line")
    _right_lines(_found(WaitFinder, page["backward"], x)[1], [(ITEM, "if gradient.isnan().any():")], "torch-line")
    yield "where PyTorch itself waits: the line that called it"
    wanted = [(ITEM, "return torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)")]
    _right_lines(_found(WaitFinder, page["library"], x)[1], wanted, "torch-line")
    yield "in a thread of PyTorch: no line"
    _in_a_thread(WaitFinder, x)
    yield "a second finder starts empty"
    first, second = WaitFinder(), WaitFinder()
    with first:
        page["inner"](x)
    if not hasattr(second, "found"):
        raise Wrong("no-mode", error="before you enter it, it has no `found`")
    if len(first.found) != 1 or len(second.found) != 0:
        raise Wrong("finds-shared", expected="1 and 0 waits", got=f"{len(first.found)} and {len(second.found)}")


class _Stacks(TorchDispatchMode):
    """Collects the lines of PyTorch's own frames."""

    def __init__(self):
        super().__init__()
        self.lines = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frames = traceback.extract_stack()
        self.lines |= {frame.line for frame in frames if frame.filename.startswith(torch.__path__[0])}
        return func(*args, **(kwargs or {}))


def _torch_lines():
    """Lines of PyTorch that stand in the stack while the page runs."""
    page, x = _page(), torch.ones(2, 3)
    with _Stacks() as stacks:
        for name in ("four", "library", "backward"):
            page[name](x)
    return stacks.lines - {"", None}


def _page(file=FILE):
    """The functions of PAGE, under the name of a notebook's cell: tracebacks show their lines."""
    linecache.cache[file] = (len(PAGE), None, PAGE.splitlines(keepends=True), file)
    names = {"__name__": "__main__", "torch": torch}
    exec(compile(PAGE, file, "exec"), names)
    return names


def _found(finder_class, function, x):
    finder = finder_class()
    if not isinstance(finder, TorchDispatchMode):
        raise Wrong("no-mode", error=f"it is {type(finder).__name__}")
    try:
        with finder:
            result = function(x)
    except TypeError as error:
        if "keyword" in str(error) or "argument after **" in str(error) or "dtype" in str(error):
            raise Wrong("arguments-lost", error=str(error).split("\n")[0]) from error
        raise
    except AttributeError as error:
        if "'NoneType'" in str(error):
            raise Wrong("result-lost", got=str(error)) from error
        raise
    if not isinstance(getattr(finder, "found", None), list):
        raise Wrong("no-mode", error="it has no list `found`")
    return result, list(finder.found)


def _in_a_thread(finder_class, x):
    """A wait in a thread whose stack begins in a file of PyTorch, as a device's thread of autograd."""
    names = {"torch": torch, "finder": finder_class(), "x": x, "done": threading.Event(), "error": []}
    code = """
def run():
    try:
        with finder:
            x.sum().item()
    except BaseException as e:
        error.append(e)
    finally:
        done.set()
"""
    exec(compile(code, f"{torch.__path__[0]}/a_thread_of_autograd.py", "exec"), names)
    _thread.start_new_thread(names["run"], ())  # threading.Thread would have frames of its own
    if not names["done"].wait(timeout=40):
        raise Wrong("endless", seconds=40.0)
    if names["error"]:
        error = names["error"][0]
        if type(error).__name__ == "BaliseNotDone":
            raise error
        raise Wrong("no-line-at-all", error=f"your code raised {type(error).__name__}: {error}") from error
    found = list(names["finder"].found)
    if not found:
        raise Wrong(
            "no-line-at-all", error="your finder listed nothing, but it is a wait all the same",
            expected=f"({ITEM}, '')"
        )
    _right_operators(found, [(ITEM, "")])
    if found[0][1]:
        raise Wrong("no-line-at-all", error=f"yours gave {found[0][1]!r}", expected="''", got=found[0][1])


def _right_operators(found, wanted):
    for entry in found:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise Wrong("no-pairs", expected="(operator, line)", got=repr(entry)[:200])
        if isinstance(entry[1], int):
            raise Wrong("line-number", got=entry[1])
        if not isinstance(entry[0], str) or not isinstance(entry[1], str | None):
            raise Wrong("no-pairs", expected="(text, text)", got=repr(entry)[:200])
    names, n = [name for name, _ in wanted], len(found)
    if n < len(wanted):
        raise Wrong("waits-missed", expected=str(names), got=str(found), n=n, wanted=len(wanted))
    if n > len(wanted):
        others = [name for name, _ in found if not name.startswith(tuple(names))]
        slug = "all-operators" if others else "listed-again"
        raise Wrong(slug, expected=str(names), got=str(found), n=n, wanted=len(wanted))
    for (got, line), (name, _) in zip(found, wanted, strict=True):
        if got != name:
            slug = "not-the-packet" if got.startswith(name + ".") else "wrong-operator"
            if slug == "wrong-operator" and name.partition(".")[2] in got:
                slug = "other-spelling"
            if name == line:
                slug = "no-pairs"
            raise Wrong(slug, expected=name, got=got)


def _lists_the_outermost(run) -> bool:
    """Whether the lines listed are those with which every thread begins: here, the outermost may have no text."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run).result()
    return {str(line).strip() for _, line in found} == {"self._bootstrap_inner()"}


def _right_lines(found, wanted, usual):
    _right_operators(found, wanted)
    lines = {line.strip() for line in PAGE.splitlines()}
    outside = {frame.line for frame in traceback.extract_stack()} - {""}
    for (_, got), (_, line) in zip(found, wanted, strict=True):
        if (got or "") == line:
            continue
        if line and line in (got or ""):
            raise Wrong("more-than-line", expected=line, got=repr(got))
        slug = "wrong-line-of-source" if (got or "").strip() in lines - {""} else usual
        if (got or "").strip() in _torch_lines():
            slug = "torch-line"
        inside = ("return inner(x) + 1", "result = function(x)", "x.square().sum().backward()")
        if got and (got.strip() in inside or got.strip() in outside):
            slug = "outer-line"
        raise Wrong(slug, expected=line, got=got or "a line without text")
