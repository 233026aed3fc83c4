"""Parallel searches of several heads on a CPU.

A search in cells is thousands of small matrix products, each too small for several threads; heads are independent, so
each gets a thread. Results do not depend on how many heads are searched.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

WORTH = 1 << 18
"""Elements of all heads below which starting threads costs more than it saves."""


def each_head(search: Callable[[int], Tensor], heads: int, elements: int, device: torch.device) -> list[Tensor]:
    """Return ``[search(0), ..., search(heads - 1)]``.

    On a CPU as many run at once as torch has threads, if ``elements`` (of all heads) are enough to pay for it.
    """
    workers = min(heads, torch.get_num_threads())
    if device.type != "cpu" or workers < 2 or elements < WORTH:
        return [search(head) for head in range(heads)]
    inference = torch.is_inference_mode_enabled()

    def run(head: int) -> Tensor:
        # modes are per thread: pass no_grad and inference_mode on
        with torch.inference_mode(inference), torch.no_grad():
            return search(head)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(heads)))
