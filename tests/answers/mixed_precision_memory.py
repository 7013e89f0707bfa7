"""Answers to balise 6 of 02_mixed_precision: bytes."""

import math

import torch

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision")


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

bank.several(6, None, parameter, activation, largest)


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


bank.several(6, None, by_finfo, lambda setup: torch.empty(0, dtype=setup.compute).element_size(), by_search)


def with_total(setup, states):
    """One key more does no harm."""
    found = parameter(setup, states)
    return {**found, "total": sum(found.values())}


bank.several(6, None, with_total, lambda setup: torch.zeros((), dtype=setup.compute).nbytes, largest)

# ---------------------------------------------------------------- wrong: a parameter


def changed(**changes):
    def bytes_per_parameter(setup, states):
        return {**parameter(setup, states), **{key: change(setup, states) for key, change in changes.items()}}

    return bytes_per_parameter


def wrong(slug, **changes):
    bank.several(6, slug, changed(**changes), activation, largest)


bank.several(6, "nothing-returned", lambda setup, states: None, activation, largest)
bank.several(
    6, "bytes-no-dictionary", lambda setup, states: sum(parameter(setup, states).values()), activation, largest
)
bank.several(
    6,
    "keys-missing",
    lambda setup, states: {"weights": 4, "gradients": 4, "states": 4 * states},
    activation,
    largest,
)
bank.several(
    6,
    "bits-not-bytes",
    lambda setup, states: {k: 8 * v for k, v in parameter(setup, states).items()},
    activation,
    largest,
)
wrong("weights-halved", weights=lambda setup, states: setup.compute.itemsize)
wrong("gradients-halved", gradients=lambda setup, states: setup.compute.itemsize)
wrong("gradients-widened", gradients=lambda setup, states: 4)
wrong("states-ignored", states=lambda setup, states: 0)
wrong("states-ignored", states=lambda setup, states: 4)
wrong("states-halved", states=lambda setup, states: states * setup.weights.itemsize)
wrong("states-widened", states=lambda setup, states: states * 4)
wrong("masters-missing", masters=lambda setup, states: 0)
wrong("masters-everywhere", masters=lambda setup, states: 4)
wrong("casts-forgotten", casts=lambda setup, states: 0)
wrong("casts-forgotten", casts=lambda setup, states: 0 if setup.masters else parameter(setup, states)["casts"])
wrong("casts-everywhere", casts=lambda setup, states: setup.compute.itemsize)
wrong("bytes-wrong", weights=lambda setup, states: 1)

# ---------------------------------------------------------------- wrong: activations and the largest model

bank.several(6, "activation-of-weights", parameter, lambda setup: setup.weights.itemsize, largest)
bank.several(6, "activation-wrong", parameter, lambda setup: 2, largest)
bank.several(6, "bits-not-bytes", parameter, lambda setup: torch.finfo(setup.compute).bits, largest)
bank.several(
    6,
    "not-whole",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: capacity / sum(parameter(setup, states).values()),
)
bank.several(
    6,
    "activations-forgotten",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: largest(capacity, setup, states),
)
bank.several(
    6,
    "activations-counted-wide",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: int(
        max(0, capacity - activations) // sum(parameter(setup, states).values())
    ),
)
bank.several(
    6,
    "negative-model",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: int(
        (capacity - activations * activation(setup)) // sum(parameter(setup, states).values())
    ),
)
bank.several(
    6,
    "binary-gigabytes",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: largest(capacity / 1e9 * 2**30, setup, states, activations),
)
bank.several(
    6,
    "largest-wrong",
    parameter,
    activation,
    lambda capacity, setup, states, activations=0: largest(capacity, setup, 2, activations),
)

bank.several(
    6,
    "casts-forgotten",
    changed(casts=lambda setup, states: setup.compute.itemsize * (setup.compute.itemsize < setup.weights.itemsize)),
    activation,
    largest,
)

bank.slip(6, "largest-wrong", ("max(0, room // sum(bytes_per_parameter(setup, states).values()))", "max(0, int(capacity) // (sum(bytes_per_parameter(setup, states).values()) + activations * bytes_per_activation(setup)))"))  # fmt: skip
