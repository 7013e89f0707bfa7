"""Balise 6: bytes a parameter and an activation. The truth is weighed on a small training step that really runs."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from dlojz_tp.checking import Wrong
from dlojz_tp.measure import LiveBytes
from dlojz_tp.probes.memory import held_bytes

HINTS = {
    "bytes-no-dictionary": "Return a dictionary with the keys weights, gradients, states, masters and casts.",
    "keys-missing": "The dictionary needs the keys weights, gradients, states, masters and casts: {names} {verb} missing.",
    "bits-not-bytes": "These are bits. A byte has eight.",
    "weights-halved": "Under autocast the weights themselves keep their dtype; only the copies of them are in 16 bits.",
    "gradients-halved": "A gradient has the dtype of its parameter, which is float32 under autocast.",
    "gradients-widened": "A gradient has the dtype of its parameter, here 16 bits. Its float32 copy exists only "
                         "during the update.",
    "states-ignored": "The optimizer keeps {states} such numbers for each parameter.",
    "states-halved": "With masters, the optimizer works on the masters, so its states are in float32.",
    "states-widened": "Without masters, the optimizer's states have the dtype of the parameters.",
    "masters-missing": "The masters are a second set of weights in float32: 4 bytes.",
    "masters-everywhere": "Without masters there is nothing to keep: 0 bytes.",
    "casts-forgotten": "Autocast makes copies of the weights in the dtype of the computation, and keeps them until "
                       "the backward pass.",
    "casts-everywhere": "If the weights already have the dtype of the computation, autocast copies nothing: 0 bytes.",
    "bytes-wrong": "{what}: measured in a step, they take {wanted_bytes} bytes per parameter.",
    "activation-of-weights": "An activation has the dtype of the computation, not that of the weights.",
    "activation-wrong": "An activation takes as many bytes as a number in the dtype of the computation.",
    "not-whole": "The number of parameters is a whole number: return an int.",
    "activations-forgotten": "Subtract the memory of the activations first.",
    "activations-counted-wide": "An activation takes bytes_per_activation(setup) bytes. You are given the number "
                                "of activations, not their bytes.",
    "negative-model": "The activations alone do not fit, so the answer is 0 parameters, not {size}.",
    "binary-gigabytes": "capacity is already in bytes: do not convert it.",
    "largest-wrong": "Return the largest whole number of parameters that fits beside the activations.",
}

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


def balise_6(per_parameter, per_activation, largest_model):
    """Nine setups, three optimizers; then cards and activations."""
    for setup in SETUPS[:4]:
        yield f"bytes per parameter, measured in a running step: {setup.name}"
        _parameter(per_parameter, setup)
    yield "other formats: float16, float64"
    for setup in SETUPS[4:]:
        _parameter(per_parameter, setup)
    yield "bytes an activation"
    for setup in SETUPS:
        _activation(per_activation, setup)
    yield "the largest model that fits, with and without activations"
    _largest(largest_model)


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


def _parameter(per_parameter, setup):
    for states in (0, 1, 2):
        truth = weigh(setup, states)
        got = per_parameter(setup, states)
        if got is None:
            raise Wrong("nothing-returned")
        if not isinstance(got, dict):
            raise Wrong("bytes-no-dictionary", got=got)
        missing = [key for key in KEYS if key not in got]
        if missing:
            raise Wrong("keys-missing", names=", ".join(missing), verb="is" if len(missing) == 1 else "are")
        for key in KEYS:
            if got[key] != truth[key]:
                slug = _which(key, got, truth, setup, states)
                raise Wrong(slug, expected=truth[key], got=got[key], where=f"{key}, {setup.name}, {states} states per parameter",
                            states=states, what=key, wanted_bytes=truth[key])  # fmt: skip


def _which(key, got, truth, setup, states):
    value, wanted = got[key], truth[key]
    if wanted and value == 8 * wanted:
        return "bits-not-bytes"
    auto = setup.compute != setup.weights
    element = truth["weights"]
    if key == "weights":
        return "weights-halved" if auto and value < wanted else "bytes-wrong"
    if key == "gradients":
        return "gradients-halved" if value < wanted else "gradients-widened" if element < value else "bytes-wrong"
    if key == "states":
        if states == 0 or value == 0 or (states == 2 and 2 * value == wanted):
            return "states-ignored"
        if setup.masters and value == states * element:
            return "states-halved"
        return "states-widened" if value == 4 * states else "bytes-wrong"
    if key == "masters":
        return "masters-missing" if wanted and not value else "masters-everywhere" if not wanted else "bytes-wrong"
    return "casts-forgotten" if wanted and not value else "casts-everywhere" if not wanted else "bytes-wrong"


def _activation(per_activation, setup):
    truth, got = weigh(setup, 0)["activation"], per_activation(setup)
    if got is None:
        raise Wrong("nothing-returned")
    if got != truth:
        slug = "activation-wrong"
        if got == 8 * truth:
            slug = "bits-not-bytes"
        elif got == setup.weights.itemsize:
            slug = "activation-of-weights"
        raise Wrong(slug, expected=truth, got=got, where=setup.name)


def _largest(largest_model):
    for setup in SETUPS:
        for states in (0, 1, 2):
            weighed = weigh(setup, states)
            each, element = sum(weighed[key] for key in KEYS), weighed["activation"]
            for capacity, n in ((80e9, 0), (16_000_000_001, 10**9), (80e9, 7 * 10**9), (1e9, 10**9)):
                room = int(capacity) - n * element
                wanted = max(0, room // each)
                got = largest_model(capacity, setup, states, n)
                if got is None:
                    raise Wrong("nothing-returned")
                where = f"{capacity:,.0f} bytes, {setup.name}, {states} states, {n:,} activations"
                if isinstance(got, bool) or not isinstance(got, int):
                    raise Wrong("not-whole", expected=wanted, got=got, where=where)
                if got == wanted:
                    continue
                slug = "largest-wrong"
                if got == int(capacity) // each:
                    slug = "activations-forgotten"
                elif got < 0:
                    slug = "negative-model"
                elif n and abs(got - (int(capacity) - n) // each) <= 1:
                    slug = "activations-counted-wide"
                elif not n and any(abs(got * each / int(capacity) / f - 1) < slack for f, slack in CONVERTED):
                    slug = "binary-gigabytes"
                raise Wrong(slug, expected=wanted, got=got, where=where, size=got)
