"""Compress one layer's keys and values without a model: bytes and error of each method, and a streaming cache.

Run: python examples/01_one_tensor.py
"""

import torch

import packedkv

torch.manual_seed(0)
keys, values = torch.randn(2, 1, 4, 512, 128)  # [batch, kv_heads, tokens, head_dim]
keys[..., 7] *= 20  # one large channel, as in the keys of many models

print(f"{'spec':14}{'bytes':>9}{'bits':>7}{'key error':>11}")
for spec in packedkv.presets():
    packed = packedkv.compress(spec, keys, values)
    keys_hat, values_hat = packed.decode()
    error = (keys_hat - keys).norm() / keys.norm()
    print(f"{spec:14}{sum(packed.nbytes.values()):9}{packed.effective_bits:7.2f}{error:11.4f}")

# a cache outside any model library: each token is encoded once, and old tokens are evicted
cache = packedkv.LayerCache(packedkv.get("saw-int4"))
for step in range(0, 512, 64):
    cache.append(keys[:, :, step : step + 64], values[:, :, step : step + 64])
    if len(cache) > 256:
        cache.evict(64)
    output = cache.attend(torch.randn(1, 8, 64, 128))  # 8 query heads share 4 KV heads
held = sum(cache.nbytes().values())
print(
    f"\nsaw-int4 cache: {len(cache)} tokens in {held} bytes, {held * 8 / cache.elements():.2f} bits; out {output.shape}"
)
