"""The run record: what ran, on what, how fast, with how much memory. Reports read records, never logs."""

import json
import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from dlojz_tp.works import whole_file

from .machine import hardware, versions

SCHEMA = 1
KINDS = ("measured", "estimated")


class RecordError(ValueError):
    """A file that does not hold a run record of this schema."""


@dataclass
class Record:
    """One run, as plain data. ``new_record`` fills in machine, versions and date.

    Attributes:
        name: what ran, as a figure shows it.
        settings: free-form, for example ``batch_size``, ``image_size``, ``model``, ``world_size``.
        out_of_memory: the run failed for lack of memory; then there may be no steps.
        hardware: see ``machine.hardware``.
        versions: see ``machine.versions``.
        date: start of the record, ISO 8601 with the time zone.
        warmup: how many of ``steps``, at the front, are warm-up and count in no figure.
        steps: for each step the seconds of each phase, and ``total``, the whole step.
        images_per_second: throughput of the counted steps, over all ranks.
        peak_memory_bytes: highest memory in use, one entry a rank; empty if unknown.
        memory_kind: ``"measured"``, ``"estimated"``, or ``None`` if unknown.
        memory_parts: bytes of each part at the peak, if an estimate was made.
        losses: training loss of each step (warm-up included).
        accuracy: validation accuracy of each evaluation, from 0 to 1.
        communications: what was sent between ranks; filled by later tools.
        power: ``{"seconds": [...], "watts": [...]}`` if power was sampled.
        schema: version of this layout.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    out_of_memory: bool = False
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    warmup: int = 0
    steps: list[dict[str, float]] = field(default_factory=list)
    images_per_second: float | None = None
    peak_memory_bytes: list[int] = field(default_factory=list)
    memory_kind: str | None = None
    memory_parts: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    communications: list[dict[str, Any]] = field(default_factory=list)
    power: dict[str, list[float]] | None = None
    schema: int = SCHEMA


def new_record(name: str, device: torch.device | str | None = None, **values: Any) -> Record:
    """Make a record that already holds the machine, the versions and the date.

    Arguments named like a field of ``Record`` fill that field; any other goes to ``settings``. So a size that did
    not fit is ``new_record("resnet", out_of_memory=True, batch_size=512)``.

    Args:
        name: what ran.
        device: where it ran; ``None`` is the GPU if there is one.
        **values: fields and settings; tensors and other objects become numbers or text.

    Returns:
        A ``Record``.

    Raises:
        ValueError: for a ``memory_kind`` that is not ``"measured"`` or ``"estimated"``.
    """
    known = {f.name for f in fields(Record)} - {"schema"}
    given = {key: _plain(values.pop(key)) for key in list(values) if key in known}
    given["settings"] = {**given.get("settings", {}), **_plain(values)}
    if given.get("memory_kind") not in (None, *KINDS):
        raise ValueError(f"memory_kind is one of {KINDS}, not {given['memory_kind']!r}")
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return Record(name, **{"hardware": hardware(device), "versions": versions(), "date": now, **given})


def counted_steps(record: Record) -> list[dict[str, float]]:
    """Give the steps of a record that count: those after the warm-up.

    Args:
        record: a run record.

    Returns:
        One dictionary a step, phase to seconds, with ``total``.
    """
    return record.steps[record.warmup :]


def save(record: Record, path: str | os.PathLike) -> Path:
    """Write a record as JSON; an interruption leaves the old file or none, never half a file.

    Args:
        record: a run record.
        path: the file to write; its folder is made if missing.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A loss may be infinite or NaN, which JSON cannot say: null stands for it.
    text = json.dumps(_plain(asdict(record), finite=True), indent=1, allow_nan=False) + "\n"
    whole_file.replace(path, f".{path.name}.", text.encode())
    return path


def load(path: str | os.PathLike) -> Record:
    """Read a record written by ``save``.

    Args:
        path: the file.

    Returns:
        The ``Record``.

    Raises:
        FileNotFoundError: if there is no such file.
        RecordError: if the file is damaged, is no run record, or has another schema.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path} is damaged: not JSON ({error})") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise RecordError(f"{path} is no run record: it has no 'schema'")
    if content["schema"] != SCHEMA:
        raise RecordError(f"{path} has schema {content['schema']!r}, this version reads schema {SCHEMA}: run it again")
    defaults = asdict(Record(""))
    if content.keys() != defaults.keys():
        strange = sorted(content.keys() ^ defaults.keys())
        raise RecordError(f"{path} is damaged: missing or unknown fields {strange}")
    for name, default in defaults.items():
        wanted = _OPTIONAL.get(name, type(default))
        if not isinstance(content[name], wanted):
            raise RecordError(f"{path} is damaged: {name!r} holds {content[name]!r}")
    if not all(isinstance(step, dict) and "total" in step for step in content["steps"]):
        raise RecordError(f"{path} is damaged: a step without its 'total' time")
    for curve in ("losses", "accuracy"):
        content[curve] = [math.nan if value is None else value for value in content[curve]]
    return Record(**content)


# Fields that may be empty: their default does not tell their type.
_OPTIONAL = {
    "images_per_second": (int, float, type(None)),
    "memory_kind": (str, type(None)),
    "power": (dict, type(None)),
}


def _plain(value: Any, finite: bool = False) -> Any:
    """Turn tensors, numpy numbers, paths and the like into what JSON holds; with ``finite``, NaN becomes None."""
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, finite) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) or not finite else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Sequence | Set):
        return [_plain(item, finite) for item in value]
    return str(value)
