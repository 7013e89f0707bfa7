"""Balise 1: the three sizes of a step from those that are given, in DeepSpeed's words and in others', and what cannot be."""

import itertools
import math
import re
from numbers import Integral

import torch

from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, tried

#     ranks, batch, micro, accumulation -> all three
TWO = {
    (2, 32, 4, None): (32, 4, 4),
    (4, 96, None, 3): (96, 8, 3),
    (3, None, 5, 7): (105, 5, 7),
    (1, 12, 12, None): (12, 12, 1),
    (8, 8, None, 1): (8, 1, 1),
}
ONE = {(4, 20, None, None): (20, 5, 1), (6, None, 7, None): (42, 7, 1), (1, 1, None, None): (1, 1, 1)}
ALL = {(2, 48, 3, 8): (48, 3, 8), (5, 30, 6, 1): (30, 6, 1)}
# of these, each number that would do
NEAREST = {
    (2, 30, 4, None): {24, 32},
    (4, 50, None, 3): {48, 60},
    (3, 10, None, None): {9, 12},
    (2, 50, 3, 8): {48},
    (2, 24, 3, 8): {48},
    (2, 96, 3, 8): {48},
    (8, 40, 8, None): {64},
}
BELOW_ONE = [(0, 8, 2, None), (2, 0, 2, None), (2, 8, 0, None), (2, 8, None, 0), (2, -8, -4, None), (2, None, 4, -1)]
WORDS = {
    "deepspeed": [
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, (64, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 4, (60, 3, 5)),
        ({"train_micro_batch_size_per_gpu": 3}, 4, (12, 3, 1)),
    ],
    "transformers": [
        ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 4}, 3, (72, 6, 4)),
        ({"per_device_train_batch_size": 6}, 3, (18, 6, 1)),
        ({"gradient_accumulation_steps": 2}, 4, (64, 8, 2)),
    ],
    "accelerate": [
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, 3, (72, 6, 4)),
        ({"batch_size": 6, "split_batches": False}, 3, (18, 6, 1)),
        ({"batch_size": 6, "split_batches": True, "gradient_accumulation_steps": 4}, 3, (24, 2, 4)),
        ({"batch_size": 40, "split_batches": True}, 4, (40, 10, 1)),
    ],
    "fabric": [({"batch_size": 6, "every": 4}, 3, (72, 6, 4)), ({"batch_size": 10}, 5, (50, 10, 1))],
}
UNEVEN = [
    ("accelerate", {"batch_size": 6, "split_batches": True, "gradient_accumulation_steps": 2}, 4),
    ("deepspeed", {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, 2),
]


def _kinds(found):
    """What came back, in words; one word if all is three whole numbers."""
    whole = [isinstance(one, tuple | list) and len(one) == 3 and all(map(_whole, one)) for one in found]
    return "three whole numbers" if all(whole) else None if found[0] is None else str(found[whole.index(False)])


def _whole(number):
    return isinstance(number, Integral) and not isinstance(number, bool)


def _refusal(call, *args):
    """How a call is refused, and the numbers in its words."""
    word = tried(call, *args)
    kind, _, message = word.partition(": ") if isinstance(word, str) else ("accepted", "", "")
    return kind, message


def _said(message):
    return {int(number) for number in re.findall(r"(?<![\d.])\d+(?![\d.]\d)", message)}


def _too_many(case, message):
    """Batches in a message that are not the nearest ones: further multiples; 0 where it stands beside a nearest one."""
    n_ranks, batch, micro, accumulation = case
    given = [number for number in (n_ranks, batch, micro, accumulation) if number]
    unit = n_ranks * (micro or 1) * (accumulation or 1)
    reasons = {math.prod(some) for k in range(1, 5) for some in itertools.combinations(given, k)} | {batch // unit}
    more = {number for number in _said(message) - NEAREST[case] - reasons if number % unit == 0 and number}
    beside = r"(?<![\d.])0[\s,\])]*(and|or)?[\s,\[(]*%d(?!\d)"
    return more | ({0} if any(re.search(beside % one, message) for one in NEAREST[case]) else set())


def observe(batch_sizes, from_words):
    for name, cases in (("two", TWO), ("one", ONE), ("all", ALL)):
        found = [tried(batch_sizes, *case) for case in cases]
        yield {f"{name} kind": _kinds(found)}
        yield {name: torch.tensor(found, dtype=torch.float64)}
    refused = {case: _refusal(batch_sizes, *case) for case in NEAREST}
    yield {"refused": [(case, kind) for case, (kind, _) in refused.items() if kind != "ValueError"][:1]}
    yield {
        "below one": [(case, kind) for case in BELOW_ONE if (kind := _refusal(batch_sizes, *case)[0]) != "ValueError"][
            :1
        ]
    }
    none = [
        (case, kind) for case in ((2,), (2, None, None, 3)) if (kind := _refusal(batch_sizes, *case)[0]) != "ValueError"
    ]
    yield {"neither": none[:1]}
    said = {case: message for case, (_, message) in refused.items()}
    yield {"not named": [(case, left) for case in NEAREST if (left := NEAREST[case] - _said(said[case]))][:1]}
    yield {"too many": [(case, more) for case in NEAREST if (more := _too_many(case, said[case]))][:1]}
    for library, cases in WORDS.items():
        given = [dict(words) for words, *_ in cases]
        found = [tried(from_words, library, mine, n) for mine, (_, n, _) in zip(given, cases)]
        changed = [(f"{words}, {n} ranks", str(mine)) for mine, (words, n, _) in zip(given, cases) if mine != words]
        yield {f"{library} kind": _kinds(found), f"{library} changed": changed[:1]}
        yield {library: torch.tensor(found, dtype=torch.float64)}
    uneven = [(case, kind) for case in UNEVEN if (kind := _refusal(from_words, *case)[0]) != "ValueError"]
    yield {"uneven words": [(f"{library}, {words}, {n} ranks", kind) for (library, words, n), kind in uneven][:1]}


def _given(case):
    names = ("batch", "micro", "accumulation")
    given = [f"{name}={size}" for name, size in zip(names, case[1:]) if size is not None]
    return ", ".join([f"{case[0]} ranks", *given])


def _first(cases):
    def fields(seen, due):
        k = int((seen != due).any(1).int().argmax())
        words = lambda row: ", ".join(f"{number:.0f}" for number in row)  # noqa: E731
        return {"expected": words(due[k]), "got": words(seen[k]), "where": cases[k]}

    return fields


def _refused(seen, due):
    case, kind = seen[0]
    where = case if isinstance(case, str) else _given(case)
    return {"expected": "ValueError", "got": kind, "where": where}


def _named(seen, due):
    case, batches = seen[0]
    few = [str(one) for one in sorted(batches)[:3]]
    return silent(seen, due) | {"where": _given(case), "batches": " and ".join(few), "batch": case[1]}


def _changed(seen, _):
    (where, after), *_ = seen
    return {"where": where, "expected": "the words as they were", "got": after}


def _kind_shown(seen, due):
    return silent(seen, due) | {"got": seen, "error": seen}


def _tables(claim, key, cases, hint):
    due = torch.tensor([*cases.values()], dtype=torch.float64)
    yield Look(claim, f"{key} kind", "three whole numbers", _no_three, fields=_kind_shown)
    yield Value("", key, due, hint, fields=_first([*map(_given, cases)]))


def _no_three(seen, due, refused="refused-right"):
    return refused if seen.startswith("ValueError") else "raised" if re.match(r"\w+Error: ", seen) else "not-three"


def _misread(seen, due):
    return _no_three(seen, due, "words-refused")


def _library(name):
    due = torch.tensor([sizes for *_, sizes in WORDS[name]], dtype=torch.float64)
    yield Look(f"{name}'s words", f"{name} kind", "three whole numbers", _misread, fields=_kind_shown)
    yield Value("", name, due, "wrong-words", fields=_first([f"{words}, {n} ranks" for words, n, _ in WORDS[name]]))
    yield Look("", f"{name} changed", [], "words-changed", fields=_changed)


LOOKS = [
    *_tables("two numbers give the third", "two", TWO, "wrong-third"),
    *_tables("one number gives two", "one", ONE, "wrong-defaults"),
    *_tables("three that agree", "all", ALL, "wrong-third"),
    Look("contradictions are refused", "refused", [], "not-refused", fields=_refused),
    Look("and so are numbers below 1, and missing numbers", "below one", [], "below-one", fields=_refused),
    Look("", "neither", [], "neither-accepted", fields=_refused),
    Look("the message names the batches that would fit", "not named", [], "nearest-unnamed", fields=_named),
    Look("", "too many", [], lambda seen, _: "names-zero" if 0 in seen[0][1] else "names-more", fields=_named),
    *[look for library in WORDS for look in _library(library)],
    Look("words that do not divide are refused", "uneven words", [], "words-not-refused", fields=_refused),
]  # fmt: skip


def balise_1(batch_sizes, from_words):
    yield from judged(LOOKS, observe, batch_sizes, from_words)
