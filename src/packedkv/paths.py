"""Where compiled kernels and downloaded models are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for files made or fetched: ``$XDG_CACHE_HOME/packedkv``, by default ``~/.cache/packedkv``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "packedkv"
