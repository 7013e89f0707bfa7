"""Watch what a Python wrapper hands to C, and run somebody's C where a crash does no harm.

`Probe` is a real library with a function `gelu(x, y, n)` that first asks a Python function whether the addresses can be
touched; if so it writes y = 3 x + 1, which nobody's GELU is. `run_c` calls a library in a process of its own.
"""

import base64
import ctypes
import functools
import json
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking.breakage import broken
from dlojz_tp.launch.errors import FROM_INSIDE, Killed, TooBusy
from dlojz_tp.measure import compiling

_SOURCE = """
#include <stdint.h>
typedef int (*asked)(const void *, void *, int64_t);
static asked ask = 0;
void set_ask(asked function) { ask = function; }
void gelu(const float *x, float *y, int64_t n) {
    if (!ask || !ask(x, y, n)) return;
    for (int64_t i = 0; i < n; i++) y[i] = 3.0f * x[i] + 1.0f;
}
"""
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)


@functools.cache
def _built() -> Path:
    folder = compiling.private_folder()
    (folder / "probe.c").write_text(_SOURCE)
    command = [
        compiling.c_compiler(),
        "-O1",
        "-shared",
        "-fPIC",
        str(folder / "probe.c"),
        "-o",
        str(folder / "probe.so"),
    ]
    return compiling.run_compiler(command, folder / "probe.so")


@dataclass(frozen=True)
class Call:
    """One call of gelu: addresses and n, where they pointed, and the mistake that kept it from being run."""

    x: int
    y: int
    n: int
    mistake: str = ""


class Probe(TorchDispatchMode):
    """A context in which `library` is a stand-in for the compiled library, called with memory of `given`.

    calls: what was handed to `gelu`. Tensors made inside are followed, so that one freed too early is noticed.
    """

    def __init__(self, given: torch.Tensor):
        super().__init__()
        self.given, self.calls, self._memory = given, [], []
        self.library = ctypes.CDLL(str(_built()))  # a new object: nobody has set its argtypes
        self._callback = _ASK(self._asked)
        self._addresses = _Addresses()
        self._follow(given)

    def __enter__(self):
        self.library.set_ask(self._callback)
        self._addresses.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._addresses.__exit__(*error)
        ctypes.CDLL(str(_built())).set_ask(_ASK(0))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self._follow(out)
        return out

    def _follow(self, tensor):
        storage = tensor.untyped_storage()
        if all(alive.expired() or begin != storage.data_ptr() for begin, _, alive in self._memory):
            self._memory.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))

    def _asked(self, x, y, n):
        try:
            mistake = self._mistake(x, y, n)
        except Exception as error:  # raised in here it would only be printed
            mistake = f"{type(error).__name__}: {error}"
        self.calls.append(Call(x, y, n, mistake))
        return not mistake

    def _mistake(self, x, y, n):
        given = self.given
        if self._cut(x) or self._cut(y):
            return "no-argtypes"
        if x == given.data_ptr() and given.dtype != torch.float32:
            return "read-as-float32"
        strides_kept = given.is_contiguous() or given.stride() == torch.empty_like(given).stride()
        if x == given.data_ptr() and not strides_kept:
            return "not-contiguous"
        begin, size = given.untyped_storage().data_ptr(), given.untyped_storage().nbytes()
        if begin <= y < begin + size:
            return "written-into-input" if begin <= x < begin + size else "addresses-swapped"
        if n > given.numel() or n < 0:
            return "wrong-n"
        alive = self._addresses.alive(x)
        if x == y and n and True in alive and False in alive:  # y took the memory that x had given up
            return "freed-too-early"
        for what, address in (("x", x), ("y", y)):
            if n and (found := self._place(what, address, 4 * n)):
                return found
        return ""

    def _place(self, what, address, size):
        """The mistake in touching `size` bytes at `address`; empty if they are there."""
        found = [(begin, length, alive) for begin, length, alive in self._memory if begin <= address < begin + length]
        living = [item for item in found if not item[2].expired()]
        told = self._addresses.alive(address)
        if told and not any(told):  # also if other memory is in its place by now, which is a matter of chance
            return "freed-too-early"
        if living and address + size > max(begin + length for begin, length, _ in living):
            return "output-too-small" if what == "y" else "wrong-n"
        if not living and not _mapped(address, size):
            return "output-too-small" if what == "y" else "no-argtypes"
        return ""

    def _cut(self, address):
        """Whether the address is the lower half of one of ours, with zeros or ones above."""
        if any(begin <= address < begin + max(size, 1) for begin, size, _ in self._memory) or _mapped(address, 1):
            return False
        low = address & 0xFFFFFFFF
        return address not in (0, low) or any(
            b & 0xFFFFFFFF <= low < (b & 0xFFFFFFFF) + s + 1 for b, s, _ in self._memory
        )


class _Addresses(TorchFunctionMode):
    """Remembers which addresses were asked for, and whose they were."""

    def __init__(self):
        super().__init__()
        self._told = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _TELL:
            self._told.setdefault(args[0].data_ptr(), []).append(StorageWeakRef(torch.Tensor.untyped_storage(args[0])))
        return result

    def alive(self, address) -> list[bool]:
        """For each time that this address was told, whether what was there then is there still."""
        return [not storage.expired() for storage in self._told.get(address, ())]


_TELL = {
    torch.Tensor.data_ptr, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__,
    torch.Tensor.untyped_storage, torch.Tensor.storage,
}  # fmt: skip


def _mapped(address, size):
    """Whether this process may touch these bytes; where the system does not tell, it is believed."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return address > 2**32
    for line in lines:
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= address and address + size <= end:
            return True
    return False


CPU_SECONDS = 2  # of computing, not of waiting for a busy machine; a thousand numbers take some microseconds
_RUNNER = """
import base64, ctypes, json, resource, struct, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_CPU)[1]))
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
gelu = ctypes.CDLL(sys.argv[1]).gelu
gelu.argtypes, gelu.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
edge, found = 4096, []
for numbers in json.loads(sys.stdin.read()):
    n = len(numbers)
    row = ctypes.c_float * (3 * n + 2 * edge)
    x, y = row(*[7.0] * (3 * n + 2 * edge)), row(*[1e30] * (3 * n + 2 * edge))
    for i, number in enumerate(numbers): x[edge + i] = number
    before = bytes(x)
    gelu(ctypes.addressof(x) + 4 * edge, ctypes.addressof(y) + 4 * edge, n)
    outside = sum(abs(value - 1e30) > 1e24 for value in [*y[:edge], *y[edge + n:]])
    got = base64.b64encode(bytes(y)[4 * edge:4 * (edge + n)]).decode()
    found.append({"y": got, "outside": outside, "kept": bytes(x) == before})
print(json.dumps(found))
"""


def run_c(library: Path, cases: list[list[float]], seconds: float = 40.0) -> list[dict] | str:
    """Call `gelu` of the library on each list of numbers, in another process, for CPU_SECONDS at most.

    Returns:
        For each case {"y": list of floats, "outside": how many others were written, "kept": the input is unchanged}; or what
        went wrong: "endless", "crash", or the message of the loader.

    Raises:
        LaunchError: the machine gave it no core, or somebody else killed it.
        OSError: nothing can be loaded from this folder.
    """
    command = [sys.executable, "-I", "-S", "-c", _RUNNER, str(library), str(CPU_SECONDS)]
    try:
        done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TooBusy(f"the machine is too busy: the C function had no core within {seconds:g} s") from None
    if done.returncode == -signal.SIGXCPU:
        return "endless"
    if done.returncode < 0:
        if (name := signal.Signals(-done.returncode).name) not in FROM_INSIDE:
            raise Killed(f"the process that ran the C function was killed by {name}")
        return "crash"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["?"])[-1]
        if broken(OSError(said), in_answer=True):  # no library at all can be loaded from this folder
            raise OSError(said)
        return said
    found = json.loads(done.stdout)
    for case in found:
        raw = base64.b64decode(case["y"])
        case["y"] = list(struct.unpack(f"{len(raw) // 4}f", raw))
    return found
