"""Constants that are built once in a process, and shared by all of its caches."""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Site

T = TypeVar("T")


@dataclass
class _Held:
    value: Any
    tensors: tuple[Tensor, ...]
    asked: int
    """When it was last requested."""


def _values(constants: Params) -> Iterable[Tensor]:
    return constants.values()


class Shared:
    """An LRU store of constants: built once in a process, shared by all caches, never written to.

    The least recently used entries are dropped while all tensors together exceed a limit.

    Parameters
    ----------
    limit : int
        Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Hashable, _Held] = {}
        self._uses: Counter[Tensor] = Counter()  # one tensor may be held by several: its bytes count once
        self._bytes = self._asked = 0
        self._lock = threading.Lock()

    def get(
        self,
        key: Hashable,
        device: torch.device,
        build: Callable[[], T],
        tensors: Callable[[T], Iterable[Tensor]] = _values,  # type: ignore[assignment]  # of Params
    ) -> T:
        """Return the entry of this key; ``build`` makes it if it is missing.

        Parameters
        ----------
        key
            Everything that the entry depends on, the device included.
        device : torch.device
            Where its tensors are.
        build : callable
        tensors : callable
            Returns the tensors of an entry; by default an entry is a mapping to tensors.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return build()  # its memory belongs to the graph, and every replay overwrites it
        with self._lock:
            if (held := self._held.get(key)) is not None:  # one look-up: hashing and comparing a key is slow
                held.asked = self._asked = self._asked + 1
                found: T = held.value
                return found
        with torch.inference_mode(False), torch.no_grad():  # inference tensors are of no use outside of it
            built = build()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will read them
        with self._lock:
            self._asked += 1
            if key in self._held:  # another thread was faster
                other: T = self._held[key].value
                return other
            self._held[key] = _Held(built, tuple(tensors(built)), self._asked)
            for tensor in self._held[key].tensors:
                self._bytes += 0 if self._uses[tensor] else tensor.nbytes
                self._uses[tensor] += 1
            while self._bytes > self.limit and len(self._held) > 1:
                self._forget(min(self._held, key=lambda one: self._held[one].asked))
            return built

    def _forget(self, key: Hashable) -> None:
        for tensor in self._held.pop(key).tensors:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                del self._uses[tensor]
                self._bytes -= tensor.nbytes

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._held.clear()
            self._uses.clear()
            self._bytes = 0


SHARED = Shared(512 << 20)
"""Of this process: constants that codecs draw (``drawn``), and the kernel tables made from them."""


def drawn(codec: Codec, site: Site) -> Params:
    """Constants of a codec that needs no sample: ``codec.fit(site)``, the same tensors every time."""
    return SHARED.get(("drawn", codec, site), site.device, lambda: codec.fit(site))
