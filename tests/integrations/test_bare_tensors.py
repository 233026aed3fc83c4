"""The bare-tensor example runs, and chunk-causal attention on it is what a full mask gives."""

import runpy
from pathlib import Path

import torch

import packedkv

EXAMPLE = Path(__file__).parents[2] / "examples" / "04_bare_tensors.py"


def test_example_runs() -> None:
    errors = runpy.run_path(str(EXAMPLE))["main"]()
    assert set(errors) == {"stream a", "stream b"}
    assert all(0 < error < 0.2 for error in errors.values())


@torch.no_grad()
def test_chunk_causal_attention_equals_one_masked_call() -> None:
    """Streaming with eviction against one call over all tokens with the chunk-causal, limited mask."""
    example = runpy.run_path(str(EXAMPLE))
    layer, chunk, keep = example["ChunkCausalAttention"](), example["CHUNK"], example["KEEP"]
    x = torch.randn(2, 6 * chunk, 256)
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    streamed = torch.cat([layer(part, cache) for part in x.split(chunk, 1)], 1)
    assert len(cache) == keep
    q, k, v = layer.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    k, v = packedkv.fake_quant("saw-int4", k, v)
    at = torch.arange(6 * chunk)
    end = (at // chunk + 1) * chunk
    mask = (at[None, :] < end[:, None]) & (at[None, :] >= end[:, None] - keep)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = layer.out(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(streamed, expected, rtol=1e-4, atol=1e-5)


def test_streams_are_independent() -> None:
    k, v = torch.randn(2, 1, 4, 40, 64)
    alone, first, second = (packedkv.LayerCache(packedkv.get("kivi-2:window=4")) for _ in range(3))
    alone.append(k, v)
    for a in range(0, 40, 8):  # interleaved with another stream
        first.append(k[:, :, a : a + 8], v[:, :, a : a + 8])
        second.append(-2 * k[:, :, a : a + 3], 3 * v[:, :, a : a + 3])
    assert all(torch.equal(x, y) for x, y in zip(alone.decode(), first.decode(), strict=True))
    assert (len(alone), len(first), len(second)) == (40, 40, 15)
