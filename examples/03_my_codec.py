"""A codec of your own in 30 lines: one bit per element (the sign) and one fp16 scale per token.

Run: python examples/03_my_codec.py. docs/add-a-codec.md has a codec with options, random constants and tests.
"""

from dataclasses import dataclass

import torch

import packedkv
from packedkv.ops.bitpack import pack, unpack


@dataclass(frozen=True)
class Sign(packedkv.Codec):
    """Quantize a value to one bit: ``y^ = mean|y| * sign(y)``."""

    def layout(self, head_dim):
        """Return the fields of one token of one head; the bits are computed from their bytes."""
        if head_dim % 8:
            raise packedkv.ShapeError(f"sign: head_dim={head_dim} is not a multiple of 8; use 64, 96 or 128.")
        fields = (
            packedkv.Field("codes", "uint8", (head_dim // 8,)),
            packedkv.Field("scale", "float16", (1,), "scales"),
        )
        return packedkv.Layout(head_dim, 1, fields, nominal_bits=1)

    def encode(self, x, params):
        """Pack ``x [B, H, N, D]`` into exactly the fields of ``layout``."""
        return {"codes": pack(x > 0, 1), "scale": x.abs().double().mean(-1, keepdim=True).half()}

    def decode(self, payload, params):
        """Dequantize to float32 ``[B, H, N, D]``."""
        signs = unpack(payload["codes"], 1, payload["codes"].shape[-1] * 8).float() * 2 - 1
        return signs * payload["scale"].float()


@packedkv.register("sign", source="examples/03_my_codec.py")
def sign(window: int = 16) -> packedkv.KVScheme:
    """Make the scheme: one bit per element, the newest tokens dense."""
    return packedkv.KVScheme(key=Sign(), value=Sign(), window=window)


if __name__ == "__main__":
    keys, values = torch.randn(2, 1, 4, 1000, 128, generator=torch.Generator().manual_seed(0))
    query = torch.randn(1, 8, 1, 128, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    for spec in ("sign:window=0", "sign", "saw-int4", "dense"):
        cache = packedkv.LayerCache(packedkv.get(spec))
        cache.append(keys, values)
        error = (cache.attend(query) - exact).norm() / exact.norm()
        held = sum(cache.nbytes().values())
        print(f"{spec:14} {held * 8 / cache.elements():6.3f} bits held per element, attention error {error:.4f}")
