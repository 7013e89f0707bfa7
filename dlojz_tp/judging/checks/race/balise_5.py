"""Balise 5: batches of like proportions, by their properties; what a small model is shown, in which shape and mode."""

from fractions import Fraction

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, at_most, form, judged, silent

STRIDE = 8
# (shapes, batch, short)
CASES = {
    "photographs, several alike": ([(480, 640), (640, 480), (427, 640), (500, 333), (375, 500), (120, 120), (333, 500), (50, 300),
                                    (640, 480), (480, 640), (612, 612)], 4, 32),
    "from 1:5 to 5:1": ([(500, 100), (90, 450), (64, 80), (100, 500), (300, 100), (80, 64), (100, 250)], 2, 64),
    "one image a batch": ([(64, 70), (30, 50), (51, 30), (28, 97), (97, 28), (40, 40), (100, 103)], 1, 40),
    "all of the same shape": ([(30, 50)] * 7, 3, 40),
    "fewer images than a batch": ([(40, 60), (45, 60), (38, 60)], 16, 32),
    "one image": ([(50, 22)], 8, 24),
}  # fmt: skip


def plain(found):
    """What `rectangles` returned, in plain numbers: [(numbers, (height, width)), ...]."""
    return None if found is None else [([int(n) for n in some], (float(h), float(w))) for some, (h, w) in found]


def members(batches):
    """(sizes of the batches, in their order; all numbers in them, in rising order)."""
    return batches and ([len(some) for some, _ in batches], sorted(n for some, _ in batches for n in some))


def all_once(images, batch):
    """The truth of `members`."""
    return [min(batch, images - i) for i in range(0, images, batch)], list(range(images))


def sides(name, shapes, short, batches):
    """Of each batch: (where, lowest and highest height / width of its images, (height, width), short)."""
    ratios = [[Fraction(*shapes[k]) for k in some] for some, _ in batches]
    return [(name, min(some), max(some), shape, short) for some, (_, shape) in zip(ratios, batches)]


def in_order(found):
    """Whether proportions rise from batch to batch, or fall."""
    pairs = list(zip(found, found[1:]))
    return all(a[2] <= b[1] for a, b in pairs) or all(a[1] >= b[2] for a, b in pairs)


def off(low, high, shape, short):
    """Pixels that the long side is farther than half a stride from what proportions from low to high ask for."""
    if shape[0] < shape[1]:
        low, high = 1 / high, 1 / low
    least, most = (float(short * max(ratio, 1)) for ratio in (low, high))
    slack = STRIDE / 2 + 0.5  # the nearest by difference, or by ratio
    return max(0.0, least - max(shape) - slack, max(shape) - most - slack)


def fits(name, low, high, shape, short):
    return min(shape) == short and max(shape) % STRIDE == 0 and not off(low, high, shape, short)


STRANGE = -1  # stands for an image that was not given
IDS = [7 * k % 11 + 1 for k in range(11)]  # the first colour of image k, everywhere: says which image it is
CLASSES = [(one - 1) // 3 for one in IDS]
SHAPES = [(40, 64), (90, 30), (33, 33), (50, 70), (64, 40), (25, 80), (70, 65), (10, 13), (48, 36), (60, 100), (16, 24)]
DRAWS = torch.Generator().manual_seed(25)
IMAGES = [torch.randn(3, h, w, generator=DRAWS) for h, w in SHAPES]
for one, image in zip(IDS, IMAGES):
    image[0] = one
RUNS = {"the model was in training mode": (11, 4, 32, True), "it was in evaluation mode": (5, 8, 24, False)}


class Probe(nn.Module):
    """Tells the class from the first colour. In training mode its answers are others. note: gets inputs and modes."""

    def __init__(self, note):
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm2d(3, affine=False), nn.Dropout(), nn.Linear(3, 4)
        self.pool, self.note = nn.AdaptiveAvgPool2d(1), note
        self.norm.running_mean[0], self.norm.running_var[0] = 6, 9
        centres = (torch.tensor([2.0, 5, 8, 11]) - 6) / 3
        with torch.no_grad():  # logits: the nearest centre has the largest
            self.head.weight.zero_()[:, 0] = 2 * centres
            self.head.bias.copy_(-(centres**2))

    def forward(self, x):
        self.note(x.detach().clone(), any(part.training for part in self.modules()))
        return self.head(self.drop(self.pool(self.norm(x)).flatten(1)))


def scaled(image, height, width):
    """The truth of a resized image, float64: each new pixel is a mean under a triangle of the old ones."""
    return triangles(image.shape[1], height) @ image.double() @ triangles(image.shape[2], width).T


def triangles(old, new):
    """(new, old): what each old pixel of a line adds to each new one."""
    scale = old / new
    centres = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    weights = (1 - (torch.arange(old) + 0.5 - centres[:, None]).abs() / max(scale, 1)).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def watched(predict, images, batch, short, training):
    """What a model sees: batches as `rectangles` has them, how far images are from the truth, modes, classes."""
    batches, apart, trained = [], [0.0], []

    def note(x, mode):
        ids = [round(one) for one in x[:, 0].nan_to_num(0, 0, 0).amax((1, 2)).tolist()]
        numbers = [IDS.index(one) if one in IDS[:images] else STRANGE for one in ids]
        batches.append((numbers, tuple(x.shape[2:])))
        pairs = [(one, IMAGES[k]) for one, k in zip(x, numbers) if k != STRANGE]
        apart.extend((one - scaled(image, *x.shape[2:])).abs().max().item() for one, image in pairs)
        trained.append(mode)

    model = Probe(note).train(training)
    found = predict(model, [image.clone() for image in IMAGES[:images]], batch, short)
    calls = members(sorted(batches, key=lambda one: -len(one[0]))) or ([], [])
    classes = found.tolist() if form(found) == f"int64 ({images},)" else form(found)
    after = " and ".join(sorted({MODES[part.training] for part in model.modules()}))
    return {"calls": calls, "trained": any(trained), "shown": sides("predict", SHAPES, short, batches), "apart": max(apart),
            "classes": classes, "after": after}  # fmt: skip


MODES = {True: "training mode", False: "evaluation mode"}


def observe(rectangles, predict):
    """Batches of all cases, then what a model sees."""
    found = [plain(rectangles(list(shapes), batch, short)) for shapes, batch, short in CASES.values()]
    yield {"members": [members(batches) for batches in found]}
    cases = zip(CASES.items(), found)
    yield {"sides": [sides(name, shapes, short, batches) for (name, (shapes, _, short)), batches in cases]}
    runs = [watched(predict, *run) for run in RUNS.values()]
    yield {key: [run[key] for run in runs] for key in runs[0]}


def first_of(cases):
    """Fields: the first case that is wrong, and what is wrong in it."""

    def fields(seen, due):
        k = next(k for k, (a, b) in enumerate(zip(seen, due)) if a != b)
        return {"where": list(cases)[k], "expected": due[k], "got": seen[k]}

    return fields


def first_batches(cases):
    """The same where sizes of batches and numbers of images are compared."""

    def fields(seen, due):
        found = first_of(cases)(seen, due)
        (sizes, numbers), (due_sizes, all_numbers) = found["got"] or ([], []), found["expected"]
        got = f"batches of {sizes}" + (f", images {numbers}" if numbers != all_numbers else "")
        return found | {
            "got": got,
            "expected": f"batches of {due_sizes}",
            "calls": len(sizes),
            "batches": len(due_sizes),
        }

    return fields


def wrong_calls(seen, due):
    """The hint: images that nobody gave, that are missing, or calls that are too many."""
    if any(STRANGE in numbers for _, numbers in seen):
        return "not-resized"
    once = all(a[1] == b[1] for a, b in zip(seen, due))
    return "one-call" if once and any(len(a[0]) != len(b[0]) for a, b in zip(seen, due)) else "batches"


def wrong_side(seen, due):
    """The hint: what is the matter with sides that are wrong."""
    wrong = [one for one in seen if not fits(*one)]
    if any(min(shape) != short for *_, shape, short in wrong):
        return "short-lost"
    if all(fits(name, low, high, shape[::-1], short) for name, low, high, shape, short in wrong):
        return "swapped"
    return "long-side" if all(off(*one[1:]) <= STRIDE / 2 for one in wrong) else "other-proportions"


def wrong_fields(seen, due):
    name, low, high, shape, _ = next(one for one in seen if not fits(*one))
    where = f"{name}: a batch with height / width from {float(low):.2f} to {float(high):.2f}"
    return {"where": where, "expected": "", "got": "(height, width) = ({:g}, {:g})".format(*shape)}


def lost(seen, due):
    """The hint: the right classes of other images, or others."""
    alike = all(isinstance(a, list) and sorted(a) == sorted(b) for a, b in zip(seen, due))
    return "order-lost" if alike else "wrong-classes"


def sides_look(claim, key):
    def see(observed):
        return sum(observed[key], [])

    return Look(
        claim, see, (), wrong_side, holds=lambda seen, due: all(fits(*one) for one in seen), fields=wrong_fields
    )


def orders(observed):
    return [in_order(found) for found in observed["sides"]]


LOOKS = [
    Look("rectangles: each image once, in batches of `batch`", "members",
         [all_once(len(shapes), batch) for shapes, batch, _ in CASES.values()], "batches", fields=first_batches(CASES)),
    Look("sorted by height / width", orders, [True] * len(CASES),
         "not-sorted", fields=lambda seen, due: first_of(CASES)(seen, due) | silent(seen, due)),
    sides_look("the short side is `short`, the long side follows the proportions of the images", "sides"),
    Look("predict: each batch goes through the model once", "calls", [all_once(*run[:2]) for run in RUNS.values()],
         wrong_calls, fields=first_batches(RUNS)),
    Look("in evaluation mode", "trained", [False] * len(RUNS), "training-mode", fields=silent),
    sides_look("in the shape of its batch", "shown"),
    Look("each image is resized, antialiased", "apart", 1e-3, "not-resized", holds=at_most, fields=silent),
    Look("a class for each image, in the order of the images", "classes", [CLASSES[: run[0]] for run in RUNS.values()], lost,
         fields=first_of(RUNS)),
    Look("afterwards the model is in its old mode", "after", [MODES[run[3]] for run in RUNS.values()], "mode-lost",
         fields=first_of(RUNS)),
]  # fmt: skip


def balise_5(rectangles, predict):
    yield from judged(LOOKS, observe, rectangles, predict)
