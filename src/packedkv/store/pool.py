"""Allocate zeroed memory for a pool of pages: on a CPU in huge pages, if the operating system has them.

Attention reads every page of a long context once per step. With memory in pages of 4 KiB, address translation takes a
tenth to a quarter of the time.
"""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20
"""Bytes of a huge page of x86 and, with small pages of 4 KiB, of ARM; elsewhere the advice is void."""


def zeroed_pool(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a uint8 tensor of zeros; memory that is never written to is not taken from the system, on a CPU.

    Parameters
    ----------
    shape : tuple of int
    device : torch.device

    Returns
    -------
    Tensor uint8 ``[*shape]``
    """
    size = math.prod(shape)
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    # Linux aligns whole numbers of huge pages; the last one, in part unused, stays in small pages
    memory = mmap.mmap(-1, -(-size // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel built without them: small pages serve
        memory.madvise(mmap.MADV_HUGEPAGE, 0, size // HUGE * HUGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size).view(shape)
