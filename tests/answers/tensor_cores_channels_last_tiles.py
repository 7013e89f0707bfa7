"""Answers to balise 3 of 03_tensor_cores_channels_last."""

import math

import numpy as np

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last")


@bank.right(3)
def quantization(m, n, tile_m, tile_n, n_sms):
    tiles = len(range(0, m, tile_m)) * len(range(0, n, tile_n))
    waves = len(range(0, tiles, n_sms))
    return [tiles, waves, (m * n) / (tiles * tile_m * tile_n), tiles / (waves * n_sms)]


@bank.right(3)
def quantization(m, n, tile_m, tile_n, n_sms):
    rows, columns = -(-m // tile_m), -(-n // tile_n)
    full, rest = divmod(rows * columns, n_sms)
    waves = full + bool(rest)
    wasted = 1 - (full * n_sms + rest) / (waves * n_sms)
    return rows * columns, waves, m / (rows * tile_m) * n / (columns * tile_n), 1 - wasted


@bank.right(3)
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

    bank.several(3, slug, quantization)


variant("tiles-rounded-down", tiles=lambda m, n, a, b, s: (m // a) * (n // b))
variant("tiles-rounded-down", tiles=lambda m, n, a, b, s: max(1, m // a) * max(1, n // b))
variant("tiles-rounded-down", tiles=lambda m, n, a, b, s: m * n // (a * b))
variant("tiles-not-whole", tiles=lambda m, n, a, b, s: m / a * (n / b))
variant("rounded-after-product", tiles=lambda m, n, a, b, s: math.ceil(m * n / (a * b)))
variant("tile-turned", tiles=lambda m, n, a, b, s: math.ceil(m / b) * math.ceil(n / a))
variant("wrong-tiles", tiles=lambda m, n, a, b, s: math.ceil(m / a) + math.ceil(n / b) + 1)
variant("waves-rounded-down", waves=lambda t, s: t // s)
variant("waves-rounded-down", waves=lambda t, s: max(1, t // s))
variant("waves-not-whole", waves=lambda t, s: t / s)
variant("other-gpu", waves=lambda t, s: math.ceil(t / 108))
variant("wrong-waves", waves=lambda t, s: t)
variant("full-wave-and-one", waves=lambda t, s: t // s + 1)
variant("other-gpu", waves=lambda t, s: math.ceil(t / 80))
variant("efficiency-above-one", of_tiles=lambda m, n, a, b, s, t: t * a * b / (m * n))
variant("efficiency-above-one", of_waves=lambda t, w, s, a: w * s / t)
variant("efficiency-in-percent", of_tiles=lambda m, n, a, b, s, t: 100 * m * n / (t * a * b))
variant("tile-efficiency-one-side", of_tiles=lambda m, n, a, b, s, t: n / (math.ceil(n / b) * b))
variant("wrong-tile-efficiency", of_tiles=lambda m, n, a, b, s, t: 1 - m * n / (t * a * b))
variant("wrong-tile-efficiency", of_tiles=lambda m, n, a, b, s, t: (m % a or a) * (n % b or b) / (a * b))
variant("last-wave-only", of_waves=lambda t, w, s, a: (t % s or s) / s)
variant("last-wave-only", of_waves=lambda t, w, s, a: t % s / s)
variant("combined-not-wave", of_waves=lambda t, w, s, a: a * t / (w * s))
variant("wrong-wave-efficiency", of_waves=lambda t, w, s, a: 1 - t / (w * s))
variant("wrong-wave-efficiency", of_waves=lambda t, w, s, a: 1.0)


@bank.wrong(3, "not-four")
def quantization(m, n, tile_m, tile_n, n_sms):
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    waves = math.ceil(tiles / n_sms)
    return tiles, waves, m * n / (tile_m * tile_n * waves * n_sms)


@bank.wrong(3, "nothing-returned")
def quantization(m, n, tile_m, tile_n, n_sms):
    print(math.ceil(m / tile_m) * math.ceil(n / tile_n))
