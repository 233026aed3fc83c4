"""Dense: the identity in 16 bit; baseline of every table, and the codec of boundary layers.

Bytes of a token: D x 2. Bits: 16. float32 input is held as fp16 (``float16``), bf16 input as bf16 when the codec is
told so; a cache tells it (``Dense(dtype="bfloat16")``) when it first sees the model's tensors.

Use: the baseline of every table, and layers that a scheme keeps in 16 bit.

Not for: saving memory: it saves none.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvcodec.codec import Codec, Params, Payload
from kvcodec.layout import Field, Layout
from kvcodec.registry import register
from kvcodec.scheme import KVScheme

DenseDtype = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class Dense(Codec):
    """Store every element as it is.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32"} or None
        None: the 16-bit dtype of the input, fp16 for float32 input.
    """

    dtype: DenseDtype | None = None

    def for_dtype(self, dtype: torch.dtype) -> "Dense":
        """Fix what is held for input of ``dtype``."""
        name: DenseDtype = "bfloat16" if dtype == torch.bfloat16 else "float16"
        return self if self.dtype else replace(self, dtype=name)

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What ``data`` is held in: nothing is rounded on the way there."""
        held = getattr(torch, self.for_dtype(dtype).dtype or "float16")
        assert isinstance(held, torch.dtype)
        return held

    def layout(self, head_dim: int) -> Layout:
        """One field, ``data [D]``."""
        field = Field("data", self.dtype or "float16", (head_dim,), "dense")
        return Layout(head_dim, 1, (field,), nominal_bits=field.nbytes * 8 / head_dim)

    def encode(self, x: Tensor, params: Params) -> Payload:
        """Cast."""
        return {"data": x.to(getattr(torch, self.dtype or "float16"))}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        """Cast back to float32."""
        return payload["data"].float()


@register("dense", source="identity (uncompressed 16-bit cache)")
def dense(dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto") -> KVScheme:
    """The uncompressed cache.

    Parameters
    ----------
    dtype : {"auto", "float16", "bfloat16", "float32"}
        What is held; auto keeps a 16-bit model's own dtype and holds float32 as fp16.
    """
    codec = Dense(None if dtype == "auto" else dtype)
    return KVScheme(key=codec, value=codec)
