"""Keep the runs of a race, a folder each, and compare them in a table. Needs no server and no network."""

import html
import importlib.util
import json
import logging
import math
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from dlojz_tp.works import temporary, whole_file
from dlojz_tp.works.columns import aligned

from .machine import hardware, versions
from .units import human_seconds

RUN = "run.json"
FORMAT = 1
TYPES = {
    "name": str, "config": dict, "curve": list, "data_version": str,
    "code_version": dict | None, "cost": dict | None,
}  # fmt: skip
LEFT = ("name", "data", "code")  # columns of words; numbers end at the right
MLRUNS = "mlruns"  # the folder that MLflow's copies are in
GIT_SECONDS = 2  # a checkout on a slow file system must not hold a run up
DAY = 86400  # seconds: no run takes so long to write
NAMED = 5  # as many files that are no runs are named


def note(
    folder: str | os.PathLike,
    name: str,
    config: Mapping[str, object],
    seconds: float,
    curve: Sequence[tuple[float, float]],
    *,
    data_version: str,
    cost: Mapping[str, float] | None = None,
) -> Path:
    """Keep one run of a race in a new folder below `folder`, whole or not at all.

    The new folder holds `run.json`, with all of this, the code's version, date, machine and versions; and TensorBoard's
    event files: the accuracy of each evaluation, and the configuration for the page HPARAMS. Where MLflow is installed,
    it gets a copy too, in a database in `folder`/mlruns; to make that takes some ten seconds, once. Look at it with
    ``mlflow ui --backend-store-uri sqlite:///FOLDER/mlruns/mlflow.db``. MLflow would report its use over the network:
    that is switched off for this process. A copy that fails gives a warning; the run is kept.

    Args:
        folder: of all runs that shall be compared; made if missing.
        name: of the entry. Several runs may have the same.
        config: what was chosen, each a number, a word or a boolean.
        seconds: to the target; ``math.inf`` or ``None`` where it was never reached.
        curve: for each evaluation the seconds since the start, and the accuracy from 0 to 1.
        data_version: names the data set's bytes, as `PhotoCells.version` does.
        cost: what the run used, by unit, such as ``{"kWh": 0.002}``.

    Returns:
        The new folder.

    Raises:
        ValueError: for a value that is none of these, or more evaluations than `table` would read, some ten thousand.
        OSError: where the folder cannot be written.
    """
    now, folder = time.time(), Path(folder).absolute()
    run = {
        "format": FORMAT,
        "name": str(name),
        "config": {str(key): _plain(f"config[{key!r}]", value) for key, value in config.items()},
        "seconds": None if seconds is None or seconds == math.inf else _number("seconds", seconds),
        "curve": [[_number("a time of the curve", at), _number("an accuracy", value)] for at, value in curve],
        "data_version": str(data_version),
        "code_version": code_version(),
        "date": datetime.fromtimestamp(now).astimezone().isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "cost": None if cost is None else {str(key): _number(f"cost[{key!r}]", value) for key, value in cost.items()},
    }
    text = json.dumps(run, indent=1, allow_nan=False) + "\n"
    if len(text) > whole_file.LARGEST:
        raise ValueError(f"{len(run['curve']):,} evaluations are too many to keep: give some of them")
    started = now - (run["curve"][-1][0] if run["curve"] else 0)
    folder.mkdir(parents=True, exist_ok=True)
    temporary.remove_ended(folder, ".noting-", unknown_after=DAY)  # what interrupted runs left
    work = Path(tempfile.mkdtemp(prefix=f".noting-{temporary.label()}-", dir=folder))
    try:
        new = work / "run"
        new.mkdir()
        _copy("tensorboard", _to_tensorboard, new, run, started)
        (new / RUN).write_text(text)
        word = re.sub(r"[^\w.-]+", "-", run["name"])[:40].strip("-.") or "run"
        place = folder / f"{word}-{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        new.rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _copy("mlflow", _to_mlflow, folder, run, started)
    return place


def table(folder: str | os.PathLike) -> "Table":
    """Read all runs that `note` has kept in the folder; what is no whole run there is named and left out.

    Args:
        folder: as `note` was given it; one without runs, or that is not there, gives an empty table.

    Returns:
        A ``Table``: a notebook shows it, and so does ``print``.

    Raises:
        OSError: where the folder cannot be read.
    """
    folder, runs, skipped = Path(folder), [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") or path.name == MLRUNS:
            continue
        try:
            runs.append(_read(path / RUN) | {"folder": path})
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            skipped.append(f"{path.name} ({f'no {RUN}' if missing else f'its {RUN} is damaged'})")
    return Table(folder, sorted(runs, key=lambda run: (_or_inf(run["seconds"]), -_best(run))), skipped)


@dataclass(repr=False)
class Table:
    """Runs side by side, the fastest to the target first.

    Attributes:
        folder: where they are kept.
        runs: for each what its `run.json` says, and ``folder``, its own.
        skipped: what else is in the folder, and why it is no run.
    """

    folder: Path
    runs: list[dict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        heads, rows = self._heads(), self._rows()
        right = {i for i, head in enumerate(heads) if head not in LEFT}
        lines = aligned([heads, *rows], right) if rows else []
        return "\n".join([*lines, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heads, rows = self._heads(), self._rows()

        def line(tag, cells):
            sides = ["left" if head in LEFT else "right" for head in heads]
            cells = (f"<{tag} style='text-align:{at}'>{html.escape(cell)}</{tag}>" for at, cell in zip(sides, cells))
            return f"<tr>{''.join(cells)}</tr>"

        body = "".join([line("th", heads), *(line("td", row) for row in rows)]) if rows else ""
        return f"<table>{body}</table>" + "".join(f"<p>{html.escape(text)}</p>" for text in self._notes())

    def _chosen(self) -> list[str]:
        """The entries of the configuration in which the runs differ."""
        keys = dict.fromkeys(key for run in self.runs for key in run["config"])
        values = {key: [run["config"].get(key) for run in self.runs] for key in keys}
        return [key for key in keys if len({(type(value) is bool, value) for value in values[key]}) > 1]  # 1 is 1.0

    def _costed(self) -> bool:
        return any("kWh" in (run["cost"] or {}) for run in self.runs)

    def _heads(self) -> list[str]:
        chosen = [_line(key) for key in self._chosen()]
        return ["name", "seconds", "best accuracy", *chosen, "data", "code", *(["kWh"] if self._costed() else [])]

    def _rows(self) -> list[list[str]]:
        return [
            [
                _line(run["name"]),
                "never" if run["seconds"] is None else human_seconds(run["seconds"]),
                f"{_best(run):.3f}" if run["curve"] else "—",
                *(_line(_shown(run["config"].get(key))) for key in self._chosen()),
                _line(run["data_version"]),
                _code(run["code_version"]),
                *([_shown((run["cost"] or {}).get("kWh"))] if self._costed() else []),
            ]
            for run in self.runs
        ]

    def _notes(self) -> list[str]:
        notes = [] if self.runs else [f"no runs in {_line(self.folder)}"]
        if self.skipped:
            more = f", and {len(self.skipped) - NAMED} more" if len(self.skipped) > NAMED else ""
            notes.append(f"left out, for they are no runs: {_line(', '.join(self.skipped[:NAMED]))}{more}")
        return notes


def code_version() -> dict | None:
    """The git commit of the working folder, and whether all files that git follows are as it has them.

    Returns:
        ``{"commit", "clean"}``; ``None`` outside of a checkout, without git, or where git takes more than two seconds.
    """
    ask = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        said = subprocess.run(
            ask, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=GIT_SECONDS,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # leaves a git that runs at the same time alone
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    commit = re.search(r"^# branch\.oid ([0-9a-f]{7,64})$", said.stdout, re.MULTILINE)
    if said.returncode or not commit:  # a checkout without a commit has none
        return None
    return {"commit": commit[1], "clean": all(line.startswith("#") for line in said.stdout.splitlines())}


def _copy(library: str, write, *arguments) -> None:
    """Give the run to a library where it is installed."""
    if not importlib.util.find_spec(library):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the library itself uses
            write(*arguments)
    except Exception as error:  # of a library: it must not cost the run
        warnings.warn(f"{library} did not take the run: {_line(error)[:300]}", stacklevel=3)


def _to_tensorboard(folder: Path, run: dict, started: float) -> None:
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    with SummaryWriter(folder) as writer:
        for step, (at, accuracy) in enumerate(run["curve"]):
            writer.add_scalar("accuracy", accuracy, step, walltime=started + at)
        for name, value in _metrics(run).items():
            writer.add_scalar(name, value)
        # SummaryWriter.add_hparams also writes which columns the page has. TensorBoard takes those of any one run, and
        # the entries that this one lacks are not shown; without them it looks into all runs.
        _, *session = hparams(run["config"], {})
        for part in session:
            writer.file_writer.add_summary(part)


def _to_mlflow(folder: Path, run: dict, started: float) -> None:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow
    from mlflow.entities import Metric, Param, RunTag

    if "?" in str(folder):  # begins the options in the address of a database
        raise ValueError("its database can be in no folder with a ? in its name")
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # tells when it makes its tables
    place = folder / MLRUNS
    place.mkdir(exist_ok=True)
    # a client of its own: what a trainee has set for MLflow stays as it is
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{place / 'mlflow.db'}")
    known = client.get_experiment_by_name("race")
    experiment = known.experiment_id if known else client.create_experiment("race", (place / "artifacts").as_uri())
    times = [round(1000 * (started + at)) for at, _ in run["curve"]]
    end = times[-1] if times else round(1000 * started)
    metrics = [Metric("accuracy", value, at, step) for step, (at, (_, value)) in enumerate(zip(times, run["curve"]))]
    metrics += [Metric(key, value, end, 0) for key, value in (_metrics(run) | (run["cost"] or {})).items()]
    tags = {"data_version": run["data_version"], "code_version": _code(run["code_version"], short=False)}
    made = client.create_run(experiment, start_time=round(1000 * started), run_name=run["name"])
    client.log_batch(
        made.info.run_id,
        metrics=metrics,
        params=[Param(key, str(value)) for key, value in run["config"].items()],
        tags=[RunTag(key, value) for key, value in tags.items()],
    )
    client.set_terminated(made.info.run_id, end_time=end)


def _metrics(run: dict) -> dict[str, float]:
    """What runs are compared by; a run that never reached the target has no seconds."""
    found = {"seconds": run["seconds"], "best accuracy": _best(run) if run["curve"] else None}
    return {key: value for key, value in found.items() if value is not None}


def _read(path: Path) -> dict:
    """A run, its entries of the types that `note` writes. Raises what `table` catches."""
    run = json.loads(whole_file.read(path))
    if run["format"] != FORMAT:
        raise ValueError(f"format {run['format']}")
    for key, kind in TYPES.items():
        if not isinstance(run[key], kind):
            raise ValueError(key)
    for key, value in run["config"].items():
        _plain(key, value)
    if run["seconds"] is not None:
        _number("seconds", run["seconds"])
    for at, value in run["curve"]:
        _number("curve", at)
        _number("curve", value)
    for key, value in (run["cost"] or {}).items():
        _number(key, value)
    if run["code_version"] is not None and not isinstance(run["code_version"]["commit"], str):
        raise ValueError("code_version")
    return run


def _plain(what: str, value: object) -> bool | int | float | str:
    """The value of a tensor or of numpy's as Python's own. Raises ValueError for what JSON holds in no single value."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"{what} is a finite number, a word or a boolean, not {value!r}")


def _number(what: str, value: object) -> float:
    value = _plain(what, value)
    if isinstance(value, str):
        raise ValueError(f"{what} is a number, not {value!r}")
    return float(value)


def _best(run: dict) -> float:
    return max((accuracy for _, accuracy in run["curve"]), default=0.0)


def _or_inf(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _code(version: dict | None, short: bool = True) -> str:
    if version is None:
        return "unknown"
    commit = version["commit"][:8] if short else version["commit"]
    return commit if version["clean"] else f"{commit}, changed"


def _line(text: object) -> str:
    """The text on one line, without characters that move a terminal's cursor or turn the direction of writing."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(text))


def _shown(value: object) -> str:
    if value is None:
        return "—"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
