"""`python -m dlojz_tp COMMAND`: what the course offers in a shell."""

import importlib
import sys

COMMANDS = {
    "check": ("dlojz_tp.grading.command", "judge the answers in a notebook or a .py file"),
    "doctor": ("dlojz_tp.doctor", "what this machine offers the course, and what to do about each gap"),
    "lab": ("dlojz_tp.lab", "copy the notebooks into work/ and open JupyterLab there"),
    "build": ("dlojz_tp.authoring.notebooks", "write the notebooks from their sources (for authors)"),
}


def main(argv: list[str]) -> int:
    """Run one command; 2 for a command that does not exist."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m dlojz_tp COMMAND ...\n")
        for name, (_, what) in COMMANDS.items():
            print(f"  {name:<8} {what}")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"dlojz_tp: no command {argv[0]!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
