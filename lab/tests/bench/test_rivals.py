"""vLLM's own attention, where vLLM is importable: on a CPU by Triton's interpreter, so that its wiring is checked."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.tests.bench.gpu_stubs import CPU
from packedkv.errors import KVError
from packedkv_lab.bench import rivals
from packedkv_lab.bench.rivals import CpuRival, Dense
from packedkv_lab.bench.shapes import Shape

ODD = Shape("odd", 2, 4, 2, 128, 77)


def test_blocks_hold_every_token_once():
    dense = Dense(ODD, CPU)
    blocks = rivals.VllmBlocks(dense, 32, 2)
    assert blocks.bytes.shape == (2 * 3, 32, 2, 2)
    seen, keys = [], []
    for key, value, slots in blocks.each():
        assert key.shape == value.shape == (len(slots), 2, 128)
        seen += slots.tolist()
        keys.append(key)
    wanted = [int(blocks.table[b, t // 32]) * 32 + t % 32 for b in range(2) for t in range(77)]
    assert seen == wanted
    assert len(set(seen)) == 2 * 77
    assert torch.equal(torch.cat(keys), dense.k.transpose(1, 2).flatten(0, 1))


def test_a_rivals_error_is_of_any_shape():
    dense = Dense(ODD, CPU)
    right = dense.sdpa(False)
    assert dense.error_of(right) == dense.error_of(right[:, :, 0]) == dense.error_of(right.transpose(1, 2)) == 0
    assert dense.error_of(torch.zeros(2, 4, 128)) == 1
    assert rivals.MOST_ERROR[16.0] < rivals.MOST_ERROR[8.0] < rivals.QUANTIZED_ERROR < 1


INTERPRETED = """
import sys, torch
from triton.backends import backends
for backend in backends.values():
    backend.driver.is_active = staticmethod(lambda: backend is backends["nvidia"])  # or vLLM does without Triton
from packedkv_lab.bench.rivals import Dense
from packedkv_lab.bench.shapes import Shape
from packedkv_lab.bench import rivals
dense = Dense(Shape("odd", 1, 2, 2, 128, 40), torch.device("cpu"))
dense.q, dense.k, dense.v = (x.half() for x in (dense.q, dense.k, dense.v))  # the interpreter has no bf16 products
print(dense.error_of(rivals.VLLM_QUANTIZED[sys.argv[1]][1](dense)()))
"""


@pytest.mark.parametrize("form", [form for form in rivals.VLLM_QUANTIZED if not form.startswith("ultraquant")])
def test_vllms_kernels_attend(form):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED, form]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) < 0.4


# -- of the CPU kernels ------------------------------------------------------------------------------------------------


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
    assert CpuRival("a", "a", "no_such_module.core.quantize", 0.1, rivals._quantized_cache).missing
    assert CpuRival("a", "a", "no_such_module", 0.1, rivals._quantized_cache).missing
    assert not CpuRival("a", "a", "torch.nn", 0.1, rivals._quantized_cache).missing
