"""Balise 1: the command, the C text and the wrapper, looked at one after the other."""

import copy
import ctypes
import math
import os
import re
from pathlib import Path

import torch

from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, filled, form, judged, silent, within
from dlojz_tp.judging.checks.compile.c_probe import Probe, run_c
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure import compiling

BUILD_SECONDS = 40.0  # a page of C takes a tenth of a second; a busy machine takes its time
WORDS = "a list of words and paths, each option a word of its own"
NUMBERS = [
    torch.tensor(case).double()
    for case in ([0.0], [k / 50 - 10.03 for k in range(1003)], [], [0.3 * k - 1 for k in range(7)])
]
WRAPPED = {  # what the wrapper is given; numbers of another dtype may be refused
    "1003 numbers in a row": torch.linspace(-4, 4, 1003),
    "17 × 58": torch.linspace(-3, 3, 17 * 58).view(17, 58),
    "17 × 58, transposed": torch.linspace(-3, 3, 17 * 58).view(17, 58).t(),
    "every second column of 17 × 58": torch.linspace(-3, 3, 17 * 58).view(17, 58)[:, ::2],
    "5 numbers, expanded to 3 × 5": torch.linspace(-1, 1, 5).expand(3, 5),
    "43 numbers, from the 17th of a tensor on": torch.linspace(-3, 3, 60)[17:],
    "torch.float64": torch.linspace(-2, 2, 64, dtype=torch.float64),
    "4 × 16, transposed, torch.float64": torch.linspace(-2, 2, 64, dtype=torch.float64).view(4, 16).t(),
    "torch.bfloat16": torch.linspace(-2, 2, 64, dtype=torch.bfloat16),
    "4 × 16, transposed, torch.bfloat16": torch.linspace(-2, 2, 64, dtype=torch.bfloat16).view(4, 16).t(),
    "a first call": torch.linspace(-1, 1, 100),
    "a second call": torch.linspace(-1, 1, 100) + 1,
}


def gelu(x, inside=0.5**0.5):
    return x / 2 * (1 + torch.erf(x * inside))


def observe(compile_command, c_source, fused_gelu):
    folder = compiling.private_folder() / "with space"
    folder.mkdir(exist_ok=True)
    source, library = folder / "kernel.c", folder / "kernel.so"
    command = compile_command(source, library)
    yield {"command": kind(command)}
    command = [os.fspath(word) for word in command]
    yield {"words": [word.replace(f"{folder}{os.sep}", "") for word in command]}
    text = c_source()
    yield {"text": form(text)}
    source.write_text("void other(void) {}\n")  # the command alone: whatever fails now is not the C text's fault
    yield {"command error": build_error(command, library)}
    library.unlink()
    source.write_text(text)
    # what is left open is found now, not when it is loaded: another library may have brought it by chance
    error = build_error([*command, "-Wl,--no-undefined"], library)
    if "no-undefined" in error and "undefined reference" not in error:  # a linker that does not know the option
        compiling.run_compiler(command, library, BUILD_SECONDS)
        error = ""
    yield {"text error": error}
    found = run_c(library, [numbers.tolist() for numbers in NUMBERS])
    yield {"failed": found if isinstance(found, str) else ""}
    yield types(re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL))
    yield {"y": [torch.tensor(case["y"]).double() for case in found]}
    yield {key: [case[key] for case in found] for key in ("kept", "outside")}
    results = []
    for where, x in WRAPPED.items():
        seen, got = wrapped(fused_gelu, copy.deepcopy(x), x.dtype != torch.float32)
        yield {f"{where}: {key}": value for key, value in seen.items()}
        results.append((got, None if got is None else got.clone()))
    yield {"first": torch.equal(*results[-2])}


def kind(command):
    if not isinstance(command, list | tuple) or not command:
        return command
    words = all(isinstance(word, str | os.PathLike) and not re.search(r"\S\s+-", os.fspath(word)) for word in command)
    return WORDS if words else str(command)


def build_error(command, library):
    try:
        compiling.run_compiler(command, library, BUILD_SECONDS)
    except compiling.BuildError as error:
        return str(error)
    return ""


def types(text):
    """The arguments of gelu; (type, declaration) of an n that is too narrow, and of what is compared with n.

    Read in the text: to run 2³¹ numbers takes 16 GiB and seconds.
    """
    found = re.search(r"\bgelu\s*\(([^)]*)\)", text)
    arguments = found[1] if found else ""
    last = arguments.rpartition(",")[2].strip()
    narrow = r"(?<!long )\b((?:unsigned|signed|short)(?:\s+(?:int|short))?|int|u?int(?:8|16|32)_t)\s+(\w+)\s*"
    n, found = (last.split() or ["$"])[-1], re.fullmatch(narrow, last)
    counters = [
        (word, f"{word} {name}")
        for word, name in re.findall(narrow + "[=;,]", text)
        if re.search(rf"\b{name}\s*(?:<=?|!=)\s*{n}\b|\b{n}\s*(?:>=?|!=)\s*{name}\b", text)
    ]
    return {"arguments": arguments, "n": [(found[1], found[0])] if found else [], "counters": counters}


REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError, ctypes.ArgumentError)


def wrapped(fused_gelu, x, may_refuse):
    """What the wrapper hands to C and makes of x, and what it returns; as it must be where it refuses and may."""
    before, got = x.clone(), None
    with Probe(x) as probe:
        try:
            got = fused_gelu(x, probe.library)
        except REFUSALS:
            if not any(call.mistake for call in probe.calls):
                if may_refuse:
                    return {"mistake": "", "called": True, "form": form(x), "bits": 64, "input": True, "y": None}, None
                raise
    wrong = next((call for call in probe.calls if call.mistake), None)
    declared, n = probe.library.gelu.argtypes, sum(call.n for call in probe.calls)
    bits = 8 * ctypes.sizeof(declared[2]) if declared and len(declared) == 3 else 64
    in_place = any(call.x == x.data_ptr() for call in probe.calls) and not x.is_contiguous()
    found = {"mistake": (wrong.mistake, wrong.n) if wrong else "", "called": bool(probe.calls), "form": form(got)}
    return found | {"bits": bits, "input": torch.equal(before, x), "y": {"got": got, "n": n, "in place": in_place}}, got


def of_command(hint, holds):
    """A look at the words of the command; holds(words, the name after -o)."""

    def find(seen):
        words = seen["words"]
        at = next((i for i, word in enumerate(words) if word.startswith("-o")), None)
        output = None if at is None else Path(words[at][2:] or "".join(words[at + 1 : at + 2])).name
        return not holds(words, output) and (hint, {"got": " ".join(words)})

    return recognised("", find)


def of_failure(seen, _):
    if seen in ("endless", "crash"):
        return f"c-{seen}"
    return "no-gelu" if "gelu" in seen else "no-libm" if "undefined symbol" in seen else "command-failed"


def first_line(seen, _):
    return {"error": seen.splitlines()[0].strip()}


def near(seen, due):
    """Whether y is the truth, for 1003 numbers."""
    return ((seen - due).abs() / (1 + NUMBERS[1].abs())).max().item() <= 5e-6


def of_values(seen, due):
    """Which known formula it is; else whether something was written at all."""
    x = NUMBERS[1]
    known = {
        "tanh-formula": [torch.nn.functional.gelu(x, approximate="tanh")],
        "not-halved": [2 * due],
        "unscaled-erf": [gelu(x, factor) for factor in (1, 1 / 2, math.sqrt(2))],
        "sigmoid-formula": [x * torch.sigmoid(1.702 * x)],
        "no-one": [due - x / 2],
        "integer-division": [0 * x],
    }
    left = (seen - 1e30).abs() < 1e24  # what stood there before
    unwritten = "nothing-written" if left.all() else "n-ignored" if left.any() else "wrong-gelu"
    return next((slug for slug, values in known.items() if any(near(seen, one) for one in values)), unwritten)


def first(holds):
    """The fields of a hint: how many numbers there are in the first case of which holds(seen, due) is not true."""
    return lambda seen, due: (
        {"n": next(len(x) for x, *pair in zip(NUMBERS, seen, due) if not holds(*pair))} | silent(seen, due)
    )


def typed(seen, _):
    return {"kind": seen[0][0], "expected": "int64_t", "got": seen[0][1]}


def misused(seen, _):
    """Why what the wrapper handed to C is of no use."""
    return "unusable" if ": " in seen[0] else seen[0]


def from_library(seen, _):
    return {"n": seen["n"], "expected": "what gelu wrote to y", "got": seen["got"]}


def of_result(seen, due):
    """Why the result is not what the library wrote."""
    got = seen["got"]
    if seen["n"] < due.numel():
        return "wrong-n"
    if seen["in place"]:
        return "not-contiguous"
    if close(got.flatten().sort().values, due.flatten().sort().values, 1e-4):
        # a contiguous result was written in its order, so what was read was not
        return "not-contiguous" if got.is_contiguous() else "result-strides"
    return "not-from-library"


def looks_at(where, claim=""):
    x = WRAPPED[where]
    due, most = (3 * x.float() + 1).to(x.dtype), 1e-2 if x.dtype == torch.bfloat16 else 1e-5
    told = {"where": where, "right": x.numel(), "dtype": str(x.dtype)[6:]}

    def look(key, due, hint, holds=None, fields=None):
        hint = "storage-address" if "from the 17th" in where else hint
        return Look(claim, f"{where}: {key}", due, hint, holds=holds,
                    fields=lambda seen, due: told | filled(fields, seen, due))  # fmt: skip

    return [
        look("mistake", "", misused, fields=lambda seen, _: dict(zip(("error", "n"), seen)) | silent(seen, _)),
        look("called", True, "not-called"),
        look("form", form(x), "wrong-kind"),
        look("bits", 64, "short-n", lambda seen, due: seen >= due, "bits"),
        look("input", True, "input-changed"),
        look("y", due, of_result, lambda seen, due: seen is None or close(seen["got"], due, most), from_library),
    ]  # fmt: skip


LEVELS = "-O", "-O1", "-O2", "-O3", "-Ofast", "-Os"
LOOKS = [
    Look("the command is a list of words, for an optimised shared library", "command", WORDS, "not-a-list"),
    of_command("only-compiled", lambda words, output: "-c" not in words),
    of_command("no-output", lambda words, output: output is not None),
    of_command("paths-swapped", lambda words, output: output != "kernel.c"),
    of_command("paths-ignored",
               lambda words, output: output == "kernel.so" and "kernel.c" in {Path(word).name for word in words}),
    of_command("no-shared", lambda words, output: "-shared" in words),
    of_command("no-pic", lambda words, output: {"-fPIC", "-fpic"} & set(words)),
    of_command("not-optimised",
               lambda words, output: ["", *(word for word in words if re.fullmatch(r"-O\S*", word))][-1] in LEVELS),
    Look("the C text compiles, and the library loads", "text", "str", "not-c-text"),
    Look("", "command error", "", "command-failed", fields=first_line),
    Look("", "text error", "", lambda seen, _: "no-libm" if "undefined reference" in seen else "c-error",
         fields=first_line),
    Look("the C function computes the exact GELU of n numbers, and changes nothing else", "failed", "", of_failure,
         # the loader's message begins with the library's path
         fields=lambda seen, _: {
             "n": "1, 1003, 0 and 7", "error": seen if "gelu" in seen else seen.split(": ", 2)[-1]}),
    Look("", "arguments", "const float *x, float *y, int64_t n", "double-pointer",
         holds=lambda seen, _: "double" not in seen),
    Look("", lambda seen: seen["y"][1], gelu(NUMBERS[1]), of_values, holds=near, fields={"n": len(NUMBERS[1])}),
    Look("", "kept", [True] * 4, "c-changes-input", fields=silent),
    Look("", "outside", [0] * 4, lambda seen, _: "past-the-end" if next(filter(None, seen)) == 1 else "n-ignored",
         fields=first(lambda outside, _: not outside)),
    Look("", "y", [gelu(x) for x in NUMBERS], "n-ignored", holds=within(1e-4), fields=first(within(1e-4))),
    Look("", "n", [], "narrow-n", fields=typed),
    Look("", "counters", [], "int-counter", fields=typed),
    *looks_at("1003 numbers in a row", "the wrapper passes the right addresses to C"),
    *(look for where in list(WRAPPED)[1:6] for look in looks_at(where, "transposed, strided and expanded tensors")),
    *(look for where in list(WRAPPED)[6:]
      for look in looks_at(where, "another dtype is converted, or refused; a second call leaves the first result alone")),
    Look("", "first", True, "result-overwritten"),
]  # fmt: skip


def balise_1(compile_command, c_source, fused_gelu):
    """The command really makes a library; its function is run apart; the wrapper is watched."""
    if compiling.c_compiler() is None:
        yield "a C compiler is there"
        raise Wrong("rank-failed", error=("There is no C compiler (cc, gcc or clang) on this machine, so this "
                                          "balise cannot be judged here. Go on with the next one."))  # fmt: skip
    yield from judged(LOOKS, observe, compile_command, c_source, fused_gelu)
