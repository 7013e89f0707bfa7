"""Reads the site file. What is wrong in it is one line, before anything starts."""

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST_PORT = 65533  # the hub takes the next two as well
FRACTIONS = ("hours", "idle_minutes")
USUAL = {
    "servers": "here",
    "port": 8000,
    "users": [],
    "groups": [],
    "admins": [],
    "work": "~/dlojz-tp",
    "data": "",
    "folder": "",
    "idle_minutes": 60,
    "hub_address": "127.0.0.1",
    "node_address": "",
    "environment": {},
    "profiles": {},
}
PROFILE = {"cores": 1, "memory": "", "gpus": 0, "hours": 8, "account": "", "partition": "", "sbatch": {}}


def read(path: Path) -> dict:
    """The site's options, all of them. Raises ValueError, in one line."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not TOML, or no text
        raise ValueError(f"{path} cannot be read: {error}") from error
    site = _checked(given, USUAL, str(path))
    if site["servers"] not in ("here", "slurm"):
        raise ValueError(f'{path}: servers is "here" or "slurm", not {site["servers"]!r}')
    if not 1 <= site["port"] <= LAST_PORT:
        raise ValueError(f"{path}: port is from 1 to {LAST_PORT}, not {site['port']}")
    site["profiles"] = {name: _checked(p, PROFILE, f"{path}, {name}") for name, p in site["profiles"].items()}
    if site["servers"] == "slurm":
        if not site["profiles"]:
            raise ValueError(f"{path}: with Slurm at least one of [profiles] is needed")
        if not shutil.which("sbatch"):
            raise ValueError(f'{path} says servers = "slurm", but there is no sbatch on this machine')
    site["folder"] = os.path.expandvars(Path(site["folder"] or ROOT / "build" / "hub").expanduser())
    return site


def _checked(given, usual: dict, where: str) -> dict:
    if not isinstance(given, dict):
        raise ValueError(f"{where}: a table is needed, not {given!r}")
    for name, value in given.items():
        if name not in usual:
            raise ValueError(f"{where}: {name} is not known; {', '.join(usual)} are")
        kinds = (int, float) if name in FRACTIONS else type(usual[name])
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"{where}: {name} = {value!r} is not of the kind of {usual[name]!r}")
        if isinstance(value, list) and not all(isinstance(one, str) for one in value):
            raise ValueError(f"{where}: {name} are names, not {value!r}")
    return usual | given


def in_words(profile: dict) -> str:
    """What a trainee reads of a profile."""
    gpus = profile["gpus"]
    parts = [
        f"{profile['cores']} core{'s' * (profile['cores'] != 1)}",
        f"{profile['memory']} of memory" if profile["memory"] else "",
        f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else "no GPU",
        f"ends after {profile['hours']:g} h",
    ]
    return ", ".join(filter(None, parts))


def sbatch_lines(profile: dict) -> str:
    """The lines of a batch script that ask for a profile."""
    minutes = max(1, round(60 * profile["hours"]))
    options = {"cpus-per-task": profile["cores"], "time": minutes, "nodes": 1, "ntasks": 1}
    options |= {"mem": profile["memory"], "account": profile["account"], "partition": profile["partition"]}
    options |= {"gpus-per-node": profile["gpus"]} | profile["sbatch"]
    lines = [f"#SBATCH --{name}" + ("" if value is True else f"={value}") for name, value in options.items() if value]
    return "\n".join(lines)
