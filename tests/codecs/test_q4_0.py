"""q4_0 against gguf's quantizer, ggml's loop written out, and the orders of llama.cpp's rotation."""

import numpy as np
import pytest
import torch
from hypothesis import given

from packedkv.codecs.q4_0 import Q40

from .support import by_definition, key_batches


def ggml_blocks(x: np.ndarray) -> np.ndarray:
    """``block_q4_0`` of rows ``[n, D]`` by ggml's loop, in float32: ``[n, D / 32, 18]`` bytes, d in front."""
    n, dim = x.shape
    out = np.zeros((n, dim // 32, 18), np.uint8)
    for r in range(n):
        for b in range(dim // 32):
            block = x[r, 32 * b : 32 * b + 32]
            amax, top = np.float32(0), np.float32(0)
            for v in block:
                if amax < abs(v):
                    amax, top = abs(v), v
            d = np.float32(top / np.float32(-8))
            inverse = np.float32(1) / d if d else np.float32(0)
            out[r, b, :2] = np.frombuffer(np.float16(d).tobytes(), np.uint8)
            for j in range(16):
                pair = [min(15, int(np.float32(block[j + 16 * half] * inverse) + np.float32(8.5))) for half in (0, 1)]
                out[r, b, 2 + j] = pair[0] | pair[1] << 4
    return out


def our_blocks(codec: Q40, y: torch.Tensor) -> np.ndarray:
    """The same bytes from the payload of ``y [n, D]``, code basis."""
    payload = codec.encode(y[None, None], {})
    codes = payload["codes"][0, 0].unflatten(-1, (-1, 16))
    scale = payload["scale"][0, 0].unsqueeze(-1).contiguous().view(torch.uint8)
    return torch.cat([scale, codes], -1).numpy()


@by_definition
@pytest.mark.parametrize("rotation", ["whole", "64", "none"])
@given(x=key_batches(dims=(64, 96, 128)))
def test_bytes_are_those_of_ggml(rotation, x):
    codec = Q40(rotation)
    y = codec.to_code(x, {})[0, 0]
    assert np.array_equal(our_blocks(codec, y), ggml_blocks(y.numpy()))


def test_bytes_are_those_of_ggufs_quantizer():
    gguf = pytest.importorskip("gguf")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 3
    wanted = gguf.quantize(x.numpy(), gguf.GGMLQuantizationType.Q4_0).reshape(64, 4, 18)
    assert np.array_equal(our_blocks(Q40("none"), x), wanted)
    payload = Q40("none").encode(x[None, None], {})
    back = gguf.dequantize(wanted.reshape(64, -1), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(Q40("none").decode(payload, {})[0, 0].numpy(), back)


def test_a_group_that_is_loud_beyond_fp16_saturates():
    x = torch.full((1, 1, 1, 32), 1e6)
    payload = Q40("none").encode(x, {})
    assert float(payload["scale"]) == -65504
    assert bool((Q40("none").decode(payload, {}) == 8 * 65504).all())
