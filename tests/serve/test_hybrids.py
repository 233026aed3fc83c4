"""Models with attention beside recurrent layers: they start, repeat, and attend as the library does."""

from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.host import LayerCache
from packedkv.errors import KVError
from tests.serve.engines import engine, generate, prompts

IDS = prompts(40, 7)
MODELS = {"qwen3-next": 3, "granite-hybrid": 1, "nemotron-h": 2, "falcon-h1": 1}
"""A layer with attention of each; the preset keeps outer layers dense, but not in a hybrid model."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n in ("falcon-h1", "nemotron-h") else n for n in MODELS]
)
def test_a_hybrid_repeats_and_attends_as_the_library(name: str, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from packedkv.integrations.vllm import backend

    seen: list[Any] = []
    told: list[str] = []
    forward = backend.PackedImpl.forward

    def watched(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, meta: Any, output: Any, **more: Any) -> Any:
        found = forward(self, layer, q, k, v, cache, meta, output, **more)
        if meta is not None and f".{MODELS[name]}." in layer.layer_name:
            n, dim = meta.chunks[-1][2] if meta.chunks else meta.decodes, self.head_size
            seen.append(tuple(x[:n].reshape(n, -1, dim).clone() for x in (q, k, v, output)))
        return found

    monkeypatch.setattr(backend.PackedImpl, "forward", watched)
    monkeypatch.setattr(backend.logger, "info", lambda text, *given: told.append(text % given))
    with engine(saved(name).folder, {"preset": "ultraquant"}, dtype="bfloat16", max_num_batched_tokens=512) as llm:
        first = generate(llm, IDS[:1])
        q, k, v, out = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*seen, strict=True))
        assert generate(llm, IDS[:1]) == first
        assert generate(llm, IDS)[0] == first[0]
    scheme = packedkv.get("ultraquant").for_layer(2, 6)
    own = LayerCache(scheme, layer=MODELS[name])
    own.append(k, v)
    assert k.shape[2] == 40 + len(first[0]) - 1
    torch.testing.assert_close(out.float(), own.attend(q).float(), rtol=2e-2, atol=2e-2)
    assert any("the prefix cache finds whole blocks" in line for line in told)


def test_dense_first_tokens_are_refused(saved: Any) -> None:
    with (
        pytest.raises(KVError, match=r'first 4 tokens dense.*hybrid model.*; give "sink": 0 to serve it without'),
        engine(saved("falcon-h1").folder, {"preset": "int-8:sink=4"}, dtype="bfloat16"),
    ):
        pass
