"""Balise 3: tiles and waves, against tiles laid one by one and handed out wave by wave."""

from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checks.tensor_cores_channels_last.numbers import number, of_each, read, several

FOUR = "(tiles, waves, tile efficiency, wave efficiency)"
CASES = {
    "sizes that divide evenly: 6 tiles, one wave or two": [(384, 512, 128, 256, 108), (384, 512, 128, 256, 3)],
    "one column too many: another column of tiles": [(256, 513, 128, 256, 108), (129, 512, 128, 256, 108)],
    "smaller than a tile; long and narrow": [
        (100, 60, 128, 256, 108), (3000, 40, 64, 128, 80), (40, 3000, 64, 128, 80),
    ],
    "108 tiles on 108 SMs, and 109 tiles on the same GPU": [
        (12 * 128, 9 * 256, 128, 256, 108), (109 * 128, 256, 128, 256, 108),
    ],
    "many waves; other GPUs": [
        (4096, 50257, 128, 256, 108), (2048, 8190, 256, 128, 132), (5000, 5000, 128, 128, 80), (7, 100000, 64, 64, 3),
    ],
}  # fmt: skip


def observe(quantization):
    """What each case gives."""
    for cases in CASES.values():
        for case in cases:
            yield {case: read(quantization(*case))}


def _looks(claim, case):
    """First the tiles, then the waves, then what each wastes."""
    m, n, tile_m, tile_n, n_sms = case
    truth = tiles, waves, tile_efficiency, wave_efficiency = _laid(*case)
    area, rows, columns, ratio = m * n / (tile_m * tile_n), m / tile_m, n / tile_n, tiles / n_sms
    padded_m, padded_n = -(-m // tile_m) * tile_m, -(-n // tile_n) * tile_n
    mistakes = {
        "wrong-tiles": [
            ("tiles-rounded-down", max(1, m // tile_m) * max(1, n // tile_n)),
            ("tiles-rounded-down", rows // 1 * (columns // 1)),
            ("tiles-not-whole", area), ("rounded-after-product", -(-area // 1)),
            ("tile-turned", -(-m // tile_n) * -(-n // tile_m)), ("tiles-rounded-down", area // 1),
        ],
        "wrong-waves": [
            ("waves-rounded-down", max(1, ratio // 1)), ("waves-rounded-down", ratio // 1), ("waves-not-whole", ratio),
            ("full-wave-and-one", tiles // n_sms + 1),
            *(("other-gpu", -(-tiles // other)) for other in (80, 108, 132) if other != n_sms),
        ],
        "wrong-tile-efficiency": [
            ("efficiency-in-percent", 100 * tile_efficiency), ("efficiency-above-one", 1 / tile_efficiency),
            ("tile-efficiency-one-side", m / padded_m), ("tile-efficiency-one-side", n / padded_n),
        ],
        "wrong-wave-efficiency": [
            ("efficiency-in-percent", 100 * wave_efficiency), ("efficiency-above-one", 1 / wave_efficiency),
            ("last-wave-only", tiles % n_sms / n_sms), ("last-wave-only", (tiles - (waves - 1) * n_sms) / n_sms),
            ("combined-not-wave", tile_efficiency * wave_efficiency),
        ],
    }  # fmt: skip
    where = f"result {m}×{n}, tiles {tile_m}×{tile_n}, {n_sms} SMs"
    yield several(claim, case, 4, "not-four", FOUR)
    for k, (hint, known) in enumerate(mistakes.items()):
        yield number("", lambda o, k=k: o[case][k], truth[k], known, hint, where)


def _laid(m, n, tile_m, tile_n, n_sms):
    """Lay the tiles over the result, then let every SM take one tile a wave, until none is left."""
    wanted = computed = tiles = 0
    for top in range(0, m, tile_m):
        for left in range(0, n, tile_n):
            tiles += 1
            wanted += min(tile_m, m - top) * min(tile_n, n - left)
            computed += tile_m * tile_n
    waves, left_over, places = 0, tiles, 0
    while left_over > 0:
        waves, left_over, places = waves + 1, left_over - n_sms, places + n_sms
    return tiles, waves, wanted / computed, tiles / places


LOOKS = of_each(CASES, _looks)


def balise_3(quantization):
    yield from judged(LOOKS, observe, quantization)
