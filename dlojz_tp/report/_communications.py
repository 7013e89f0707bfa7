"""What crosses between ranks, and whether it hides behind the computation."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlojz_tp.measure import Record, human_bytes, human_seconds

from ._style import COLOURS, GREY, Chart, as_records, style

MOST_RANKS = 8  # lanes that can be told apart
MOST_LAYERS = 4  # collectives drawn above each other where they run at once
WAITING = "wait"  # a phase of this name is no work: nothing hides behind it
PINK = COLOURS["communication"]


def communications(records: Record | Sequence[Record]) -> Chart:
    """Show what ranks sent: kinds, counts, bytes and times, and each collective over time, below what the rank did.

    Args:
        records: one or more runs whose ``communications`` hold entries of ``measure.Communications``, of all ranks.
            A phase called "wait" counts as idle. Several runs share the time axis.

    Returns:
        A figure.

    Raises:
        TypeError: if these are no records.
        ValueError: if a record holds no communication that has ended.
    """
    records = as_records(records)
    runs = [_by_rank(record) for record in records]
    lengths = [max(e["end"] for found in ranks.values() for e in found) for ranks in runs]
    heights = [1.0 + 0.62 * min(len(ranks), MOST_RANKS) for ranks in runs]
    with style():
        figure = Chart(height=0.8 + sum(heights))
        grid = figure.subplots(
            len(runs), 2, squeeze=False, gridspec_kw={"width_ratios": [3, 8], "height_ratios": heights}
        )
        figure.suptitle("What do the ranks send, and does it hide behind the computation?")
        drawn: dict[str, str] = {}
        most = 0.0
        for (left, right), record, ranks in zip(grid, records, runs, strict=True):
            most = max(most, _kinds(left, ranks))
            _lanes(right, record.name, ranks, drawn)
            right.set_xlim(0, 1000 * max(lengths))
        for left in grid[:, 0]:
            left.set_xlim(0, 1.7 * most or 1.0)  # room for the number of the longest bar
        grid[-1, 0].set_xlabel("time in flight (ms), a rank")
        grid[-1, 1].set_xlabel("time (ms)")
        handles = [Patch(color=colour, label=name) for name, colour in drawn.items()]
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles))
    return figure


def _by_rank(record: Record) -> dict[int, list[dict]]:
    """Sort the entries that have ended by rank; times from the first of them on."""
    ended = [e for e in record.communications if e.get("end") is not None and e.get("start") is not None]
    if not any(e["kind"] != "phase" for e in ended):
        raise ValueError(f"the record {record.name!r} holds no communication: make it with measure.Communications")
    begin = min(e["start"] for e in ended)
    ranks: dict[int, list[dict]] = {}
    for e in ended:
        ranks.setdefault(e["rank"], []).append(e | {"start": e["start"] - begin, "end": e["end"] - begin})
    return dict(sorted(ranks.items()))


def _sent(entries: list[dict]) -> list[dict]:
    return [e for e in entries if e["kind"] != "phase"]


def _kinds(ax: Axes, ranks: dict[int, list[dict]]) -> float:
    """One bar a kind: mean time in flight of a rank, with how often and how many bytes. Returns the longest (ms)."""
    names = list(dict.fromkeys(e["name"] for entries in ranks.values() for e in _sent(entries)))
    times = []
    for row, name in enumerate(names):
        mine = [[e for e in _sent(entries) if e["name"] == name] for entries in ranks.values()]
        seconds = sum(_length(_union(found)) for found in mine) / len(ranks)
        count, size = (sum(map(f, mine)) / len(ranks) for f in (len, lambda found: sum(e["bytes"] for e in found)))
        times.append(1000 * seconds)
        ax.barh(row, 1000 * seconds, height=0.3, color=PINK)
        words = f"{name}: {count:.4g} calls, {human_bytes(size)}"
        ax.text(0, row - 0.2, words, ha="left", va="bottom")
        ax.text(1000 * seconds, row, f" {human_seconds(seconds)}", ha="left", va="center")
    ax.set_ylim(len(names) - 0.5, -0.8)
    ax.set_yticks([])
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_title("A rank sends")
    return max(times)


def _lanes(ax: Axes, name: str, ranks: dict[int, list[dict]], drawn: dict[str, str]) -> None:
    """Two lanes a rank: what it did, and below it what was in flight."""
    shown = dict(list(ranks.items())[:MOST_RANKS])
    ticks = {}
    for row, (rank, entries) in enumerate(shown.items()):
        for e in entries:
            if e["kind"] == "phase":
                colour = "#DDDDDD" if e["name"] == WAITING else COLOURS.get(e["name"], GREY)
                drawn[e["name"]] = colour
                _bar(ax, e, row - 0.22, 0.4, colour)
        layers = _layers(_sent(entries))
        height = 0.4 / len(layers)
        for depth, layer in enumerate(layers):
            for e in layer:
                _bar(ax, e, row + 0.02 + height * (depth + 0.5), height, PINK)
        ticks[row] = f"rank {rank}"
    drawn["communication"] = PINK
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    hidden = _hidden(ranks)
    words = "" if hidden is None else f": {100 * hidden:.0f} % of the communication hides behind work"
    left_out = f" ({MOST_RANKS} of {len(ranks)} ranks shown)" if len(ranks) > MOST_RANKS else ""
    ax.set_title(name + words + left_out)


def _bar(ax: Axes, e: dict, row: float, height: float, colour: str) -> None:
    width = 1000 * (e["end"] - e["start"])
    ax.barh(row, width, left=1000 * e["start"], height=height, color=colour, edgecolor="white", linewidth=0.6)


def _layers(entries: list[dict]) -> list[list[dict]]:
    """Spread what runs at once over layers; what finds none free goes to the last."""
    layers: list[list[dict]] = [[]]
    for e in sorted(entries, key=lambda e: e["start"]):
        free = next((layer for layer in layers if not layer or layer[-1]["end"] <= e["start"]), None)
        if free is None and len(layers) < MOST_LAYERS:
            free = []
            layers.append(free)
        (layers[-1] if free is None else free).append(e)
    return layers


def _hidden(ranks: dict[int, list[dict]]) -> float | None:
    """The share of the time in flight during which the rank worked; None without phases."""
    if not any(e["kind"] == "phase" for entries in ranks.values() for e in entries):
        return None
    flying = covered = 0.0
    for entries in ranks.values():
        sent = _union(_sent(entries))
        work = _union([e for e in entries if e["kind"] == "phase" and e["name"] != WAITING])
        flying += _length(sent)
        covered += sum(max(0.0, min(b, d) - max(a, c)) for a, b in sent for c, d in work)
    return covered / flying if flying else 0.0


def _union(entries: list[dict]) -> list[tuple[float, float]]:
    """Join intervals that touch: what runs at once counts once."""
    joined: list[list[float]] = []
    for begin, end in sorted((e["start"], e["end"]) for e in entries):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return [(begin, end) for begin, end in joined]


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)
