"""What each practical work on one device gained, measured and modelled, kept from notebook to notebook."""

import contextlib
import html
import itertools
import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dlojz_tp import measure
from dlojz_tp.cards.render import Card
from dlojz_tp.measure import Record, human_seconds
from dlojz_tp.modelled_gpu import MISSED
from dlojz_tp.report import recorded
from dlojz_tp.works import state
from dlojz_tp.works.columns import aligned

SAME = 1.2  # two runs of one setting on a machine that has other things to do too may differ by this factor
KEY = "gain"  # under which a GPU's figures are recorded
BESIDE = "modelled"  # under which the model of the same card is recorded, with its errors
_here: dict[str, tuple[Record, Record]] = {}  # what this process measured, should the folder not be writable
_modelled: dict[str, dict] = {}  # and what it modelled


@dataclass(frozen=True)
class Gain:
    """One technique: medians of a step's computing and of the wait for its batch (seconds), images a second."""

    work: str
    technique: str
    step: tuple[float, float]  # before, after
    loading: tuple[float, float]
    images_per_second: tuple[float, float]
    device: str

    @property
    def factor(self) -> float:
        """Images a second after the technique over those before it."""
        return self.images_per_second[1] / self.images_per_second[0]


def keep(work: str, technique: str, before: Record, after: Record) -> None:
    """Keep what a technique gained, in the trainee's private state folder; run again, it replaces the old figures.

    Args:
        work: the practical work, such as "02_mixed_precision".
        technique: what was added between the two runs, as the table shows it.
        before, after: records of `training_run.run`, made one after the other.

    Raises:
        ValueError: for a record without steps that count, or for two that ran on different devices or sizes.
    """
    gain = _gain(work, technique, before, after)
    after = replace(after, settings={**after.settings, "technique": technique})
    _here[work] = before, after
    with contextlib.suppress(OSError):  # a folder that cannot be written is no error: this process remembers
        for name, record in (("before", before), ("after", after)):
            measure.save(record, _folder() / f"{work}.{name}.json")
    recorded.note(work, KEY, asdict(gain))


def keep_modelled(work: str, card: str, before: Record, after: Record, *, loads: bool = False) -> None:
    """Keep what the technique of a work would gain on a modelled card, as `keep` does with what was measured.

    loads: the loading of batches is part of the model; else they are there when a step wants them.
    """
    pair = before, after
    figures = {
        "card": card,
        "images": before.settings["batch_size"],
        "steps": [record.name for record in pair],
        "seconds": [float(f"{_median(record, 'total'):.4g}") for record in pair],
        "loads": loads,
    }
    _modelled[work] = figures
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / f"{work}.modelled.json").write_text(json.dumps(figures))
    recorded.note_modelled(work, card, figures)


def kept_modelled() -> dict[str, dict]:
    """{work: figures} of `keep_modelled`; damaged files count as none."""
    found = {}
    for path in _folder().glob("[0-9][0-9]_*.modelled.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, IndexError, ZeroDivisionError):
            figures = json.loads(path.read_text())
            _factor(figures)
            found[path.name.removesuffix(".modelled.json")] = figures
    return dict(sorted((found | _modelled).items()))


def expected(work: str) -> str:
    """For the opening of a work: what is recorded on a GPU, and what its solution is worth on a modelled card."""
    measured, model = recorded.load(work, KEY), _recorded_model(work)
    lines = ["No training run of a GPU is recorded yet for this work."]
    if measured:
        speeds = " → ".join(f"{value:,.0f}" for value in measured["images_per_second"])
        lines = [f"recorded on {recorded.where(work)}: {speeds} images/s, {_on_gpu(work)}"]
    if model:
        steps = " → ".join(f"{name} {human_seconds(s)}" for name, s in zip(model["steps"], model["seconds"]))
        said = f"{steps} a step of {model['images']} images, × {_factor(model):.2f}{_error(model)}"
        lines.append(f"modelled, {model['card']}: {said}")
        lines += [MISSED] * ("error" not in model)
    return "\n".join(lines)


def beside(work: str) -> str | None:
    """After a run on a GPU: record the model of the same card beside what was measured. One line; None for neither."""
    measured = recorded.load(work, KEY)
    cards = recorded.modelled(work) if measured else {}
    model = next((found for card, found in cards.items() if card in measured["device"]), None)
    if model is None:
        return None
    true = [model["images"] / speed for speed in measured["images_per_second"]] if model["loads"] else measured["step"]
    errors = [a / b - 1 for a, b in zip(model["seconds"], true)]
    model |= {"measured": true, "errors of a step": errors, "error": _factor(model) * true[1] / true[0] - 1}
    recorded.add(work, BESIDE, model)
    mine, true = (" → ".join(map(human_seconds, pair)) for pair in (model["seconds"], true))
    return f"modelled, {model['card']}: {mine} a step, × {_factor(model):.2f}; measured {true}{_error(model)}"


def _recorded_model(work) -> dict | None:
    return recorded.load(work, BESIDE) or next(iter(recorded.modelled(work).values()), None)


def _factor(model) -> float:
    before, after = model["seconds"]
    return before / after


def _error(model) -> str:
    if "error" not in model:
        return ""
    what = "step, with its loading" if model["loads"] else "step alone"
    return f" ({100 * model['error']:+.0f} % off the measured gain of the {what})"


def table() -> Card:
    """One row a practical work done so far on this machine, beside what was recorded on a GPU and what is modelled."""
    found = kept()
    if not (found or kept_modelled()):
        return Card(_NOTHING, f"<p>{_NOTHING}</p>")
    return Card(_text(found), _html(found))


def kept() -> list[Gain]:
    """The gains kept on this machine, in the order of the works; damaged or half-written files count as none."""
    pairs = {}
    for path in _folder().glob("[0-9][0-9]_*.after.json"):
        work = path.name.removesuffix(".after.json")
        with contextlib.suppress(OSError, ValueError):
            pairs[work] = measure.load(path.with_name(f"{work}.before.json")), measure.load(path)
    pairs |= _here
    found = []
    for work, (before, after) in sorted(pairs.items()):
        with contextlib.suppress(KeyError, ValueError):  # a pair of which only one half was written anew
            found.append(_gain(work, after.settings["technique"], before, after))
    return found


_NOTHING = "No gain is kept yet: run a practical work to its end."
_HEAD = ("work", "technique", "step", "loading", "images/s", "gain", "on a GPU", "modelled")


def _folder() -> Path:
    return state.folder() / "gains"


def _gain(work, technique, before, after) -> Gain:
    for record in (before, after):
        if not record.images_per_second:
            raise ValueError(f"{record.name!r} has no step that counts: run more steps than the warm-up")
    if _what(before) != _what(after):
        raise ValueError(f"before and after are not the same training run: {_what(before)} and {_what(after)}")
    pairs = {phase: tuple(_median(record, phase) for record in (before, after)) for phase in ("step", "loading")}
    speeds = before.images_per_second, after.images_per_second
    return Gain(work, technique, pairs["step"], pairs["loading"], speeds, before.hardware.get("device_name", ""))


def _what(record) -> tuple:
    sizes = (record.settings.get(name) for name in ("model", "image_size", "batch_size"))
    return record.hardware.get("device_name"), *sizes


def _median(record, phase) -> float:
    return statistics.median(step.get(phase, 0.0) for step in measure.counted_steps(record))


def _on_gpu(work) -> str:
    before, after = (recorded.load(work, KEY) or {}).get("images_per_second", (1, 0))
    return f"× {after / before:.2f}" if after else ""


def _on_model(work) -> str:
    """The trainee's own, unless the model has figures of a GPU beside it."""
    model = recorded.load(work, BESIDE) or kept_modelled().get(work)
    return f"{model['card']}: × {_factor(model):.2f}{_error(model)}" if model else ""


def _rows(found) -> list[tuple[str, ...]]:
    """Works of which only the model is known have a row too; columns that would be empty are left out."""
    rows = [
        (work, " → ".join(figures["steps"]), "", "", "", "", _on_gpu(work), _on_model(work))
        for work, figures in kept_modelled().items()
        if work not in {gain.work for gain in found}
    ]
    for gain in found:
        times = (" → ".join(human_seconds(s) for s in pair) for pair in (gain.step, gain.loading))
        speed = " → ".join(f"{value:,.0f}" for value in gain.images_per_second)
        gpu = _on_gpu(gain.work), _on_model(gain.work)
        rows.append((gain.work, gain.technique, *times, speed, f"× {gain.factor:.2f}", *gpu))
    rows = [_HEAD, *sorted(rows)]
    shown = [i for i in range(len(_HEAD)) if any(row[i] for row in rows[1:])]
    return [tuple(row[i] for i in shown) for row in rows]


def _notes(found) -> list[str]:
    """The lines under the table: what the gains give together, where they were measured, where the GPU's come from."""
    devices = " and ".join(dict.fromkeys(gain.device for gain in found))
    notes = [*filter(None, [_together(found)]), *([f"Measured on {devices}."] if found else [])]
    places = dict.fromkeys(filter(None, (recorded.where(gain.work) for gain in found)))
    notes.append(f"On a GPU: {'; '.join(places)}." if places else "No figures of a GPU are recorded yet.")
    if any(_on_model(work) for work in {*kept_modelled(), *(gain.work for gain in found)}):
        notes.append(f"Modelled: nothing in this column was measured. {MISSED}")
    return notes


def _together(found) -> str:
    """From the first step to the last, where each begins at the speed with which the one before ended; else why not."""
    for last, gain in itertools.pairwise(found):
        if last.device != gain.device:
            return "No product of the gains: they were not measured on one machine."
        ended, begins = last.images_per_second[1], gain.images_per_second[0]
        if not 1 / SAME < begins / ended < SAME:
            return (
                f"No product of the gains: {gain.work} does not build on {last.work}, which ended with {ended:,.0f} "
                f"images/s, while it begins with {begins:,.0f}."
            )
    if len(found) < 2:
        return ""
    return f"All together: × {found[-1].images_per_second[1] / found[0].images_per_second[0]:.2f}, first to last."


def _text(found) -> str:
    return "\n".join([*aligned(_rows(found)), *_notes(found)])


def _html(found) -> str:
    left = "style='text-align:left'"

    def row(cells, tag):
        return "<tr>" + "".join(f"<{tag} {left}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *rows = _rows(found)
    body = row(head, "th") + "".join(row(cells, "td") for cells in rows)
    return f"<table>{body}</table>" + "".join(f"<p>{html.escape(note)}</p>" for note in _notes(found))
