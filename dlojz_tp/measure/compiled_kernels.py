"""What Triton's compiler says of a kernel, for a card that is not there: it needs none before the kernel runs.

The interpreter accepts all of Python, the compiler a part of it, and the compiler alone knows what a kernel takes of a
card's shared memory. `kernels.Watched` has the launches.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.compiler import compile as triton_compile
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, mangle_type

from dlojz_tp.measure.kernels import Launch

A100 = 80  # the compute capability, as a whole number


class Taken(NamedTuple):
    """shared: bytes of shared memory of a program. registers: of a thread. spilled: bytes of a thread in memory."""

    shared: int
    registers: int
    spilled: int


def refused(launch: Launch, capability: int = A100) -> str:
    """Why the compiler would not take this kernel with these arguments, in a line; empty if it takes it. 10 ms."""
    if knobs.runtime.interpret:  # then the language's own functions can't be compiled in this process
        return ""
    target = GPUTarget("cuda", capability, 32)
    source, backend, context = _source(launch), make_backend(target), ir.context()
    options = backend.parse_options({})
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except CompilationError as error:
        why = error.__cause__ or error
        line = getattr(error.node, "lineno", 1)
        return f"line {line} of {launch.kernel}: {_first_sentence(getattr(why, 'error_message', None) or str(why))}"
    return ""


def _first_sentence(text: str) -> str:
    return re.sub(r"^\w+\(['\"]", "", text.strip().split("\n")[0]).split(". ")[0]


def taken(launch: Launch, capability: int = A100, **options) -> Taken:
    """What the kernel takes of a card of this capability. options: such as num_warps and num_stages. About 1 s."""
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        found = triton_compile(_source(launch), target=GPUTarget("cuda", capability, 32), options=options)
        (ptx := Path(folder, "kernel.ptx")).write_text(found.asm["ptx"])
        name = re.search(r"\.target (\w+)", found.asm["ptx"])[1]
        ptxas = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", str(ptx), "-o", f"{folder}/out"]
        said = subprocess.run(ptxas, capture_output=True, text=True, check=True).stderr
    numbers = [re.search(rf"(\d+) {words}", said) for words in ("registers", "bytes spill stores")]
    return Taken(found.metadata.shared, *[int(number[1]) if number else 0 for number in numbers])


def _source(launch: Launch) -> ASTSource:
    """The kernel, specialised for its arguments as in a launch on a card: the compiler is told what 16 divides."""
    function = launch.function if isinstance(launch.function, JITFunction) else JITFunction(launch.function.fn)
    constants, signature, attributes = {}, {}, {}
    for place, (name, value) in enumerate(launch.arguments.items()):
        if name in launch.constants or value is None or (type(value) is int and value == 1):
            constants[name], signature[name] = value, "constexpr"
            continue
        signature[name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if type(number) is int and number % 16 == 0:
            attributes[place,] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constexprs=constants, attrs=attributes)
