"""Rivals of the CPU kernels: each that is installed attends as float32 SDPA does, up to the rounding of its cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.errors import KVError
from packedkv_lab.bench import rivals
from packedkv_lab.bench.rivals import CpuRival

RIVALS = {rival.spec: rival for rival in rivals.cpu_rivals()}
BITS = {
    "flex": 32.0, "llama.cpp-f16": 16.0, "llama.cpp-q8_0": 8.5, "llama.cpp-q4_0": 4.5,
    "quantized-cache-quanto": 5.0, "quantized-cache-hqq": 5.0,
}  # fmt: skip


def kv(tokens: int = 513) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, n, 64, generator=generator) for h, n in ((6, 1), (2, tokens), (2, tokens)))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("spec", BITS)
def test_attention_of_what_is_installed(spec: str) -> None:
    rival = RIVALS[spec]
    if rival.missing:
        pytest.skip(f"needs {rival.package}")
    q, k, v = kv()
    call, bits = rival.checked(q, k, v)
    assert bits == pytest.approx(BITS[spec], rel=0.01)
    assert list(rival.version()) == [rival.package]
    first = call().clone()
    assert first.shape == q.shape
    assert torch.equal(call(), first)  # it does not grow from call to call
    q.neg_()
    if spec.startswith("llama"):
        assert torch.equal(call(), first)  # it has its own
    else:
        assert not torch.allclose(call(), first)


def test_a_wrong_result_is_not_timed() -> None:
    def make(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return lambda: torch.ones_like(q), 8

    with pytest.raises(KVError, match="bench decode: odd differs from SDPA by"):
        CpuRival("odd", "odd", "torch", 0.1, make).checked(*kv())


def test_a_rival_whose_module_is_not_installed_is_missing() -> None:
    assert CpuRival("a", "a", "no_such_module.core.quantize", 0.1, rivals._flex_on_cpu).missing
    assert CpuRival("a", "a", "no_such_module", 0.1, rivals._flex_on_cpu).missing
    assert not CpuRival("a", "a", "torch.nn", 0.1, rivals._flex_on_cpu).missing
