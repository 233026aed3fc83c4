"""What a failure, an odd argument or a long life leaves behind: nothing half done, nothing silently else."""

import pytest
import torch

import packedkv
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import ShapeError, SpecError
from packedkv.integrations.transformers import layers
from packedkv.integrations.transformers.argument import passing
from tests.conftest import tiny_model

SAW = packedkv.get("saw-int4")


def kv(tokens: int, batch: int = 1, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    k, v = torch.randn(2, batch, 2, tokens, dim, generator=generator)
    return k, v


def fail_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The ``at``-th call of the codec's encode runs out of memory."""
    real, calls = SawInt4.encode, []

    def encode(self: SawInt4, x: torch.Tensor, params: object) -> object:
        calls.append(x)
        if len(calls) == at:
            raise MemoryError("no memory left")
        return real(self, x, params)  # type: ignore[arg-type]

    monkeypatch.setattr(SawInt4, "encode", encode)


def test_keys_and_values_stay_in_step_when_an_append_dies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, expected = packedkv.LayerCache(SAW), packedkv.LayerCache(SAW)
    cache.append(*kv(100))
    fail_once(monkeypatch, 2)
    with pytest.raises(MemoryError):
        cache.append(*kv(3))
    for c, sizes in ((cache, (5,)), (expected, (100, 5))):
        for n in sizes:
            c.append(*kv(n))
    assert len(cache) == 105
    for a, b in zip(cache.decode(), expected.decode(), strict=True):
        assert torch.equal(a, b)


def test_half_a_prefill_is_no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "APPEND_TOKENS", 16)
    model = tiny_model("llama-gqa")
    cache, ids = packedkv.cache_for(model, "saw-int4", probe=False), torch.arange(40)[None]
    fail_once(monkeypatch, 3)
    with torch.no_grad():
        with pytest.raises(MemoryError):
            model(ids, **passing(model, cache))
        assert len(cache.layer_caches[0]) == 0
        model(ids, **passing(model, cache))
    assert cache.get_seq_length() == 40


def test_sliding_layer_does_not_count_a_refused_token() -> None:
    layer = packedkv.cache_for(tiny_model("mistral"), "saw-int4", probe=False).packed_layers[0]
    k, v = kv(20)
    layer.update(k, v)
    seen = layer.get_seq_length(), layer.get_mask_sizes(1)
    with pytest.raises(ValueError, match="not finite"):
        layer.update(torch.full_like(k[:, :, :1], torch.nan), v[:, :, :1])
    assert (layer.get_seq_length(), layer.get_mask_sizes(1)) == seen


def test_reserved_cache_of_fixed_length_stays_bounded() -> None:
    cache = packedkv.LayerCache(SAW, capacity=128)
    sizes = []
    for _ in range(60):
        cache.append(*kv(10))
        cache.evict(max(len(cache) - 64, 0))
        sizes.append(sum(cache.nbytes().values()))
    assert max(sizes[30:]) <= max(sizes[:30])


def test_dense_in_32_bit_is_lossless() -> None:
    k, v = kv(70)
    packed = packedkv.compress("dense:dtype=float32", k, v)
    assert packed.effective_bits == 32
    cache = packedkv.LayerCache(packedkv.get("dense:dtype=float32"))
    cache.append(k, v)
    for hat in (packed.decode(), cache.decode()):
        assert torch.equal(hat[0], k)
        assert torch.equal(hat[1], v)


def test_limit_of_magnitude_is_the_same_in_bf16() -> None:
    x = torch.full((1, 1, 1, 64), 65536.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"channel=0\] = 65536.0 is above 65504"):
        packedkv.compress("saw-int4", x, x)


def test_mask_is_broadcast_over_chunks_and_refused_when_it_does_not_fit() -> None:
    cache = packedkv.LayerCache(SAW)
    cache.append(*kv(100))
    q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(0))
    everything = cache.attend(q, mask=torch.ones(1, 1, 1, 1, dtype=torch.bool), chunk=30)
    torch.testing.assert_close(everything, cache.attend(q))
    for width in (99, 150):
        with pytest.raises(ShapeError, match="does not fit 100 tokens"):
            cache.attend(q, mask=torch.ones(1, 1, 1, width, dtype=torch.bool))
    with pytest.raises(ShapeError, match="chunk=0"):
        cache.attend(q, chunk=0)


def test_select_and_arguments_of_the_cache_are_checked() -> None:
    cache = packedkv.LayerCache(SAW)
    cache.append(*kv(10, batch=2))
    with pytest.raises(ShapeError, match="batch of 2"):
        cache.select(torch.tensor([0, 2]))
    with pytest.raises(SpecError, match=r"pass packedkv.get\('saw-int4'\)"):
        packedkv.LayerCache("saw-int4")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="page_tokens=0"):
        packedkv.LayerCache(SAW, page_tokens=0)
    with pytest.raises(SpecError, match="max_len='10'"):
        packedkv.cache_for(tiny_model("llama-gqa"), "saw-int4", max_len="10")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="page_tokens=48"):
        packedkv.cache_for(tiny_model("llama-gqa"), "kivi-2", page_tokens=48)


def test_class_of_the_package_is_not_replaced_by_a_namesake() -> None:
    type("SawInt4", (SawInt4,), {})
    assert packedkv.from_json(SAW.to_json()) == SAW
    assert type(packedkv.from_json(SAW.to_json()).key) is SawInt4
