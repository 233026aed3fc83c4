"""Rolling caches of frames: what they hold equals a cache that never rolled, in memory that does not grow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv import FrameCache
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.errors import KVError, ShapeError, UnsupportedError
from packedkv.kernels import flash
from packedkv.ops.rope import Rotary
from packedkv.scheme import KVScheme
from packedkv.store.site import LayerSite, MeanRemoval

HEADS, DIM, TOKENS, FRAMES, SINKS = 2, 64, 12, 5, 1


def scheme_of(spec: str, tokens: int = TOKENS) -> KVScheme:
    """A preset with a residual window of one frame, and the sink frames in 16 bit."""
    return replace(packedkv.get(spec).for_layer(1, 3), window=tokens, sink=SINKS * tokens)


def frames(n: int, seed: int = 0, tokens: int = TOKENS, batch: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(n, 2, batch, HEADS, tokens, DIM, generator=generator).unbind(1)
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


def check_rolled(video: FrameCache, oracle: Any) -> None:
    """A cache holds and attends to what one holds that never rolled."""
    assert video.held == [0, *range(video.seen - FRAMES + SINKS, video.seen)]
    assert (len(oracle), len(video.cache)) == (video.seen * video.tokens, FRAMES * video.tokens)
    kept = live(video)
    for mine, theirs in zip(video.cache.decode(), oracle.decode(), strict=True):
        assert torch.equal(mine, theirs[:, :, kept])
    q = torch.randn(oracle.batch, HEADS, video.tokens, DIM, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, 1, 1, len(oracle), dtype=torch.bool)
    mask[..., kept] = True
    for queries in (q, q[:, :, :1], q.repeat(1, 2, 1, 1)):
        torch.testing.assert_close(video.attend(queries), attend(queries, oracle, mask=mask), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    ("kind", "spec", "n"),
    [
        *((FusedLayerCache, spec, 1000) for spec in ("saw-int4", "kivi-4:group=16")),
        *((kind, spec, 60) for kind in (FusedLayerCache, LayerCache) for spec in ("octopus-3", "turboquant-2")),
        pytest.param(LayerCache, "saw-int4", 1000, marks=pytest.mark.nightly),
    ],
)
def test_many_frames_on_it_holds_what_a_cache_holds_that_never_rolled(kind: Any, spec: str, n: int) -> None:
    sizes: set[int] = set()
    scheme = scheme_of(spec)
    check_rolled(rolled(kind, scheme, n, sizes, 16), never_rolled(kind, scheme, n))
    assert max(sizes) <= -(-FRAMES * TOKENS // 16) + 3  # no growth: what no live token lies in is freed


def test_sink_frames_may_be_packed_too() -> None:
    scheme = replace(scheme_of("saw-int4"), sink=0)
    video = rolled(LayerCache, scheme, 20)
    assert len(video.cache.roles["key"].runs) == 2
    check_rolled(video, never_rolled(LayerCache, scheme, 20))


@pytest.mark.nightly
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("spec", packedkv.presets())
def test_every_preset_rolls(spec: str, replays: bool) -> None:
    try:
        scheme = scheme_of(spec, 64)  # so many that groups of 128 tokens are full before they are evicted
        if replays:
            video, oracle = replayed(scheme, 64, None, batch=1)
        else:
            video, oracle = rolled(LayerCache, scheme, 13), never_rolled(LayerCache, scheme, 13)
    except KVError as error:  # needs constants of a model or kernels, or another head_dim
        pytest.skip(str(error))
    if video.cache.is_fitted:
        check_rolled(video, oracle)
        return
    # fewer tokens are held than constants are fitted on: all stay in 16 bit
    wanted = (torch.cat(list(x), 2).half().float() for x in frames(video.seen, 0, 64))
    for mine, theirs in zip(video.cache.decode(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs[:, :, live(video)])


def host_state(video: FrameCache) -> list[tuple[Any, str, Any]]:
    """What Python knows of a rolling cache, as ``restored`` takes it: what the replay of a CUDA graph leaves alone."""
    cache = video.cache
    found: list[tuple[Any, str, Any]] = [(video, "seen", video.seen), (cache, "start", cache.start)]
    found.append((cache, "length", cache.length))
    assert cache.store is not None
    found += [(cache.store, name, getattr(cache.store, name)) for name in ("pages", "table")]
    for state in cache.roles.values():
        found += [(state, name, getattr(state, name)) for name in ("sink", "window")]
        found.append((state, "runs", list(state.runs)))
    return found


def restored(state: list[tuple[Any, str, Any]]) -> None:
    for of, name, x in state:
        setattr(of, name, list(x) if isinstance(x, list) else x)


def replayed(scheme: KVScheme, tokens: int, page_tokens: int | None, batch: int) -> tuple[FrameCache, Any]:
    """A cache of which most frames were appended as the replay of CUDA graphs would, and one that never rolled."""
    video = FrameCache(FusedLayerCache(scheme, page_tokens=page_tokens), tokens=tokens, frames=FRAMES, sinks=SINKS)
    before, flag = 2 * FRAMES, torch.zeros(1, dtype=torch.int32)
    for k, v in zip(*frames(before, 0, tokens, batch), strict=True):
        video.append(k, v)
    n = before + 5 * (phases := video.phases)
    given, captured = list(zip(*frames(n, 0, tokens, batch), strict=True)), []
    for k, v in given[before : before + phases]:
        captured.append(host_state(video))
        video.append(k, v, flag=flag)
    captured.append(host_state(video))
    for at in range(before + phases, n):
        restored(captured[(at - before) % phases])
        video.append(*given[at], flag=flag)
    restored(captured[-1])
    video.replayed(n - before - phases)
    oracle = FusedLayerCache(scheme)
    oracle.append(*given[0])
    oracle.append(*(torch.cat(list(x), 2) for x in zip(*given[1:], strict=True)))
    assert not flag.item()
    return video, oracle


@pytest.mark.parametrize(
    ("spec", "tokens", "page_tokens", "window"),
    [
        ("saw-int4", 16, 16, 16),  # a frame fills a page
        ("octopus-3", 24, 64, 24),  # 8 frames fill 3
        ("saw-int4", 12, 16, 0),
        ("kivi-2", 24, 64, 8),  # groups of 32: the window's length changes from frame to frame
    ],
)
def test_frames_of_a_full_cache_may_be_replayed(spec: str, tokens: int, page_tokens: int, window: int) -> None:
    scheme = replace(scheme_of(spec, tokens), window=window)
    check_rolled(*replayed(scheme, tokens, page_tokens, batch=2))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3", "turboquant-2"])
def test_captured_frames_roll_as_eager_ones(spec: str) -> None:
    tokens, heads = 64, 4
    scheme, n = scheme_of(spec, tokens), 40
    generator = torch.Generator("cuda").manual_seed(0)
    k, v, q = torch.randn(3, n, 2, heads, tokens, DIM, generator=generator, device="cuda").half()
    captured, eager = (FrameCache(FusedLayerCache(scheme), tokens=tokens, frames=FRAMES, sinks=SINKS) for _ in range(2))
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    with torch.inference_mode():
        for i in range(2 * FRAMES):
            for video in (captured, eager):
                video.append(k[i], v[i])
                video.attend(q[i])
        assert captured.phases == 1
        new_k, new_v, new_q = k[0].clone(), v[0].clone(), q[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # records, stores nothing
            captured.append(new_k, new_v, flag=flag)
            captured.turn(new_q)  # any numbers
            out = captured.attend(new_q)
        for i in range(2 * FRAMES, n):
            for to, x in ((new_k, k), (new_v, v), (new_q, q)):
                to.copy_(x[i])
            graph.replay()
            eager.append(k[i], v[i])
            eager.turn(q[i])
            torch.testing.assert_close(out, eager.attend(q[i]), atol=2e-3, rtol=0)
        captured.replayed(n - 2 * FRAMES - 1)  # the one that was recorded is counted
    assert (captured.seen, captured.held) == (eager.seen, eager.held)
    assert all(map(torch.equal, captured.cache.decode(), eager.cache.decode()))
    assert not flag.item()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frames_of_a_full_cache_are_attended_by_cudnn(
    dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, own = list[int](), flash._cudnn

    def counted(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(k.shape[2])
        return own(q, k, *rest, **options)

    monkeypatch.setattr(flash, "_cudnn", counted)
    tokens, scheme = 72, scheme_of("octopus-3", 72)  # so that packed tokens begin inside a tile
    video = FrameCache(FusedLayerCache(scheme), tokens=tokens, frames=FRAMES, sinks=SINKS)
    generator = torch.Generator("cuda").manual_seed(0)
    for i in range(12):
        k, v = torch.randn(2, 2, 4, tokens, DIM, generator=generator, device="cuda", dtype=dtype)
        video.append(k, v)
        q = torch.randn(2, heads, tokens, DIM, generator=generator, device="cuda", dtype=dtype)
        found, planned = video.attend(q), len(calls)
        assert planned == max(0, i + 1 - FRAMES)
        keys, values = (x.float().repeat_interleave(heads // 4, 1) for x in video.cache.decode())
        wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), keys, values)
        torch.testing.assert_close(found.float(), wanted, atol=5e-3 if dtype == torch.float16 else 2e-2, rtol=5e-3)
        assert found.dtype == dtype
    assert set(calls) == {FRAMES * tokens}


def test_with_a_flag_kernels_tell_what_codecs_cannot_hold() -> None:
    scheme, flag = replace(scheme_of("saw-int4"), window=0, sink=0), torch.zeros(1, dtype=torch.int32)
    video, x = FrameCache(FusedLayerCache(scheme), tokens=TOKENS, frames=FRAMES), torch.zeros(1, HEADS, TOKENS, DIM)
    x[:, :, 3, 0] = torch.nan
    with pytest.raises(ValueError, match="nan is not finite"):
        video.append(x, x)
    video.append(x, x, flag=flag)
    assert (flag.item(), video.held) == (1, [0])
    assert not video.cache.decode()[0].isnan().any()
    with pytest.raises(UnsupportedError, match="the cache is not fused"):
        rolled(LayerCache, scheme_of("saw-int4"), 2).append(x, x, flag=flag)


def test_the_newest_frame_is_put_anew_while_it_is_denoised() -> None:
    scheme = scheme_of("saw-int4")
    once, often = rolled(LayerCache, scheme, 8), rolled(LayerCache, scheme, 7)
    noisy, clean = (tuple(x[-1] for x in frames(8, seed)) for seed in (1, 0))
    often.append(*noisy)
    often.replace(*noisy)
    often.replace(*clean)
    assert often.held == once.held
    assert all(map(torch.equal, often.cache.decode(), once.cache.decode()))
    assert often.cache.nbytes() == once.cache.nbytes()


def test_positions_may_count_within_what_is_held() -> None:
    """All frames but the sinks keep their keys; scores are those of positions that begin anew at the sinks."""
    rotary = Rotary(1e4 ** -(torch.arange(DIM // 2) / (DIM // 2)))

    def turned(x: Tensor, frame: int) -> Tensor:
        return rotary.turn(x, torch.full((1, 1), frame))

    scheme = replace(packedkv.get("dense:dtype=float16"), window=TOKENS, sink=TOKENS)
    video, (k, v) = FrameCache(FusedLayerCache(scheme), tokens=TOKENS, frames=FRAMES, sinks=1), frames(11)
    for i in range(11):
        video.append(turned(k[i], i), v[i])
        nearer = max(0, i + 1 - FRAMES)
        video.turn(turned(k[0], nearer))
        again = FrameCache(LayerCache(scheme), tokens=TOKENS, frames=FRAMES, sinks=1)
        for place, frame in enumerate(video.held):
            again.append(turned(k[frame], place), v[frame])
        q = torch.randn(1, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(i))
        torch.testing.assert_close(video.attend(turned(q, i)), again.attend(turned(q, i - nearer)), atol=2e-3, rtol=0)


def test_keys_that_are_not_those_of_the_sinks_turn_nothing() -> None:
    video, x = rolled(FusedLayerCache, scheme_of("saw-int4"), 8), torch.zeros(1, HEADS, 2 * TOKENS, DIM)
    before = video.cache.decode()[0]
    with pytest.raises(ShapeError, match="turn: keys of 24 tokens; 5 frames of 12 are held, and 1 are sinks"):
        video.turn(x)
    with pytest.raises(ShapeError, match="do not fit the cache"):
        video.turn(x[:, :1, :TOKENS])
    x[:, :, 3, 0] = torch.inf
    with pytest.raises(ValueError, match="inf is not finite"):
        video.turn(x[:, :, :TOKENS])
    assert torch.equal(video.cache.decode()[0], before)
    packed = rolled(LayerCache, replace(scheme_of("saw-int4"), sink=0), 8)
    with pytest.raises(UnsupportedError, match=r"sink frames are packed, and keys are encoded once\. Set sink=12"):
        packed.turn(x[:, :, :TOKENS])
    with pytest.raises(ShapeError, match="0 frames of 12 are held"):
        rolled(LayerCache, scheme_of("saw-int4"), 0).turn(x[:, :, :TOKENS])


def test_what_is_no_frame_is_refused_and_nothing_changes() -> None:
    video = rolled(LayerCache, scheme_of("saw-int4"), 8)
    before, kept, x = video.held, video.cache.decode(), torch.zeros(1, HEADS, 4 * FRAMES * TOKENS, DIM)
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
    for call in (video.append, video.replace):
        with pytest.raises(ValueError, match="nan is not finite"):
            call(x[:, :, :TOKENS], x[:, :, :TOKENS])
    with pytest.raises(ShapeError, match="do not fit the cache"):
        video.replace(*torch.zeros(2, 1, HEADS + 1, TOKENS, DIM))
    assert video.held == before
    assert all(map(torch.equal, video.cache.decode(), kept))
    video.evict(4)
    assert video.held == [0]
    video.reset()
    assert (video.held, len(video.cache)) == ([], 0)


def test_a_cache_that_cannot_roll_is_refused() -> None:
    plain = LayerCache(packedkv.get("saw-int4"))
    for options, text in (
        ({"tokens": 0, "frames": 2}, "frames of 0 tokens"),
        ({"tokens": 4, "frames": 2, "sinks": 2}, "2 held, 2 of them sinks"),
    ):
        with pytest.raises(ShapeError, match=text):
            FrameCache(plain, **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="does not use evicted slots again; leave the capacity out"):
        FrameCache(FusedLayerCache(packedkv.get("saw-int4"), capacity=64), tokens=4, frames=2)
    with pytest.raises(UnsupportedError, match="sink is 0 tokens, and 1 frames of 4 are 4"):
        FrameCache(FusedLayerCache(packedkv.get("saw-int4")), tokens=4, frames=2, sinks=1)
    plain.append(*torch.zeros(2, 1, 1, 4, 64))
    with pytest.raises(ShapeError, match="holds 4 tokens already"):
        FrameCache(plain, tokens=4, frames=2)
    mean = MeanRemoval("pre", Rotary(torch.ones(DIM // 2)), torch.ones(1, HEADS, DIM))
    with pytest.raises(UnsupportedError, match="mean before RoPE"):
        FrameCache(LayerCache(LayerSite(packedkv.get("saw-int4:mean=pre"), mean=mean)), tokens=TOKENS, frames=FRAMES)


def test_only_whole_turns_of_a_full_cache_count_as_replayed() -> None:
    video = rolled(FusedLayerCache, scheme_of("saw-int4"), 0, page_tokens=16)
    with pytest.raises(ShapeError, match="append a frame first"):
        _ = video.phases
    for k, v in zip(*frames(3), strict=True):
        video.append(k, v)
    with pytest.raises(ShapeError, match=r"replayed\(4\): 3 of 5 frames are held"):
        video.replayed(4)
    for k, v in zip(*frames(3), strict=True):
        video.append(k, v)
    assert video.phases == 4
    with pytest.raises(ShapeError, match=r"replayed\(3\): 5 of 5 frames are held, and graphs of 4 phases"):
        video.replayed(3)


def test_several_frames_may_come_at_once_as_chunks_do() -> None:
    one, chunks = rolled(LayerCache, scheme_of("saw-int4"), 9), rolled(LayerCache, scheme_of("saw-int4"), 0)
    for part in zip(*(x.split(3) for x in frames(9)), strict=True):
        chunks.append(*(torch.cat(list(x), 2) for x in part))
    assert chunks.held == one.held
    assert all(map(torch.equal, chunks.cache.decode(), one.cache.decode()))
