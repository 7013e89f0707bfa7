"""Balise 3: tiles and waves, against tiles laid one by one and handed out wave by wave."""

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.tensor_cores_channels_last.numbers import first, same, several

HINTS = {
    "not-four": "Return four numbers: tiles, waves, tile efficiency, wave efficiency.",
    "tiles-rounded-down": "The rest at the edge also needs a tile, or those results are never computed. Round up.",
    "tiles-not-whole": "A tile is computed as a whole, even where it holds few results, so the number of tiles is "
                       "a whole number.",
    "rounded-after-product": "Tiles form a grid. Round up the rows of tiles and the columns of tiles separately.",
    "tile-turned": "You have swapped tile_m and tile_n: tile_m goes with m, tile_n with n.",
    "wrong-tiles": "The number of tiles is wrong. It is rows of tiles × columns of tiles.",
    "waves-rounded-down": "The last wave may be small, but it takes as long as a full one. Round up.",
    "waves-not-whole": "All tiles take equally long, so a wave that is not full takes as long as a full one. Round up.",
    "full-wave-and-one": "These tiles fill their waves exactly, so there is no further wave.",
    "other-gpu": "This number of waves is for another number of SMs. Use n_sms.",
    "wrong-waves": "The number of waves is wrong. Each wave takes one tile per SM.",
    "efficiency-above-one": "An efficiency is at most 1: divide the useful by the computed, not the reverse.",
    "efficiency-in-percent": "An efficiency is a fraction between 0 and 1, not a percentage.",
    "tile-efficiency-one-side": "Both m and n may fill their last tiles only partly. Compare areas.",
    "wrong-tile-efficiency": "The tile efficiency is wrong. It is the wanted results over the computed ones, "
                             "including those outside the matrix.",
    "last-wave-only": "This is how full the last wave is. The full waves before it also count.",
    "combined-not-wave": "This is both losses together. The wave efficiency alone is tiles over places in all waves.",
    "wrong-wave-efficiency": "The wave efficiency is wrong. It is tiles over places for tiles in all waves.",
}  # fmt: skip
FOUR = "(tiles, waves, tile efficiency, wave efficiency)"
CASES = {
    "sizes that divide evenly: 6 tiles, one wave or two": [(384, 512, 128, 256, 108), (384, 512, 128, 256, 3)],
    "one column too many: another column of tiles": [(256, 513, 128, 256, 108), (129, 512, 128, 256, 108)],
    "smaller than a tile; long and narrow": [(100, 60, 128, 256, 108), (3000, 40, 64, 128, 80), (40, 3000, 64, 128, 80)],
    "108 tiles on 108 SMs, and 109 tiles on the same GPU": [(12 * 128, 9 * 256, 128, 256, 108), (109 * 128, 256, 128, 256, 108)],
    "many waves; other GPUs": [
        (4096, 50257, 128, 256, 108), (2048, 8190, 256, 128, 132), (5000, 5000, 128, 128, 80), (7, 100000, 64, 64, 3),
    ],
}  # fmt: skip


def balise_3(quantization):
    """Every case in turn: first the tiles, then what they waste; then the waves, and what they waste."""
    for title, cases in CASES.items():
        yield title
        for case in cases:
            _case(quantization, *case)


def _case(quantization, m, n, tile_m, tile_n, n_sms):
    got = several(quantization(m, n, tile_m, tile_n, n_sms), 4, "not-four", FOUR)
    tiles, waves, tile_efficiency, wave_efficiency = _laid(m, n, tile_m, tile_n, n_sms)
    where = f"result {m}×{n}, tiles {tile_m}×{tile_n}, {n_sms} SMs"

    def compare(k, truth, mistakes, default):
        if not same(got[k], truth):
            known = [(slug, value) for slug, value in mistakes if not same(value, truth)]
            shown = [f"{value:,.6g}" for value in (truth, got[k])]
            raise Wrong(first(got[k], known, default), expected=shown[0], got=shown[1], where=where)

    area = m * n / (tile_m * tile_n)
    rows, columns = m / tile_m, n / tile_n
    compare(0, tiles, [
        ("tiles-rounded-down", max(1, m // tile_m) * max(1, n // tile_n)), ("tiles-rounded-down", rows // 1 * (columns // 1)),
        ("tiles-not-whole", area), ("rounded-after-product", -(-area // 1)),
        ("tile-turned", -(-m // tile_n) * -(-n // tile_m)), ("tiles-rounded-down", area // 1),
    ], "wrong-tiles")  # fmt: skip
    ratio = tiles / n_sms
    compare(1, waves, [
        ("waves-rounded-down", max(1, ratio // 1)), ("waves-rounded-down", ratio // 1), ("waves-not-whole", ratio),
        ("full-wave-and-one", tiles // n_sms + 1),
        *(("other-gpu", -(-tiles // other)) for other in (80, 108, 132) if other != n_sms),
    ], "wrong-waves")  # fmt: skip
    padded_m, padded_n = -(-m // tile_m) * tile_m, -(-n // tile_n) * tile_n
    compare(2, tile_efficiency, [
        ("efficiency-in-percent", 100 * tile_efficiency), ("efficiency-above-one", 1 / tile_efficiency),
        ("tile-efficiency-one-side", m / padded_m), ("tile-efficiency-one-side", n / padded_n),
    ], "wrong-tile-efficiency")  # fmt: skip
    compare(3, wave_efficiency, [
        ("efficiency-in-percent", 100 * wave_efficiency), ("efficiency-above-one", 1 / wave_efficiency),
        ("last-wave-only", tiles % n_sms / n_sms), ("last-wave-only", (tiles - (waves - 1) * n_sms) / n_sms),
        ("combined-not-wave", tile_efficiency * wave_efficiency),
    ], "wrong-wave-efficiency")  # fmt: skip


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
