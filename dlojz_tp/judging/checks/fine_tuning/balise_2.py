"""Balise 2: features of a body that notes each pass, and standardised features in float64."""

import math

import numpy as np
import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, same, silent

CASES = {  # shape of the images, batch, the body's mode
    "a smaller last batch": ((10, 3, 2, 2), 4, True),
    "whole batches, images (n, 4, 3)": ((8, 4, 3), 4, False),
    "fewer than a batch": ((3, 12), None, True),
    "one image": ((1, 3, 2, 2), 1, False),
}


class Body(nn.Module):
    """Batch norm, dropout and a product of 12 numbers an image; notes each pass."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(3)
        self.norm, self.drop = nn.BatchNorm1d(12), nn.Dropout(0.5)
        self.norm.running_mean += torch.randn(12, generator=draws)
        self.norm.running_var *= 1 + torch.rand(12, generator=draws)
        self.weight = nn.Parameter(torch.randn(12, 5, generator=draws))
        self.passes, self.modes = [], set()

    def forward(self, images):
        self.passes.append(len(images))
        self.modes |= {self.training, self.norm.training, self.drop.training}
        if self.norm.training and len(images) == 1:
            return images.flatten(1) @ self.weight  # batch norm would raise
        return self.drop(self.norm(images.flatten(1))) @ self.weight


def images_of(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def truth(shape):
    body, x = Body(), images_of(shape).double().numpy().reshape(shape[0], 12)
    mean, var = body.norm.running_mean.double().numpy(), body.norm.running_var.double().numpy()
    return torch.tensor((x - mean) / np.sqrt(var + 1e-5) @ body.weight.detach().double().numpy()).float()


TRUTH = [truth(shape) for shape, *_ in CASES.values()]
DRAWS = torch.Generator().manual_seed(4)
TRAIN = torch.randn(4, 5, generator=DRAWS) * torch.tensor([0.02, 0.5, 1.0, 3.0, 10.0]) + torch.tensor(
    [0.0, 1, -2, 5, 30]
)
OTHERS = [torch.randn(n, 5, generator=DRAWS) * 4 + 6 for n in (6, 1)]
CONSTANT = torch.tensor([[2.0, 1.0], [2.0, 4.0], [2.0, 1.5]])


def standard(train, *others):
    train, *others = (one.double().numpy() for one in (train, *others))
    mean = sum(train) / len(train)
    deviation = np.sqrt(sum((row - mean) ** 2 for row in train) / len(train))
    return [torch.tensor((one - mean) / (deviation + 0.1)).float() for one in (train, *others)]


def observe(features, standardised):
    body, images = Body().train(), images_of((10, 3, 2, 2))
    before = images.clone()
    found = features(body, images, 4)
    yield {"form": form(found)}
    yield {"graph": found.requires_grad, "images": torch.equal(images, before)}
    bodies, values = [], []
    for shape, batch, mode in CASES.values():
        bodies.append(Body().train(mode))
        values.append(features(bodies[-1], images_of(shape), *([batch] if batch else [])))
    largest = [max(one.passes, default=0) for one in bodies]
    few = [len(one.passes) <= math.ceil(c[0][0] / (c[1] or 250)) + 1 for one, c in zip(bodies, CASES.values())]
    yield {"asleep": [one.modes for one in bodies], "largest": largest, "few": few}
    yield {"rows": [None if one is None else len(one) for one in values], "values": values}
    yield {"mode": [one.training for one in bodies]}

    given = [TRAIN.clone(), *(one.clone() for one in OTHERS)]
    got = standardised(*given)
    yield {"standard form": form(got), "untouched": all(map(torch.equal, given, [TRAIN, *OTHERS]))}
    alone = standardised(TRAIN.clone())
    yield {"alone form": form(alone)}
    yield {"alone": list(alone), "train": got[0], "others": list(got[1:])}
    hard = [standardised(TRAIN[:1].clone(), OTHERS[0].clone()), standardised(CONSTANT.clone(), CONSTANT[:1] + 1)]
    yield {"hard": list(map(list, hard))}


def where(seen, due):
    k = next(k for k, (a, b) in enumerate(zip(seen, due)) if not same(a, b))
    return {"where": list(CASES)[k], "got": "", "expected": ""}


def pass_fields(seen, due):
    return {"got": f"{max(seen)} images in a pass", "expected": f"at most {max(due)}"}


LOOKS = [
    Look("features: one row for each image", "form", "float32 (10, 5)",
         lambda seen, due: "last-batch-lost" if seen == "float32 (8, 5)" else "wrong-form"),
    Look("without a graph", "graph", False, "graph-kept"),
    Look("", "images", True, "inputs-changed"),
    Look("every module is in evaluation mode during each pass", "asleep", [{False}] * len(CASES), "awake-pass", fields=silent),
    Look("`batch` images at a time", "largest", [4, 4, 3, 1], "other-batches",
         holds=lambda seen, due: all(a <= b for a, b in zip(seen, due)), fields=pass_fields),
    Look("in no more passes than necessary", "few", [True] * len(CASES), "other-batches", fields=silent),
    Look("no image is left out", "rows", [len(one) for one in TRUTH], "last-batch-lost"),
    Look("each image's features, in the order of the images", "values", TRUTH, "wrong-features", fields=where),
    Look("the body is back in its mode", "mode", [mode for *_, mode in CASES.values()], "mode-left", fields=silent),
    Look("standardised returns a list, `train` first", "standard form", form([TRAIN, *OTHERS]), "wrong-form"),
    Look("", "alone form", form([TRAIN]), "wrong-form"),
    Look("the inputs are unchanged", "untouched", True, "inputs-changed"),
    Value("the training features: minus their mean, divided by the deviation + 0.1", "alone", standard(TRAIN), "wrong-standard", fields=silent),
    Look("the same with other sets beside them", "train", standard(TRAIN)[0], "all-together", fields=silent),
    Value("the other sets: the same shift and scale", "others", standard(TRAIN, *OTHERS)[1:], "own-statistics", fields=silent),
    Look("a single row, and a constant feature", "hard", [standard(TRAIN[:1], OTHERS[0]), standard(CONSTANT, CONSTANT[:1] + 1)],
         "wrong-standard", fields=silent),
]  # fmt: skip


def balise_2(features, standardised):
    yield from judged(LOOKS, observe, features, standardised)
