"""Answers to balise 8 of 24_triton_kernels: a choice of tiles."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 8, whole=True)

# by loops, from its own count of bytes
BY_LOOPS = """
def seconds(m, n, k, tile, card, itemsize=2):
    high, wide = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    read = (m * wide + n * high) * k * itemsize
    moving = (read + 4 * m * n) / card.bandwidth
    one = 2 * tile[0] * tile[1] * k / (card.operations / card.units)
    computing = math.ceil(high * wide / card.units) * one
    return moving if moving > computing else computing


def best_tile(m, n, k, tiles, card, stages=3, itemsize=2):
    best = None
    for tile in tiles:
        rows, columns, inner = tile
        if stages * (rows * inner + inner * columns) * itemsize > card.shared:
            continue
        took = seconds(m, n, k, tile, card, itemsize)
        if best is None or took < best[0]:
            best = took, tile
    if best is None:
        raise ValueError("no tile fits")
    return best[1]
"""
bank.text(None, BY_LOOPS)
bank.slip(None, ("return min(fit, key=lambda tile: seconds(m, n, k, tile, card, itemsize))", "return sorted(fit, key=lambda tile: seconds(m, n, k, tile, card, itemsize))[0]"))  # fmt: skip

WAVES = "waves = triton.cdiv(triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]), card.units)"
bank.hint("wrong-seconds", "The seconds are wrong. The longer counts: bytes / bandwidth, or waves × operations of a tile / "
                              "operations per second of a unit.")  # fmt: skip
bank.slip("wrong-seconds", ("* card.units / card.operations", "/ card.operations"))
bank.slip("wrong-seconds", ("waves * 2 * ", "waves * "))
bank.variant("wrong-seconds", BY_LOOPS, ("one = 2 *", "one ="))

bank.hint("part-of-a-wave", "Waves are whole: a wave that isn't full takes as long as a full one. Round up.")
bank.slip("part-of-a-wave", (WAVES, "waves = triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]) / card.units"))
bank.variant("part-of-a-wave", BY_LOOPS, ("math.ceil(high * wide / card.units)", "(high * wide / card.units)"))

bank.hint("no-edges", "Tiles at the edge count as full ones. Round up the tiles of each side.", edge=True)
bank.slip("no-edges", (WAVES, "waves = triton.cdiv(m * n, tile[0] * tile[1] * card.units)"))
bank.slip(
    "no-edges", ("2 * tile[0] * tile[1] * k * card.units", "2 * m * n * k"), ("computing = waves * ", "computing = ")
)
bank.variant("no-edges", BY_LOOPS, ("math.ceil(high * wide / card.units)", "math.ceil(m * n / (tile[0] * tile[1]) / card.units)"))  # fmt: skip

bank.hint("added", "Moving and computing happen at the same time: the longer of them counts, not their sum.")
bank.slip("added", ("return max(matmul_bytes(m, n, k, tile, itemsize) / card.bandwidth, computing)", "return matmul_bytes(m, n, k, tile, itemsize) / card.bandwidth + computing"))  # fmt: skip
bank.variant("added", BY_LOOPS, ("return moving if moving > computing else computing", "return moving + computing"))

bank.hint("bytes-of-the-product", "The bytes aren't those that these tiles move: each element of a factor is read once for each "
                                     "tile of the other side.")  # fmt: skip
bank.slip("bytes-of-the-product", ("matmul_bytes(m, n, k, tile, itemsize)", "(itemsize * (m * k + k * n) + 4 * m * n)"))
bank.slip(
    "bytes-of-the-product", ("matmul_bytes(m, n, k, tile, itemsize)", "matmul_bytes(m, n, k, (m, n, k), itemsize)")
)
bank.variant("bytes-of-the-product", BY_LOOPS, ("(m * wide + n * high)", "(m + n)"))

bank.hint("itemsize-ignored", "The bytes don't follow `itemsize`. Pass it on.", edge=True)
bank.slip("itemsize-ignored", ("matmul_bytes(m, n, k, tile, itemsize)", "matmul_bytes(m, n, k, tile, 2)"))
bank.variant("itemsize-ignored", BY_LOOPS, ("k * itemsize", "k * 2"))

bank.hint("does-not-fit", "For {where}, this tile takes more shared memory than a program has: `stages` tiles of both factors, "
                             "in bytes.")  # fmt: skip
bank.slip("does-not-fit", ("stages * itemsize * bk", "itemsize * bk"))
bank.slip("does-not-fit", ("stages * itemsize * bk", "stages * bk"))
bank.slip("does-not-fit", ("for bm, bn, bk in tiles if stages * itemsize * bk * (bm + bn) <= card.shared", "for bm, bn, bk in tiles"))  # fmt: skip
bank.variant("does-not-fit", BY_LOOPS, ("(rows * inner + inner * columns)", "rows * inner"))

bank.hint("slower-tile", "For {where}, another tile that fits is faster by your own formula.")
bank.slip("slower-tile", ("return min(fit", "return max(fit"))
bank.slip("slower-tile", ("<= card.shared", "< card.shared"))
bank.slip("slower-tile", ("return min(fit, key=lambda tile: seconds(m, n, k, tile, card, itemsize))", "return max(fit, key=lambda tile: tile[0] * tile[1])"))  # fmt: skip
bank.variant("slower-tile", BY_LOOPS, ("if best is None or took < best[0]:", "if best is None:"))

bank.hint("last-of-equals", "Of equally fast tiles, return the first.", edge=True)
bank.slip("last-of-equals", ("return min(fit,", "return min(fit[::-1],"))
bank.variant("last-of-equals", BY_LOOPS, ("took < best[0]", "took <= best[0]"))

bank.hint("no-tile", "That is none of the tiles given: return the tile itself, (BM, BN, BK).")
bank.slip("no-tile", ("return min(fit, key=lambda tile: seconds(m, n, k, tile, card, itemsize))", "return min(seconds(m, n, k, tile, card, itemsize) for tile in fit)"))  # fmt: skip
bank.variant("no-tile", BY_LOOPS, ("return best[1]", "return best"))

bank.hint("nothing-fits", "If no tile fits, raise ValueError with a line that says so.", edge=True)
bank.slip("nothing-fits", ("    if not fit:\n", "    if not fit:\n        return None\n"))
bank.variant("nothing-fits", BY_LOOPS, ('raise ValueError("no tile fits")', "return tiles[0]"))
