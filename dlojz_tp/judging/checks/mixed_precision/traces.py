"""Scales that a scaler with a known mistake goes through, and the random overflows that tell them apart."""

import random


def random_overflows(seed: int, interval: int) -> list[bool]:
    """40 steps: a row of good ones longer than twice the interval, overflows one by one and in pairs, then chance."""
    chance = random.Random(seed)
    first = [False] * (2 * interval + 1) + [True] + [False] * (interval - 1) + [True, True] + [False] * (interval + 1)
    return first + [chance.random() < 0.25 for _ in range(40 - len(first))]


def trace(overflows, init_scale, growth_factor, backoff_factor, growth_interval, *, mistake="", cap=0.0):
    """The scale after each step, in plain Python, with one mistake built in; cap: where growth ends, if it does."""
    scale, good, scales, seen = init_scale, 0, [], False
    for bad in overflows:
        seen = seen or bad
        if mistake == "overflow-remembered":
            bad = seen
        if bad:
            if mistake != "no-backoff":
                scale *= 0.5 if mistake == "factors-hard-coded" else backoff_factor
            if mistake != "counter-not-reset-by-overflow":
                good = 0
        else:
            good += 1
            limit = growth_interval + {"grows-too-late": 1, "grows-too-early": -1}.get(mistake, 0)
            if good >= limit and mistake != "no-growth":
                scale *= 2.0 if mistake == "factors-hard-coded" else growth_factor
                if mistake == "growth-capped":
                    scale = min(scale, cap)
                if mistake != "counter-not-reset-by-growth":
                    good = 0
        scales.append(scale)
    return scales


def known_traces(overflows, cap, **options) -> dict[str, list[float]]:
    """{slug: the scales that this mistake gives}. cap: see `trace`."""
    names = (
        "overflow-remembered", "no-backoff", "no-growth", "counter-not-reset-by-overflow", "counter-not-reset-by-growth",
        "grows-too-late", "grows-too-early", "factors-hard-coded", "growth-capped",
    )  # fmt: skip
    return {name: trace(overflows, **options, mistake=name, cap=cap) for name in names}
