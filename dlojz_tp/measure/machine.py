"""Say on what machine, and with which versions, a measurement was made."""

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil
import torch


def as_device(device: torch.device | str | int | None = None) -> torch.device:
    """Give the device to measure on: the one asked for, else the GPU, else the CPU.

    Args:
        device: a device, its name or its number; ``None`` takes the current GPU if there is one.

    Returns:
        A ``torch.device``; a GPU always carries its number.

    Raises:
        ValueError: for a device that is neither a CPU nor a CUDA GPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"only 'cpu' and 'cuda' devices can be measured, not {str(device)!r}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait until the device has finished all the work it was given; on a CPU there is nothing to wait for.

    Args:
        device: where to wait; ``None`` is the current GPU if there is one.
    """
    device = as_device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_model() -> str:
    """Give the name of the processor, or its architecture where the system does not tell.

    Returns:
        For example ``"AMD EPYC 7763 64-Core Processor"``.
    """
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware(device: torch.device | str | None = None) -> dict:
    """Describe the device that is measured and the machine around it.

    Args:
        device: the device that is measured; ``None`` is the GPU if there is one.

    Returns:
        ``device_type``, ``device_name``, ``device_count`` and ``device_memory_bytes`` (of one device),
        ``cpu_model``, ``cpu_cores`` (those this process may use), ``memory_bytes`` (of the machine).
    """
    device = as_device(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {
        "cpu_model": cpu_model(),
        "cpu_cores": cores,
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found = {
            "device_name": card.name,
            "device_count": torch.cuda.device_count(),
            "device_memory_bytes": card.total_memory,
        }
    else:
        found = {
            "device_name": machine["cpu_model"],
            "device_count": 1,
            "device_memory_bytes": machine["memory_bytes"],
        }
    return {"device_type": device.type, **found, **machine}


def versions() -> dict[str, str]:
    """Give the versions that a timing depends on.

    Returns:
        ``python``, ``torch``, ``torchvision`` (``"not installed"`` where it is missing), and ``cuda`` if torch has it.
    """
    try:
        # The package's metadata says it without the seconds that importing it costs.
        torchvision = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        torchvision = "not installed"
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "torchvision": torchvision}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
