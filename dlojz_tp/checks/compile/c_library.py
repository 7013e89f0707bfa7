"""Balise 1: the command, the C text and the wrapper, looked at one after the other."""

import ctypes
import math
import os
import re
from pathlib import Path

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.compile.c_probe import Probe, run_c
from dlojz_tp.measure import compiling

HINTS = {
    "not-a-list": "Return the command as a list of words, with each option as a separate word: ['cc', '-O3', …]. A "
                  "shell would split a single string; here nothing does.",
    "no-shared": "Without -shared, cc makes a program, and a program needs a main. A library for ctypes is a "
                 "shared library.",
    "no-pic": "The library is loaded wherever there is room in memory: its code must not depend on its address. "
              "Tell the compiler so: -fPIC.",
    "not-optimised": "Without -O2 or -O3 the compiler translates line by line, and the loop takes several times as "
                     "long.",
    "no-libm": "A function is missing: {error}. The mathematical functions are in libm. Link it with -lm, after "
               "the source.",
    "only-compiled": "-c stops before linking: the result is an object file, not a library.",
    "no-output": "The command does not say where the library goes: add -o and its path.",
    "paths-swapped": "The library's path is where the source should be: -o is followed by the file that the "
                     "compiler makes.",
    "paths-ignored": "The two paths passed in are the source and the library; the command contains others.",
    "command-failed": "The command does not make the requested library: {error}",
    "not-c-text": "c_source() must return the text of a C file, a str.",
    "c-error": "The compiler refuses the C text: {error}",
    "no-gelu": "The library has no function `gelu`. C keeps a function's name as you write it.",
    "double-pointer": "The C text takes pointers to double, 8 bytes a number. The tensor's numbers are float, 4 bytes.",
    "c-crash": "The C function crashed when it was called with {n} numbers: it accessed memory that is not its own.",
    "c-endless": "The C function did not return after 2 s of computing. Does the loop's counter advance?",
    "n-ignored": "With {n} numbers, some are missing at the end, or more are written. The loop must run n times.",
    "nothing-written": "What y held before is still there: the loop never runs, or it adds to y. Assign: y[i] = ….",
    "int-counter": "The loop counts in {kind}, which cannot hold n's largest values: for a tensor of 2³¹ numbers "
                   "it overflows. Count in int64_t, the type of n.",
    "narrow-n": "gelu takes n as {kind}, but Python passes 64 bits, and a tensor can have 2³¹ numbers. Make n an "
                "int64_t.",
    "past-the-end": "The C function writes outside the n numbers at y. Indices run from 0 to n - 1.",
    "c-changes-input": "The C function writes to x, which is the caller's input. Write to y.",
    "tanh-formula": "This is the tanh approximation of the GELU. It is wrong in the fourth digit; the exact "
                    "formula uses erf.",
    "not-halved": "The results are twice the right values: the factor 1/2 is missing.",
    "unscaled-erf": "erf is given something other than x / √2. (That is x times 0.7071…, not times √2, and not x "
                    "itself.)",
    "sigmoid-formula": "This is the sigmoid approximation of the GELU, x · sigmoid(1.702 x). The exact formula "
                       "uses erf.",
    "no-one": "The results are x/2 · erf(x/√2): the 1 in the brackets is missing.",
    "wrong-gelu": "The C function does not compute x/2 · (1 + erf(x/√2)).",
    "integer-division": "All results are 0. In C, 1/2 is an integer division and gives 0: write 0.5f.",
    "not-called": "`gelu` of the library that was passed in was not called. It must do the computing.",
    "no-argtypes": "The address that arrived in C is not an address of this process: ctypes takes a Python integer "
                   "for a 32-bit number and truncates it. Declare addresses as c_void_p in argtypes.",
    "read-as-float32": "C was given the address of {dtype} numbers, and would read their bytes as float32. Convert "
                       "them before the call, and back after it.",
    "not-contiguous": "C was given the address of a tensor whose numbers are not stored one after the other, in "
                      "the order of its elements ({where}). It needs a contiguous copy.",
    "written-into-input": "The result is written into the input's own memory. Create a new tensor for it.",
    "addresses-swapped": "C was told to write to the input's memory, and to read elsewhere. Pass x first, then y.",
    "short-n": "n is declared as a number of {bits} bits; in C it is int64_t, so use c_int64.",
    "result-strides": "The numbers are right, but in a different order ({where}). empty_like of a transposed "
                      "tensor is transposed too. C writes the numbers one after the other, so the result must be "
                      "contiguous.",
    "wrong-n": "C was told to work on {n} numbers, but the tensor has {right} ({where}).",
    "output-too-small": "The result has no memory: y points to fewer than n numbers. Create a tensor of x's size "
                        "first.",
    "freed-too-early": "The tensor at an address was freed before C was called: nothing refers to it any more. "
                       "Give it a name that lives until the call is over.",
    "input-changed": "The input has changed after the call ({where}).",
    "not-from-library": "The result is not what the library wrote ({where}). The library must do all the computing.",
    "storage-address": "This goes wrong for {where}: you pass the address of the storage, but the tensor begins "
                       "later in it. x.data_ptr() is the address of the tensor's own first number.",
    "wrong-kind": "The result must have the input's shape and dtype ({where}).",
    "result-overwritten": "A second call changed the result of the first: each call needs new memory for its result.",
}


def balise_1(compile_command, c_source, fused_gelu):
    """The command really makes a library; its function is run apart; the wrapper is watched."""
    if compiling.c_compiler() is None:
        yield "a C compiler is there"
        raise Wrong("rank-failed", error=("There is no C compiler (cc, gcc or clang) on this machine, so this "
                                          "balise cannot be judged here. Go on with the next one."))  # fmt: skip
    yield "the command is a list of words, for an optimised shared library"
    folder = compiling.private_folder() / "with space"
    folder.mkdir(exist_ok=True)
    source, library = folder / "kernel.c", folder / "kernel.so"
    command = _command(compile_command, source, library)
    yield "the C text compiles, and the library loads"
    _build(command, c_source(), source, library)
    yield "the C function computes the exact GELU of n numbers, and changes nothing else"
    _computes(library)
    yield "the wrapper passes the right addresses to C"
    _wraps(fused_gelu, torch.linspace(-4, 4, 1003), "1003 numbers in a row")
    yield "transposed, strided and expanded tensors"
    numbers = torch.linspace(-3, 3, 17 * 58)
    _wraps(fused_gelu, numbers.view(17, 58), "17 × 58")
    _wraps(fused_gelu, numbers.view(17, 58).t(), "17 × 58, transposed")
    _wraps(fused_gelu, numbers.view(17, 58)[:, ::2], "every second column of 17 × 58")
    _wraps(fused_gelu, torch.linspace(-1, 1, 5).expand(3, 5), "5 numbers, expanded to 3 × 5")
    try:
        _wraps(fused_gelu, torch.linspace(-3, 3, 60)[17:], "43 numbers, from the 17th of a tensor on")
    except Wrong as wrong:
        wrong.slug = "storage-address"
        raise
    yield "another dtype is converted, or refused; a second call leaves the first result alone"
    for dtype in (torch.float64, torch.bfloat16):
        numbers = torch.linspace(-2, 2, 64, dtype=dtype)
        _wraps(fused_gelu, numbers, str(dtype), may_refuse=True)
        _wraps(fused_gelu, numbers.view(4, 16).t(), f"4 × 16, transposed, {dtype}", may_refuse=True)
    _twice(fused_gelu)


def _command(compile_command, source, library):
    command = compile_command(source, library)
    if command is None:
        raise Wrong("nothing-returned")
    if isinstance(command, str) or not isinstance(command, list | tuple):
        raise Wrong("not-a-list", expected="['cc', …]", got=command)
    if not all(isinstance(word, str | os.PathLike) for word in command) or not command:
        raise Wrong("not-a-list", expected="words (str) and paths", got=str(command))
    command = [os.fspath(word) for word in command]
    if any(re.search(r"\S\s+-", word) for word in command):
        raise Wrong("not-a-list", expected="each option a word of its own", got=str(_short(command, source)))
    _places(command, source, library)
    if "-shared" not in command:
        raise Wrong("no-shared", got=str(_short(command, source)))
    if not {"-fPIC", "-fpic"} & set(command):
        raise Wrong("no-pic", got=str(_short(command, source)))
    levels = [word for word in command if re.fullmatch(r"-O\S*", word)]
    if not levels or levels[-1] not in ("-O", "-O1", "-O2", "-O3", "-Ofast", "-Os"):
        raise Wrong("not-optimised", got=str(_short(command, source)))
    return command


def _places(command, source, library):
    """The source is read and the library is written; relative names would do where the compiler runs in their folder."""
    if "-c" in command:
        raise Wrong("only-compiled", got=str(_short(command, source)))
    at = next((i for i, word in enumerate(command) if word.startswith("-o")), None)
    if at is None:
        raise Wrong("no-output", got=str(_short(command, source)))
    made = command[at][2:] or (command[at + 1] if at + 1 < len(command) else "")
    names = {Path(word).name for word in command}
    if Path(made).name == source.name:
        raise Wrong("paths-swapped", got=str(_short(command, source)))
    if Path(made).name != library.name or source.name not in names:
        raise Wrong("paths-ignored", expected=f"{source.name} and {library.name}", got=str(_short(command, source)))


def _short(command, source):
    return " ".join(command).replace(f"{source.parent}{os.sep}", "")


BUILD_SECONDS = 40.0  # a page of C takes a tenth of a second; a busy machine takes its time


def _build(command, text, source, library):
    if text is None:
        raise Wrong("nothing-returned")
    if not isinstance(text, str):
        raise Wrong("not-c-text", got=text)
    source.write_text("void other(void) {}\n")  # the command alone: whatever fails now is not the C text's fault
    try:
        compiling.run_compiler(command, library, BUILD_SECONDS)
    except compiling.BuildError as error:
        raise Wrong("command-failed", error=_line(error)) from None
    library.unlink()
    source.write_text(text)
    try:  # what is left open is found now, not when it is loaded: another library may have brought it by chance
        compiling.run_compiler([*command, "-Wl,--no-undefined"], library, BUILD_SECONDS)
    except compiling.BuildError as error:
        if "undefined reference" in str(error):
            raise Wrong("no-libm", error=_line(error)) from None
        if "no-undefined" not in str(error):  # else: a linker that does not know the option
            raise Wrong("c-error", error=_line(error)) from None
        compiling.run_compiler(command, library, BUILD_SECONDS)


def _line(error):
    return str(error).splitlines()[0].strip()


def _computes(library):
    cases = [[0.0], [k / 50 - 10.03 for k in range(1003)], [], [0.3 * k - 1 for k in range(7)]]
    found = run_c(library, cases)
    if found in ("endless", "crash"):
        raise Wrong(f"c-{found}", n="1, 1003, 0 and 7")
    if isinstance(found, str):
        if "gelu" in found:
            raise Wrong("no-gelu", error=found)
        # the loader's message begins with the library's path
        raise Wrong("no-libm" if "undefined symbol" in found else "command-failed", error=found.split(": ", 2)[-1])
    numbers, got = cases[1], found[1]["y"]
    if "double" in _signature(library):
        raise Wrong("double-pointer", expected="const float *x, float *y", got=_signature(library))
    _values(numbers, got)
    for case, result in zip(cases, found, strict=True):
        if not result["kept"]:
            raise Wrong("c-changes-input")
        if result["outside"]:
            raise Wrong("past-the-end" if result["outside"] == 1 else "n-ignored", n=len(case))
        if any(abs(y - _gelu(x)) > 1e-4 for x, y in zip(case, result["y"], strict=True)):
            raise Wrong("n-ignored", n=len(case), expected=_gelu(case[-1]), got=result["y"][-1])
    _counts_far(library)


def _counts_far(library):
    """What is compared with n counts as far as n does. Read in the text: to run 2³¹ numbers takes 16 GiB and seconds."""
    text, n = _text(library), _signature(library).rpartition(",")[2].split()[-1:]
    narrow = r"(?<!long )\b((?:unsigned|signed|short)(?:\s+(?:int|short))?|int|u?int(?:8|16|32)_t)\s+(\w+)\s*"
    if found := re.fullmatch(narrow, _signature(library).rpartition(",")[2].strip()):
        raise Wrong("narrow-n", kind=found[1], expected="int64_t", got=found[0])
    for kind, name in re.findall(narrow + "[=;,]", text):
        if n and re.search(rf"\b{name}\s*(?:<=?|!=)\s*{n[0]}\b|\b{n[0]}\s*(?:>=?|!=)\s*{name}\b", text):
            raise Wrong("int-counter", kind=kind, expected="int64_t", got=f"{kind} {name}")


def _text(library):
    """The C text, comments left out."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", library.with_suffix(".c").read_text(), flags=re.DOTALL)


def _signature(library):
    """The arguments of gelu in the C text."""
    found = re.search(r"\bgelu\s*\(([^)]*)\)", _text(library))
    return found[1] if found else ""


def _gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _values(numbers, got):
    def differs(function):
        return max(abs(y - function(x)) / (1 + abs(x)) for x, y in zip(numbers, got, strict=True))

    if differs(_gelu) <= 5e-6:
        return
    known = {
        "tanh-formula": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "not-halved": lambda x: 2 * _gelu(x),
        "unscaled-erf": lambda x: 0.5 * x * (1 + math.erf(x)),
        "unscaled-erf ": lambda x: 0.5 * x * (1 + math.erf(x / 2)),
        "unscaled-erf  ": lambda x: 0.5 * x * (1 + math.erf(x * math.sqrt(2))),
        "sigmoid-formula": lambda x: x / (1 + math.exp(-1.702 * x)),
        "no-one": lambda x: 0.5 * x * math.erf(x / math.sqrt(2)),
        "integer-division": lambda x: 0.0,
    }
    slug = next((slug.strip() for slug, function in known.items() if differs(function) < 5e-6), "wrong-gelu")
    left = [abs(y - 1e30) < 1e24 for y in got]  # what stood there before
    if slug == "wrong-gelu" and any(left):
        raise Wrong("nothing-written" if all(left) else "n-ignored", n=len(numbers))
    worst = max(zip(numbers, got, strict=True), key=lambda pair: abs(pair[1] - _gelu(pair[0])))
    raise Wrong(slug, expected=_gelu(worst[0]), got=worst[1], where=f"x = {worst[0]:.2f}")


_REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError, ctypes.ArgumentError)


def _wraps(fused_gelu, x, where, may_refuse=False):
    before = x.clone()
    with Probe(x) as probe:
        try:
            got = fused_gelu(x, probe.library)
        except _REFUSALS:
            mistake = next((call.mistake for call in probe.calls if call.mistake), "")
            if may_refuse and not mistake:
                return None
            if not mistake:
                raise
            got = None
    for call in probe.calls:
        if call.mistake and call.mistake not in HINTS:
            raise Wrong("unusable", error=call.mistake)
        if call.mistake:
            dtype = str(x.dtype).removeprefix("torch.")
            raise Wrong(call.mistake, where=where, n=call.n, right=x.numel(), dtype=dtype)
    if not probe.calls:
        raise Wrong("not-called", where=where)
    if got is None:
        raise Wrong("nothing-returned")
    declared = probe.library.gelu.argtypes
    if declared and len(declared) == 3 and (size := ctypes.sizeof(declared[2])) < 8:
        raise Wrong("short-n", bits=8 * size, expected="ctypes.c_int64", got=declared[2].__name__)
    if not isinstance(got, torch.Tensor) or got.shape != x.shape or got.dtype != x.dtype:
        raise Wrong("wrong-kind", expected=x, got=got, where=where)
    if not torch.equal(before, x):
        raise Wrong("input-changed", expected=before, got=x, where=where)
    if not close(got, (3 * before.float() + 1).to(x.dtype), 1e-2 if x.dtype == torch.bfloat16 else 1e-5):
        if sum(call.n for call in probe.calls) < x.numel():
            raise Wrong("wrong-n", n=sum(call.n for call in probe.calls), right=x.numel(), where=where)
        if any(call.x == x.data_ptr() for call in probe.calls) and not x.is_contiguous():
            raise Wrong("not-contiguous", where=where)
        if close(got.flatten().sort().values, (3 * before.float() + 1).to(x.dtype).flatten().sort().values, 1e-4):
            # a contiguous result was written in its order, so what was read was not
            raise Wrong("not-contiguous" if got.is_contiguous() else "result-strides", where=where)
        raise Wrong("not-from-library", expected="what gelu wrote to y", got=got, where=where)
    return got


def _twice(fused_gelu):
    x = torch.linspace(-1, 1, 100)
    first = _wraps(fused_gelu, x, "a first call")
    kept = first.clone()
    _wraps(fused_gelu, x + 1, "a second call")
    if not torch.equal(first, kept):
        raise Wrong("result-overwritten")
