"""`python -m dlojz_tp COMMAND`, or `dlojz COMMAND`: what the course offers in a shell."""

import contextlib
import importlib
import os
import sys

COMMANDS = {
    "check": ("dlojz_tp.judging.grading.command", "judge the answers in a notebook or a .py file"),
    "class": ("dlojz_tp.classroom.command", "the verdicts of a class, live on one page (for instructors)"),
    "doctor": ("dlojz_tp.commands.doctor", "what this machine offers the course, and what to do about each gap"),
    "lab": ("dlojz_tp.commands.lab", "copy the notebooks into work/ and open JupyterLab there"),
    "reset": ("dlojz_tp.commands.reset", "forget which balises have passed, and guesses and measures"),
    "plan": ("dlojz_tp.commands.plan", "the best layouts of a large model over many GPUs, predicted"),
    "build": ("dlojz_tp.authoring.notebooks", "write the notebooks from their sources (for authors)"),
    "answers": ("dlojz_tp.authoring.answering", "judge the answers to a balise in its bank (for authors)"),
    "slides": ("dlojz_tp.authoring.slides", "write slides from the executed solutions (for instructors)"),
    "site": ("dlojz_tp.authoring.site", "build a site of the course from the executed solutions (for instructors)"),
    "minutes": ("dlojz_tp.authoring.minutes", "how long each practical work takes, counted (for authors)"),
    "weight": ("dlojz_tp.authoring.weight", "lines, hints, answers and seconds of each practical work (for authors)"),
    "rehearse": ("dlojz_tp.authoring.rehearsing", "run the solutions on GPUs that are only pretended (for authors)"),
    "record": ("dlojz_tp.authoring.recording", "run the solutions on a GPU and record what they measure (for authors)"),
}


LINUX = "The course is for Linux."
WINDOWS = f"{LINUX} On Windows, run it in WSL 2: `wsl --install`, then the README's commands in there."
MACOS = f"{LINUX} Nobody has tried it on macOS: docs/containers.md has a container, Colab and Kaggle."
NOT_HERE = {"win32": WINDOWS, "cygwin": WINDOWS, "darwin": MACOS}


def main(argv: list[str] | None = None) -> int:
    """Run one command; 2 for a command that does not exist, 1 where the output cannot be written.

    argv: its words; None are those of the shell, for the program `dlojz`.
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # a terminal may not know all characters
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, not at the interpreter's end: a full disk is one line
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        with contextlib.suppress(OSError):  # what is left in the buffer has nowhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
            with contextlib.suppress(OSError):
                where = f"{error.filename}: " if error.filename else "cannot write the output: "
                print(f"dlojz_tp {' '.join(argv[:1])}: {where}{error.strerror or error}", file=sys.stderr)
        return 1


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m dlojz_tp COMMAND ...\n")
        for name, (_, what) in COMMANDS.items():
            print(f"  {name:<8} {what}")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"dlojz_tp: no command {argv[0]!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if sys.platform in NOT_HERE:
        print(NOT_HERE[sys.platform], file=sys.stderr)
        if sys.platform != "darwin":  # ranks are forked
            return 1
    if os.environ.get("DLOJZ_PRETENDED_GPUS"):
        importlib.import_module("dlojz_tp.judging.pretend_gpu.rehearsed").enter()
    module, what = COMMANDS[argv[0]]
    command = importlib.import_module(module)
    command.__doc__ = command.__doc__ or what  # its --help begins with it; PYTHONOPTIMIZE=2 leaves docstrings out
    return command.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
