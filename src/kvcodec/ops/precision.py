"""What is stored and attended is computed in a precision of its own, whatever ``torch.autocast`` says.

Models often run under autocast, which would take rotations, scores and norms to 16 bit: the bytes of a token would
depend on it.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

DEVICES = ("cpu", "cuda")

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method that runs with autocast off."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return run(*args, **kwargs)
        return method(*args, **kwargs)

    return run
