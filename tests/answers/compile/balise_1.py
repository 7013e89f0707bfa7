"""Answers to 06_compile, balise 1: the command, the C text, the wrapper."""

import ctypes

import numpy as np
import torch
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("06_compile", 1)

bank.hint("not-a-list", "Return the command as a list of words, with each option as a separate word: ['cc', '-O3', …]. "
          "A shell would split a single string; here nothing does.")  # fmt: skip
# the command
bank.slip("not-a-list", ('return ["cc", *options,', 'return " ".join(["cc", *options,'), ('"-lm"]', '"-lm"])'))
bank.slip("not-a-list", ('options = ["-O3", "-march=native",', 'options = ["-O3 -march=native",'))
bank.slip("not-a-list", ('"-lm"]', "3]"), variant=True)
bank.hint("no-shared", "Without -shared, cc makes a program, and a program needs a main. A library for ctypes is a "
          "shared library.")  # fmt: skip
bank.slip("no-shared", ('"-shared", ', ""), variant=True)
bank.hint("no-pic", "The library is loaded wherever there is room in memory: its code must not depend on its address. "
          "Tell the compiler so: -fPIC.")  # fmt: skip
bank.slip("no-pic", (', "-fPIC"]', "]"), variant=True)
bank.hint("not-optimised", "Without -O2 or -O3 the compiler translates line by line, and the loop takes several times "
          "as long.")  # fmt: skip
bank.slip("not-optimised", ('"-O3", ', ""))
bank.slip("not-optimised", ('"-O3", ', '"-O0", '), variant=True)
bank.hint("no-libm", "A function is missing: {error}. The mathematical functions are in libm. Link it with -lm, after "
          "the source.")  # fmt: skip
bank.slip("no-libm", (', "-lm"]', "]"), ('"-march=native", "-ffast-math", ', ""))
bank.slip(
    "no-libm", ('["cc", *options,', '["cc", *options, "-Wl,--as-needed", "-lm",'), ('), "-lm"]', ")]"), variant=True
)
bank.hint("paths-ignored", "The two paths passed in are the source and the library; the command contains others.")
bank.slip("paths-ignored", ("str(source)", '"gelu.c"'))
bank.slip("paths-ignored", ("str(library)", '"gelu.so"'), variant=True)
bank.hint("paths-swapped", "The library's path is where the source should be: -o is followed by the file that the "
          "compiler makes.")  # fmt: skip
bank.slip("paths-swapped", ('str(source), "-o", str(library)', 'str(library), "-o", str(source)'), variant=True)
bank.hint("no-output", "The command does not say where the library goes: add -o and its path.")
bank.slip("no-output", (', "-o", str(library)', ""), variant=True)
bank.hint("command-failed", "The command does not make the requested library: {error}")
bank.slip("command-failed", ('"cc"', '"no-such-compiler"'), variant=True)
bank.hint("only-compiled", "-c stops before linking: the result is an object file, not a library.")
bank.slip("only-compiled", ('"-fPIC"', '"-fPIC", "-c"'), variant=True)
bank.slip(None, ('str(source), "-o", str(library)', '"-o" + str(library), str(source)'))
bank.slip("nothing-returned", ('return ["cc"', 'words = ["cc"'))

bank.hint("not-c-text", "c_source() must return the text of a C file, a str.")
# the C text
bank.slip("not-c-text", ('return """', 'return b"""'), variant=True)
bank.slip("nothing-returned", ('return """', 'text = """'))
bank.hint("c-error", "The compiler refuses the C text: {error}")
bank.slip("c-error", ("int64_t i = 0; i < n; i++)", "int64_t i = 0, i < n, i++)"))
bank.slip("c-error", ("#include <stdint.h>", ""), variant=True)
bank.hint("no-gelu", "The library has no function `gelu`. C keeps a function's name as you write it.")
bank.slip("no-gelu", ("void gelu(", "void fused_gelu("))
bank.slip("no-gelu", ("void gelu(", "static void gelu("), variant=True)
bank.hint("double-pointer", "The C text takes pointers to double, 8 bytes a number. The tensor's numbers are float, 4 "
          "bytes.")  # fmt: skip
bank.slip("double-pointer", ("const float *x, float *y", "const double *x, double *y"), variant=True)
bank.hint("c-crash", "The C function crashed when it was called with {n} numbers: it accessed memory that is not its "
          "own.")  # fmt: skip
bank.slip("c-crash", ("i < n; i++)", "i < n; i++, y += 100000000)"), variant=True)
bank.hint("c-endless", "The C function did not return after 2 s of computing. Does the loop's counter advance?")
bank.slip(
    "c-endless", ("i < n; i++)", "i < n || n < 5; i += n > 5)"), ("y[i] =", "y[0] ="), ("-O3", "-O1"), variant=True
)
bank.hint("n-ignored", "With {n} numbers, some are missing at the end, or more are written. The loop must run n times.")
bank.slip("n-ignored", ("i < n;", "i < 1000;"))
bank.hint("nothing-written", "What y held before is still there: the loop never runs, or it adds to y. Assign: y[i] = "
          "….")  # fmt: skip
bank.slip("nothing-written", ("y[i] = 0.5f", "y[i] += 0.5f"), variant=True)
bank.slip("n-ignored", ("i < n;", "i < n - 1;"))
bank.slip("n-ignored", ("int64_t i = 0;", "int64_t i = 1;"), variant=True)
bank.hint("past-the-end", "The C function writes outside the n numbers at y. Indices run from 0 to n - 1.")
bank.slip("past-the-end", ("i < n;", "i <= n;"), variant=True)
bank.hint("c-changes-input", "The C function writes to x, which is the caller's input. Write to y.")
bank.slip("c-changes-input", ("const float *x,", "float *x,"), ("y[i] =", "y[i] = x[i] ="), variant=True)
bank.hint("tanh-formula", "This is the tanh approximation of the GELU. It is wrong in the fourth digit; the exact "
          "formula uses erf.")  # fmt: skip
bank.slip(
    "tanh-formula",
    ("1.0f + erff(x[i] * 0.70710678f)", "1.0f + tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]))"),
    variant=True,
)
bank.hint("not-halved", "The results are twice the right values: the factor 1/2 is missing.")
bank.slip("not-halved", ("0.5f * x[i] *", "x[i] *"), variant=True)
bank.hint("unscaled-erf", "erf is given something other than x / √2. (That is x times 0.7071…, not times √2, and not x "
          "itself.)")  # fmt: skip
bank.slip("unscaled-erf", ("x[i] * 0.70710678f", "x[i]"))
bank.slip("unscaled-erf", ("x[i] * 0.70710678f", "x[i] / 2"))
bank.slip("unscaled-erf", ("x[i] * 0.70710678f", "x[i] * 1.41421356f"), variant=True)
bank.hint("sigmoid-formula", "This is the sigmoid approximation of the GELU, x · sigmoid(1.702 x). The exact formula "
          "uses erf.")  # fmt: skip
bank.slip(
    "sigmoid-formula",
    ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "x[i] / (1.0f + expf(-1.702f * x[i]))"),
    variant=True,
)
bank.hint("no-one", "The results are x/2 · erf(x/√2): the 1 in the brackets is missing.")
bank.slip("no-one", ("(1.0f + erff(x[i] * 0.70710678f))", "erff(x[i] * 0.70710678f)"), variant=True)
bank.hint("integer-division", "All results are 0. In C, 1/2 is an integer division and gives 0: write 0.5f.")
bank.slip("integer-division", ("0.5f *", "(1 / 2) *"), variant=True)
bank.hint("wrong-gelu", "The C function does not compute x/2 · (1 + erf(x/√2)).")
bank.slip("wrong-gelu", ("x[i] * 0.70710678f", "-x[i] * 0.70710678f"), variant=True)

bank.hint("no-argtypes", "The address that arrived in C is not an address of this process: ctypes takes a Python "
          "integer for a 32-bit number and truncates it. Declare addresses as c_void_p in argtypes.")  # fmt: skip
# the wrapper
bank.slip("no-argtypes", ("    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]\n", ""))
bank.slip("no-argtypes", ("[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]", "[ctypes.c_int] * 3"), variant=True)
bank.hint("not-called", "`gelu` of the library that was passed in was not called. It must do the computing.")
bank.slip(
    "not-called",
    ("library.gelu(numbers.data_ptr(), result.data_ptr(), numbers.numel())", "result = F.gelu(numbers)"),
)
bank.slip(
    "not-called", ("    return result.to(x.dtype)", "    return x"), ("    library.gelu(n", "    len; (n"), variant=True
)
bank.hint("not-from-library", "The result is not what the library wrote ({where}). The library must do all the "
          "computing.")  # fmt: skip
bank.slip("not-from-library", ("return result.to", "return F.gelu(x).to"))
bank.slip("not-from-library", ("return result.to", "return x.clone().to"), variant=True)
bank.hint("read-as-float32", "C was given the address of {dtype} numbers, and would read their bytes as float32. "
          "Convert them before the call, and back after it.")  # fmt: skip
bank.slip("read-as-float32", (".to(torch.float32)", ""), variant=True)
bank.hint("not-contiguous", "C was given the address of a tensor whose numbers are not stored one after the other, in "
          "the order of its elements ({where}). It needs a contiguous copy.")  # fmt: skip
bank.slip("not-contiguous", (".contiguous()", ""), ("empty_like(numbers)", "empty(x.shape)"))
bank.slip("not-contiguous", ("x.detach().to(torch.float32).contiguous()", "x.detach().to(torch.float32)"))
NO_ROW = "x.detach().contiguous() if x.dtype == torch.float32 else x.detach().float()"  # .float() keeps the strides
bank.slip(
    "not-contiguous",
    ("x.detach().to(torch.float32).contiguous()", NO_ROW),
    ("empty_like(numbers)", "empty(x.shape)"),
    variant=True,
)
bank.hint("written-into-input", "The result is written into the input's own memory. Create a new tensor for it.")
bank.slip("written-into-input", ("torch.empty_like(numbers)", "numbers"), variant=True)
bank.hint("addresses-swapped", "C was told to write to the input's memory, and to read elsewhere. Pass x first, then y.")  # fmt: skip
bank.slip(
    "addresses-swapped",
    ("numbers.data_ptr(), result.data_ptr()", "result.data_ptr(), numbers.data_ptr()"),
    variant=True,
)
bank.hint("short-n", "n is declared as a number of {bits} bits; in C it is int64_t, so use c_int64.")
bank.slip("short-n", ("c_void_p, ctypes.c_int64]", "c_void_p, ctypes.c_int]"), variant=True)
bank.hint("result-strides", "The numbers are right, but in a different order ({where}). empty_like of a transposed "
          "tensor is transposed too. C writes the numbers one after the other, so the result must be contiguous.")  # fmt: skip
bank.slip("result-strides", ("torch.empty_like(numbers)", "torch.empty_like(x, dtype=torch.float32)"), variant=True)
bank.hint("wrong-n", "C was told to work on {n} numbers, but the tensor has {right} ({where}).")
bank.slip("wrong-n", ("numbers.numel())", "4 * numbers.numel())"))
bank.slip("wrong-n", ("numbers.numel())", "len(numbers))"))
bank.slip("wrong-n", ("numbers.numel())", "x.shape[-1])"))
bank.slip("wrong-n", ("numbers.numel())", "1003)"))
bank.hint("output-too-small", "The result has no memory: y points to fewer than n numbers. Create a tensor of x's size "
          "first.")  # fmt: skip
bank.slip("output-too-small", ("torch.empty_like(numbers)", "torch.empty(0)"))
bank.slip(
    "output-too-small",
    ("torch.empty_like(numbers)", "torch.empty(len(x))"),
    ("return result", "return result.view(x.shape)"),
    variant=True,
)
bank.hint("freed-too-early", "The tensor at an address was freed before C was called: nothing refers to it any more. "
          "Give it a name that lives until the call is over.")  # fmt: skip
bank.slip(
    "freed-too-early",
    ("numbers = x.detach().to(torch.float32).contiguous()", "numbers = x"),
    ("library.gelu(numbers.data_ptr()", "library.gelu(x.detach().to(torch.float32).contiguous().data_ptr()"),
    ("empty_like(numbers)", "empty(x.shape)"),
)
bank.slip(  # the result may get the memory that was freed just before
    "freed-too-early",
    ("numbers = x.detach().to(torch.float32).contiguous()", "numbers = x"),
    (
        "result = torch.empty_like(numbers)",
        "start = x.detach().to(torch.float32).contiguous().data_ptr()\n    result = torch.empty(x.shape)",
    ),
    ("library.gelu(numbers.data_ptr()", "library.gelu(start"),
    variant=True,
)
bank.slip(  # in place, on a copy of its own
    None,
    (
        "numbers = x.detach().to(torch.float32).contiguous()",
        "numbers = x.detach().float().clone(memory_format=torch.contiguous_format)",
    ),
    ("result = torch.empty_like(numbers)", "result = numbers"),
)
bank.slip(  # addresses by way of NumPy
    None,
    (
        "numbers = x.detach().to(torch.float32).contiguous()",
        "import numpy as np\n\n    numbers = np.ascontiguousarray(x.detach().float().numpy())",
    ),
    ("result = torch.empty_like(numbers)", "out = np.empty_like(numbers)"),
    ("numbers.data_ptr(), result.data_ptr(), numbers.numel()", "numbers.ctypes.data, out.ctypes.data, numbers.size"),
    ("return result.to(x.dtype)", "return torch.from_numpy(out).to(x.dtype)"),
)
bank.hint("wrong-kind", "The result must have the input's shape and dtype ({where}).")
bank.slip("wrong-kind", (".to(x.dtype)", ""))
bank.slip("wrong-kind", ("return result.to(x.dtype)", "return result.flatten().to(x.dtype)"), variant=True)
bank.slip("nothing-returned", ("    return result.to(x.dtype)\n", ""))
bank.hint("input-changed", "The input has changed after the call ({where}).")
bank.slip(
    "input-changed",
    (
        "    return result.to(x.dtype)",
        "    out = result.to(x.dtype)\n    x.copy_(out) if x.is_contiguous() else None\n    return out",
    ),
    variant=True,
)
bank.slip("signature", ("def fused_gelu(x, library)", "def fused_gelu(x)"))
bank.hint("result-overwritten", "A second call changed the result of the first: each call needs new memory for its "
          "result.")  # fmt: skip
bank.slip(
    "result-overwritten",
    ("result = torch.empty_like(numbers)", "result = kept.setdefault(numbers.shape, torch.empty_like(numbers))"),
    ("def fused_gelu(x, library)", "def fused_gelu(x, library, kept={})"),
    variant=True,
)

# right ones
bank.slip(None, ('"-march=native", "-ffast-math", ', ""))
bank.slip(
    None, ('["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]', '["-fPIC", "-Ofast", "-shared", "-Wall"]')
)
bank.slip(None, ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "x[i] / 2 * (1 + erf(x[i] / sqrt(2)))"))
bank.slip(None, ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "0.5f * x[i] * (1.0f + erff(x[i] / 1.41421f))"))
bank.slip(None, ("0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f))", "x[i] * 0.5 * erfc(-x[i] * M_SQRT1_2)"))
bank.slip(None, ("for (int64_t i = 0; i < n; i++)", "while (n-- > 0) { const int64_t i = n;"), ("f));\n", "f)); }\n"))
bank.slip(None, (".detach().to(torch.float32)", ".float()"), ("empty_like(numbers)", "empty(x.shape)"))


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
    bank.several(None, compile_command, c_source, wrapper)


def of_torch(x, library):
    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    y = torch.empty_like(x.float().contiguous())
    library.gelu(x.float().contiguous().data_ptr(), y.data_ptr(), 0)
    return F.gelu(x)


bank.several("wrong-n", compile_command, c_source, of_torch, variant=True)

# a counter that ends before n does
LOOP = "for (int64_t i = 0; i < n; i++)"
bank.hint("int-counter", "The loop counts in {kind}, which cannot hold n's largest values: for a tensor of 2³¹ numbers "
          "it overflows. Count in int64_t, the type of n.")  # fmt: skip
bank.slip("int-counter", (LOOP, "for (int i = 0; i < n; i++)"))
bank.slip("int-counter", (LOOP, "unsigned i = 0;\n        for (; i < n; ++i)"), variant=True)
bank.slip(None, (LOOP, "for (long int i = n - 1; i >= 0; i--)"))
bank.slip(None, (LOOP, "int k = 0; /* int i < n */\n        k++;\n        for (int64_t i = k - 1; i != n; i++)"))
bank.hint("narrow-n", "gelu takes n as {kind}, but Python passes 64 bits, and a tensor can have 2³¹ numbers. Make n an "
          "int64_t.")  # fmt: skip
bank.slip("narrow-n", ("float *y, int64_t n", "float *y, int n"))
bank.slip(
    "narrow-n",
    ("float *y, int64_t n)", "float *y,\n        unsigned int count)"),
    ("i < n", "i < count"),
    variant=True,
)

bank.hint("storage-address", "This goes wrong for {where}: you pass the address of the storage, but the tensor begins "
          "later in it. x.data_ptr() is the address of the tensor's own first number.")  # fmt: skip
bank.slip(
    "storage-address", ("numbers.data_ptr(), result", "numbers.untyped_storage().data_ptr(), result"), variant=True
)
