"""Rolling caches of frames: what they hold equals a cache that never rolled, in memory that does not grow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcodec
from kvcodec import FrameCache
from kvcodec.attention import attend
from kvcodec.cache.growing import GrowingCache
from kvcodec.cache.host import LayerCache
from kvcodec.cache.site import LayerSite, MeanRemoval
from kvcodec.cache.static import StaticCache
from kvcodec.errors import KVError, ShapeError, UnsupportedError
from kvcodec.ops.rope import Rotary
from kvcodec.scheme import KVScheme

HEADS, DIM, TOKENS, FRAMES, SINKS = 2, 64, 12, 5, 1


def scheme_of(spec: str, tokens: int = TOKENS) -> KVScheme:
    """A preset with a residual window of one frame, and the sink frames in 16 bit."""
    return replace(kvcodec.get(spec).for_layer(1, 3), window=tokens, sink=SINKS * tokens)


def frames(n: int, seed: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(n, 2, 1, HEADS, tokens, DIM, generator=generator).unbind(1)
    return k, v


def rolled(
    kind: Any, scheme: KVScheme, n: int, sizes: set[int] | None = None, page_tokens: int | None = None
) -> FrameCache:
    tokens = scheme.window
    video = FrameCache(kind(scheme, page_tokens=page_tokens), tokens=tokens, frames=FRAMES, sinks=SINKS)
    for i, (k, v) in enumerate(zip(*frames(n, 0, tokens), strict=True)):
        video.append(k, v)
        if sizes is not None and i >= 2 * FRAMES:
            assert video.cache.store is not None
            sizes.add(video.cache.store.pages.shape[0])
    return video


def never_rolled(kind: Any, scheme: KVScheme, n: int) -> Any:
    (k, v), cache = frames(n, 0, scheme.window), kind(scheme)
    cache.append(k[0], v[0])  # constants may be fitted on the first call
    cache.append(*(torch.cat(list(x[1:]), 2) for x in (k, v)))
    return cache


def live(cache: FrameCache) -> Tensor:
    return (torch.tensor(cache.held)[:, None] * cache.tokens + torch.arange(cache.tokens)).flatten()


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (GrowingCache, "saw-int4"),
        (GrowingCache, "kivi-4:group=16"),
        pytest.param(LayerCache, "saw-int4", marks=pytest.mark.nightly),
    ],
)
def test_a_thousand_frames_on_it_holds_what_a_cache_holds_that_never_rolled(kind: Any, spec: str) -> None:
    sizes: set[int] = set()
    scheme, n = scheme_of(spec), 1000
    video, oracle = rolled(kind, scheme, n, sizes, 16), never_rolled(kind, scheme, n)
    assert video.held == [0, 996, 997, 998, 999]
    assert (len(video), video.seen, len(video.cache)) == (FRAMES, n, FRAMES * TOKENS)
    kept = live(video)
    for mine, theirs in zip(video.cache.decode(), oracle.decode(), strict=True):
        assert torch.equal(mine, theirs[:, :, kept])
    assert max(sizes) <= -(-FRAMES * TOKENS // 16) + 2  # no growth: what no live token lies in is freed
    q = torch.randn(1, 2 * HEADS, TOKENS, DIM)
    mask = torch.zeros(1, 1, 1, len(oracle), dtype=torch.bool)
    mask[..., kept] = True
    torch.testing.assert_close(video.attend(q), attend(q, oracle, mask=mask), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3", "turboquant-2"])
def test_a_fused_cache_rolls_as_the_reference_does(spec: str) -> None:
    scheme, n, sizes = scheme_of(spec), 60, set[int]()
    fused, plain = rolled(GrowingCache, scheme, n, sizes, 16), rolled(LayerCache, scheme, n)
    assert fused.held == plain.held
    for mine, theirs in zip(fused.cache.decode(), plain.cache.decode(), strict=True):
        assert torch.equal(mine, theirs)
    assert max(sizes) <= -(-FRAMES * TOKENS // 16) + 3
    q = torch.randn(1, HEADS, TOKENS, DIM)
    for queries in (q, q[:, :, :1]):
        torch.testing.assert_close(fused.attend(queries), plain.attend(queries), atol=5e-3, rtol=5e-3)


def test_sink_frames_may_be_packed_too() -> None:
    scheme = replace(scheme_of("saw-int4"), sink=0)
    video, oracle = rolled(LayerCache, scheme, 20), never_rolled(LayerCache, scheme, 20)
    assert video.held == [0, 16, 17, 18, 19]
    assert len(video.cache.roles["key"].runs) == 2
    kept = live(video)
    for mine, theirs in zip(video.cache.decode(), oracle.decode(), strict=True):
        assert torch.equal(mine, theirs[:, :, kept])
    q, mask = torch.randn(1, HEADS, TOKENS, DIM), torch.zeros(1, 1, 1, len(oracle), dtype=torch.bool)
    mask[..., kept] = True
    torch.testing.assert_close(video.attend(q), attend(q, oracle, mask=mask), atol=5e-3, rtol=5e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", kvcodec.presets())
def test_every_preset_rolls(spec: str) -> None:
    try:
        scheme = scheme_of(spec, 64)  # so many that groups of 128 tokens are full before they are evicted
        video, oracle = rolled(LayerCache, scheme, 13), never_rolled(LayerCache, scheme, 13)
    except KVError as error:  # needs constants of a model, or another head_dim
        pytest.skip(str(error))
    assert video.held == [0, 9, 10, 11, 12]
    wanted = oracle.decode()
    if not video.cache.is_fitted:  # fewer tokens are held than constants are fitted on: all stay in 16 bit
        k, v = (torch.cat(list(x), 2).half().float() for x in frames(13, 0, 64))
        wanted = k, v
    for mine, theirs in zip(video.cache.decode(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs[:, :, live(video)])


def test_the_newest_frame_is_put_anew_while_it_is_denoised() -> None:
    scheme = scheme_of("saw-int4")
    once, often = rolled(LayerCache, scheme, 8), rolled(LayerCache, scheme, 7)
    noisy, clean = (tuple(x[-1] for x in frames(8, seed)) for seed in (1, 0))
    often.append(*noisy)
    often.replace(*noisy)
    often.replace(*clean)
    assert often.held == once.held
    for mine, theirs in zip(often.cache.decode(), once.cache.decode(), strict=True):
        assert torch.equal(mine, theirs)
    assert often.cache.nbytes() == once.cache.nbytes()


def test_several_frames_may_come_at_once_as_chunks_do() -> None:
    scheme = scheme_of("saw-int4")
    one, chunks = rolled(LayerCache, scheme, 9), FrameCache(LayerCache(scheme), tokens=TOKENS, frames=FRAMES, sinks=1)
    for part in zip(*(x.split(3) for x in frames(9)), strict=True):
        chunks.append(*(torch.cat(list(x), 2) for x in part))
    assert chunks.held == one.held
    for mine, theirs in zip(chunks.cache.decode(), one.cache.decode(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_no_frame_is_refused_and_nothing_changes() -> None:
    video = rolled(LayerCache, scheme_of("saw-int4"), 8)
    before, x = video.held, torch.zeros(1, HEADS, 4 * FRAMES * TOKENS, DIM)
    for n, call, text in (
        (TOKENS - 1, video.append, "11 new tokens are no whole number of frames of 12"),
        (0, video.append, "0 new tokens"),
        (TOKENS + 5, video.replace, "17 new tokens are no whole number"),
        (5 * TOKENS, video.append, "5 new frames at once, and 5 are held, 1 of them sinks"),
        (5 * TOKENS, video.replace, "replace: 5 frames, and 5 are held, 1 of them sinks"),
    ):
        with pytest.raises(ShapeError, match=text):
            call(x[:, :, :n], x[:, :, :n])
    for n in (5, -1):
        with pytest.raises(ShapeError, match=rf"evict\({n}\): 5 frames are held, 1 of them sinks; 0\.\.4"):
            video.evict(n)
    x[:, :, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="nan is not finite"):
        video.append(x[:, :, :TOKENS], x[:, :, :TOKENS])
    assert video.held == before
    video.evict(4)
    assert video.held == [0]
    video.reset()
    assert (video.held, len(video.cache)) == ([], 0)


def test_a_cache_that_cannot_roll_is_refused() -> None:
    plain = LayerCache(kvcodec.get("saw-int4"))
    for options, text in (
        ({"tokens": 0, "frames": 2}, "frames of 0 tokens"),
        ({"tokens": 4, "frames": 2, "sinks": 2}, "2 held, 2 of them sinks"),
    ):
        with pytest.raises(ShapeError, match=text):
            FrameCache(plain, **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="does not use evicted slots again"):
        FrameCache(StaticCache(kvcodec.get("saw-int4"), capacity=64), tokens=4, frames=2)
    with pytest.raises(UnsupportedError, match="sink is 0 tokens, and 1 frames of 4 are 4"):
        FrameCache(GrowingCache(kvcodec.get("saw-int4")), tokens=4, frames=2, sinks=1)
    plain.append(*torch.zeros(2, 1, 1, 4, 64))
    with pytest.raises(ShapeError, match="holds 4 tokens already"):
        FrameCache(plain, tokens=4, frames=2)


def test_a_frame_that_cannot_replace_another_leaves_it() -> None:
    video = rolled(LayerCache, scheme_of("saw-int4"), 8)
    before, kept, x = video.held, video.cache.decode(), torch.zeros(1, HEADS, TOKENS, DIM)
    x[:, :, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="nan is not finite"):
        video.replace(x, x)
    with pytest.raises(ShapeError, match="do not fit the cache"):
        video.replace(*torch.zeros(2, 1, HEADS + 1, TOKENS, DIM))
    assert video.held == before
    for mine, theirs in zip(video.cache.decode(), kept, strict=True):
        assert torch.equal(mine, theirs)


def test_a_mean_before_rope_is_refused() -> None:
    rotary = Rotary(torch.ones(DIM // 2))
    site = LayerSite(kvcodec.get("saw-int4:mean=pre"), mean=MeanRemoval("pre", rotary, torch.ones(1, HEADS, DIM)))
    with pytest.raises(UnsupportedError, match="mean before RoPE"):
        FrameCache(LayerCache(site), tokens=TOKENS, frames=FRAMES)
