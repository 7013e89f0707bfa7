"""Answers to 06_compile, balise 1: the command, the C text, the wrapper."""

import ctypes

import numpy as np
import torch
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("06_compile")

# the command
bank.slip(1, "not-a-list", ('return ["cc", *options,', 'return " ".join(["cc", *options,'), ('"-lm"]', '"-lm"])'))
bank.slip(1, "not-a-list", ('options = ["-O3", "-march=native",', 'options = ["-O3 -march=native",'))
bank.slip(1, "not-a-list", ('"-lm"]', "3]"))
bank.slip(1, "no-shared", ('"-shared", ', ""))
bank.slip(1, "no-pic", (', "-fPIC"]', "]"))
bank.slip(1, "not-optimised", ('"-O3", ', ""))
bank.slip(1, "not-optimised", ('"-O3", ', '"-O0", '))
bank.slip(1, "no-libm", (', "-lm"]', "]"), ('"-march=native", "-ffast-math", ', ""))
bank.slip(1, "no-libm", ('["cc", *options,', '["cc", *options, "-Wl,--as-needed", "-lm",'), ('), "-lm"]', ")]"))
bank.slip(1, "paths-ignored", ("str(source)", '"gelu.c"'))
bank.slip(1, "paths-ignored", ("str(library)", '"gelu.so"'))
bank.slip(1, "paths-swapped", ('str(source), "-o", str(library)', 'str(library), "-o", str(source)'))
bank.slip(1, "no-output", (', "-o", str(library)', ""))
bank.slip(1, "command-failed", ('"cc"', '"no-such-compiler"'))
bank.slip(1, "only-compiled", ('"-fPIC"', '"-fPIC", "-c"'))
bank.slip(1, None, ('str(source), "-o", str(library)', '"-o" + str(library), str(source)'))
bank.slip(1, "nothing-returned", ('return ["cc"', 'words = ["cc"'))

# the C text
bank.slip(1, "not-c-text", ('return """', 'return b"""'))
bank.slip(1, "nothing-returned", ('return """', 'text = """'))
bank.slip(1, "c-error", ("int64_t i = 0; i < n; i++)", "int64_t i = 0, i < n, i++)"))
bank.slip(1, "c-error", ("#include <stdint.h>", ""))
bank.slip(1, "no-gelu", ("void gelu(", "void fused_gelu("))
bank.slip(1, "no-gelu", ("void gelu(", "static void gelu("))
bank.slip(1, "double-pointer", ("const float *x, float *y", "const double *x, double *y"))
bank.slip(1, "c-crash", ("i < n; i++)", "i < n; i++, y += 100000000)"))
bank.slip(1, "c-endless", ("i < n; i++)", "i < n || n < 5; i += n > 5)"), ("y[i] =", "y[0] ="), ("-O3", "-O1"))
bank.slip(1, "n-ignored", ("i < n;", "i < 1000;"))
bank.slip(1, "nothing-written", ("y[i] = 0.5f", "y[i] += 0.5f"))
bank.slip(1, "n-ignored", ("i < n;", "i < n - 1;"))
bank.slip(1, "n-ignored", ("int64_t i = 0;", "int64_t i = 1;"))
bank.slip(1, "past-the-end", ("i < n;", "i <= n;"))
bank.slip(1, "c-changes-input", ("const float *x,", "float *x,"), ("y[i] =", "y[i] = x[i] ="))
bank.slip(
    1,
    "tanh-formula",
    ("1.0f + erff(x[i] * 0.70710678f)", "1.0f + tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]))"),
)
bank.slip(1, "not-halved", ("0.5f * x[i] *", "x[i] *"))
bank.slip(1, "unscaled-erf", ("x[i] * 0.70710678f", "x[i]"))
bank.slip(1, "unscaled-erf", ("x[i] * 0.70710678f", "x[i] / 2"))
bank.slip(1, "unscaled-erf", ("x[i] * 0.70710678f", "x[i] * 1.41421356f"))
bank.slip(
    1,
    "sigmoid-formula",
    ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "x[i] / (1.0f + expf(-1.702f * x[i]))"),
)
bank.slip(1, "no-one", ("(1.0f + erff(x[i] * 0.70710678f))", "erff(x[i] * 0.70710678f)"))
bank.slip(1, "integer-division", ("0.5f *", "(1 / 2) *"))
bank.slip(1, "wrong-gelu", ("x[i] * 0.70710678f", "-x[i] * 0.70710678f"))

# the wrapper
bank.slip(1, "no-argtypes", ("    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]\n", ""))
bank.slip(1, "no-argtypes", ("[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]", "[ctypes.c_int] * 3"))
bank.slip(
    1,
    "not-called",
    ("library.gelu(numbers.data_ptr(), result.data_ptr(), numbers.numel())", "result = F.gelu(numbers)"),
)
bank.slip(1, "not-called", ("    return result.to(x.dtype)", "    return x"), ("    library.gelu(n", "    len; (n"))
bank.slip(1, "not-from-library", ("return result.to", "return F.gelu(x).to"))
bank.slip(1, "not-from-library", ("return result.to", "return x.clone().to"))
bank.slip(1, "read-as-float32", (".to(torch.float32)", ""))
bank.slip(1, "not-contiguous", (".contiguous()", ""), ("empty_like(numbers)", "empty(x.shape)"))
bank.slip(1, "not-contiguous", ("x.detach().to(torch.float32).contiguous()", "x.detach().to(torch.float32)"))
NO_ROW = "x.detach().contiguous() if x.dtype == torch.float32 else x.detach().float()"  # .float() keeps the strides
bank.slip(1, "not-contiguous", ("x.detach().to(torch.float32).contiguous()", NO_ROW), ("empty_like(numbers)", "empty(x.shape)"))
bank.slip(1, "written-into-input", ("torch.empty_like(numbers)", "numbers"))
bank.slip(1, "addresses-swapped", ("numbers.data_ptr(), result.data_ptr()", "result.data_ptr(), numbers.data_ptr()"))
bank.slip(1, "short-n", ("c_void_p, ctypes.c_int64]", "c_void_p, ctypes.c_int]"))
bank.slip(1, "result-strides", ("torch.empty_like(numbers)", "torch.empty_like(x, dtype=torch.float32)"))
bank.slip(1, "wrong-n", ("numbers.numel())", "4 * numbers.numel())"))
bank.slip(1, "wrong-n", ("numbers.numel())", "len(numbers))"))
bank.slip(1, "wrong-n", ("numbers.numel())", "x.shape[-1])"))
bank.slip(1, "wrong-n", ("numbers.numel())", "1003)"))
bank.slip(1, "output-too-small", ("torch.empty_like(numbers)", "torch.empty(0)"))
bank.slip(
    1,
    "output-too-small",
    ("torch.empty_like(numbers)", "torch.empty(len(x))"),
    ("return result", "return result.view(x.shape)"),
)
bank.slip(
    1,
    "freed-too-early",
    ("numbers = x.detach().to(torch.float32).contiguous()", "numbers = x"),
    ("library.gelu(numbers.data_ptr()", "library.gelu(x.detach().to(torch.float32).contiguous().data_ptr()"),
    ("empty_like(numbers)", "empty(x.shape)"),
)
bank.slip(  # the result may get the memory that was freed just before
    1,
    "freed-too-early",
    ("numbers = x.detach().to(torch.float32).contiguous()", "numbers = x"),
    (
        "result = torch.empty_like(numbers)",
        "start = x.detach().to(torch.float32).contiguous().data_ptr()\n    result = torch.empty(x.shape)",
    ),
    ("library.gelu(numbers.data_ptr()", "library.gelu(start"),
)
bank.slip(  # in place, on a copy of its own
    1,
    None,
    (
        "numbers = x.detach().to(torch.float32).contiguous()",
        "numbers = x.detach().float().clone(memory_format=torch.contiguous_format)",
    ),
    ("result = torch.empty_like(numbers)", "result = numbers"),
)
bank.slip(  # addresses by way of NumPy
    1,
    None,
    (
        "numbers = x.detach().to(torch.float32).contiguous()",
        "import numpy as np\n\n    numbers = np.ascontiguousarray(x.detach().float().numpy())",
    ),
    ("result = torch.empty_like(numbers)", "out = np.empty_like(numbers)"),
    ("numbers.data_ptr(), result.data_ptr(), numbers.numel()", "numbers.ctypes.data, out.ctypes.data, numbers.size"),
    ("return result.to(x.dtype)", "return torch.from_numpy(out).to(x.dtype)"),
)
bank.slip(1, "wrong-kind", (".to(x.dtype)", ""))
bank.slip(1, "wrong-kind", ("return result.to(x.dtype)", "return result.flatten().to(x.dtype)"))
bank.slip(1, "nothing-returned", ("    return result.to(x.dtype)\n", ""))
bank.slip(
    1,
    "input-changed",
    (
        "    return result.to(x.dtype)",
        "    out = result.to(x.dtype)\n    x.copy_(out) if x.is_contiguous() else None\n    return out",
    ),
)
bank.slip(1, "signature", ("def fused_gelu(x, library)", "def fused_gelu(x)"))
bank.slip(
    1,
    "result-overwritten",
    ("result = torch.empty_like(numbers)", "result = kept.setdefault(numbers.shape, torch.empty_like(numbers))"),
    ("def fused_gelu(x, library)", "def fused_gelu(x, library, kept={})"),
)

# right ones
bank.slip(1, None, ('"-march=native", "-ffast-math", ', ""))
bank.slip(
    1, None, ('["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]', '["-fPIC", "-Ofast", "-shared", "-Wall"]')
)
bank.slip(1, None, ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "x[i] / 2 * (1 + erf(x[i] / sqrt(2)))"))
bank.slip(1, None, ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "0.5f * x[i] * (1.0f + erff(x[i] / 1.41421f))"))
bank.slip(1, None, ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "x[i] * 0.5 * erfc(-x[i] * M_SQRT1_2)"))
bank.slip(
    1, None, ("for (int64_t i = 0; i < n; i++)", "while (n-- > 0) { const int64_t i = n;"), ("f));\n", "f)); }\n")
)
bank.slip(1, None, (".detach().to(torch.float32)", ".float()"), ("empty_like(numbers)", "empty(x.shape)"))


def compile_command(source, library):
    return ("cc", "-O2", "-fPIC", "-shared", "-o", library, source, "-lm")  # paths are words as well


def c_source():
    return r"""
#include <math.h>
#include <stdint.h>
static inline float one(float v) { return 0.5f * v * (1.0f + erff(v * (float)M_SQRT1_2)); }
void gelu(const float *restrict x, float *restrict y, int64_t n)
{
    const float *end = x + n;
    while (x != end) *y++ = one(*x++);
}
"""


def with_pointers(x, library):
    if x.dtype != torch.float32:
        raise TypeError(f"float32 is wanted, not {x.dtype}")
    x = x.contiguous()
    y = torch.empty(x.shape)
    floats = ctypes.POINTER(ctypes.c_float)
    library.gelu(ctypes.cast(x.data_ptr(), floats), ctypes.cast(y.data_ptr(), floats), ctypes.c_int64(x.numel()))
    return y


def with_c_values(x, library):
    assert x.dtype == torch.float32, "float32 only"
    numbers, y = x.contiguous(), torch.zeros(x.numel())
    library["gelu"](ctypes.c_void_p(numbers.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()))
    return y.view_as(x)


def with_numpy(x, library):
    numbers = np.ascontiguousarray(x.detach().float().numpy())
    y = np.empty_like(numbers)
    array = np.ctypeslib.ndpointer(dtype=np.float32, flags="C_CONTIGUOUS")
    gelu = library.gelu
    gelu.argtypes, gelu.restype = [array, array, ctypes.c_int64], None
    gelu(numbers, y, numbers.size)
    return torch.from_numpy(y).to(x.dtype)


def with_a_prototype(x, library):
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    gelu = prototype(("gelu", library))
    source = x.detach().clone(memory_format=torch.contiguous_format).float()
    target = torch.full_like(source, float("nan"))
    gelu(source.data_ptr(), target.data_ptr(), source.numel())
    return target.to(x.dtype)


def keeping_strides(x, library):
    """A dense tensor's memory can be taken as it lies, if the result lies the same way."""
    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    work = x.float()
    result = torch.empty_like(work)
    if work.stride() != result.stride():
        work = torch.empty_like(work).copy_(work)
    library.gelu(work.data_ptr(), result.data_ptr(), work.numel())
    return result.type(x.dtype)


def row_by_row(x, library):
    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    rows = x.float().reshape(-1, x.shape[-1]).contiguous()
    y = torch.empty_like(rows)
    for source, target in zip(rows, y, strict=True):
        library.gelu(source.data_ptr(), target.data_ptr(), len(source))
    return y.reshape(x.shape).to(x.dtype)


def in_arrays_of_c(x, library):
    n = x.numel()
    array = ctypes.c_float * n
    source, target = array(*x.flatten().tolist()), array()
    library.gelu(source, target, ctypes.c_int64(n))
    return torch.tensor(list(target)).view(x.shape).to(x.dtype)


def on_a_clone(x, library):
    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    work = x.float().clone(memory_format=torch.contiguous_format)
    library.gelu(work.data_ptr(), work.data_ptr(), work.numel())
    return work.to(x.dtype)


for wrapper in (
    in_arrays_of_c,
    on_a_clone,
    with_pointers,
    with_c_values,
    with_numpy,
    with_a_prototype,
    keeping_strides,
    row_by_row,
):
    bank.several(1, None, compile_command, c_source, wrapper)


def of_torch(x, library):
    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    y = torch.empty_like(x.float().contiguous())
    library.gelu(x.float().contiguous().data_ptr(), y.data_ptr(), 0)
    return F.gelu(x)


bank.several(1, "wrong-n", compile_command, c_source, of_torch)

# a counter that ends before n does
LOOP = "for (int64_t i = 0; i < n; i++)"
bank.slip(1, "int-counter", (LOOP, "for (int i = 0; i < n; i++)"))
bank.slip(1, "int-counter", (LOOP, "unsigned i = 0;\n        for (; i < n; ++i)"))
bank.slip(1, None, (LOOP, "for (long int i = n - 1; i >= 0; i--)"))
bank.slip(1, None, (LOOP, "int k = 0; /* int i < n */\n        k++;\n        for (int64_t i = k - 1; i != n; i++)"))
bank.slip(1, "narrow-n", ("float *y, int64_t n", "float *y, int n"))
bank.slip(1, "narrow-n", ("float *y, int64_t n)", "float *y,\n        unsigned int count)"), ("i < n", "i < count"), variant=True)

bank.slip(1, "storage-address", ("numbers.data_ptr(), result", "numbers.untyped_storage().data_ptr(), result"))
