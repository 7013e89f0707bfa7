"""What launches of kernels did: which program read and wrote which elements, and what can be counted of it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

SECTOR = 32  # bytes that a GPU moves at least


class Dot(NamedTuple):
    """A product of tiles, (m, k) by (k, n). sums: the dtype in which it is summed, such as "fp32"."""

    m: int
    n: int
    k: int
    of: str
    sums: str


class Outside(NamedTuple):
    """An access outside of the tensor whose pointer was used.

    element: the first such place, counted from the tensor's first element. between: whether it lies between the
    elements of a view, which has strides. count: of lanes.
    """

    kernel: str
    program: tuple[int, int, int]
    kind: str
    tensor: str
    element: int
    count: int
    between: bool

    def __str__(self):
        verb = {"read": "reads", "write": "writes"}.get(self.kind, "updates")
        place = f"`{self.tensor} {'+' if self.element >= 0 else '-'} {abs(self.element)}`"
        lies = "between the elements of" if self.between else "outside of"
        return f"Program {self.program} of `{self.kernel}` {verb} {place}, {lies} `{self.tensor}`"


class Launch(NamedTuple):
    """kernel: its name. grid: numbers of programs. constants: values of its `tl.constexpr`, by name."""

    kernel: str
    grid: tuple[int, int, int]
    constants: dict
    function: object
    arguments: dict


@dataclass(eq=False)
class Memory:
    """A storage that a launch was given. inside: of each element, whether a tensor of the launch has it."""

    name: str
    storage: torch.UntypedStorage
    itemsize: int
    inside: np.ndarray


class Access(NamedTuple):
    """What one program reads or writes at once. elements: of the storage, flat, in the order of the lanes."""

    launch: int
    program: int
    kind: str
    memory: Memory
    elements: np.ndarray


watching: list["Watched"] = []  # those that watch now, the innermost last


class Watched:
    """Watch all launches inside.

    order: of a sequence of programs, in which order they run, such as `reversed`; default by number, the first
    dimension of the grid fastest. A kernel must not depend on it.

    launches: list of Launch. outside: list of Outside; these lanes read infinity, and write nothing. dots: list of Dot.
    Methods take a tensor, and tell of the elements that it has; without one, of all memory.
    """

    def __init__(self, order: Callable = iter):
        self.order = order
        self.launches: list[Launch] = []
        self.outside: list[Outside] = []
        self.dots: list[Dot] = []
        self.log: list[Access] = []
        self.memories: dict[int, Memory] = {}

    def __enter__(self):
        self._before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")  # fills what `torch.empty` returns
        watching.append(self)
        return self

    def __exit__(self, *error):
        watching.remove(self)
        torch.set_deterministic_debug_mode(self._before)

    def reads(self, tensor: torch.Tensor) -> torch.Tensor:
        """How many times each element was read; int64, the shape of the tensor."""
        return self._counts(tensor, "read", "atomic")

    def writes(self, tensor: torch.Tensor, *, atomics: bool = True) -> torch.Tensor:
        """How many times each element was written; int64, the shape of the tensor. atomics: whether these count."""
        return self._counts(tensor, "write", *["atomic"] * atomics)

    def raced(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of each element, whether one program writes it and another reads or writes it; bool, the tensor's shape.

        Two atomics never race. Launches run after each other, so these don't race either.
        """
        both = self._conflicts(self._of(tensor), len(self._blank(tensor)))
        return self._shaped(tensor, both["written twice"] | both["read and written"])

    def races(self) -> list[str]:
        """Of all memory: "written twice" by two programs of a launch, "read and written" by two."""
        found = set()
        for memory in self.memories.values():
            accesses = [one for one in self.log if one.memory is memory]
            found |= {kind for kind, where in self._conflicts(accesses, len(memory.inside)).items() if where.any()}
        return sorted(found)

    def _conflicts(self, accesses, size) -> dict[str, np.ndarray]:
        accesses = list(accesses)
        first: dict[int, np.ndarray] = {}  # of each launch, the program that wrote an element first, or -1
        found = {"written twice": np.zeros(size, bool), "read and written": np.zeros(size, bool)}
        for kind, kinds in zip(found, (("write",), ("read", "atomic"))):
            for one in (one for one in accesses if one.kind in kinds):
                writer = first.setdefault(one.launch, np.full(size, -1))
                found[kind][one.elements[(writer[one.elements] >= 0) & (writer[one.elements] != one.program)]] = True
                if one.kind == "write":
                    writer[one.elements] = one.program
        return found

    def idle(self) -> int:
        """Programs that have read and written nothing, in all launches."""
        return sum(math.prod(launch.grid) for launch in self.launches) - self.busy()

    def busy(self) -> int:
        """Programs that have read or written something, in all launches."""
        return len({(one.launch, one.program) for one in self.log})

    def read_bytes(self, tensor: torch.Tensor | None = None) -> int:
        """Bytes read, each as many times as it was."""
        return sum(one.elements.size * one.memory.itemsize for one in self._of(tensor, "read", "atomic"))

    def written_bytes(self, tensor: torch.Tensor | None = None) -> int:
        """Bytes written, each as many times as it was."""
        return sum(one.elements.size * one.memory.itemsize for one in self._of(tensor, "write", "atomic"))

    def distinct_bytes(self, tensor: torch.Tensor | None = None) -> int:
        """Bytes read at least once: what a cache without limits would fetch."""
        return _distinct(self._of(tensor, "read"))

    def sectors(self, tensor: torch.Tensor | None = None) -> int:
        """Sectors of 32 bytes moved: those that each load, store or atomic of a program touches."""
        return sum(len(np.unique(a.elements * a.memory.itemsize // SECTOR)) for a in self._of(tensor))

    def at_once(self, programs: int, tensor: torch.Tensor | None = None) -> list[int]:
        """Distinct bytes that the first `programs` programs of each launch read, then the next, and so on."""
        waves: dict[tuple, list] = {}
        for one in self._of(tensor, "read"):
            waves.setdefault((one.launch, one.program // programs), []).append(one)
        return [_distinct(waves[key]) for key in sorted(waves)]

    def _of(self, tensor, *kinds) -> Iterator[Access]:
        memory = None if tensor is None else self.memories.get(tensor.untyped_storage().data_ptr())
        if tensor is None or memory is not None:
            yield from (a for a in self.log if (not kinds or a.kind in kinds) and memory in (None, a.memory))

    def _blank(self, tensor) -> np.ndarray:
        return np.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), np.int64)

    def _shaped(self, tensor, of_storage) -> torch.Tensor:
        strides = [stride * of_storage.itemsize for stride in tensor.stride()]
        start = of_storage[tensor.storage_offset() :]
        return torch.from_numpy(np.lib.stride_tricks.as_strided(start, tensor.shape, strides).copy())

    def _counts(self, tensor, *kinds) -> torch.Tensor:
        found = self._blank(tensor)
        for one in self._of(tensor, *kinds):
            np.add.at(found, one.elements, 1)
        return self._shaped(tensor, found)


def _distinct(accesses) -> int:
    elements: dict[int, list] = {}
    memories = {}
    for one in accesses:
        memories[id(one.memory)] = one.memory
        elements.setdefault(id(one.memory), []).append(one.elements)
    return sum(len(np.unique(np.concatenate(some))) * memories[key].itemsize for key, some in elements.items())
