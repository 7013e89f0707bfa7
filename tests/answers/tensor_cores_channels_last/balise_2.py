"""Answers to balise 2 of 03_tensor_cores_channels_last: the roofline."""

from fractions import Fraction

import numpy as np
import torch

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last", 2)


@bank.right()
def roofline(flop, n_bytes, peak, bandwidth):
    computing, moving = flop / peak, n_bytes / bandwidth
    return flop / max(computing, moving), "compute" if computing > moving else "memory", peak / bandwidth


@bank.right()
def roofline(flop, n_bytes, peak, bandwidth):
    ridge = Fraction(peak) / Fraction(bandwidth)
    intensity = Fraction(flop) / Fraction(n_bytes)
    bound = ("memory", "compute")[intensity >= ridge]
    return [float(intensity * Fraction(bandwidth)) if bound == "memory" else peak, bound, float(ridge)]


@bank.right()
def roofline(flop, n_bytes, peak, bandwidth):
    rates = {"memory": flop / n_bytes * bandwidth, "compute": peak}
    bound = min(rates, key=rates.get)
    return torch.tensor(rates[bound], dtype=torch.float64), bound, np.float64(peak / bandwidth)


PLAIN = """
def roofline(flop, n_bytes, peak, bandwidth):
    intensity, ridge = flop / n_bytes, peak / bandwidth
    left = intensity < ridge
    rate = bandwidth * intensity if left else peak
    return rate, "memory" if left else "compute", ridge
"""
bank.text(None, PLAIN)


def wrong_roofline(slug, rate=None, bound=None, ridge=None):
    """A roofline with one mistake in it; each part is given (flop, n_bytes, peak, bandwidth)."""

    def roofline(*work):
        flop, n_bytes, peak, bandwidth = work
        right = (
            min(peak, flop / n_bytes * bandwidth),
            "memory" if flop / n_bytes < peak / bandwidth else "compute",
            peak / bandwidth,
        )
        return tuple(part(*work) if part else value for part, value in zip((rate, bound, ridge), right))

    bank.several(slug, roofline)


# At the edge are places beside the ridge, and another unit.

bank.hint(
    "times-added",
    "You let computing and moving data follow each other. On a roofline they overlap, and the slower one decides.",
)
wrong_roofline("times-added", rate=lambda f, q, p, b: f / (f / p + q / b))
bank.variant(
    "times-added",
    PLAIN,
    (
        "rate = bandwidth * intensity if left else peak",
        "rate = 1 / (1 / peak + 1 / bandwidth / intensity) if flop else 0",
    ),
)

bank.hint("upper-roof", "This is the higher of the two roofs. A kernel can reach only the lower one.")
wrong_roofline("upper-roof", rate=lambda f, q, p, b: max(p, f / q * b))
bank.variant("upper-roof", PLAIN, ("if left else peak", "if not left else peak"))

bank.hint(
    "peak-only",
    "This is the peak, whatever the intensity. Under the slanted roof the memory is slower: use bandwidth × intensity.",
)
wrong_roofline("peak-only", rate=lambda f, q, p, b: p)
bank.variant("peak-only", PLAIN, ("bandwidth * intensity if left else peak", "peak"))

bank.hint("slope-only", "This is bandwidth × intensity, even where that is more than the peak.")
wrong_roofline("slope-only", rate=lambda f, q, p, b: f / q * b)
bank.variant("slope-only", PLAIN, (" if left else peak", ""))

bank.hint("intensity-inverted", "Your intensity is upside down: it is FLOP per byte, not bytes per FLOP.")
wrong_roofline("intensity-inverted", rate=lambda f, q, p, b: min(p, q / f * b) if f else 0)
bank.variant(
    "intensity-inverted",
    PLAIN,
    ("bandwidth * intensity if left else peak", "min(peak, bandwidth * n_bytes / (flop or 1))"),
)

bank.hint("seconds-not-rate", "This is the time in seconds. Divide the work by it to get the attainable FLOP/s.")
wrong_roofline("seconds-not-rate", rate=lambda f, q, p, b: max(f / p, q / b))
bank.variant(
    "seconds-not-rate",
    PLAIN,
    ("bandwidth * intensity if left else peak", "n_bytes / bandwidth if left else flop / peak"),
)

bank.hint("fraction-not-rate", "This is a fraction of the peak. The task asks for FLOP/s.", edge=True)
wrong_roofline("fraction-not-rate", rate=lambda f, q, p, b: min(1, f / q * b / p))
bank.variant(
    "fraction-not-rate", PLAIN, ("bandwidth * intensity if left else peak", "intensity / ridge if left else 1.0")
)

bank.hint("scaled-rate", "The number is right except for a power of ten: FLOP/s go in, FLOP/s come out.", edge=True)
wrong_roofline("scaled-rate", rate=lambda f, q, p, b: min(p, f / q * b) / 1e12)
bank.variant("scaled-rate", PLAIN, ("return rate,", "return rate / 1e9,"))

bank.hint("wrong-rate", "The attainable rate is wrong. It is the lower of the peak and bandwidth × intensity.")
wrong_roofline("wrong-rate", rate=lambda f, q, p, b: min(p, f / q))
wrong_roofline("wrong-rate", rate=lambda f, q, p, b: min(p, 2 * f / q * b))
bank.variant("wrong-rate", PLAIN, ("bandwidth * intensity if", "bandwidth * flop if"))

bank.hint("ridge-inverted", "Your ridge point is upside down: it is an intensity, in FLOP per byte.")
wrong_roofline("ridge-inverted", ridge=lambda f, q, p, b: b / p)
bank.variant("ridge-inverted", PLAIN, ('"compute", ridge', '"compute", bandwidth / peak'))

bank.hint(
    "ridge-of-the-layer",
    "This is the layer's intensity. The ridge point belongs to the machine: it is where the two roofs meet.",
)
wrong_roofline("ridge-of-the-layer", ridge=lambda f, q, p, b: f / q)
bank.variant("ridge-of-the-layer", PLAIN, ('"compute", ridge', '"compute", intensity'))

bank.hint(
    "wrong-ridge",
    "The ridge point is wrong. It is the intensity at which bandwidth × intensity reaches the peak.",
)
wrong_roofline("wrong-ridge", ridge=lambda f, q, p, b: p / b / 1e3)
bank.variant("wrong-ridge", PLAIN, ('"compute", ridge', '"compute", int(ridge)'))

bank.hint("other-words", 'The bound must be one of two words, "compute" or "memory".')
wrong_roofline("other-words", bound=lambda f, q, p, b: "computing" if f / q > p / b else "bandwidth")
wrong_roofline("other-words", bound=lambda f, q, p, b: f / q > p / b)
bank.variant("other-words", PLAIN, ('"memory" if left', '"bandwidth" if left'))

bank.hint("bound-reversed", "You have swapped the two words: to the left of the ridge point, memory is the limit.")
wrong_roofline("bound-reversed", bound=lambda f, q, p, b: "compute" if f / q < p / b else "memory")
wrong_roofline("bound-reversed", bound=lambda f, q, p, b: "memory" if f and f / q < p / b else "compute")
bank.variant("bound-reversed", PLAIN, ('"memory" if left else "compute"', '"compute" if left else "memory"'))

bank.hint(
    "bound-by-counts",
    "Having more operations than bytes does not make a layer compute-bound: machines do many operations in the time "
    "that one byte takes. Compare the intensity with the ridge point.",
)
wrong_roofline("bound-by-counts", bound=lambda f, q, p, b: "compute" if f > q else "memory")
bank.variant("bound-by-counts", PLAIN, ('"memory" if left', '"memory" if intensity <= 1'))

bank.hint(
    "bound-of-one-machine",
    "Your word is right for one machine and wrong for another. Decide with the peak and the bandwidth.",
)
wrong_roofline("bound-of-one-machine", bound=lambda f, q, p, b: "compute" if f / q > 153 else "memory")
bank.variant("bound-of-one-machine", PLAIN, ('"memory" if left', '"memory" if intensity < 100'))

wrong_roofline("wrong-ridge", ridge=lambda f, q, p, b: 153.01)

bank.hint(
    "bound-beside-ridge",
    "Close to the ridge point your word is wrong. Compare the two intensities exactly, without rounding and without a "
    "margin.",
    edge=True,
)
wrong_roofline("bound-beside-ridge", bound=lambda f, q, p, b: "compute" if f / q > 1.05 * p / b else "memory")
wrong_roofline("bound-beside-ridge", bound=lambda f, q, p, b: "compute" if round(f / q) > round(p / b) else "memory")
bank.variant("bound-beside-ridge", PLAIN, ('"memory" if left', '"memory" if intensity < 0.95 * ridge'))


bank.hint("not-three-values", 'Return three values: attainable FLOP/s, "compute" or "memory", and the ridge point.')
bank.variant("not-three-values", PLAIN, ("return rate, ", "return "))


@bank.wrong("not-three-values")
def roofline(flop, n_bytes, peak, bandwidth):
    return min(peak, flop / n_bytes * bandwidth)


@bank.wrong("nothing-returned")
def roofline(flop, n_bytes, peak, bandwidth):
    min(peak, flop / n_bytes * bandwidth)
