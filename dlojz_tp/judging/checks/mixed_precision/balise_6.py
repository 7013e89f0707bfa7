"""Balise 6: bytes a parameter and an activation. The truth is weighed on a small training step that really runs."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.probes.memory import held_bytes
from dlojz_tp.measure import LiveBytes

# a capacity that was converted, over the right one; what becomes a few bytes is cut off by whole numbers
CONVERTED = (2**30 / 1e9, 1e-3), (1e9 / 2**30, 1e-3), (1e-9, 0.5), (2**-30, 0.5)
KEYS = ("weights", "gradients", "states", "masters", "casts")


@dataclass(frozen=True)
class Setup:
    """As in the notebook: how numbers are kept and computed with."""

    name: str
    weights: torch.dtype
    compute: torch.dtype
    masters: bool = False


W, B, H = torch.float32, torch.bfloat16, torch.float16
SETUPS = [
    Setup("float32", W, W),
    Setup("autocast to bfloat16", W, B),
    Setup("all in bfloat16", B, B),
    Setup("bfloat16 with masters", B, B, masters=True),
    Setup("autocast to float16", W, H),
    Setup("float16 with masters", H, H, masters=True),
    Setup("float64", torch.float64, torch.float64),
    Setup("float16 under autocast to bfloat16", H, B),  # other numbers of the same size
    Setup("float16 with masters under autocast to bfloat16", H, B, masters=True),
]
STATES = 0, 1, 2
ROOMS = (80e9, 0), (16_000_000_001, 10**9), (80e9, 7 * 10**9), (1e9, 10**9)  # capacity, activations


def observe(per_parameter, per_activation, largest_model):
    """What each call returns, by its setup, states and room."""
    for case in itertools.product(SETUPS, STATES):
        yield {case: per_parameter(*case)}
    for setup in SETUPS:
        yield {setup: per_activation(setup)}
    for setup, states, (capacity, n) in itertools.product(SETUPS, STATES, ROOMS):
        yield {(setup, states, capacity, n): largest_model(capacity, setup, states, n)}


@cache
def weigh(setup: Setup, states: int) -> dict[str, int]:
    """Run a step of two linear layers and weigh what is there, in bytes a parameter (activation: an element)."""
    torch.manual_seed(0)
    weights = [torch.randn(32, 32).to(setup.weights).requires_grad_() for _ in range(2)]
    n = 2 * 32 * 32
    copies = [w.detach().float() for w in weights] if setup.masters else []
    make = (
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    )[states]
    optimizer = make(copies or weights)
    x = torch.randn(4, 32).to(setup.weights).requires_grad_()  # as within a network: backward needs every weight's copy
    auto = setup.compute != setup.weights
    with torch.autocast("cpu", dtype=setup.compute) if auto else nullcontext():
        with LiveBytes() as live:
            y = F.linear(F.linear(x, weights[0]), weights[1])
        element = y.element_size()
        # alive: x cast, two outputs of 4 × 32, and the copies of the weights
        casts = live.live - 2 * y.numel() * element - (x.numel() * element if auto else 0)
    y.float().sum().backward()
    gradients = held_bytes([w.grad for w in weights])
    for copy, weight in zip(copies, weights):
        copy.grad = weight.grad.float()
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
    total = {
        "weights": held_bytes([w.detach() for w in weights]), "gradients": gradients, "states": held_bytes(kept),
        "masters": held_bytes(copies), "casts": casts,
    }  # fmt: skip
    return {name: size // n for name, size in total.items()} | {"activation": element}


def _parameter(setup, states, claim=""):
    """Looks at a dictionary and at each of its numbers."""
    yield Look(claim, (setup, states), "a dictionary", "bytes-no-dictionary",
               holds=lambda seen, _: isinstance(seen, dict))  # fmt: skip
    yield Look("", lambda o: [key for key in KEYS if key not in o[setup, states]], [], "keys-missing", fields=_names)
    yield from (_number(setup, states, key) for key in KEYS)


def _names(missing, _):
    return {"names": ", ".join(missing), "verb": "is" if len(missing) == 1 else "are"}


def _number(setup, states, key):
    """The look at one number of a dictionary."""
    about = {"where": f"{key}, {setup.name}, {states} states per parameter", "states": states, "what": key}

    def due(_):
        return weigh(setup, states)[key]

    def fields(_, due):
        return about | {"wanted_bytes": due}

    return Look("", lambda o: o[setup, states][key], due, partial(_which, setup, states, key), fields=fields)


def _which(setup, states, key, value, wanted):
    """The mistake in one number of a dictionary."""
    if wanted and value == 8 * wanted:
        return "bits-not-bytes"
    element = setup.weights.itemsize
    if key == "weights":
        return "weights-halved" if setup.compute != setup.weights and value < wanted else "bytes-wrong"
    if key == "gradients":
        return "gradients-halved" if value < wanted else "gradients-widened" if element < value else "bytes-wrong"
    if key == "states":
        if states == 0 or value == 0 or (states == 2 and 2 * value == wanted):
            return "states-ignored"
        if setup.masters and value == states * element:
            return "states-halved"
        return "states-widened" if value == 4 * states else "bytes-wrong"
    missing = "masters-missing" if key == "masters" else "casts-forgotten"
    return missing if wanted and not value else f"{key}-everywhere" if not wanted else "bytes-wrong"


def _activation(setup, claim=""):
    """The look at the bytes of an activation."""

    def hint(seen, due):
        if seen == 8 * due:
            return "bits-not-bytes"
        return "activation-of-weights" if seen == setup.weights.itemsize else "activation-wrong"

    return Look(claim, setup, lambda _: weigh(setup, 0)["activation"], hint, fields={"where": setup.name})


def _largest(setup, states, capacity, n, claim=""):
    """Looks at the largest model beside n activations."""

    def each():
        return sum(weigh(setup, states)[key] for key in KEYS)

    def due(_):
        return max(0, (int(capacity) - n * weigh(setup, states)["activation"]) // each())

    def hint(got, _):
        if got == int(capacity) // each():
            return "activations-forgotten"
        if got < 0:
            return "negative-model"
        if n:
            return "activations-counted-wide" if abs(got - (int(capacity) - n) // each()) <= 1 else "largest-wrong"
        converted = any(abs(got * each() / int(capacity) / f - 1) < slack for f, slack in CONVERTED)
        return "binary-gigabytes" if converted else "largest-wrong"

    where = f"{capacity:,.0f} bytes, {setup.name}, {states} states, {n:,} activations"
    key, fields = (setup, states, capacity, n), lambda seen, _: {"where": where, "size": seen}
    yield Look(claim, key, due, "not-whole", fields=fields,
               holds=lambda seen, _: isinstance(seen, int) and not isinstance(seen, bool))  # fmt: skip
    yield Look("", key, due, hint, fields=fields)


LOOKS = []
for setup, states in itertools.product(SETUPS, STATES):
    name = f"bytes per parameter, measured in a running step: {setup.name}"
    LOOKS += _parameter(setup, states, name if setup in SETUPS[:4] else "other formats: float16, float64")
LOOKS += [_activation(setup, "bytes an activation") for setup in SETUPS]
for setup, states, room in itertools.product(SETUPS, STATES, ROOMS):
    LOOKS += _largest(setup, states, *room, "the largest model that fits, with and without activations")


def balise_6(per_parameter, per_activation, largest_model):
    yield from judged(LOOKS, observe, per_parameter, per_activation, largest_model)
