"""Attention of a chunk of a prompt over unpacked keys and values by vLLM's own flash attention: version 3 on Hopper.

PyTorch's operator is version 2, and its causal mask begins at the first key, so the history and the chunk itself are
two calls whose results are merged. Here the mask ends at the last key, as in vLLM's own backend: one call.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kvcodec.attention import Partial
from kvcodec.kernels.flash import Flash


@lru_cache(maxsize=64)
def _ends(tokens: int, device: torch.device) -> Tensor:
    """Start and end of a single sequence, int32 ``[2]``; shared by the layers of a model."""
    with torch.inference_mode(mode=False):
        return torch.arange(0, 2 * tokens, tokens, dtype=torch.int32, device=device)


@lru_cache
def flash_for(head_dim: int) -> Flash | None:
    """Return the function for ``attend_chunk(flash=...)``; None where vLLM has no version 3 for this GPU."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        version = get_flash_attn_version(head_size=head_dim)
    except (ImportError, AssertionError):
        return None
    if version != 3:
        return None

    def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        n, t = q.shape[2], k.shape[2]
        rows, keys = _ends(n, q.device), _ends(t, q.device)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=n,
            cu_seqlens_q=rows,
            max_seqlen_k=t,
            cu_seqlens_k=keys,
            softmax_scale=scale,
            causal=True,
            return_softmax_lse=True,
            fa_version=version,
        )
        return Partial(out.transpose(0, 1)[None], lse[None])

    return flash
