"""How vLLM's flash attention is called; a module of the same name stands for it, as it needs a GPU."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcodec.attention import partial
from kvcodec.integrations.vllm.flash import flash_for

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
    fa_version: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``[n, HQ, D]`` over ``[t, H, D]``: the mask ends at the last key; sums ``[HQ, n]``."""
    n, t = q.shape[0], k.shape[0]
    assert (max_seqlen_q, max_seqlen_k, fa_version) == (n, t, 3)
    assert causal
    assert return_softmax_lse
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (cu_seqlens_q.tolist(), cu_seqlens_k.tolist()) == ([0, n], [0, t])
    hidden = torch.full((n, t), -torch.inf).triu(t - n + 1)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    part = partial(heads[0], heads[1], heads[2], softmax_scale, hidden)
    return part.out[0].transpose(0, 1).to(q.dtype), part.lse[0]


@pytest.mark.parametrize(("n", "t"), [(1, 1), (1, 9), (5, 9), (9, 9)])
def test_the_newest_queries_over_all_keys(n: int, t: int, engine: Any) -> None:
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, 4, n, 64, generator=generator).half()
    k, v = torch.randn(2, 1, 2, t, 64, generator=generator).half()
    flash = flash_for(64)
    assert flash is not None
    found = flash(q, k, v, 0.125)
    want = partial(q, k, v, 0.125, torch.full((n, t), -torch.inf).triu(t - n + 1))
    assert found.out.shape == q.shape
    assert found.lse.shape == q.shape[:3]
    torch.testing.assert_close(found.out.float(), want.out, rtol=0, atol=2e-3)
    torch.testing.assert_close(found.lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [2, None])
def test_there_is_none_without_version_3(version: int | None, engine: Any) -> None:
    engine.get_flash_attn_version = lambda head_size: version
    assert flash_for(64) is None
