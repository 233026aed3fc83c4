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
class _Entry:
    value: Any
    tensors: tuple[Tensor, ...]
    last_use: int


def _values(constants: Params) -> Iterable[Tensor]:
    return constants.values()


class Shared:
    """An LRU store of constants: built once in a process, shared by all caches, never written to.

    The least recently used entries are dropped while all tensors together exceed ``limit`` bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: dict[Hashable, _Entry] = {}
        self._uses: Counter[Tensor] = Counter()  # several entries may share a tensor: its bytes count once
        self._bytes = self._requests = 0
        self._lock = threading.Lock()

    def get(
        self,
        key: Hashable,
        device: torch.device,
        build: Callable[[], T],
        tensors: Callable[[T], Iterable[Tensor]] = _values,  # type: ignore[assignment]  # of Params
    ) -> T:
        """Return the entry of this key; ``build`` makes it if it is missing.

        The key has everything that the entry depends on, the device included. ``tensors`` returns the tensors of an
        entry, which are on ``device``; by default an entry is a mapping to tensors.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return build()  # its memory belongs to the graph, and every replay overwrites it
        with self._lock:
            if (entry := self._entries.get(key)) is not None:  # one look-up: hashing and comparing a key is slow
                entry.last_use = self._requests = self._requests + 1
                value: T = entry.value
                return value
        with torch.inference_mode(False), torch.no_grad():  # inference tensors are of no use outside of it
            built = build()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will read them
        with self._lock:
            self._requests += 1
            if key in self._entries:  # another thread was faster
                other: T = self._entries[key].value
                return other
            entry = self._entries[key] = _Entry(built, tuple(tensors(built)), self._requests)
            for tensor in entry.tensors:
                self._bytes += 0 if self._uses[tensor] else tensor.nbytes
                self._uses[tensor] += 1
            while self._bytes > self.limit and len(self._entries) > 1:
                self._forget(min(self._entries, key=lambda one: self._entries[one].last_use))
            return built

    def _forget(self, key: Hashable) -> None:
        for tensor in self._entries.pop(key).tensors:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                del self._uses[tensor]
                self._bytes -= tensor.nbytes

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._entries.clear()
            self._uses.clear()
            self._bytes = 0


SHARED = Shared(512 << 20)
"""Constants that codecs sample from a seed (``seeded_params``), and the kernel tables made from them."""


def seeded_params(codec: Codec, site: Site) -> Params:
    """Constants of a codec that needs no sample: ``codec.fit(site)``, the same tensors every time."""
    return SHARED.get(("seeded", codec, site), site.device, lambda: codec.fit(site))
