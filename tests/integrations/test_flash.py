"""How vLLM's flash attention is called; a module of the same name stands for it, as it needs a GPU."""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from packedkv.attention import partial
from packedkv.integrations.vllm.flash import flash_for
from packedkv.kernels.flash import Ragged, ragged_attention

NAME = "vllm.v1.attention.backends.fa_utils"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names that are imported, with version 3."""
    for i in range(1, NAME.count(".") + 2):
        name = ".".join(NAME.split(".")[:i])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules[NAME]
    module.get_flash_attn_version = lambda head_size: 3
    module.flash_attn_varlen_func = varlen
    flash_for.cache_clear()
    yield module
    flash_for.cache_clear()


def varlen(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int, cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int, cu_seqlens_k: torch.Tensor, softmax_scale: float, causal: bool, return_softmax_lse: bool,
    fa_version: int, out: torch.Tensor, window_size: list[int] | None, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``[n, HQ, D]`` over ``[t, H, D]``: the mask ends at the last key; sums ``[HQ, n]``. A window without itself."""
    assert causal
    assert return_softmax_lse
    assert fa_version == (2 if softcap else 3)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    window = window_size[0] + 1 if window_size else 0
    ragged = Ragged(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    return out, ragged_attention(q, k, v, ragged, softmax_scale, softcap, out)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (3, 2.0)])
def test_each_sequences_newest_queries_over_all_its_keys(window: int, softcap: float, engine: Any) -> None:
    if softcap:  # which PyTorch's version 2 has not, but vLLM's
        engine.get_flash_attn_version = lambda head_size: 2
    generator = torch.Generator().manual_seed(1)
    queries, keys = [0, 1, 2, 7, 16], [0, 1, 10, 19, 28]
    q = torch.randn(queries[-1], 4, 64, generator=generator).half()
    k, v = torch.randn(2, keys[-1], 2, 64, generator=generator).half()
    flash = flash_for(64, softcap > 0)
    ragged = Ragged(*(torch.tensor(x, dtype=torch.int32) for x in (queries, keys)), 9, 9, window)
    out = torch.empty_like(q)
    lse = flash(q, k, v, ragged, 0.125, softcap, out)
    assert lse.shape == (4, len(q))
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        n, t = b - a, d - c
        hidden = torch.full((n, t), -torch.inf).triu(t - n + 1)
        if window:
            hidden += torch.full((n, t), -torch.inf).tril(t - n - window)
        rows, own_k, own_v = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        want = partial(rows, own_k, own_v, 0.125, hidden, softcap)
        torch.testing.assert_close(out[a:b].transpose(0, 1)[None].float(), want.out, rtol=0, atol=2e-3)
        torch.testing.assert_close(lse[None, :, a:b], want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [2, None])
def test_there_is_none_without_version_3(version: int | None, engine: Any) -> None:
    engine.get_flash_attn_version = lambda head_size: version
    assert flash_for(64) is None
