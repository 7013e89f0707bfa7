"""Balise 8: an entry of any kind, run twice on a small easy set: what it yields, logs, computes and learns."""

import contextlib
import functools
import itertools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dlojz_tp import scale
from dlojz_tp.judging.checking.looks import Look, at_most, judged, silent
from dlojz_tp.models import small_resnet
from dlojz_tp.training.race_data import Log, Photos

CLASSES, MORE_CLASSES, VALIDATION = 4, 20, 120
ALLOWED, MARGIN = 0.5, 1.02  # of the baseline's work
LEARNT = 0.5  # accuracy, the mean of two runs: 0.25 without learning, nearly 1 with any that fits
ALIKE, SHARE = 0.5, 0.85  # weights of one output whose cosine is above ALIKE are alike; so many of all tell one origin
SEEDS = 11, 12


def images():
    """How many there are to train on: no batch divides a prime number."""
    return 2411 if scale() == "full" else 601


@functools.cache
def easy_photos():
    """Four colours, beneath grey blocks as large as a pixel of a 4 x 4 image: the same to see at any size."""
    draws, n = torch.Generator().manual_seed(3), images() + VALIDATION
    labels = torch.randperm(n, generator=draws) % CLASSES
    colours = torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, -1]])[labels]
    blocks = torch.randn(n, 1, 4, 4, generator=draws).repeat_interleave(8, 2).repeat_interleave(8, 3)
    noise = 8 * torch.randn(n, 3, 1, 1, generator=draws) + 6 * torch.randn(n, 3, 32, 32, generator=draws)
    x = (115 + 60 * colours[:, :, None, None] + 40 * blocks + noise).clamp(0, 255).to(torch.uint8)
    train, validation = zip(x.split([images(), VALIDATION]), labels.split([images(), VALIDATION]))
    return Photos(train, validation, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class Flop(TorchDispatchMode):
    """Add up what runs inside, backward passes too, by FlopCounterMode's formulas but without its cost for each call."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if formula := flop_registry.get(func.overloadpacket):
            self.total += formula(*args, **kwargs or {}, out_val=out)
        return out


@functools.cache
def baseline_flop():
    """FLOP of the baseline's epochs on the easy set."""
    width, epochs = (64, 10) if scale() == "full" else (8, 5)
    with torch.device("meta"), Flop() as flop:
        logits = small_resnet(width, CLASSES)(torch.empty(16, 3, 32, 32))
        F.cross_entropy(logits, torch.zeros(16, dtype=torch.int64)).backward()
    return flop.total / 16 * images() * epochs


def weights(model):
    """Copies of all weights with a row for each output."""
    return [one.detach().cpu().float().flatten(1).clone() for one in model.parameters() if one.dim() > 1]


def alike(one, other):
    """The share of outputs whose weights are alike in two models; 0 for models of other shapes.

    Without those of the classes: what they learn is much the same from any start.
    """
    pairs = [(a, b) for a, b in zip(one, other) if len(a) != CLASSES]
    if not pairs or [a.shape for a in one] != [b.shape for b in other]:
        return 0.0
    return torch.cat([F.cosine_similarity(a, b) for a, b in pairs]).gt(ALIKE).double().mean().item()


def run(entry, photos, seed, most=None):
    """A run to its end, with its evaluations, as five_runs does it. most: FLOP after which nothing more is asked for."""
    photos.log = log = Log(itertools.count().__next__)
    log("run_start")
    ends, found, accuracies, flop = [], [], [], Flop()
    # nothing here is worth a compilation, and what is compiled is not counted
    with torch.compiler.set_stance("force_eager"), flop if most else contextlib.nullcontext():
        made = entry(photos, seed)
        given = "" if isinstance(made, Iterable) and not isinstance(made, nn.Module) else _a(made)
        for model in made if not given else ():
            if not isinstance(model, nn.Module):
                given = f"a generator of {_a(model)}"
                break
            trained = flop.total
            ends.append(len(log.events))
            model.eval()
            accuracies.append(photos.evaluate(model))
            model.train()
            found = [*found[:1], weights(model)]
            flop.total = trained
            if most and trained > most:
                break
    given = given or ("models" if ends else "a generator that yields nothing")
    return {
        "given": given,
        "log": log.events,
        "ends": ends,
        "weights": found,
        "accuracies": accuracies,
        "flop": flop.total,
    }


def _a(value):
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def read(events):
    """Numbers of the training images that were read, in a list for each reading."""
    numbers = (torch.as_tensor(event["value"]) for event in events if event["key"] == "train_read")
    return [(some.nonzero() if some.dtype == torch.bool else some).flatten().tolist() for some in numbers]


def logged(events, key):
    return [event["value"] for event in events if event["key"] == key]


def observe(entry):
    torch.set_num_threads(1)
    photos, most = easy_photos(), ALLOWED * MARGIN * baseline_flop()
    first = run(entry, photos, SEEDS[0], most)
    yield {"given": first["given"]}
    ends, log = first["ends"], first["log"]
    parts = [read(log[a:b]) for a, b in itertools.pairwise([0, *ends])]
    rows = [sum(map(len, part)) for part in parts]
    everything = [number for some in read(log) for number in some]
    yield {"read": bool(everything), "foreign": sum(number not in photos.train for number in everything)}
    yield {"in a row": max(rows), "work": first["flop"] / baseline_flop(), "after": len(everything) - sum(rows)}
    lacking = [] if logged(log, "seed") else ["the seed"]
    if set(map(str, logged(log, "weights_from"))) != {"random"}:
        lacking.append('weights_from, with the value "random"')
    yield {"lacking": " and ".join(lacking)}
    changed = any(not torch.equal(a, b) for a, b in zip(first["weights"][0], first["weights"][-1]))
    yield {"changed": changed or len(ends) == 1}
    second = run(entry, photos, SEEDS[1])
    yield {"given again": second["given"]}
    seeds = [repr(logged(events, "seed")[-1:]) for events in (log, second["log"])]
    yield {"other seed": seeds[0] != seeds[1]}
    yield {"alike": max(alike(old, second["weights"][0]) for old in first["weights"])}
    yield {"accuracy": (first["accuracies"][-1] + second["accuracies"][-1]) / 2}
    yield {"outputs": outputs(entry, photos)}


def outputs(entry, photos):
    """How many numbers the first model gives an image where `photos` tells of more classes than its labels have."""
    photos.log, photos.classes = Log(), MORE_CLASSES
    try:
        with torch.compiler.set_stance("force_eager"):
            model = next(iter(entry(photos, 13)), None).eval()
        with torch.no_grad():
            return model(photos.read([0, 1])[0]).shape[1]
    finally:
        photos.classes = CLASSES


def at_least(seen, due):
    return seen >= due


def said(name):
    """Fields: what was seen, under this name, for the hint alone."""
    return lambda seen, due: silent(seen, due) | {name: seen, "images": images()}


LOOKS = [
    Look("a generator of models", "given", "models", "not-models", fields=said("what")),
    Look("trained on images that photos.read gives", "read", True, "nothing-read", fields=said("n")),
    Look("on no images but the training images", "foreign", 0, "validation-read", fields=said("n")),
    Look("evaluated at least once every len(photos.train) images", "in a row", lambda at: images(), "sparse", holds=at_most, fields=said("n")),
    Look(f"at most {ALLOWED:.0%} of the baseline's FLOP", "work", ALLOWED * MARGIN, "too-much-work", holds=at_most,
         fields=said("share")),
    Look("and evaluated at the end", "after", 0, "trained-on", fields=said("n")),
    Look("the log has the seed and the first weights", "lacking", "", "log-lacks", fields=said("what")),
    Look("the model learns", "changed", True, "never-changes"),
    Look("another run, with another seed", "given again", "models", "not-models", fields=said("what")),
    Look("", "other seed", True, "same-seed"),
    Look("starts from its own weights", "alike", SHARE, "same-start", holds=at_most, fields=said("share")),
    Look("accuracy at the end of the runs", "accuracy", LEARNT, "low-accuracy", holds=at_least, fields=said("share")),
    Look("any number of classes", "outputs", MORE_CLASSES, "fixed-classes", holds=at_least, fields=said("n")),
]  # fmt: skip


def balise_8(entry):
    yield from judged(LOOKS, observe, entry)
