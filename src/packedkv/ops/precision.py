"""Make stored bytes and attention independent of PyTorch's modes around a call.

Autocast would compute rotations, scores and norms in 16 bit; a tensor made in inference mode cannot be written outside.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

DEVICES = ("cpu", "cuda")

P = ParamSpec("P")
R = TypeVar("R")


def without_modes(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method that runs outside of autocast and inference mode."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return run(*args, **kwargs)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return method(*args, **kwargs)
        return method(*args, **kwargs)

    return run
