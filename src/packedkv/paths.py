"""Folder of compiled kernels and downloaded models."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder of compiled and downloaded files: ``$XDG_CACHE_HOME/packedkv`` or ``~/.cache/packedkv``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "packedkv"
