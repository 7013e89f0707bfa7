"""A check as a table: what an answer does, seen by fixed probes, and looks that compare it with the truth.

A check file has three parts, and one `balise_N` that joins them:

    def observe(unit):                                  # 1. run fixed probes; never judge
        got = unit(torch.tensor([3.0, 4.0]))
        return {"form": form(got), "values": got}       # plain numbers, words, tensors

    LOOKS = [                                           # 2. each compares one thing with the truth
        Look("a vector of two numbers", "form", "float32 (2,)", "unit-form"),
        Value("that has length one", "values", torch.tensor([0.6, 0.8]), "wrong-unit"),
    ]

    def balise_1(unit):                                 # 3.
        yield from judged(LOOKS, observe, unit)

`judged` goes through the looks in order and raises `Wrong` at the first that does not hold. `observe` may also yield
its dictionary in parts (outside of any `with`): a part is asked for once a look needs a key of it. Then a later probe
may rely on what earlier looks have seen, such as the form of what comes back, and a wrong answer costs no more time
than its mistake takes. An answer that raises is recognised by `judge`; what is expected to raise, `observe` notes as a
word.

A `Look` is at what the method promises (the form, what is held, sent, waited for, read back) and carries its own hint.
A `Value` is at numbers. Its hint is that of the nearest known mistake on record (see `mistakes.py`), and its own where
none is near. Of a yes or no the verdict shows the hint alone. The records, and the texts of the hints,
come from the bank: `tests/answers/WORK/balise_N.py` has each mistake, its hint and its wrong answers together, and
`make notebooks` writes `dlojz_tp/judging/checks/WORK/mistakes/N.json`. A hint of several balises is in the HINTS of the
module that gives it.

Over ranks, `observe` runs on each rank and an observation is the list of their dictionaries; the key of a look then
gives the list of what all ranks have under it, and `at` is what the truth depends on. `judged_on_ranks`, with looks
that hold on every rank, is in `dlojz_tp.judging.probes.shared_looks`.

For `holds` there are `within`, `at_most`, `above`, `nothing`, `every` and `one_of`; for `fields`, `silent`. In an
`observe`, `form`, `shape` and `numbers` say what came back, and `tried` what a call raised.

Numbers under one `Value` shall be of one size: the distance to a known mistake is taken over all of them. What is free
in a right design (an order, a random draw) is taken out by `observe` or by `see`: sort, count, use quantiles. Where a
record misleads, a `Look` whose hint is a function of (seen, due) recognises the mistake by hand.
"""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from types import FunctionType

import torch

from dlojz_tp.judging.checking import mistakes
from dlojz_tp.judging.checking.compare import close
from dlojz_tp.judging.checking.wrong import Wrong, fails
from dlojz_tp.launch import stacks
from dlojz_tp.works.balise import BaliseNotDone


@dataclass(frozen=True)
class Look:
    """One thing that must hold.

    claim: what is looked at, a line of the verdict; "" belongs to the line above. see: a key of the observation, or a
    function of it. due: the truth, or a function of `at`. hint: the slug where it does not hold, or a function of
    (seen, due) that returns it. holds(seen, due): whether it does; default `same`. fields: for the hint's {fields}, a
    dictionary, or a function of (seen, due) that returns one; or the name of the one field that is what was seen.
    "expected", "got" and "where" in it replace the whole values in the verdict.
    """

    claim: str
    see: str | Callable
    due: object
    hint: str | Callable
    _: KW_ONLY
    holds: Callable = None
    fields: Callable | dict | str | None = None

    def seen(self, observed):
        """What is compared."""
        if callable(self.see):
            return self.see(observed)
        return [rank[self.see] for rank in observed] if isinstance(observed, list) else observed[self.see]


@dataclass(frozen=True)
class Value(Look):
    """A look at numbers: where it does not hold, the nearest known mistake has the hint, `hint` where none is near."""


def judged(looks: list[Look], observe: Callable, *answers, at=None, where: str = ""):
    """Yield the claims; raise Wrong at the first look that does not hold, unless it is at the edge: see `fails`.

    observe(*answers): the observation: a dictionary, or its parts, or over ranks a list of dictionaries. at: what the
    truth depends on, such as the number of ranks: a number or a word. where: said in the verdict. An observation of
    None where something is due has the hint "nothing-returned".
    """
    yield looks[0].claim
    observed = observe(*answers)
    if isinstance(observed, Iterator):
        observed = _Parts(observed)
    line, below = "", 0
    for look in looks:
        line, below = (look.claim, 0) if look.claim else (line, below + 1)
        yield line
        seen, due = look.seen(observed), look.due(at) if callable(look.due) else look.due
        if (look.holds or same)(seen, due):
            continue
        if due is not None and (seen is None or (isinstance(seen, list) and seen and all(one is None for one in seen))):
            fails(Wrong("nothing-returned", where=where))
            continue
        slug = look.hint(seen, due) if callable(look.hint) else look.hint
        said = silent(seen, due) if isinstance(due, bool) else {"expected": due, "got": seen}
        wrong = Wrong(slug, **said | {"where": where} | filled(look.fields, seen, due))
        if isinstance(look, Value):
            sketches = {"seen": mistakes.sketch(seen), "due": mistakes.sketch(due)}
            wrong.evidence = {"look": f"{line} {below}" if below else line, "at": at} | sketches
        fails(wrong)


class _Parts(dict):
    """An observation whose parts are made when they are needed."""

    def __init__(self, parts):
        super().__init__()
        self._parts = parts

    def __missing__(self, key):
        for part in self._parts:
            self.update(part)
            if key in part:
                return part[key]
        raise KeyError(key)


def same(seen, due) -> bool:
    """Whether both are equal: words exactly, numbers and tensors within the tolerance of their dtype; also in lists."""
    if isinstance(due, list | tuple):
        return isinstance(seen, list | tuple) and len(seen) == len(due) and all(map(same, seen, due))
    if isinstance(due, torch.Tensor | float) or isinstance(seen, torch.Tensor):
        return close(seen, due)
    if isinstance(due, dict):
        return isinstance(seen, dict) and seen.keys() == due.keys() and all(same(seen[key], due[key]) for key in due)
    return (type(seen) is type(due) or not says_so_itself(seen)) and bool(seen == due)


def says_so_itself(value) -> bool:
    """Whether what a value equals is decided by code that neither Python nor a library brings: an answer's own."""
    equal = type(value).__eq__
    return isinstance(equal, FunctionType) and stacks.is_trainee(equal.__code__.co_filename)


def filled(fields, seen, due) -> dict:
    """What a look's `fields` says of these."""
    if isinstance(fields, str):
        return {fields: seen}
    return fields(seen, due) if callable(fields) else fields or {}


def within(most: float) -> Callable:
    """A look's `holds`: equal but for `most`, relative and absolute."""
    return lambda seen, due: close(seen, due, most)


def at_most(seen, due) -> bool:
    """A look's `holds`: no number, or none of a list, is above the bound."""
    return bool((torch.as_tensor(seen) <= due).all())


def above(seen, due) -> bool:
    """A look's `holds`: the number is larger than the bound."""
    return bool(seen > due)


def nothing(seen, due) -> bool:
    """A look's `holds`: nothing is in it, or nothing in any of its parts."""
    return not any(seen)


def every(seen, due) -> bool:
    """A look's `holds`: it is true of all."""
    return all(seen)


def one_of(seen, due) -> bool:
    """A look's `holds`: each of what was seen, if it is a list, is among what is due."""
    return all(one in due for one in (seen if isinstance(seen, list) else [seen]))


def silent(seen, due) -> dict:
    """A look's `fields`: the hint says it all, and the verdict shows no values."""
    return {"expected": "", "got": ""}


def tried(call: Callable, *args):
    """What a call returns; if it raises, that in words: "TypeError: float images are expected"."""
    try:
        return call(*args)
    except BaliseNotDone:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)}".split("\n")[0]


def numbers(got) -> list[float] | None:
    """The numbers that came, [] where they are none, None for None."""
    try:
        return None if got is None else [float(one) for one in got]
    except (TypeError, ValueError):
        return []


def form(value):
    """What a value is, in words: "float32 (2, 3)" for a tensor; of a list or tuple, a list of them; None for None."""
    return _each(value, lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")


def shape(value):
    """As `form`, without the dtype: a tuple of ints for a tensor."""
    return _each(value, lambda tensor: tuple(tensor.shape))


def _each(value, of_tensor):
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, list | tuple):
        return [_each(one, of_tensor) for one in value]
    return None if value is None else type(value).__name__
