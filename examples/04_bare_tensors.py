"""Attend with a packed cache and no model library: chunk-causal attention of a streaming encoder, head_dim 64, MHA.

A token sees every token of its own chunk and of earlier chunks, up to a limit; the oldest tokens are evicted. Each
stream has a cache of its own.
"""

import torch

import packedkv

CHUNK, KEEP = 16, 48  # tokens per chunk; tokens in the cache


class ChunkCausalAttention(torch.nn.Module):
    """Multi-head attention over packed K and V."""

    def __init__(self, dim: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, cache: packedkv.LayerCache) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)  # each [B, H, n, 64]
        cache.append(k, v)
        cache.evict(max(len(cache) - KEEP, 0))
        o = cache.attend(q, causal=False)  # no mask: all tokens in the cache belong to this chunk or an earlier one
        return self.out(o.transpose(1, 2).flatten(2))


@torch.no_grad()
def main() -> dict[str, float]:
    """Run two streams of different length and compare with uncompressed attention."""
    torch.manual_seed(0)
    layer = ChunkCausalAttention()
    errors = {}
    for name, chunks in (("stream a", 5), ("stream b", 2)):
        packed, plain = packedkv.LayerCache(packedkv.get("saw-int4")), packedkv.LayerCache(packedkv.get("dense"))
        for chunk in torch.randn(chunks, 1, CHUNK, 256):
            y, reference = layer(chunk, packed), layer(chunk, plain)
        errors[name] = float((y - reference).norm() / reference.norm())
        held, full = (sum(cache.nbytes().values()) for cache in (packed, plain))
        print(f"{name}: {len(packed)} tokens, {held} bytes ({full} in 16 bit), relative error {errors[name]:.3f}")
    return errors


if __name__ == "__main__":
    main()
