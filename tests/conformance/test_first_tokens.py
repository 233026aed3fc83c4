"""Constants and means of the first tokens: dense until there are enough, then encoded once, however split."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.codec import Codec, roundtrip
from packedkv.codecs.rope_pairs import RopePairs
from packedkv.errors import FitError
from packedkv.ops.rope import Rotary
from packedkv.scheme import KVScheme
from packedkv.shared import seeded_params
from packedkv.store.site import MEAN_TOKENS, LayerSite, MeanRemoval

DIM = 32
ROTARY = Rotary(10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))


@dataclass(frozen=True)
class Patient(RopePairs):
    """A codec that wants 40 tokens."""

    fit_tokens = property(lambda self: 40)
    fit_every = property(lambda self: 3)  # it needs no neighbours


def scheme(mean: str = "pre", sink: int = 0, window: int = 0, key: Codec | None = None) -> KVScheme:
    found = packedkv.get("int-4")
    return KVScheme(key or found.key, found.value, sink=sink, window=window, mean=mean)  # type: ignore[arg-type]


def cache_of(own: KVScheme, most: int | None = None) -> LayerCache:
    mean = MeanRemoval("pre", ROTARY) if own.mean == "pre" else None
    return LayerCache(LayerSite(own, mean=mean, most=most), page_tokens=32)


def tokens(n: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Keys with a large mean before RoPE, and values."""
    draw = torch.Generator().manual_seed(n)
    k, v = torch.randn(2, batch, 2, n, DIM, generator=draw)
    mean = torch.zeros(1, 2, 1, DIM)
    mean[..., DIM - 2], mean[:, 1, :, 3] = 60.0, -20.0
    return ROTARY.turn(k + mean, torch.arange(n)[None]).half().float(), v.half().float()


def fill(cache: LayerCache, kv: tuple[Tensor, Tensor], parts: tuple[int, ...]) -> None:
    at = 0
    for n in parts:
        cache.append(*(x[:, :, at : at + n] for x in kv))
        at += n


def turned64(x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
    """RoPE in float64 from its definition."""
    angle = sign * positions.double()[:, None, :, None] * ROTARY.frequencies.double()
    a, b = x.double().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def defined(
    cache: LayerCache, keys: Tensor, positions: Tensor, first: int, sample: Callable[[Tensor], Tensor]
) -> Tensor:
    """Keys of the definition in float64: their mean from ``sample``, subtracted, coded, added."""
    mean = sample(turned64(keys, positions, -1)).mean(2, keepdim=True)
    removed = turned64(mean, positions)
    codec = cache.roles["key"].codec
    params = seeded_params(codec, cache.roles["key"].site)
    coded = roundtrip(codec, (keys.double() - removed).float(), params).double() + removed
    return torch.cat([keys.double()[:, :, :first], coded[:, :, first:]], 2)


# -- the definition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [0, 4])
@pytest.mark.parametrize("parts", [(200,), (1,) * 200, (60, 80, 60), (131, 1, 68)], ids=["one", "ones", "three", "odd"])
def test_a_mean_of_the_first_tokens_is_the_explicit_one(parts: tuple[int, ...], sink: int) -> None:
    kv, at = tokens(200), torch.arange(200)[None]
    cache = cache_of(scheme(sink=sink))
    fill(cache, kv, parts)
    wanted = defined(cache, kv[0], at, sink, lambda x: x[:, :, sink : sink + MEAN_TOKENS])
    got = cache.decode()[0].double()
    off = (got - wanted).abs() > 1e-4  # a code may differ where float32 and float64 round apart
    assert off.double().mean() < 2e-3
    assert (got - wanted).abs().amax() < 2
    assert (kv[0] - got).abs().amax() < 1  # the mean of 60 takes no levels
    assert (packedkv.fake_quant("int-4", *kv)[0] - kv[0]).abs().amax() > 2


@pytest.mark.parametrize("key", [None, Patient(3)], ids=["mean", "mean and constants"])
@pytest.mark.parametrize("mean", ["pre", "post", "none"])
@pytest.mark.parametrize("parts", [(1,) * 150, (100, 50), (127, 1, 22), (39, 1, 110), (150, 0)])
def test_the_split_of_the_calls_does_not_show(mean: str, key: Codec | None, parts: tuple[int, ...]) -> None:
    if mean == "none" and key is None:
        pytest.skip("nothing waits")
    kv, own = tokens(150), scheme(mean, sink=2, window=5, key=key)
    whole, split = cache_of(own), cache_of(own)
    fill(whole, kv, (150,))
    fill(split, kv, parts)
    assert whole.is_fitted
    for role in ("key", "value"):
        a, b = whole.roles[role], split.roles[role]  # type: ignore[index]
        assert a.runs == b.runs == [(0, 143)]
        assert torch.equal(a.window, b.window)
        for name, x in whole.store.read(role, 0, 143).items():
            assert torch.equal(x, split.store.read(role, 0, 143)[name])
    assert torch.equal(whole.decode()[0], split.decode()[0])


# -- operations --------------------------------------------------------------------------------------------------------


def test_padding_is_left_out_and_a_row_is_what_it_is_alone() -> None:
    pad, n = 20, 200
    kv = tokens(n)
    own = [x.repeat(2, 1, 1, 1) for x in kv]
    for x in own:
        x[0] = torch.cat([torch.full((2, pad, DIM), 9.0), x[0, :, : n - pad]], 1)
    positions = torch.stack([(torch.arange(n) - pad).clamp_min(0), torch.arange(n)])
    cache, alone = cache_of(scheme()), cache_of(scheme())
    for at in (0, 130, 140):  # the padded row has its tokens only in the third call
        part = slice(at, {0: 130, 130: 140, 140: n}[at])
        cache.append(*(x[:, :, part] for x in own), positions[:, part])
        assert cache.is_fitted == (at == 140)
    fill(alone, kv, (n,))
    assert torch.equal(cache.mean, alone.mean.expand(2, -1, -1))
    assert torch.equal(cache.decode()[0][0, :, pad:], alone.decode()[0][0, :, : n - pad])
    assert torch.equal(cache.decode()[0][1], alone.decode()[0][0])


def test_a_sliding_layer_fits_on_what_it_ever_holds() -> None:
    cache, kv = cache_of(scheme(), most=15), tokens(60)
    for at in range(60):
        cache.append(*(x[:, :, at : at + 1] for x in kv))
        assert cache.is_fitted == (at >= 14)
        if len(cache) > 15:
            cache.evict(len(cache) - 15)
    assert cache.roles["key"].dense_tokens == 0
    assert (cache.decode()[0] - kv[0][:, :, 45:]).abs().amax() < 2


def test_a_failed_append_leaves_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, kv = cache_of(scheme()), tokens(200)
    fill(cache, kv, (100,))
    value = type(cache.roles["value"].codec)
    with monkeypatch.context() as patched:
        patched.setattr(value, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.append(*(x[:, :, 100:200] for x in kv))
    assert not cache.is_fitted
    assert len(cache.positions) == len(cache) == 100
    whole = cache_of(scheme())
    fill(whole, kv, (200,))
    cache.append(*(x[:, :, 100:200] for x in kv))
    assert torch.equal(cache.decode()[0], whole.decode()[0])


# -- what is decided and refused without a model -----------------------------------------------------------------------


def test_without_a_model_auto_is_none_and_post_is_the_first_tokens() -> None:
    kv = tokens(200)
    auto, none = (LayerCache(packedkv.get(spec)) for spec in ("int-4", "int-4:mean=none"))
    for cache in (auto, none):
        cache.append(*kv)
    assert auto.scheme.mean == "none"
    assert torch.equal(auto.decode()[0], none.decode()[0])
    post = LayerCache(packedkv.get("int-4:mean=post"))
    post.append(*kv)
    assert post.mean is not None
    torch.testing.assert_close(post.mean, kv[0][:, :, :MEAN_TOKENS].mean(2), atol=1e-4, rtol=1e-5)
    assert (post.decode()[0] - kv[0]).square().mean() < 0.5 * (none.decode()[0] - kv[0]).square().mean()
    given = {"mean": kv[0].mean(2)}
    fitted = LayerCache(packedkv.get("int-4:mean=post"), params={"key": given})
    fitted.append(*(x[:, :, :3] for x in kv))
    assert fitted.roles["key"].encoded == 3


def test_a_mean_before_rope_without_a_model_is_refused() -> None:
    with pytest.raises(FitError, match="only a model knows"):
        LayerCache(packedkv.get("int-4:mean=pre"))
