"""What a benchmark's numbers were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

import torch

from sgc_backend import OptionError, __version__, emulated


def chosen_device() -> tuple[Any, str]:
    """(device module, torch device type) that benchmarks run on: CUDA where there is one, unless SGC_DEVICE differs."""
    asked = os.environ.get("SGC_DEVICE", "")
    if asked not in ("", "emulated"):
        raise OptionError(f"SGC_DEVICE must be 'emulated' or unset, got {asked!r}")
    if torch.cuda.is_available() and not asked:
        return torch.cuda, "cuda"
    return emulated, "cpu"


def environment() -> dict[str, str]:
    """Device, driver, versions, date and command, as text."""
    _, kind = chosen_device()
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "device": torch.cuda.get_device_name() if kind == "cuda" else f"emulated, on {platform.machine()}",
        "driver": _driver() if kind == "cuda" else "none",
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "sgc_backend": __version__,
        "date": datetime.date.today().isoformat(),
        "command": "python -m sgc_backend " + " ".join(sys.argv[1:]),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
