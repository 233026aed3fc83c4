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
