"""Compile in private folders, and count what Dynamo did: graphs, and the breaks between them."""

import contextlib
import io
import logging
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dlojz_tp.works import temporary

BUILD_SECONDS = 60.0  # a compiler that needs longer for a page of C is stuck
_temporary: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


class BuildError(Exception):
    """A compiler did not make the library; the message is what it said, its first error first."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback.
        return str(self).splitlines()


@dataclass(frozen=True)
class Capture:
    """What was captured in one call: number of graphs; for each break, its line of code, and the reason in short."""

    graphs: int
    breaks: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        counts = {"graph": self.graphs, "break": len(self.breaks)}
        words = [", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items())]
        return "\n".join([*words, *(f"  at {line:<42} {reason}" for line, reason in self.breaks)])

    __repr__ = __str__


def capture(function: Callable, *args: object) -> Capture:
    """Trace one call of `function(*args)`, run it, and tell its graphs and breaks. What it prints goes nowhere.

    Compiled functions of this process are forgotten: they compile again at their next call.
    """
    import torch._dynamo

    torch._dynamo.reset()
    with contextlib.redirect_stdout(io.StringIO()):
        found = torch._dynamo.explain(function)(*args)
    torch._dynamo.reset()
    breaks = []
    for reason in found.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        breaks.append(((frame.line or "?").strip() if frame else "?", reason.reason.split("\n")[0]))
    return Capture(found.graph_count, tuple(breaks))


def c_compiler() -> str | None:
    """Name of this machine's C compiler; None where there is none."""
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def compile_missing(device: torch.device | str = "cpu") -> str:
    """What torch.compile lacks here to make code for `device`, in one line; empty if nothing."""
    if torch.device(device).type == "cuda":
        from importlib.util import find_spec

        return "" if find_spec("triton") else "torch.compile makes GPU code with Triton, which is not installed"
    name = cpp_compiler()
    return (
        "" if shutil.which(name) else f"torch.compile makes CPU code with a C++ compiler, and {name} is not installed"
    )


def cpp_compiler() -> str:
    """Name of the C++ compiler that torch.compile calls, whether it is there or not."""
    return os.environ.get("CXX") or "g++"


def run_compiler(command: list[str], library: Path, seconds: float = BUILD_SECONDS) -> Path:
    """Run a compiler's command (a list of words), which must make the file `library`.

    Returns:
        The library's path.

    Raises:
        BuildError: with what the compiler said, if it failed, made nothing, or took longer than `seconds`.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL, cwd=library.parent
        )
    except FileNotFoundError:
        raise BuildError(f"there is no compiler {command[0]!r} on this machine") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler was not ready after {seconds:.0f} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).replace(f"{library.parent}{os.sep}", "").splitlines()
        first = next((i for i, line in enumerate(said) if "error" in line or "undefined" in line), 0)
        raise BuildError("\n".join(said[first : first + 3]) or f"the compiler ended with status {done.returncode}")
    if not library.is_file():
        raise BuildError(f"the command ended well, but made no file {library.name}")
    return library


def private_folder() -> Path:
    """A new folder of this user alone, removed when the process ends."""
    _temporary.append(tempfile.TemporaryDirectory(prefix=temporary.prefix("build")))
    return Path(_temporary[-1].name)


def settle_compiler() -> Path:
    """Let torch.compile keep what it makes in the course's private folder, without processes of its own, and quietly.

    Returns:
        The folder of the cache, which later runs find again; a temporary one where the course's cannot be written.
    """
    folder = _cache()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    import torch._dynamo
    import torch._inductor.config

    if not torch.cuda.is_available():
        torch._inductor.config.compile_threads = 1  # a pool of processes pays with many cores only
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR, aot=logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for module in (r"torch\._dynamo", r"torch\._inductor", r"torch\.utils"):
        warnings.filterwarnings("ignore", module=module)
    return folder


def _cache() -> Path:
    from dlojz_tp.works import state

    folder = state.folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid == os.getuid():
            folder.chmod(0o700)
            (folder / ".writable").touch()
            return folder
    except OSError:
        pass  # no place to keep anything: then for this process alone
    return private_folder()
