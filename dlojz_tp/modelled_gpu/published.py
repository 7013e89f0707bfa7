"""Speeds that were published (rows.toml), beside what the same programs are worth on a modelled card."""

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dlojz_tp.modelled_gpu.programs import measure
from dlojz_tp.modelled_gpu.runs import Modelled, on_card
from dlojz_tp.planner.cards import CARDS

ROWS = Path(__file__).with_name("rows.toml")
FAMILIES = "GPT", "BERT", "ResNet", "EfficientNet"


@dataclass(frozen=True)
class Row:
    """figure: in `unit`, milliseconds or what is done a second. over: the row that a gain is counted from. fitted: a
    constant comes from it. options: of `programs.measure`."""

    source: str
    name: str
    card: str
    figure: float
    unit: str
    over: str | None
    fitted: bool
    options: Mapping = field(hash=False)

    def __str__(self):
        return f"{self.card:9} {self.source}: {self.name}"

    @property
    def family(self) -> str:
        return next(name for name in FAMILIES if self.options["net"].startswith(name.lower()))

    @property
    def done(self) -> int:
        """Images, sequences or tokens of a step."""
        per = self.options["length"] if self.unit == "tokens/s" else 1
        return self.options["batch"] * self.options.get("accumulate", 1) * per

    @property
    def seconds(self) -> float:
        """Of a step, as published."""
        return self.figure / 1e3 if self.unit == "ms" else self.done / self.figure

    def modelled(self) -> Modelled:
        """The run on the modelled card, whose result is the seconds of a step; memory is no limit."""
        card = replace(CARDS[self.card], memory=1e13)
        return on_card(partial(measure, **self.options), card=card, name=str(self))


def rows(words: Sequence[str] = ()) -> list[Row]:
    """The rows of which all these words are in the card's, the source's or the row's name."""
    found = []
    for source in tomllib.loads(ROWS.read_text(encoding="utf-8"))["sources"]:
        for given in source["rows"]:
            given = source["all"] | given
            kept = {key: given.pop(key, None) for key in ("name", "card", "figure", "over", "fitted")}
            row = Row(source["name"], unit=source["unit"], options=given, **kept | {"fitted": bool(kept["fitted"])})
            if all(word.lower() in f"{row} {row.family}".lower() for word in words):
                found.append(row)
    return found


def gains(seconds: Mapping[Row, float]) -> list[tuple[Row, float, float]]:
    """(row, published, modelled) of each gain of which both rows are there: one speed over the other."""
    found = {(row.source, row.card, row.name): row for row in seconds}
    pairs = [(row, found.get((row.source, row.card, row.over))) for row in seconds if row.over]
    more = [(row, old, row.done / old.done) for row, old in pairs if old]
    return [(row, n * old.seconds / row.seconds, n * seconds[old] / seconds[row]) for row, old, n in more]


def misses(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(mean, largest) size of the error of speeds or gains, each (published, modelled); (0, 0) of none."""
    sizes = [abs(modelled / published - 1) for published, modelled in pairs]
    return (statistics.mean(sizes), max(sizes)) if sizes else (0.0, 0.0)


def held_out(seconds: Mapping[Row, float]) -> tuple[list, list]:
    """Pairs (published, modelled) of the speeds, and of the gains, in which no constant was fitted."""
    held = {row: s for row, s in seconds.items() if not row.fitted}
    return [(1 / row.seconds, 1 / s) for row, s in held.items()], [(a, b) for _, a, b in gains(held)]
