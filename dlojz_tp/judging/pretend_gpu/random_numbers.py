"""Random numbers: each GPU has its own generator, of the CPU's kind."""

import contextlib

import torch

from dlojz_tp.judging.pretend_gpu.memory import CPU, META, real_device


def replaced(machine) -> list[tuple]:
    """(module, name, stand-in) of each."""

    class Kind(type(torch.Generator)):
        def __instancecheck__(cls, value):
            return isinstance(value, torch._C.Generator)

    class Generator(torch.Generator, metaclass=Kind):
        """A generator that says that it is on a GPU; its numbers are a CPU generator's."""

        def __new__(cls, device="cpu"):
            self = torch._C.Generator.__new__(cls, CPU)
            self.place = machine.place(device)
            if self.place.type == "cuda":
                machine.generators[self._cdata] = self
            return self

        @property
        def device(self):
            return self.place

        def set_state(self, new_state):
            return self if real_device(new_state) == META else super().set_state(new_state)

    own = machine.drawn_from = tuple(Generator(torch.device("cuda", index)) for index in range(machine.count))

    def of(device=None):
        return own[machine.index(device)]

    def set_all(states):
        for generator, state in zip(own, states, strict=False):
            generator.set_state(state)

    functions = {
        "manual_seed": lambda seed: of().manual_seed(seed) and None,
        "manual_seed_all": lambda seed: [each.manual_seed(seed) for each in own] and None,
        "seed": lambda: of().seed() and None,
        "seed_all": lambda: [each.seed() for each in own] and None,
        "initial_seed": lambda: of().initial_seed(),
        "get_rng_state": lambda device="cuda": of(device).get_state(),
        "set_rng_state": lambda new_state, device="cuda": of(device).set_state(new_state) and None,
        "get_rng_state_all": lambda: [each.get_state() for each in own],
        "set_rng_state_all": set_all,
    }
    return [
        (torch, "Generator", Generator),
        (torch.cuda, "default_generators", own),
        *((torch.cuda, name, function) for name, function in functions.items()),
    ]


@contextlib.contextmanager
def drawing(machine, index: int):
    """Inside, what C++ draws without a generator comes from this GPU's."""
    usual, own = torch.default_generator, machine.drawn_from[index]
    before = usual.get_state()
    usual.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(usual.get_state())
        usual.set_state(before)
