"""Answers to balise 3 of 03_tensor_cores_channels_last."""

import math

import numpy as np

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last", 3)


@bank.right()
def quantization(m, n, tile_m, tile_n, n_sms):
    tiles = len(range(0, m, tile_m)) * len(range(0, n, tile_n))
    waves = len(range(0, tiles, n_sms))
    return [tiles, waves, (m * n) / (tiles * tile_m * tile_n), tiles / (waves * n_sms)]


@bank.right()
def quantization(m, n, tile_m, tile_n, n_sms):
    rows, columns = -(-m // tile_m), -(-n // tile_n)
    full, rest = divmod(rows * columns, n_sms)
    waves = full + bool(rest)
    wasted = 1 - (full * n_sms + rest) / (waves * n_sms)
    return rows * columns, waves, m / (rows * tile_m) * n / (columns * tile_n), 1 - wasted


@bank.right()
def quantization(m, n, tile_m, tile_n, n_sms):
    grid = np.ceil(np.array([m, n]) / np.array([tile_m, tile_n]))
    tiles = grid.prod()
    waves = np.ceil(tiles / n_sms)
    return tiles, waves, m * n / (grid * [tile_m, tile_n]).prod(), tiles / waves / n_sms


def variant(slug, tiles=None, waves=None, of_tiles=None, of_waves=None):
    """One mistake: each part is given the sizes, and what the right parts before it gave."""

    def quantization(m, n, tile_m, tile_n, n_sms):
        sizes = m, n, tile_m, tile_n, n_sms
        t = tiles(*sizes) if tiles else math.ceil(m / tile_m) * math.ceil(n / tile_n)
        w = waves(t, n_sms) if waves else math.ceil(t / n_sms)
        a = of_tiles(*sizes, t) if of_tiles else m * n / (t * tile_m * tile_n) if t else 0
        b = of_waves(t, w, n_sms, a) if of_waves else t / (w * n_sms) if w else 0
        return t, w, a, b

    bank.several(slug, quantization, variant=True)


bank.hint(
    "tiles-rounded-down",
    "The rest at the edge also needs a tile, or those results are never computed. Round up.",
)
variant("tiles-rounded-down", tiles=lambda m, n, a, b, s: (m // a) * (n // b))
variant("tiles-rounded-down", tiles=lambda m, n, a, b, s: max(1, m // a) * max(1, n // b))
variant("tiles-rounded-down", tiles=lambda m, n, a, b, s: m * n // (a * b))

bank.hint(
    "tiles-not-whole",
    "A tile is computed as a whole, even where it holds few results, so the number of tiles is a whole number.",
)
variant("tiles-not-whole", tiles=lambda m, n, a, b, s: m / a * (n / b))

bank.hint("rounded-after-product", "Tiles form a grid. Round up the rows of tiles and the columns of tiles separately.")
variant("rounded-after-product", tiles=lambda m, n, a, b, s: math.ceil(m * n / (a * b)))

bank.hint("tile-turned", "You have swapped tile_m and tile_n: tile_m goes with m, tile_n with n.")
variant("tile-turned", tiles=lambda m, n, a, b, s: math.ceil(m / b) * math.ceil(n / a))

bank.hint("wrong-tiles", "The number of tiles is wrong. It is rows of tiles × columns of tiles.")
variant("wrong-tiles", tiles=lambda m, n, a, b, s: math.ceil(m / a) + math.ceil(n / b) + 1)

bank.hint("waves-rounded-down", "The last wave may be small, but it takes as long as a full one. Round up.")
variant("waves-rounded-down", waves=lambda t, s: t // s)
variant("waves-rounded-down", waves=lambda t, s: max(1, t // s))

bank.hint(
    "waves-not-whole",
    "All tiles take equally long, so a wave that is not full takes as long as a full one. Round up.",
)
variant("waves-not-whole", waves=lambda t, s: t / s)

bank.hint("other-gpu", "This number of waves is for another number of SMs. Use n_sms.")
variant("other-gpu", waves=lambda t, s: math.ceil(t / 108))

bank.hint("wrong-waves", "The number of waves is wrong. Each wave takes one tile per SM.")
variant("wrong-waves", waves=lambda t, s: t)

bank.hint("full-wave-and-one", "These tiles fill their waves exactly, so there is no further wave.")
variant("full-wave-and-one", waves=lambda t, s: t // s + 1)
variant("other-gpu", waves=lambda t, s: math.ceil(t / 80))

bank.hint("efficiency-above-one", "An efficiency is at most 1: divide the useful by the computed, not the reverse.")
variant("efficiency-above-one", of_tiles=lambda m, n, a, b, s, t: t * a * b / (m * n))
variant("efficiency-above-one", of_waves=lambda t, w, s, a: w * s / t)

bank.hint("efficiency-in-percent", "An efficiency is a fraction between 0 and 1, not a percentage.")
variant("efficiency-in-percent", of_tiles=lambda m, n, a, b, s, t: 100 * m * n / (t * a * b))

bank.hint("tile-efficiency-one-side", "Both m and n may fill their last tiles only partly. Compare areas.")
variant("tile-efficiency-one-side", of_tiles=lambda m, n, a, b, s, t: n / (math.ceil(n / b) * b))

bank.hint(
    "wrong-tile-efficiency",
    "The tile efficiency is wrong. It is the wanted results over the computed ones, including those outside the "
    "matrix.",
)
variant("wrong-tile-efficiency", of_tiles=lambda m, n, a, b, s, t: 1 - m * n / (t * a * b))
variant("wrong-tile-efficiency", of_tiles=lambda m, n, a, b, s, t: (m % a or a) * (n % b or b) / (a * b))

bank.hint("last-wave-only", "This is how full the last wave is. The full waves before it also count.")
variant("last-wave-only", of_waves=lambda t, w, s, a: (t % s or s) / s)
variant("last-wave-only", of_waves=lambda t, w, s, a: t % s / s)

bank.hint(
    "combined-not-wave",
    "This is both losses together. The wave efficiency alone is tiles over places in all waves.",
)
variant("combined-not-wave", of_waves=lambda t, w, s, a: a * t / (w * s))

bank.hint("wrong-wave-efficiency", "The wave efficiency is wrong. It is tiles over places for tiles in all waves.")
variant("wrong-wave-efficiency", of_waves=lambda t, w, s, a: 1 - t / (w * s))
variant("wrong-wave-efficiency", of_waves=lambda t, w, s, a: 1.0)


bank.hint("not-four", "Return four numbers: tiles, waves, tile efficiency, wave efficiency.")


@bank.wrong("not-four", variant=True)
def quantization(m, n, tile_m, tile_n, n_sms):
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    waves = math.ceil(tiles / n_sms)
    return tiles, waves, m * n / (tile_m * tile_n * waves * n_sms)


@bank.wrong("nothing-returned")
def quantization(m, n, tile_m, tile_n, n_sms):
    print(math.ceil(m / tile_m) * math.ceil(n / tile_n))
