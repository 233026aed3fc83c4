"""vLLM's own attention, where vLLM is importable: on a CPU by Triton's interpreter, so that its wiring is checked."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from lab.tests.bench.gpu_stubs import CPU
from packedkv_lab.bench import rivals
from packedkv_lab.bench.rivals import Dense
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
