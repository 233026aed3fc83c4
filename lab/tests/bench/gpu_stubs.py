"""Stand-ins for the GPU: a clock that counts calls, and a packed cache whose attention is the reference's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packedkv.cache.layer import LayerCache
from packedkv.cli.stamp import stamp
from packedkv_lab.bench import packed, rivals
from packedkv_lab.bench.record import Recorder

CPU = torch.device("cpu")


class Clock:
    """Calls once; every time is 100 us, or what ``next_times`` holds."""

    def __init__(self) -> None:
        self.calls = 0
        self.next_times: list[float] = []

    def cold(self, call: Callable[[], object], reps: int = 30) -> dict[str, float]:
        call()
        self.calls += 1
        us = self.next_times.pop(0) if self.next_times else 100.0
        return {"p20": us * 0.9, "p50": us, "p80": us * 1.2}

    clean = eager = cold

    def warm(self, call: Callable[[], object], calls: int = 20) -> dict[str, float]:
        return self.cold(call)


def recorder(clock: Clock | None = None, path: Path | None = None, **options: Any) -> Recorder:
    """A recorder with a stand-in for the GPU's timer; other libraries are left out."""
    found = Recorder(path, stamp(CPU, 0, "abc"), lambda _: None, **{"libraries": False, **options})
    found.timer = clock or Clock()  # type: ignore[assignment]
    return found


class ReferenceCache(LayerCache):
    """What the benches need of a fused cache, served by the reference."""

    def refresh(self) -> None:
        pass


def use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FusedLayerCache", ReferenceCache)
    monkeypatch.setattr(packed, "refusal", lambda *_, **__: "")
    monkeypatch.setattr(rivals, "BACKENDS", {"cudnn": torch.nn.attention.SDPBackend.MATH})
