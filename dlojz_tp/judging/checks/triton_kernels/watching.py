"""What every check of a kernel looks at: where it reads and writes, who computes, and whether a GPU would take it."""

import copy
import dataclasses

import torch

from dlojz_tp.judging.checking.looks import Look, at_most, form, silent
from dlojz_tp.measure import compiled_kernels, kernels
from dlojz_tp.measure.operations import FREE, Operations

HINTS = {
    "another-form": "The result has another dtype or shape, or is no tensor.",
    "wrong-there": "It fails for {what}. Take all sizes and strides from the tensors given.",
    "no-kernel": "No kernel was launched. Launch yours: `kernel[grid](arguments)`.",
    "pytorch-computes": "PyTorch does a part of the work: `{what}`. That reads and writes memory once more. Leave it to "
                        "the kernel.",
    "pytorch-copies": "PyTorch copies or fills a tensor: `{what}`. That reads and writes memory once more. A kernel can use "
                      "strides and dtypes as they are, and writes all of its result.",
    "several-launches": "{n} kernels are launched. One launch starts all programs: its grid says how many.",
    "reads-outside": "{what}. Lanes past the end need a mask in `tl.load`.",
    "writes-outside": "{what}. Lanes past the end need a mask in `tl.store`, too: on a GPU they overwrite what lies there.",
    "stride-ignored": "{what}. The neighbours of a view aren't neighbours in memory: multiply by its strides.",
    "one-program": "One program does all the work, and a GPU runs a program on one of its many units. Launch many.",
    "idle-programs": "{n} programs do nothing. A grid counts blocks, not elements.",
    "read-again": "{n} elements of argument {argument} are read more than once. Load each once, and keep it in registers.",
    "never-written": "{n} elements of the result are never written. Do your programs cover all of it? "
                     "`triton.cdiv(n, BLOCK)` blocks cover n elements.",
    "written-twice": "A program writes {n} elements of the result more than once. Keep them in registers, and store at the "
                     "end.",
    "given-changed": "The kernel writes into `{what}`, which it was given to read.",
    "programs-race": "Two programs write the same element without an atomic. On a GPU they run at once, and nobody knows "
                     "whose value stays.",
    "order-relied": "A program reads what another one of the same launch writes. On a GPU nobody knows which of them runs "
                    "first. Use a second launch, or an atomic.",
    "compiler-refuses": "A GPU would not run this kernel: {what}. The interpreter takes any Python, the compiler a part "
                        "of it.",
}  # fmt: skip
COPIES = {"aten.clone", "aten._to_copy", "aten.copy_", "aten.zeros", "aten.new_zeros", "aten.zeros_like", "aten.zero_"}
ALLOCATES = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided"}


def watched(answer, *given, order=iter, **options):
    """Call an answer with all launches watched: (what it returned, `kernels.Watched`, operators that computed).

    It gets copies of the tensors, with the same strides: `seen.given`. Ask `seen.reads` for these.
    """
    given = copy.deepcopy(given)
    with Operations() as ran, kernels.Watched(order) as seen:
        result = answer(*given, **options)
    seen.given = given
    return result, seen, sorted(name for name in ran.calls if name not in FREE | ALLOCATES)


def kernel_parts(answer, *given, allowed=(), name="", **options):
    """The first parts of an observation, for a look at "form" and KERNEL_LOOKS. Returns what `watched` does.

    given: the arguments, tensors and others. allowed: operators of PyTorch that may compute. name: of the call, where a
    check makes several: its looks are `looks_at(name, LOOKS)`.
    """
    parts = _parts(answer, given, allowed, options)
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return end.value
        yield {name + key: value for key, value in part.items()}


def _parts(answer, given, allowed, options):
    result, seen, ran = watched(answer, *given, **options)
    results = [one for one in (result if isinstance(result, tuple | list) else [result]) if torch.is_tensor(one)]
    inputs = [one for one in seen.given if torch.is_tensor(one)]
    yield {"form": form(result), "launches": len(seen.launches)}
    yield {"pytorch": [name for name in ran if name not in allowed]}
    yield {kind: [one for one in seen.outside if (one.kind == "read") is (kind == "reads outside")]
           for kind in ("reads outside", "writes outside")}  # fmt: skip
    races = seen.races()
    yield {"races": races, "idle": seen.idle()}
    yield {"never": sum(int((seen.writes(one) == 0).sum()) for one in results)}
    twice = sum(int((seen.writes(one, atomics=False) > 1).sum()) for one in results)
    yield {"twice": 0 if races else twice}  # by one program
    yield {"given": [k for k, one in enumerate(inputs) if seen.writes(one).any()]}
    yield {"again": [int((seen.reads(one) > 1).sum()) for one in inputs]}
    yield {"refused": next(filter(None, map(compiled_kernels.refused, seen.launches)), "")}
    return result, seen, ran


def _what(seen, due):
    return {"what": seen if isinstance(seen, str) else str(seen[0]), "expected": "", "got": ""}


def _number(seen, due):
    return {"n": seen, "expected": "", "got": ""}


def _by_pytorch(seen, due):
    return "pytorch-copies" if set(seen) <= COPIES else "pytorch-computes"


def _outside(slug):
    return lambda seen, due: "stride-ignored" if seen[0].between else slug


def _again(seen, due):
    return {"argument": 1 + next(k for k, n in enumerate(seen) if n), "n": max(seen), "expected": "", "got": ""}


def _at_least(seen, due):
    return seen >= due


def _meets(seen, due):
    return "order-relied" if "read and written" in seen else "programs-race"


KERNEL_LOOKS = [
    Look("a kernel is launched", "launches", 1, "no-kernel", holds=_at_least, fields=silent),
    Look("it does all the work", "pytorch", [], _by_pytorch, fields=_what),
    Look("it reads inside of the tensors given", "reads outside", [], _outside("reads-outside"), fields=_what),
    Look("it writes inside of them", "writes outside", [], _outside("writes-outside"), fields=_what),
    Look("what it reads stays as it was", "given", [], "given-changed",
         fields=lambda seen, due: {"what": f"argument {seen[0] + 1}", "expected": "", "got": ""}),
    Look("no program meets another's writes", "races", [], _meets, fields=silent),
    Look("each element of the result is written", "never", 0, "never-written", fields=_number),
    Look("once", "twice", 0, "written-twice", fields=_number),
    Look("the compiler takes the kernel", "refused", "", "compiler-refuses", fields=_what),
]  # fmt: skip
ONE_LAUNCH = Look("in one launch", "launches", 1, "several-launches", fields=_number)
NO_IDLE = Look("no program is idle", "idle", 1, "idle-programs", holds=at_most, fields=_number)
MANY_PROGRAMS = Look("many programs share the work", "busy", 2, "one-program", holds=_at_least, fields=silent)
# "again": of each tensor given, how many of its elements are read more than once
READ_ONCE = Look("each element is read once", "again", 0, "read-again", holds=at_most, fields=_again)


def looks_at(name, looks):
    """These looks at the call that `kernel_parts` knows by this name."""
    return [dataclasses.replace(look, claim=f"{name.strip()}: {look.claim}", see=name + look.see) for look in looks]
