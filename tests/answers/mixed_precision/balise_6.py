"""Answers to balise 6 of 02_mixed_precision: bytes."""

import math

import torch

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision", 6)


def parameter(setup, states):
    weights, kept = setup.weights.itemsize, 4 if setup.masters else setup.weights.itemsize
    casts = 0 if setup.weights == setup.compute else setup.compute.itemsize
    return {
        "weights": weights,
        "gradients": weights,
        "states": kept * states,
        "masters": 4 * setup.masters,
        "casts": casts,
    }


def activation(setup):
    return setup.compute.itemsize


def largest(capacity, setup, states, activations=0):
    return max(0, int(capacity - activations * activation(setup)) // sum(parameter(setup, states).values()))


# ---------------------------------------------------------------- right

bank.several(None, parameter, activation, largest)


def by_finfo(setup, states):
    def size(dtype):
        return torch.finfo(dtype).bits // 8

    found = dict.fromkeys(("casts", "masters", "states", "gradients", "weights"), 0)
    found["weights"] += size(setup.weights)
    found["gradients"] += size(setup.weights)
    if setup.masters:
        found["masters"] = size(torch.float32)
    for _ in range(states):
        found["states"] += found["masters"] or found["weights"]
    if setup.compute is not setup.weights:
        found["casts"] = size(setup.compute)
    return found


def by_search(capacity, setup, states, activations=0):
    each = sum(by_finfo(setup, states).values())
    n = math.floor((capacity - activations * torch.finfo(setup.compute).bits / 8) / each)
    return n if n > 0 else 0


bank.several(None, by_finfo, lambda setup: torch.empty(0, dtype=setup.compute).element_size(), by_search)


def with_total(setup, states):
    """One key more does no harm."""
    found = parameter(setup, states)
    return {**found, "total": sum(found.values())}


bank.several(None, with_total, lambda setup: torch.zeros((), dtype=setup.compute).nbytes, largest)

# ---------------------------------------------------------------- wrong: a parameter


def changed(**changes):
    def bytes_per_parameter(setup, states):
        return {**parameter(setup, states), **{key: change(setup, states) for key, change in changes.items()}}

    return bytes_per_parameter


def wrong(slug, *, variant=False, **changes):
    bank.several(slug, changed(**changes), activation, largest, variant=variant)


bank.several("nothing-returned", lambda setup, states: None, activation, largest)
bank.hint("bytes-no-dictionary", "Return a dictionary with the keys weights, gradients, states, masters and casts.")
bank.several(
    "bytes-no-dictionary",
    lambda setup, states: sum(parameter(setup, states).values()),
    activation,
    largest,
    variant=True,
)
bank.hint("keys-missing", "The dictionary needs the keys weights, gradients, states, masters and casts: {names} "
          "{verb} missing.")  # fmt: skip
bank.several(
    "keys-missing",
    lambda setup, states: {"weights": 4, "gradients": 4, "states": 4 * states},
    activation,
    largest,
    variant=True,
)
bank.hint("bits-not-bytes", "These are bits. A byte has eight.")
bank.several(
    "bits-not-bytes",
    lambda setup, states: {k: 8 * v for k, v in parameter(setup, states).items()},
    activation,
    largest,
)
bank.hint("weights-halved", "Under autocast the weights themselves keep their dtype; only the copies of them are "
          "in 16 bits.")  # fmt: skip
wrong("weights-halved", weights=lambda setup, states: setup.compute.itemsize, variant=True)
bank.hint("gradients-halved", "A gradient has the dtype of its parameter, which is float32 under autocast.")
wrong("gradients-halved", gradients=lambda setup, states: setup.compute.itemsize, variant=True)
bank.hint("gradients-widened", "A gradient has the dtype of its parameter, here 16 bits. Its float32 copy exists "
          "only during the update.")  # fmt: skip
wrong("gradients-widened", gradients=lambda setup, states: 4, variant=True)
bank.hint("states-ignored", "The optimizer keeps {states} such numbers for each parameter.")
wrong("states-ignored", states=lambda setup, states: 0)
wrong("states-ignored", states=lambda setup, states: 4, variant=True)
bank.hint("states-halved", "With masters, the optimizer works on the masters, so its states are in float32.")
wrong("states-halved", states=lambda setup, states: states * setup.weights.itemsize, variant=True)
bank.hint("states-widened", "Without masters, the optimizer's states have the dtype of the parameters.")
wrong("states-widened", states=lambda setup, states: states * 4, variant=True)
bank.hint("masters-missing", "The masters are a second set of weights in float32: 4 bytes.")
wrong("masters-missing", masters=lambda setup, states: 0, variant=True)
bank.hint("masters-everywhere", "Without masters there is nothing to keep: 0 bytes.")
wrong("masters-everywhere", masters=lambda setup, states: 4, variant=True)
bank.hint("casts-forgotten", "Autocast makes copies of the weights in the dtype of the computation, and keeps them "
          "until the backward pass.")  # fmt: skip
wrong("casts-forgotten", casts=lambda setup, states: 0)
wrong("casts-forgotten", casts=lambda setup, states: 0 if setup.masters else parameter(setup, states)["casts"])
bank.hint("casts-everywhere", "If the weights already have the dtype of the computation, autocast copies nothing: "
          "0 bytes.")  # fmt: skip
wrong("casts-everywhere", casts=lambda setup, states: setup.compute.itemsize, variant=True)
bank.hint("bytes-wrong", "{what}: measured in a step, they take {wanted_bytes} bytes per parameter.")
wrong("bytes-wrong", weights=lambda setup, states: 1, variant=True)

# ---------------------------------------------------------------- wrong: activations and the largest model

bank.hint("activation-of-weights", "An activation has the dtype of the computation, not that of the weights.")
bank.several("activation-of-weights", parameter, lambda setup: setup.weights.itemsize, largest, variant=True)
bank.hint("activation-wrong", "An activation takes as many bytes as a number in the dtype of the computation.")
bank.several("activation-wrong", parameter, lambda setup: 2, largest, variant=True)
bank.several("bits-not-bytes", parameter, lambda setup: torch.finfo(setup.compute).bits, largest, variant=True)
bank.hint("not-whole", "The number of parameters is a whole number: return an int.")
bank.several(
    "not-whole",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: capacity / sum(parameter(setup, states).values()),
    variant=True,
)
bank.hint("activations-forgotten", "Subtract the memory of the activations first.")
bank.several(
    "activations-forgotten",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: largest(capacity, setup, states),
    variant=True,
)
bank.hint("activations-counted-wide", "An activation takes bytes_per_activation(setup) bytes. You are given the "
          "number of activations, not their bytes.")  # fmt: skip
bank.several(
    "activations-counted-wide",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: int(
        max(0, capacity - activations) // sum(parameter(setup, states).values())
    ),
    variant=True,
)
bank.hint("negative-model", "The activations alone do not fit, so the answer is 0 parameters, not {size}.")
bank.several(
    "negative-model",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: int(
        (capacity - activations * activation(setup)) // sum(parameter(setup, states).values())
    ),
    variant=True,
)
bank.hint("binary-gigabytes", "capacity is already in bytes: do not convert it.")
bank.several(
    "binary-gigabytes",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: largest(capacity / 1e9 * 2**30, setup, states, activations),
    variant=True,
)
bank.hint("largest-wrong", "Return the largest whole number of parameters that fits beside the activations.")
bank.several(
    "largest-wrong",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: largest(capacity, setup, 2, activations),
)

bank.several(
    "casts-forgotten",
    changed(casts=lambda setup, states: setup.compute.itemsize * (setup.compute.itemsize < setup.weights.itemsize)),
    activation,
    largest,
    variant=True,
)

bank.slip("largest-wrong", ("max(0, room // sum(bytes_per_parameter(setup, states).values()))", "max(0, int(capacity) // (sum(bytes_per_parameter(setup, states).values()) + activations * bytes_per_activation(setup)))"), variant=True)  # fmt: skip
