"""Places in a race: ties within the noise are ties."""

LEVEL = 0.02  # ratios this close are level: on a quiet machine, too, another start of a race differs as much


def level(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two races, (ratio, noise) each, differ by no more than the larger noise."""
    low, high = sorted((one[0], other[0]))
    return high / low - 1 <= max(one[1], other[1], LEVEL)


def ranked(best: dict[str, tuple[float, float]]) -> list[dict]:
    """A line for each name, the smallest ratio first. best: {name: (ratio, noise)}.

    A name that is level with the first of a place shares it; the next place counts all names before it.
    """
    lines, first = [], None
    for k, (name, one) in enumerate(sorted(best.items(), key=lambda item: (item[1], item[0])), 1):
        if first is None or not level(first[1], one):
            first = k, one
        lines.append({"place": first[0], "name": name, "ratio": one[0], "noise": one[1]})
    return lines
