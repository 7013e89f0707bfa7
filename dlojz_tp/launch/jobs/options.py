"""What a centre asks of a job (account, partition, modules, ...): from one small file, or from the environment.

The file is `~/.config/dlojz/slurm.toml` (XDG_CONFIG_HOME is respected); a variable such as DLOJZ_SLURM_ACCOUNT goes
before it. docs/slurm.md shows a whole file.
"""

import contextlib
import os
import re
import shlex
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of a variable
OPTION = re.compile(r"-{0,2}[A-Za-z][A-Za-z0-9_-]*")  # of sbatch
PREFIX = "DLOJZ_SLURM_"


class JobError(Exception):
    """A job that could not be submitted, was cancelled, or ended before its ranks could tell anything; one line."""

    def _render_traceback_(self):
        # IPython shows this instead of frames of the launcher, which say nothing to the user.
        return [f"JobError: {self}"]


@dataclass(frozen=True)
class Options:
    """What is asked for each job; all may stay empty.

    use: False runs jobs on this machine though there is a Slurm. folder: where the folders of the jobs go; the compute
    nodes must see it. gpus_per_node: most GPUs to ask on a node; a job asks for one a rank. cpus_per_task: cores of
    each rank. collective_timeout: seconds a rank waits for the others in a collective. modules: shell lines run before
    the ranks. environment: variables set for the ranks. sbatch: further options of sbatch, without their dashes.
    """

    use: bool | None = None
    account: str = ""
    partition: str = ""
    constraint: str = ""
    qos: str = ""
    reservation: str = ""
    hint: str = ""
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    collective_timeout: int = 120
    folder: str = ""
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    sbatch: dict[str, str | bool] = field(default_factory=dict)


def path() -> Path:
    """The file with the options, which need not exist."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    with contextlib.suppress(RuntimeError):  # in some containers the user has no name and no home
        folder = folder or Path.home() / ".config"
    return Path(folder or os.devnull) / "dlojz" / "slurm.toml"


def load() -> Options:
    """Read the options: the file first, then the environment over it.

    Returns Options. Errors: JobError, one line with the file or the variable and what is wrong there.
    """
    file = path()
    try:
        stored = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        stored = {}
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise JobError(f"{file} cannot be read: {' '.join(str(why).split())}") from None
    options = Options()
    for name, value in stored.items():
        options = _put(options, name, value, str(file))
    for variable, text in sorted(os.environ.items()):
        if variable.startswith(PREFIX) and text.strip():
            name = variable.removeprefix(PREFIX).lower()
            options = _put(options, name, _parse(name, text.strip(), variable), variable)
    return options


def _put(options: Options, name: str, value, where: str) -> Options:
    known = [f.name for f in fields(Options)]
    if name not in known:
        raise JobError(f"{where}: there is no option {name!r}; there are: {', '.join(known)}")
    problem = _problem(name, value)
    if problem:
        raise JobError(f"{where}: {name} must be {problem}, not {value!r}")
    if name == "modules":
        value = tuple(value)
    if name == "environment":
        value = {key: str(part) for key, part in value.items()}
    if name == "sbatch":
        value = {key.lstrip("-"): part if isinstance(part, bool) else str(part) for key, part in value.items()}
    return replace(options, **{name: value})


def _problem(name: str, value) -> str:
    """What an option must be, where `value` is something else; an empty text where it is right."""
    if name == "use":
        return "" if isinstance(value, bool) else "true or false"
    if name in ("gpus_per_node", "cpus_per_task"):
        return "" if type(value) is int and value >= 0 else "a whole number, 0 or more"
    if name == "collective_timeout":
        return "" if type(value) is int and value > 0 else "a whole number of seconds, 1 or more"
    if name == "modules":
        right = isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value)
        return "" if right else "a list of shell lines"
    if name in ("environment", "sbatch"):
        right = isinstance(value, dict) and all(isinstance(part, (str, int, float)) for part in value.values())
        # Names go into the batch script as they are, and a line of options ends where the line ends.
        form = NAME if name == "environment" else OPTION
        if right and (wrong := next((key for key in value if not form.fullmatch(key)), None)) is not None:
            return f"a table of names and values, and {wrong!r} is no name"
        if right and name == "sbatch" and any("\n" in str(part) for part in value.values()):
            return "a table of names and values of one line"
        return "" if right else "a table of names and values"
    return "" if isinstance(value, str) and "\n" not in value else "a text of one line"


def _parse(name: str, text: str, variable: str):
    """The value of an option that is written as text in the environment."""
    if name == "use":
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        return words.get(text.lower(), text)
    if name in ("gpus_per_node", "cpus_per_task", "collective_timeout"):
        return int(text) if text.isdecimal() else text
    if name == "modules":
        return [line.strip() for line in text.replace(";", "\n").splitlines() if line.strip()]
    if name in ("environment", "sbatch"):
        try:
            pairs = [word.partition("=") for word in shlex.split(text)]
        except ValueError as error:
            raise JobError(f"{variable}: {error}") from None
        return {key: value if equals else True for key, equals, value in pairs}
    return text
