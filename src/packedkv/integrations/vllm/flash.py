"""Attention of prompt chunks by vLLM's flash attention: version 3 on Hopper, and version 2 for soft caps elsewhere."""

from functools import lru_cache

from torch import Tensor

from packedkv.kernels.flash import WIDEST, Flash, Ragged


@lru_cache
def flash_for(head_dim: int, softcap: bool = False) -> Flash | None:
    """Return the function for ``ChunkReader(flash=...)``; None where PyTorch's is as good, or vLLM has none."""
    if head_dim > WIDEST:
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        version = get_flash_attn_version(head_size=head_dim)
    except (ImportError, AssertionError):
        return None
    if version != 3:  # on other GPUs vLLM's version 2 gains only the soft cap
        if version is None or not softcap:
            return None
        version = 2

    def flash(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float, softcap: float, out: Tensor) -> Tensor:
        lse: Tensor
        _, lse = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=ragged.most_queries,
            cu_seqlens_q=ragged.queries,
            max_seqlen_k=ragged.most_keys,
            cu_seqlens_k=ragged.keys,
            softmax_scale=scale,
            causal=True,
            window_size=[ragged.window - 1, 0] if ragged.window else None,
            softcap=softcap,
            return_softmax_lse=True,
            fa_version=version,
            out=out,
        )
        return lse

    return flash
