"""Results measured on a real GPU, kept in `solutions/recorded/` and shown beside the trainee's own.

DLOJZ_RECORDED is another folder for them, for a rehearsal.

Modelled figures are there in modelled.json: the same everywhere, except for the rates at which 05 loads.
"""

import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dlojz_tp import frameworks, measure
from dlojz_tp.launch import place
from dlojz_tp.works.source import SOLUTIONS

MEASURED = SOLUTIONS / "recorded"  # what all notebooks show: never of a pretended GPU
FOLDER = Path(os.environ.get("DLOJZ_RECORDED") or MEASURED)
MODELLED = "modelled"


def load(work: str, key: str) -> Any:
    """What was recorded on a GPU for the practical work `work` under `key`; None if there is nothing."""
    return _read(work).get("results", {}).get(key)


def where(work: str) -> str | None:
    """Device, version and day of what is recorded for `work`, such as "NVIDIA H200, torch 2.11.0, 2026-11-21"."""
    found = _read(work)
    return f"{found['device']}, torch {found['torch']}, {found['date']}" if found else None


def line(work: str, key: str) -> str:
    """One line for a notebook: what was recorded under `key`, and where, or that nothing is yet."""
    found = load(work, key)
    if found is None:
        return "Nothing is recorded on GPUs yet: the figures above are this machine's alone."
    return f"recorded on {where(work)}: {found}"


def instead(library: str, work: str, key: str) -> Any:
    """What was recorded with a library that is not here, or None; prints that it is skipped, and how to get it."""
    kept = load(work, key)
    said = "nothing is recorded" if kept is None else f"what follows was recorded with it: {where(work)}"
    print(f"{library} is not installed here ({frameworks.install(library)}): skipped; {said}")
    return kept


def note(work: str, key: str, value: Any, *, on_cpu: bool = False) -> None:
    """Write a result, if this is a GPU and DLOJZ_RECORD is set; else do nothing.

    Results of another device, version or day are thrown away first: a file speaks of one run on one machine.

    Args:
        work: the practical work, such as "02_mixed_precision".
        key: name of the result.
        value: numbers, text, lists and dictionaries of these.
        on_cpu: also where there is no GPU: for what has nothing to do with one, or needs a library that few have.

    Raises:
        TypeError: for a value that JSON cannot hold.
    """
    if not (os.environ.get("DLOJZ_RECORD") and (on_cpu or torch.cuda.is_available())):
        return
    here = {
        "device": measure.hardware()["device_name"],
        "torch": torch.__version__.partition("+")[0],
        "date": date.today().isoformat(),
    }
    found = _read(work)
    results = found.pop("results", {}) if {k: found.get(k) for k in here} == here else {}
    _write(work, {**here, "results": {**results, key: value}})


def once(work: str, key: str, make: Callable[[], Any]) -> Any:
    """What is recorded under `key`; where nothing is, or while results are recorded, make() is run, and noted then."""
    found = load(work, key)
    if found is None or os.environ.get("DLOJZ_RECORD"):
        found = make()
        note(work, key, found, on_cpu=True)
    return found


def add(work: str, key: str, value: Any) -> None:
    """Write a result that follows from what is recorded for `work` already, of the same device and day."""
    found = _read(work)
    found["results"][key] = value
    _write(work, found)


def modelled(work: str) -> dict[str, dict]:
    """{card: what the solution of `work` is worth on a model of it}, as far as it is recorded."""
    return _read(MODELLED).get(work, {})


def note_modelled(work: str, card: str, value: dict) -> None:
    """Write what the solution of `work` is worth on a modelled card, while solutions are executed; else do nothing."""
    if os.environ.get("DLOJZ_RECORD") or os.environ.get("DLOJZ_RECORD_MODELLED"):
        found = _read(MODELLED)
        found[work] = found.get(work, {}) | {card: value}
        _write(MODELLED, dict(sorted(found.items())))


def _write(name: str, found: dict):
    pretended = place.pretended() or found.get("device", "").startswith(place.NAME)
    if pretended and FOLDER.resolve() == MEASURED.resolve():
        raise measure.RecordError(
            f"nothing of a pretended GPU is recorded in {MEASURED}: set DLOJZ_RECORDED to a folder"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def _read(work: str) -> dict:
    path = FOLDER / f"{work}.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise measure.RecordError(f"{path} is damaged ({error}). Get it back: git checkout -- {path}") from None
