"""Answers to balise 5 of 25_race: rectangular validation."""

from tests.answers.bank import Bank

bank = Bank("25_race", 5, whole=True)

# falling proportions, the geometric mean of a batch's two ends; classes in a list, put in order by sorting
FALLING = """
def rectangles(shapes, batch, short):
    order = sorted(range(len(shapes)), key=lambda k: shapes[k][1] / shapes[k][0])
    batches = []
    while order:
        numbers, order = tuple(order[:batch]), order[batch:]
        (h0, w0), (h1, w1) = shapes[numbers[0]], shapes[numbers[-1]]
        tall = math.sqrt(h0 / w0 * h1 / w1)
        height = short if tall < 1 else STRIDE * int(short * tall / STRIDE + 0.5)
        width = short if tall >= 1 else STRIDE * int(short / tall / STRIDE + 0.5)
        batches.append((numbers, (height, width)))
    return batches


@torch.no_grad()
def predict(model, images, batch, short):
    before = model.training
    model.train(False)
    classes = {}
    try:
        for numbers, (height, width) in rectangles([(i.size(1), i.size(2)) for i in images], batch, short):
            x = torch.stack([F.interpolate(images[k].unsqueeze(0), (height, width), mode="bilinear", antialias=True)[0] for k in numbers])
            for k, scores in zip(numbers, model(x)):
                classes[k] = scores.argmax()
    finally:
        model.train(before)
    return torch.stack([classes[k] for k in range(len(images))])
"""
bank.text(None, FALLING)

# a generator of tensors, the middle image's proportions; the mode of each layer is kept; the order by argsort
TENSORS = """
def rectangles(shapes, batch, short):
    h, w = torch.tensor([list(shape) for shape in shapes], dtype=torch.float64).T
    for numbers in (h / w).argsort().split(batch):
        middle = numbers[len(numbers) // 2]
        sides = torch.stack([h[middle], w[middle]])
        sides = (short * sides / sides.min() / STRIDE).round() * STRIDE
        sides[sides.argmin()] = short
        yield numbers, (int(sides[0]), int(sides[1]))


def predict(model, images, batch, short):
    modes = {part: part.training for part in model.modules()}
    model.eval()
    all_numbers, all_classes = [], []
    with torch.inference_mode():
        for numbers, shape in rectangles([image.shape[-2:] for image in images], batch, short):
            x = torch.empty(len(numbers), 3, *shape)
            for row, k in enumerate(numbers):
                x[row] = F.interpolate(images[k][None], size=shape, mode="bilinear", antialias=True)[0]
            all_numbers.append(numbers)
            all_classes.append(model(x).softmax(-1).max(-1).indices)
    for part, mode in modes.items():
        part.training = mode
    return torch.cat(all_classes)[torch.cat(all_numbers).argsort()]
"""
bank.text(None, TENSORS)

# numpy; the mean of the heights over that of the widths
ARRAYS = """
import numpy as np


def rectangles(shapes, batch, short):
    sides = np.array([tuple(shape) for shape in shapes])
    order = np.argsort(-sides[:, 0] / sides[:, 1], kind="stable")
    found = []
    for numbers in np.split(order, range(batch, len(order), batch)):
        h, w = sides[numbers].mean(0)
        scale = short / min(h, w)
        found.append([numbers, [max(short, int(np.round(side * scale / STRIDE)) * STRIDE) for side in (h, w)]])
    return found


@torch.no_grad()
def predict(model, images, batch, short):
    training, model.training = model.training, False
    model.eval()
    found = np.zeros(len(images), dtype=np.int64)
    for numbers, shape in rectangles([image.shape[1:] for image in images], batch, short):
        x = torch.cat([F.interpolate(images[k][None], size=tuple(shape), mode="bilinear", antialias=True) for k in numbers])
        found[numbers] = model(x).argmax(dim=1).numpy()
    model.train(training)
    return torch.from_numpy(found)
"""
bank.text(None, ARRAYS)
bank.slip(None, ("math.exp(sum(math.log(shapes[k][0] / shapes[k][1]) for k in numbers) / len(numbers))", "sum(shapes[k][0] / shapes[k][1] for k in numbers) / len(numbers)"))  # fmt: skip

bank.slip(None, ("    mode = model.training\n    model.eval()\n", "    mode, model = False, copy.deepcopy(model).eval()\n"))  # fmt: skip

bank.hint("batches", "Images are missing, or appear twice, or a batch has the wrong size. Every image belongs "
                        "to exactly one batch. Each batch has `batch` images; only the last may have fewer.")  # fmt: skip
bank.slip("batches", ("range(0, len(order), batch)", "range(0, len(order) - batch + 1, batch)"))
bank.slip("batches", ("order[i : i + batch]", "order[i : i + batch + 1]"))
bank.slip("batches", ("range(0, len(order), batch)", "range(0, len(order) // batch * batch, batch)"))
bank.slip("batches", ("images], batch, short):", "images], batch, short)[:-1]:"))
bank.slip("batches", ("images], batch, short):", "images], batch + 1, short):"))
bank.variant("batches", FALLING, ("order[batch:]", "order[batch - 1 :][: len(order) - batch]"))
bank.variant("batches", ARRAYS, ("range(batch, len(order), batch)", "range(batch, len(order), batch + 1)"))
bank.variant("batches", TENSORS, (".split(batch)", ".chunk(batch)"))

bank.hint("not-sorted", "The batches are not in the order of height / width. Sort first, then cut into batches: "
                           "otherwise one shape has to fit tall and wide images at once.")  # fmt: skip
bank.slip("not-sorted", ("key=lambda k: shapes[k][0] / shapes[k][1]", "key=lambda k: shapes[k][0] * shapes[k][1]"))
bank.slip("not-sorted", ("shapes[k][0] / shapes[k][1])", "round(shapes[k][0] / shapes[k][1], 1))"))
bank.slip("not-sorted", (", key=lambda k: shapes[k][0] / shapes[k][1]", ""))
bank.slip("not-sorted", ("key=lambda k: shapes[k][0] / shapes[k][1]", "key=lambda k: max(shapes[k]) / min(shapes[k])"))  # fmt: skip
bank.variant("not-sorted", TENSORS, ("(h / w).argsort()", "h.argsort()"))
bank.variant("not-sorted", ARRAYS, ("-sides[:, 0] / sides[:, 1]", "sides[:, 0] // sides[:, 1]"))

bank.hint("swapped", "You have swapped height and width. Height comes first; where height / width is above 1, "
                        "the height is the long side.")  # fmt: skip
bank.slip("swapped", ("(long, short) if ratio > 1 else (short, long)", "(short, long) if ratio > 1 else (long, short)"))  # fmt: skip
bank.slip("swapped", ("(long, short) if ratio > 1 else (short, long)", "(short, long)"))
bank.slip("swapped", ("[image.shape[1:] for image in images]", "[(image.shape[2], image.shape[1]) for image in images]"))  # fmt: skip
bank.slip("swapped", ("size=shape", "size=shape[::-1]"))
bank.variant("swapped", FALLING, ("(height, width)))", "(width, height)))"))
bank.variant("swapped", TENSORS, ("int(sides[0]), int(sides[1])", "int(sides[1]), int(sides[0])"))

bank.hint("short-lost", "The short side of a batch is not `short`. It always is; the long side follows from the proportions.")  # fmt: skip
bank.slip("short-lost", ("short * max(ratio, 1 / ratio)", "short * min(ratio, 1 / ratio)"), (" / STRIDE) * STRIDE", " / STRIDE + 0.5) * STRIDE"))  # fmt: skip
bank.slip("short-lost", ("round(short * max(ratio, 1 / ratio) / STRIDE)", "round(short * max(ratio, 1 / ratio) ** 0.5 / STRIDE)"), ("(long, short) if ratio > 1 else (short, long)", "(long, short * short // long) if ratio > 1 else (short * short // long, long)"))  # fmt: skip
bank.slip("short-lost", ("(long, short) if ratio > 1 else (short, long)", "(short + 8, short + 8)"))
bank.variant("short-lost", ARRAYS, ("short / min(h, w)", "short / max(h, w)"), ("max(short, int", "max(8, int"))

bank.hint("long-side", "The long side is `short` times the proportions of the batch, rounded to the nearest "
                          "multiple of STRIDE, not always down and not always up.")  # fmt: skip
bank.slip("long-side", ("round(short * max(ratio, 1 / ratio) / STRIDE)", "math.floor(short * max(ratio, 1 / ratio) / STRIDE)"))  # fmt: skip
bank.slip("long-side", ("round(short * max(ratio, 1 / ratio) / STRIDE)", "math.ceil(short * max(ratio, 1 / ratio) / STRIDE)"))  # fmt: skip
bank.slip("long-side", ("round(short * max(ratio, 1 / ratio) / STRIDE) * STRIDE", "round(short * max(ratio, 1 / ratio))"))  # fmt: skip
bank.variant("long-side", FALLING, ("short * tall / STRIDE + 0.5", "short * tall / STRIDE"), ("short / tall / STRIDE + 0.5", "short / tall / STRIDE"))  # fmt: skip
bank.variant("long-side", TENSORS, (".round() * STRIDE", " * STRIDE"))

bank.hint("other-proportions", "Your shape squashes the images, or stretches them: its height / width is not "
                                  "between theirs. Give each batch its own shape, from a mean of the proportions "
                                  "of its images.")  # fmt: skip
bank.slip("other-proportions", ("(long, short) if ratio > 1 else (short, long)", "(short, short)"))
bank.slip("other-proportions", ("for k in numbers) / len(numbers))", "for k in order) / len(order))"))
bank.slip("other-proportions", (" size=shape,", " size=(short, short),"))
bank.slip("other-proportions", ("/ len(numbers))", "/ batch)"))
bank.variant("other-proportions", FALLING, ("(h0, w0), (h1, w1) = shapes[numbers[0]], shapes[numbers[-1]]", "h0, w0, h1, w1 = 1, 2, 1, 2"))  # fmt: skip
bank.variant("other-proportions", ARRAYS, ("sides[numbers].mean(0)", "sides.mean(0)"))

bank.hint("one-call", "You call the model {calls} times for {batches} batches. Resize the images of a batch one "
                         "by one, stack them, and call the model once.")  # fmt: skip
bank.slip("one-call", ("model(torch.cat(x)).argmax(1)", "torch.cat([model(one).argmax(1) for one in x])"))
bank.variant("one-call", FALLING, ("zip(numbers, model(x))", "((k, model(x[i : i + 1])[0]) for i, k in enumerate(numbers))"))  # fmt: skip

bank.hint("training-mode", "The model runs in training mode: dropout is on, and batch norm uses the batch's own "
                              "statistics. Call `model.eval()` first.")  # fmt: skip
bank.slip("training-mode", ("    model.eval()\n", ""))
bank.variant("training-mode", TENSORS, ("    model.eval()\n", "    model.training = False\n"))

bank.hint("not-resized", "The model does not get the result of bilinear scaling with `antialias=True`. Resize "
                            "each whole image from its own shape to that of its batch, without a crop, a border or "
                            "an intermediate size.")  # fmt: skip
bank.slip("not-resized", (", antialias=True) for k", ") for k"))
bank.slip("not-resized", ("model(torch.cat(x))", "model(torch.cat(x) / 255)"))
bank.slip("not-resized", ('mode="bilinear", antialias=True', 'mode="nearest"'))
bank.slip("not-resized", ('mode="bilinear", antialias=True', 'mode="bicubic", antialias=True'))
bank.slip("not-resized", ('F.interpolate(images[k][None], size=shape, mode="bilinear", antialias=True)', "F.pad(images[k][None, :, : shape[0], : shape[1]], (0, max(0, shape[1] - images[k].shape[2]), 0, max(0, shape[0] - images[k].shape[1])))"))  # fmt: skip
bank.slip("not-resized", ("F.interpolate(images[k][None], size", "F.interpolate(resized(images[k][None], short), size"))  # fmt: skip
bank.variant("not-resized", FALLING, (", antialias=True)[0]", ")[0]"))

bank.hint("order-lost", "The classes are right, but not in the order of `images`. Put each class at the "
                           "position of its image.")  # fmt: skip
bank.slip("order-lost", ("found[numbers] = model(torch.cat(x)).argmax(1)", "done = locals().get('done', 0)\n        found[done : done + len(numbers)] = model(torch.cat(x)).argmax(1)\n        done += len(numbers)"))  # fmt: skip
bank.variant("order-lost", TENSORS, ("[torch.cat(all_numbers).argsort()]", ""))
bank.variant("order-lost", TENSORS, ("torch.cat(all_numbers).argsort()", "torch.cat(all_numbers)"))

bank.hint("wrong-classes", "Return one class per image, (n,) int64: the index of the largest of its logits.")
bank.slip("wrong-classes", (".argmax(1)", ".argmin(1)"))
bank.slip("wrong-classes", ("    model.train(mode)\n    return found", "    model.train(mode)\n    return found.float()"))  # fmt: skip
bank.slip("wrong-classes", ("    model.train(mode)\n    return found", "    model.train(mode)\n    return found[:, None]"))  # fmt: skip
bank.variant("wrong-classes", FALLING, ("scores.argmax()", "scores.max()"))

bank.hint("mode-lost", "After the call the model is in another mode than before. Save `model.training` before "
                          "`model.eval()`, and restore it with `model.train(mode)`.")  # fmt: skip
bank.slip("mode-lost", ("    model.train(mode)\n", ""))
bank.slip("mode-lost", ("model.train(mode)", "model.train()"))
bank.slip("mode-lost", ("    mode = model.training\n    model.eval()\n", "    model.eval()\n    mode = model.training\n"))  # fmt: skip
bank.variant("mode-lost", ARRAYS, ("    model.train(training)\n", "    model.training = training\n"))
