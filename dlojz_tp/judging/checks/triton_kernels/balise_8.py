"""Balise 8: modelled seconds of a product by tiles, and the best tile that fits."""

from fractions import Fraction
from types import SimpleNamespace

from dlojz_tp.judging.checking.looks import Look, Value, judged, tried

SMALL = SimpleNamespace(bandwidth=2e3, operations=5e6, units=4, shared=12_000)  # computes little, or moves little
WIDE = SimpleNamespace(bandwidth=1e6, operations=5e6, units=7, shared=40_000)
TILES = [(16, 16, 16), (32, 16, 16), (32, 32, 16), (64, 32, 16), (32, 64, 32), (64, 64, 32), (128, 128, 32)]
# (m, n, k, tile): whole tiles, tiles at the edge, one wave and a bit
PRODUCTS = [
    (64, 64, 64, (16, 16, 16)),
    (100, 70, 50, (32, 16, 16)),
    (130, 33, 40, (64, 32, 32)),
    (9, 9, 9, (16, 16, 16)),
]
CHOICES = {  # what is told of it: (m, n, k), card, options
    "a card that moves little": ((256, 256, 256), SMALL, {}),
    "one with more shared memory": ((256, 256, 256), SimpleNamespace(**vars(SMALL) | {"shared": 200_000}), {}),
    "one that moves much": ((200, 200, 200), WIDE, {}),
    "a small product": ((70, 70, 500), WIDE, {}),
    "two stages": ((256, 256, 256), SMALL, {"stages": 2}),
    "float32": ((256, 256, 256), SMALL, {"itemsize": 4}),
    "exactly as much shared memory": ((256, 256, 256), SimpleNamespace(**vars(SMALL) | {"shared": 9216}), {}),
    "equally fast tiles": ((16, 16, 16), SimpleNamespace(**vars(WIDE) | {"bandwidth": 1e9, "units": 1}), {"tiles": [(16, 16, 32), (16, 16, 16)]}),
}  # fmt: skip


def up(a, b):
    return -(-a // b)


def moved(m, n, k, tile, itemsize):
    return itemsize * m * k * up(n, tile[1]) + itemsize * k * n * up(m, tile[0]) + 4 * m * n


def computed(m, n, k, tile, card):
    waves = up(up(m, tile[0]) * up(n, tile[1]), card.units)
    return Fraction(waves * 2 * tile[0] * tile[1] * k * card.units) / Fraction(card.operations)


def due_seconds(m, n, k, tile, card, itemsize=2):
    return float(
        max(Fraction(moved(m, n, k, tile, itemsize)) / Fraction(card.bandwidth), computed(m, n, k, tile, card))
    )


def due_tile(size, card, stages=3, itemsize=2, tiles=TILES):
    fit = [t for t in tiles if stages * itemsize * (t[0] * t[2] + t[1] * t[2]) <= card.shared]
    return min(fit, key=lambda t: due_seconds(*size, t, card, itemsize))


def observe(seconds, best_tile):
    slow, fast = (SimpleNamespace(**vars(WIDE) | {"bandwidth": b}) for b in (1e3, 1e12))
    yield {"moving": [seconds(*product, slow) for product in PRODUCTS]}
    yield {"moving float32": [seconds(*product, slow, itemsize=4) for product in PRODUCTS]}
    yield {"computing": [seconds(*product, fast) for product in PRODUCTS]}
    yield {"both": [seconds(*product, card) for product in PRODUCTS for card in (SMALL, WIDE)]}
    for name, (size, card, options) in CHOICES.items():
        given = {"tiles": list(TILES)} | options
        yield {name: best_tile(*size, card=card, **given)}
    tiny = SimpleNamespace(**vars(SMALL) | {"shared": 10})
    yield {"none": str(tried(best_tile, 64, 64, 64, list(TILES), tiny)).split(":")[0]}


def chosen(name, size, card, options):
    def hint(seen, due):
        if seen not in options.get("tiles", TILES):
            return "no-tile"
        taken = options.get("stages", 3) * options.get("itemsize", 2) * seen[2] * (seen[0] + seen[1])
        if taken > card.shared:
            return "does-not-fit"
        return "last-of-equals" if name == "equally fast tiles" else "slower-tile"

    return Look(f"the best tile for {name}", name, due_tile(size, card, **options), hint,
                fields={"where": name})  # fmt: skip


def all_of(card, itemsize=2):
    return [due_seconds(*product, card, itemsize) for product in PRODUCTS]


SLOW, FAST = (SimpleNamespace(**vars(WIDE) | {"bandwidth": b}) for b in (1e3, 1e12))
LOOKS = [
    Value("seconds on a card that is slow to move", "moving", all_of(SLOW), "wrong-seconds"),
    Value("", "moving float32", all_of(SLOW, 4), "wrong-seconds"),
    Value("on one that is slow to compute", "computing", all_of(FAST), "wrong-seconds"),
    Value("on others", "both", [due_seconds(*p, card) for p in PRODUCTS for card in (SMALL, WIDE)], "wrong-seconds"),
    *[chosen(name, *choice) for name, choice in CHOICES.items()],
    Look("an error if none fits", "none", "ValueError", "nothing-fits"),
]


def balise_8(seconds, best_tile):
    yield from judged(LOOKS, observe, seconds, best_tile)
