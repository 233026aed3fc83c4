"""This checkout, and the environment in which a process runs on it or on another one."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(checkout: Path = ROOT) -> dict[str, str]:
    """Variables of a process that imports the checkout's packages and tests, whatever is installed."""
    path = [*(str(checkout / part) for part in ("src", "lab/src", ".")), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
