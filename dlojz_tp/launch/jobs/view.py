"""A job as it is shown: live in a notebook, plain lines elsewhere, and the table of all jobs."""

import html
from dataclasses import dataclass

from dlojz_tp.launch import starting
from dlojz_tp.launch.jobs import files
from dlojz_tp.works.columns import aligned

LINES = 8  # of the logs, at the end of the live view
LONGEST = 120  # characters of a reason
KINDS = {"done": "pass", "failed": "fail", "cancelled": "fail"}


@dataclass(frozen=True)
class Look:
    """How a job is: state in one word, why it waits or where it runs, seconds from its submission to its end or now.

    over: it has ended. error: what `results` raises.
    """

    state: str
    reason: str
    seconds: float
    over: bool = False
    error: Exception | None = None

    def words(self) -> str:
        """State, time and reason on one line."""
        s = int(self.seconds)
        time = f"{s // 60} min {s % 60:02} s" if s >= 60 else f"{s} s"
        return f"{self.state}, {time}" + (f" ({shorten(self.reason)})" if self.reason else "")


def shorten(text: str) -> str:
    """A text of one line, cut where it is long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class View:
    """Shows the progress of a job while somebody waits for it, in one place: `view = View(job)`, `view.show(look)`."""

    def __init__(self, job):
        self._job = job
        self._handle = None
        self._in_notebook = starting.in_notebook()
        self._said = ""
        self._read = [0] * job.world_size  # bytes of each log that are printed

    def show(self, look: Look) -> None:
        """Show the state, then what the logs say by now."""
        if self._in_notebook:
            self._show_rich(look)
        else:
            self._show_plain(look)

    def _show_rich(self, look: Look) -> None:
        from IPython.display import display

        lines = _last_lines(self._job)
        text = "\n".join([f"Job {self._job.name}: {look.words()}, {self._job.where()}", *lines])
        bundle = {"text/plain": text, "text/html": page(self._job, look, lines)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _show_plain(self, look: Look) -> None:
        self._print_logs(whole=look.over)
        if (look.state, look.reason) != self._said:
            self._said = (look.state, look.reason)
            print(f"Job {self._job.name}: {look.words()}", flush=True)

    def _print_logs(self, whole: bool) -> None:
        for rank, read in enumerate(self._read):
            text = _tail_from(self._job.folder / f"rank-{rank}.log", read)
            end = len(text) if whole else text.rfind(b"\n") + 1
            self._read[rank] = read + end
            for line in text[:end].decode(errors="replace").splitlines():
                print(f"[rank {rank}] {line}", flush=True)


def _tail_from(path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError:
        return b""


def _last_lines(job) -> list[str]:
    """The last lines of all logs, a few of each rank; the batch script's own where no rank has printed."""
    n = job.world_size
    each = max(1, LINES // n)
    lines = [f"[rank {r}] {line}" for r in range(n) for line in files.tail(job.folder / f"rank-{r}.log", each)]
    return lines[: max(LINES, n)] or files.tail(job.folder / "batch.log", LINES)


def page(job, look: Look, lines: list[str]) -> str:
    """A job as HTML, in the style of the verdicts."""
    from dlojz_tp.cards import render

    kind = KINDS.get(look.state, "not done")
    mark = {"pass": "✓", "fail": "✗"}.get(kind, "…")
    head = f"<b>{mark} Job {_e(job.name)}</b>: {_e(look.words())} <span style='opacity:.7'>{_e(job.where())}</span>"
    style = "margin:4px 0 0;background:transparent;color:inherit;white-space:pre-wrap;font-size:90%"
    log = f'<pre style="{style}">{_e(chr(10).join(lines))}</pre>' if lines else ""
    return f'<div style="{render._STYLE.format(c=render._COLOUR[kind])}">{head}{log}</div>'


class Table:
    """The user's jobs: a table that also finds one by its name, `launch.queue()["train-1"]`."""

    def __init__(self, jobs: list, looks: list[Look]):
        self._jobs, self._looks = jobs, looks

    def __getitem__(self, name: str):
        for job in self._jobs:
            if job.name == name:
                return job
        names = ", ".join(job.name for job in self._jobs) or "none"
        raise KeyError(f"no job {name!r}; there are: {names}")

    def __iter__(self):
        return iter(self._jobs)

    def __len__(self):
        return len(self._jobs)

    def _rows(self) -> list[tuple[str, ...]]:
        return [(job.name, *_columns(look), job.where()) for job, look in zip(self._jobs, self._looks, strict=True)]

    def __repr__(self):
        if not self._jobs:
            return "no jobs"
        return "\n".join(aligned([("name", "state", "time", "reason", "size"), *self._rows()]))

    def _repr_html_(self):
        if not self._jobs:
            return "no jobs"
        rows = ["".join(f"<td style='text-align:left'>{_e(cell)}</td>" for cell in row) for row in self._rows()]
        head = "".join(
            f"<th style='text-align:left'>{name}</th>" for name in ("name", "state", "time", "reason", "size")
        )
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _columns(look: Look) -> tuple[str, str, str]:
    return look.state, f"{int(look.seconds) // 60}:{int(look.seconds) % 60:02}", shorten(look.reason)


def _e(text) -> str:
    return html.escape(str(text))
