"""Balise 3: a dispatch mode that finds waits, tried on a page of code that stands for a notebook's cell."""

import _thread
import functools
import linecache
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, one_of
from dlojz_tp.judging.probes.seeded import seeded

PAGE = '''
def four(x):
    y = (x * 2).sum()
    if y > 0:
        y = y + 1
    chosen = x[x > 0]
    where = x.nonzero()
    return y.item()

def plain(x):
    return (x * 2).sum(0).relu()

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
PAGE_LINES = {line.strip() for line in PAGE.splitlines()} - {""}
ITEM, MASK, NONZERO = "aten._local_scalar_dense", "aten.index", "aten.nonzero"


def observe(finder_class):
    """What the finder does to results and what it lists, use by use; in a thread of PyTorch; what a second one has."""
    page, other, x = _page(FILE), _page(ELSEWHERE), torch.arange(-3.0, 3.0).reshape(2, 3)[:, [0, 1, 2]]
    for name in ("plain", "none"):  # the second has operators with keyword arguments
        yield {name: _used(finder_class, page[name], x) | {"expected": page[name](x)}}
    with seeded(1):
        expected = page["state"](x)
        torch.manual_seed(1)
        state = _used(finder_class, page["state"], x)
    yield {"state": state | {"expected": expected}}
    four = _used(finder_class, page["four"], x.abs())
    yield {"four": four, "again": _used(finder_class, page["again"], x)}
    if _lines(four) != [line for _, line in FOUR]:
        elsewhere = _lines(_used(finder_class, other["four"], x.abs()))
        four |= {"elsewhere": elsewhere, "outermost": _lists_the_outermost(finder_class, page, x)}
        page = other if elsewhere == [line for _, line in FOUR] else page
    yield {"each line": four}
    for name in ("outer", "backward", "library"):
        yield {name: _used(finder_class, page[name], x)}
    yield _in_a_thread(finder_class, x)
    first, second = finder_class(), finder_class()
    with first:
        page["inner"](x)
    yield {"lists": hasattr(second, "found")}
    yield {"both": [len(first.found), len(second.found)]}


class _Stacks(TorchDispatchMode):
    """Collects the lines of PyTorch's own frames."""

    lines = set()

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


def _used(finder_class, function, x):
    """What a use returns and lists; outside: the lines that call it. trouble: (slug, error) of one that fails."""
    finder = finder_class()
    if not isinstance(finder, TorchDispatchMode):
        return {"trouble": ("no-mode", f"it is {type(finder).__name__}")}
    before, outside = len(getattr(finder, "found", ())), {frame.line for frame in traceback.extract_stack()} - {""}
    try:
        with finder:
            result = function(x)
    except (TypeError, AttributeError) as error:
        text = str(error)
        if isinstance(error, TypeError) and any(sign in text for sign in ("keyword", "argument after **", "dtype")):
            return {"trouble": ("keywords-refused", text.split("\n")[0])}
        if isinstance(error, AttributeError) and "'NoneType'" in text:
            return {"trouble": ("result-lost", text)}
        raise
    if not isinstance(getattr(finder, "found", None), list):
        return {"trouble": ("no-mode", "it has no list `found`")}
    return {"trouble": ("", ""), "result": result, "found": finder.found[before:], "outside": outside}


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
    before = len(getattr(names["finder"], "found", ()))
    _thread.start_new_thread(names["run"], ())  # threading.Thread would have frames of its own
    if not names["done"].wait(timeout=40):
        return {"ended": False}
    error, found = (names["error"] or [None])[0], names["finder"].found[before:] if not names["error"] else []
    if type(error).__name__ == "BaliseNotDone":
        raise error
    said = "" if found else "your finder listed nothing, but it is a wait all the same"
    said = f"your code raised {type(error).__name__}: {error}" if error else said
    return {"ended": True, "no line": said, "thread": {"found": [(ITEM, "")] if said else found}}  # what failed is told


def _lists_the_outermost(finder_class, page, x) -> bool:
    """Whether the lines listed are those with which every thread begins: here, the outermost may have no text."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_used, finder_class, page["four"], x.abs()).result()["found"]
    return {str(line).strip() for _, line in found} == {"self._bootstrap_inner()"}


def _lines(use):
    return [line or "" for _, line in use["found"]]


def _entry(entry):
    """The mistake of an entry that is no pair of texts."""
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        return "no-pairs"
    if isinstance(entry[1], int):
        return "line-number"
    return "" if isinstance(entry[0], str) and isinstance(entry[1], str | None) else "no-pairs"


def _first_slug(slugs, _):
    """Of several, some of them empty, or of (slug, error)."""
    return next(filter(None, slugs))


def _number_slug(names, seen, due):
    others = [name for name, _ in seen if not name.startswith(tuple(names))]
    return "waits-missed" if len(seen) < due else "all-operators" if others else "listed-again"


def _names_slug(wanted, seen, due):
    """Of the first name that is wrong; of one that is only spelt otherwise where there is no other."""
    slugs = []
    for (got, line), (name, _) in zip(seen, wanted):
        if name == line != got:
            slugs.append("no-pairs")
        elif got != name:
            spelt = "other-spelling" if name.partition(".")[2] in got else "wrong-operator"
            slugs.append("not-the-packet" if got.startswith(name + ".") else spelt)
    return next((slug for slug in slugs if slug in ("no-pairs", "wrong-operator")), slugs[0])


def _lines_slug(usual, seen, due):
    """Of the first line that is wrong; of one that has more than the line where there is no other."""
    slugs = [_line_slug(usual, seen["outside"], *pair) for pair in zip(_lines(seen), due)]
    worst = next((slug for slug in slugs if slug not in ("", "more-than-line")), "")
    if worst and "elsewhere" in seen:
        return "torch-by-name" if seen["elsewhere"] == due else "outer-line" if seen["outermost"] else worst
    return worst or "more-than-line"


def _line_slug(usual, outside, got, line):
    bare = got.strip()
    if got == line:
        return ""
    if line and line in got:
        return "whole-stack" if "\n" in bare else "more-than-line"
    if got and bare in {"return inner(x) + 1", "result = function(x)", "x.square().sum().backward()"} | outside:
        return "outer-line"
    if bare in PAGE_LINES:
        return "wrong-line-of-source"
    return "torch-line" if bare in _torch_lines() else usual


def _form(result):
    return "" if result is None else f"{result.dtype}, shape {tuple(result.shape)}"


def _change(seen, name):
    """What became of a result: a slug, or ""; its form counts, too, but for what is drawn."""
    got, due = seen["result"], seen["expected"]
    if got is None:
        return "result-lost"
    if name != "state" and _form(got) != _form(due):
        return "arguments-lost"
    return "" if close(got, due) else "result-changed"


def _result(claim, name):
    """Looks at a use that changes no result."""
    fields = lambda seen, _: {"error": _form(seen["result"]), "expected": seen["expected"], "got": seen["result"]}  # noqa: E731
    return [_use(claim, name), Look("", name, name, _change, holds=lambda *both: not _change(*both), fields=fields)]


def _use(claim, name):
    return Look(claim, lambda o: o[name]["trouble"], ("", ""), _first_slug, fields=_error)


def _error(trouble, _):
    return {"error": trouble[1]}


def _operators(name, wanted):
    """Looks at what a use has listed: as many pairs as there are waits, with the names of the operators."""
    names, found = [name for name, _ in wanted], lambda o: o[name]["found"]

    def counted(seen, due):
        return {"n": len(seen), "wanted": due, "expected": str(names), "got": str(seen)}

    def other_name(seen, due):
        return {"got": next(got for (got, _), name in zip(seen, due) if got != name)}

    return [
        Look("", lambda o: list(map(_entry, found(o))), [""], _first_slug, holds=one_of),
        Look("", found, len(wanted), functools.partial(_number_slug, names), holds=lambda seen, due: len(seen) == due,
             fields=counted),
        Look("", found, names, functools.partial(_names_slug, wanted), fields=other_name,
             holds=lambda seen, due: [name for name, _ in seen] == due),
    ]  # fmt: skip


def _listed_lines(claim, name, wanted, usual):
    return Look(claim, name, [line for _, line in wanted], functools.partial(_lines_slug, usual), fields=_got_lines,
                holds=lambda seen, due: _lines(seen) == due)  # fmt: skip


def _got_lines(use, _):
    return {"got": _lines(use)}


def _thread_line(o):
    return _lines(o["thread"])[0]


def _one_wait(claim, name, line, usual):
    """Looks at a use with a single wait."""
    return [_use(claim, name), *_operators(name, [(ITEM, line)]), _listed_lines("", name, [(ITEM, line)], usual)]


FOUR = [(ITEM, "if y > 0:"), (MASK, "chosen = x[x > 0]"), (NONZERO, "where = x.nonzero()"), (ITEM, "return y.item()")]
LOOKS = [
    *_result("inside, everything is computed as outside", "plain"), *_result("", "none"), *_result("", "state"),
    _use("the operators that wait are listed in order, and no others", "four"), *_operators("four", FOUR),
    *_operators("none", []), _use("", "again"), *_operators("again", [(ITEM, "")] * 3),
    _listed_lines("each with its line", "each line", FOUR, "own-line"),
    *_one_wait("the innermost line, even in a function called by a function, and in the backward pass", "outer",
               "return x.max().item()", "outer-line"),
    *_one_wait("", "backward", "if gradient.isnan().any():", "torch-line"),
    *_one_wait("where PyTorch itself waits: the line that called it", "library",
               "return torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)", "torch-line"),
    Look("in a thread of PyTorch: no line", "ended", True, "endless", fields={"seconds": 40.0}),
    Look("", "no line", "", "no-line-at-all", fields="error"), *_operators("thread", [(ITEM, "")]),
    Look("", _thread_line, "", "no-line-at-all", fields=lambda seen, _: {"error": f"yours gave {seen!r}"}),
    Look("a second finder starts empty", "lists", True, "no-mode",
         fields={"error": "before you enter it, it has no `found`"}),
    Look("", "both", [1, 0], "finds-shared"),
]  # fmt: skip


def balise_3(WaitFinder):  # noqa: N803  (the answer is a class)
    yield from judged(LOOKS, observe, WaitFinder)
