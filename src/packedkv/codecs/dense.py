"""Dense: the identity in 16 bit; baseline of every table, and the codec of boundary layers (``packedkv.codec.Dense``).

Bytes of a token: D x 2. Bits: 16, or 32 with dtype=float32.
"""

from typing import Literal

from packedkv.codec import Dense
from packedkv.registry import register
from packedkv.scheme import KVScheme


@register("dense", source="identity (uncompressed 16-bit cache)", mark="baseline")
def dense(dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto") -> KVScheme:
    """The uncompressed cache.

    Parameters
    ----------
    dtype : {"auto", "float16", "bfloat16", "float32"}
        The stored dtype; auto keeps a 16-bit model's own dtype and stores float32 as fp16.
    """
    codec = Dense(None if dtype == "auto" else dtype)
    return KVScheme(key=codec, value=codec)
