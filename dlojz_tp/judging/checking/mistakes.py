"""Known mistakes: what is recorded of how they behave, and which of them an answer behaves like.

Beside the checks of a work lies one file a balise, `checks/WORK/mistakes/N.json`, which `make notebooks` writes from
the bank of answers: the hints of the balise, and of each wrong answer what the look saw at which it failed.
A behaviour is recorded as a sketch: up to 16 numbers as they are, of more numbers 16 sums with random signs. Sums of
the difference of two behaviours say how far apart they are, and show nobody an answer. The signs come from Python's own
generator, so a sketch is the same on every machine, up to the rounding of what was seen.
"""

import functools
import json
import random
from pathlib import Path

import numpy as np
import torch

CHECKS = Path(__file__).resolve().parent.parent / "checks"
SKETCH = 16  # numbers that are recorded of a behaviour
NEAR = 0.25  # of the distance to the truth: an answer that is nearer than that to a known mistake makes that mistake
DIGITS = 6  # of a recorded number
FAR = 1e6  # stands for infinities and NaN


def load(work: str, number: int) -> dict:
    """The records of a balise: {"hints": {slug: text}, "mistakes": [{slug, look, at, seen}]}; both empty if none.

    work: the name of its module, such as "data_augmentation".
    """
    path = path_of(work, number)
    return _read(path, path.stat().st_mtime_ns) if path.exists() else {"hints": {}, "mistakes": []}


def edges(work: str, number: int) -> dict[str, set[tuple[str, str]]]:
    """A balise's mistakes at the edge: {slug: after-effects}; see `wrong.py`. work: as for `load`."""
    path = edges_of(work)
    marked = _read(path, path.stat().st_mtime_ns).get(str(number), {}) if path.exists() else {}
    return {slug: set(map(tuple, after)) for slug, after in marked.items()}


def edges_of(work: str) -> Path:
    """Where the mistakes at the edge of a work are."""
    return CHECKS / work / "mistakes" / "edges.json"


def path_of(work: str, number: int) -> Path:
    """Where the records of a balise are."""
    return CHECKS / work / "mistakes" / f"{number}.json"


@functools.lru_cache(maxsize=64)
def _read(path: Path, _changed: int) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def sketch(value):
    """What is recorded of a behaviour, fit for JSON.

    value: numbers and tensors, also in lists and dictionaries: {"n": how many, "sums": list of floats}. If there are
    words in it, or None: {"words": its text}.
    """
    found: list[torch.Tensor] = []
    if not _numbers(value, found):
        return {"words": str(value)[:300]}
    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *found]).nan_to_num(FAR, FAR, -FAR).clamp(-FAR, FAR)
    sums = flat if len(flat) <= SKETCH else _signs(len(flat)) @ flat / len(flat) ** 0.5
    return {"n": len(flat), "sums": [float(f"{one:.{DIGITS}g}") for one in sums.tolist()]}


def _numbers(value, found) -> bool:
    """Put all numbers of `value` in `found`, float64 and flat; False where something in it is no number."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list | tuple):
        return all(_numbers(one, found) for one in value)
    if not isinstance(value, torch.Tensor | int | float | np.number):
        return False
    found.append(torch.as_tensor(value).detach().double().flatten())
    return True


@functools.lru_cache(maxsize=32)
def _signs(length: int) -> torch.Tensor:
    """(SKETCH, length) of -1 and 1."""
    drawn = random.Random(length).randbytes(SKETCH * -(-length // 8))
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8)).reshape(SKETCH, -1)[:, :length]
    return torch.from_numpy(2.0 * bits - 1)


def distance(one: dict, other: dict) -> float:
    """The distance of two sketches; infinite where the behaviours have not the same form."""
    if "words" in one or "words" in other or one["n"] != other["n"]:
        return 0.0 if one == other else float("inf")
    return float(np.linalg.norm(np.subtract(one["sums"], other["sums"])))


def nearest(evidence: dict, known: list[dict]) -> list[tuple[str, float]]:
    """The known mistakes that failed at the same look, the nearest first: (slug, distance), each slug once.

    evidence: {"look", "at", "seen", "due"}, the last two as sketches. A distance of 0 is the same behaviour, 1 is as
    far from the mistake as from the truth.
    """
    scale, found = distance(evidence["seen"], evidence["due"]), {}
    if scale == float("inf"):  # the truth has another form
        scale = float(np.linalg.norm(evidence["seen"].get("sums", [1.0])))
    for mistake in known:
        if mistake["look"] == evidence["look"] and mistake["at"] == evidence["at"]:
            far = distance(evidence["seen"], mistake["seen"])
            # where a sketch cannot tell the answer from the truth: only a mistake that it cannot tell either
            far = far / scale if scale else float("inf") if far else 0.0
            found[mistake["slug"]] = min(far, found.get(mistake["slug"], far))
    return sorted(found.items(), key=lambda pair: pair[1])
