"""Answers to balise 6 of 01_gpu_acceleration: memory as a straight line."""

import math

import numpy as np
import torch

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration", 6)


def fitting(peaks):
    return {b: peak for b, peak in peaks.items() if peak is not None}


def line(peaks):
    peaks = fitting(peaks)
    slope, start = np.polyfit(list(peaks), list(peaks.values()), 1)
    return float(start), float(slope)


@bank.right()
def memory_model(peaks, capacity):
    model, image = line(peaks)
    # polyfit is right to about nine digits: a hair of a byte must not cost an image
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.right()
def memory_model(peaks, capacity):
    sizes = torch.tensor([[1.0, b] for b, p in peaks.items() if p is not None], dtype=torch.float64)
    values = torch.tensor([[float(p)] for p in peaks.values() if p is not None], dtype=torch.float64)
    model, image = torch.linalg.lstsq(sizes, values).solution.flatten().tolist()
    return [model, image, max(0, math.floor((capacity - model) / image + 1e-9))]


@bank.right()
def memory_model(peaks, capacity):
    """A line through the first and the last size: fine where the sizes are far apart."""
    known = sorted(fitting(peaks).items())
    (b0, p0), (b1, p1) = known[0], known[-1]
    if len(known) > 5:
        return memory_model_of_all(peaks, capacity)
    image = (p1 - p0) / (b1 - b0)
    return p0 - b0 * image, image, max(0, int((capacity - p0 + b0 * image) // image))


def memory_model_of_all(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0, int((capacity - model) / image + 1e-6))


bank.hint("not-three", "Return three numbers: model_bytes, bytes_per_image, largest_batch.")


@bank.wrong("not-three")
def memory_model(peaks, capacity):
    return line(peaks)


@bank.wrong("nothing-returned")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    print(model, image, (capacity - model) // image)


bank.hint("swapped", "The model's part and the part per image are swapped: polyfit returns the slope first.")


@bank.wrong("swapped", variant=True)
def memory_model(peaks, capacity):
    peaks = fitting(peaks)
    model, image = np.polyfit(list(peaks), list(peaks.values()), 1)
    return model, image, int((capacity - model) // image)


bank.hint("no-fixed-part", "You divide the peak by the batch size. That is not the memory per image, because the "
          "model's part is still in it. Fit a straight line with an intercept.")  # fmt: skip


@bank.wrong("no-fixed-part")
def memory_model(peaks, capacity):
    peaks = fitting(peaks)
    image = sum(peak / b for b, peak in peaks.items()) / len(peaks)
    return 0.0, image, int(capacity // image)


@bank.wrong("no-fixed-part", variant=True)
def memory_model(peaks, capacity):
    largest = max(fitting(peaks))
    image = peaks[largest] / largest
    return 0.0, image, int(capacity // image)


bank.hint("two-points", "Your line goes through two of the points and follows their noise. Fit all the points "
          "(least squares).")  # fmt: skip


@bank.wrong("two-points")
def memory_model(peaks, capacity):
    (b0, p0), (b1, p1) = sorted(fitting(peaks).items())[:2]
    image = (p1 - p0) / (b1 - b0)
    model = p0 - b0 * image
    return model, image, max(0, int((capacity - model) // image))


bank.hint("failed-counted", "Sizes with None did not fit, so they have no peak. Leave them out of the fit.")


@bank.wrong("failed-counted")
def memory_model(peaks, capacity):
    image, model = np.polyfit(list(peaks), list(peaks.values()), 1)
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.wrong("failed-counted", variant=True)
def memory_model(peaks, capacity):
    image, model = np.polyfit(list(peaks), [peak or 0 for peak in peaks.values()], 1)
    return model, image, max(0, int((capacity - model) / image + 1e-6))


bank.hint("wrong-line", "The line does not fit the peaks: peak = model_bytes + bytes_per_image × batch size.")


@bank.wrong("wrong-line")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model / 2**20, image / 2**20, max(0, int((capacity - model) / image + 1e-6))


bank.hint("rounded-up", "This batch does not fit: it needs {needed}, and the card has {capacity}. Round down. If "
          "not even one image fits, the answer is 0.")  # fmt: skip


@bank.wrong("rounded-up")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0, math.ceil((capacity - model) / image))


@bank.wrong("rounded-up", variant=True)
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0, round((capacity - model) / image))


bank.hint("fixed-part-forgotten", "You divided the whole capacity among the images, but the model takes its part "
          "first.")  # fmt: skip


@bank.wrong("fixed-part-forgotten", variant=True)
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, int(capacity // image)


bank.hint("negative-batch", "The model alone does not fit: the largest batch is 0, not {size}.")


@bank.wrong("negative-batch")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, math.floor((capacity - model) / image + 1e-6)


bank.hint("not-an-integer", "The largest batch must be a whole number, an int.")


@bank.wrong("not-an-integer", variant=True)
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, max(0.0, (capacity - model) / image)


bank.hint("wrong-largest", "The largest batch is the largest whole number with model_bytes + bytes_per_image × "
          "batch ≤ capacity. Use the line, not the sizes that were tried.")  # fmt: skip


@bank.wrong("wrong-largest")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, 128 if capacity > model else 0


@bank.wrong("wrong-largest")
def memory_model(peaks, capacity):
    model, image = line(peaks)
    fits = int((capacity - model) / image + 1e-6)
    return model, image, 2 ** (fits.bit_length() - 1) if fits > 0 else 0


@bank.wrong("wrong-line")
def memory_model(peaks, capacity):
    """Hard-coded: the numbers of one network."""
    return 300_000_000.0, 7_500_000.0, max(0, (capacity - 300_000_000) // 7_500_000)


def with_largest(model, image, capacity):
    return model, image, max(0, int((capacity - model) / image + 1e-6))


@bank.right()
def memory_model(peaks, capacity):
    known = fitting(peaks)
    mean_b, mean_p = sum(known) / len(known), sum(known.values()) / len(known)
    above = sum((b - mean_b) * (p - mean_p) for b, p in known.items())
    image = above / sum((b - mean_b) ** 2 for b in known)
    return with_largest(mean_p - image * mean_b, image, capacity)


@bank.wrong("two-points")
def memory_model(peaks, capacity):
    (b0, p0), (b1, p1) = sorted(fitting(peaks).items())[-2:]
    image = (p1 - p0) / (b1 - b0)
    return with_largest(p0 - b0 * image, image, capacity)


@bank.wrong("two-points")
def memory_model(peaks, capacity):
    known = sorted(fitting(peaks).items())
    (b0, p0), (b1, p1) = known[0], known[-1]
    image = (p1 - p0) / (b1 - b0)
    return with_largest(p0 - b0 * image, image, capacity)


@bank.wrong("two-points")
def memory_model(peaks, capacity):
    known = list(fitting(peaks).items())
    slopes = [(q - p) / (c - b) for i, (b, p) in enumerate(known) for c, q in known[i + 1 :]]
    image = sorted(slopes)[len(slopes) // 2]
    models = sorted(p - image * b for b, p in known)
    return with_largest(models[len(models) // 2], image, capacity)


@bank.wrong("not-three", variant=True)
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return str(model), str(image), max(0, int((capacity - model) / image + 1e-6))


bank.hint("peaks-changed", "You changed the dictionary that you were given. Leave it unchanged, and collect the "
          "sizes that fitted in a new one.")  # fmt: skip


@bank.wrong("peaks-changed", variant=True)
def memory_model(peaks, capacity):
    for b in [b for b, peak in peaks.items() if peak is None]:
        del peaks[b]
    return with_largest(*line(peaks), capacity)


bank.hint("wrong-intercept", "The part per image is right, but the model's part is not. It is the line's value at "
          "batch size 0, which is below the smallest peak.")  # fmt: skip


@bank.wrong("wrong-intercept", variant=True)
def memory_model(peaks, capacity):
    return with_largest(min(fitting(peaks).values()), line(peaks)[1], capacity)


@bank.wrong("negative-batch", variant=True)
def memory_model(peaks, capacity):
    model, image = line(peaks)
    return model, image, int((capacity - model) / image + 1e-6) if capacity > model else None


@bank.wrong("two-points", variant=True)
def memory_model(peaks, capacity):
    """The first and the last size in the dictionary."""
    there = [b for b in peaks if peaks[b] is not None]
    first, last = there[0], there[-1]
    image = (peaks[last] - peaks[first]) / (last - first)
    model = peaks[first] - image * first
    return model, image, max(0, int((capacity - model) // image))


@bank.wrong("wrong-line", variant=True)
def memory_model(peaks, capacity):
    """Sizes sorted, peaks not: with sizes in another order they no longer belong together."""
    there = {b: peak for b, peak in peaks.items() if peak is not None}
    image, model = np.polyfit(sorted(there), list(there.values()), 1)
    return model, image, max(0, int((capacity - model) // image))


@bank.wrong("wrong-largest", variant=True)
def memory_model(peaks, capacity):
    """No batch that failed, or a larger one: the line is not asked alone."""
    model, image, largest = with_largest(*line(peaks), capacity)
    return model, image, min([largest, *(b - 1 for b, peak in peaks.items() if peak is None)])
