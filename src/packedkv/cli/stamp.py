"""Provenance of a result: versions, machine, commit, time."""

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import packedkv


def versions(packages: Iterable[str] = ("transformers",)) -> dict[str, str]:
    """Versions that a result depends on: packedkv, torch, Python, CUDA, and the installed ones of ``packages``."""
    numbers = {"packedkv": packedkv.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        numbers["cuda"] = torch.version.cuda
    for name in packages:
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return numbers


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's architecture and the number of threads used."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    return str(device)


def commit() -> str | None:
    """Commit of the checkout that this file is tracked in, with ``-dirty`` if it was edited; None outside one."""
    here = Path(__file__)
    for command in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--abbrev=12"]):
        try:
            done = subprocess.run(["git", "-C", str(here.parent), *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    return done.stdout.strip()


def stamp(device: torch.device, seed: int, commit_id: str | None = None) -> dict[str, Any]:
    """Return the provenance fields of every row of a run on a device: machine, versions, commit (default: git's), seed,
    start (UTC).
    """
    numbers = versions(("triton", "cuda-core", "transformers"))
    if device.type == "cuda" and torch.backends.cudnn.is_available():
        numbers["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "gpu": device_name(device),
        "versions": numbers,
        "commit": commit_id or commit(),
        "seed": seed,
        "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
