"""FrameCache: a rolling cache of frames, for causal video and streaming encoders, on top of a layer's cache."""

import math

import torch
from torch import Tensor

from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.checks import check_shapes, check_tensors
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.layout import PAGE_TOKENS
from packedkv.ops.precision import without_modes


class FrameCache:
    """The rolling cache of one layer.

    Parameters
    ----------
    cache : LayerCache
        Empty; of any preset. ``window=F`` in its spec keeps the newest frame of F tokens in 16 bit, ``sink=F`` the
        first one.
    tokens : int
        Tokens of a frame, F.
    frames : int
        Capacity in frames, the newest and the sinks included.
    sinks : int
        First frames, which are never evicted.

    Raises
    ------
    ShapeError
        Numbers that do not fit each other, or a cache that holds tokens.
    UnsupportedError
        A static cache, whose lengths lie on the device; keys without their mean before RoPE; or sinks that the fused
        kernels cannot keep.

    Examples
    --------
    >>> import packedkv, torch
    >>> video = FrameCache(packedkv.LayerCache(packedkv.get("saw-int4")), tokens=16, frames=4, sinks=1)
    >>> for _ in range(9):
    ...     q, k, v = torch.randn(3, 1, 2, 16, 64)
    ...     video.append(k, v)
    >>> video.held, video.seen, video.attend(q).shape
    ([0, 6, 7, 8], 9, torch.Size([1, 2, 16, 64]))
    """

    def __init__(self, cache: LayerCache, *, tokens: int, frames: int, sinks: int = 0) -> None:
        if tokens < 1 or sinks < 0 or frames <= sinks:
            raise ShapeError(
                f"frames of {tokens} tokens, {frames} held, {sinks} of them sinks: expected at least one token, and a "
                f"frame that is no sink."
            )
        if len(cache):
            raise ShapeError(f"the cache holds {len(cache)} tokens already; begin with an empty one.")
        if cache.static:
            raise UnsupportedError(
                "a static cache (capacity) does not use evicted slots again; leave the capacity out: frames roll in "
                "memory that is allocated once."
            )
        if cache.site.mean is not None and cache.site.mean.kind == "pre":
            raise UnsupportedError(
                "the cache holds keys without their mean before RoPE, which is put back by positions in one dimension; "
                "frames have positions of their own. Use mean=post or mean=none."
            )
        if isinstance(cache, FusedLayerCache) and cache.scheme.sink != sinks * tokens:
            raise UnsupportedError(
                f"the fused kernels read one run of packed tokens, so they keep first frames in 16 bit only: the "
                f"scheme's sink is {cache.scheme.sink} tokens, and {sinks} frames of {tokens} are {sinks * tokens}. "
                f"Set sink={sinks * tokens} in the spec, or use LayerCache."
            )
        self.cache, self.tokens, self.frames, self.sinks, self.seen = cache, tokens, frames, sinks, 0
        # a frame is stored before the oldest one goes, which may leave a page live in part; packed sinks may another
        scheme, unit = cache.scheme, math.lcm(cache.scheme.key.block_tokens, cache.scheme.value.block_tokens)
        page = cache.page_tokens or -(-PAGE_TOKENS // unit) * unit
        parts = (tokens % page > 0) + (sinks * tokens > scheme.sink)
        packed = max((frames + 1) * tokens - scheme.sink - scheme.window, 0) + parts * page
        cache.reserve, cache.rolls = max(cache.reserve, packed), True
        self.places: dict[tuple[str, str, torch.Size], Tensor] = {}

    def __len__(self) -> int:
        """Frames held."""
        return len(self.cache) // self.tokens

    @property
    def held(self) -> list[int]:
        """Numbers of the frames held, the oldest first; 0 is the first that was appended."""
        first = min(self.sinks, self.seen, len(self))
        return [*range(first), *range(self.seen - len(self) + first, self.seen)]

    @property
    def phases(self) -> int:
        """Number of frames after which a full cache writes and reads the same memory again.

        1 where a frame fills whole pages. Raises ShapeError before the first append, which makes the pages.
        """
        if self.cache.store is None:
            raise ShapeError("phases: the cache is empty; append a frame first, which makes its pages.")
        page = self.cache.store.layout.page_tokens
        return page // math.gcd(page, self.tokens)

    @without_modes
    def append(self, keys: Tensor, values: Tensor, *, flag: Tensor | None = None) -> None:
        """Add n whole frames; evict the oldest frames that no longer fit.

        Parameters
        ----------
        keys, values : Tensor ``[B, H, F * n, D]``
            Keys after the model's RoPE, at positions of its own.
        flag : Tensor int32 ``[1]``, optional
            Of fused caches: do not check the numbers, which synchronizes, as a CUDA graph cannot; kernels raise the
            flag for numbers that codecs cannot store.

        Raises
        ------
        ShapeError
            A frame of another size, or more new frames than fit beside the sinks.
        ValueError
            As ``LayerCache.append``; the cache is unchanged then.
        UnsupportedError
            A flag for a cache that is not fused, or whose keys are encoded without their mean.
        """
        n = self._frames_of(keys)
        if n > self.frames - min(self.sinks, self.seen):
            raise ShapeError(
                f"{n} new frames at once, and {self.frames} are held, {self.sinks} of them sinks: the new ones would "
                f"be evicted before they are seen. Append fewer at a time."
            )
        self._check_flag(flag)
        self._add(keys, values, flag)
        self.seen += n
        if (over := len(self) - self.frames) > 0:
            self.evict(over)
        self._keep_addresses()

    @without_modes
    def replace(self, keys: Tensor, values: Tensor, *, flag: Tensor | None = None) -> None:
        """Replace the newest n frames after a denoising pass; arguments and errors as ``append``."""
        n = self._frames_of(keys)
        if n > len(self) or (self.seen > len(self) and n > len(self) - self.sinks):
            raise ShapeError(f"replace: {n} frames, and {len(self)} are held, {self.sinks} of them sinks; pass fewer.")
        if flag is None:
            check_tensors(keys, values)  # before the older ones are gone
        check_shapes(keys, values, *self.cache.template)
        self._check_flag(flag)
        self.cache.crop(len(self.cache) - n * self.tokens)
        self._add(keys, values, flag)
        self._keep_addresses()

    @torch.no_grad()
    @without_modes
    def turn(self, keys: Tensor) -> None:
        """Replace the sinks' keys ``[B, H, F * sinks, D]`` by the same keys rotated to other positions.

        For positions that count within the cache: each evicted frame moves the sinks one frame nearer to all others.
        The model stores their keys before RoPE. A call that a CUDA graph captures does not check the numbers.

        Raises
        ------
        ShapeError
            Keys of other tokens than all sinks, or not all sinks are cached.
        ValueError
            NaN, Inf or |x| > 65504; the cache is unchanged then.
        UnsupportedError
            The sinks are packed: keys are encoded once.
        """
        count, state = self.sinks * self.tokens, self.cache.roles.get("key")
        if state is None or not count or len(self.cache) < count or keys.shape[2] != count:
            raise ShapeError(
                f"turn: keys of {keys.shape[2]} tokens; {len(self)} frames of {self.tokens} are held, and {self.sinks} "
                f"are sinks. Pass the keys of all of them when they are held."
            )
        if state.sink.shape[2] != count:
            raise UnsupportedError(
                f"turn: the scheme's sink is {self.cache.scheme.sink} tokens, so sink frames are packed, and keys are "
                f"encoded once. Set sink={count} in the spec."
            )
        check_shapes(keys, keys, *self.cache.template)
        if not (keys.is_cuda and torch.cuda.is_current_stream_capturing()):
            check_tensors(keys, keys)
        state.sink.copy_(keys)

    @without_modes
    def evict(self, n: int) -> None:
        """Drop the oldest ``n`` frames behind the sinks; ShapeError if there are fewer."""
        loose = max(len(self) - self.sinks, 0)
        if not 0 <= n <= loose:
            raise ShapeError(f"evict({n}): {len(self)} frames are held, {len(self) - loose} of them sinks; 0..{loose}.")
        if n:
            self.cache.evict(n * self.tokens, keep=self.sinks * self.tokens)

    @without_modes
    def attend(self, q: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention of the newest frames' queries ``[B, HQ, n, D]`` over every cached token, their own included."""
        return self.cache.attend(q, scale=scale, causal=False)

    def replayed(self, n: int) -> None:
        """Count ``n`` frames that replayed CUDA graphs appended to a full cache.

        Raises ShapeError if the cache is not full, or n is no multiple of ``phases``.
        """
        if len(self) < self.frames or n < 0 or n % self.phases:
            raise ShapeError(
                f"replayed({n}): {len(self)} of {self.frames} frames are held, and graphs of {self.phases} phases are "
                f"replayed in turn; append eagerly until the cache is full, then replay whole turns."
            )
        self.seen += n
        self.cache.start += n * self.tokens

    def reset(self) -> None:
        """Forget every frame, and the memory."""
        self.cache.reset()
        self.places.clear()
        self.seen = 0

    def _check_flag(self, flag: Tensor | None) -> None:
        fused = isinstance(self.cache, FusedLayerCache)
        if flag is None or (fused and self.cache.site.mean is None):
            return
        why = "keys are held without their mean" if fused else "the cache is not fused"
        raise UnsupportedError(f"a flag is raised by fused kernels, of keys as they are, and {why}; leave it out.")

    def _add(self, keys: Tensor, values: Tensor, flag: Tensor | None) -> None:
        self.cache.append(keys, values, **({} if flag is None else {"flag": flag}))

    @torch.no_grad()
    def _keep_addresses(self) -> None:
        """Copy sink and window to the memory that they had when they were last of this length."""
        for role, state in self.cache.roles.items():
            for name in ("sink", "window"):
                new = getattr(state, name)
                if (old := self.places.get((role, name, new.shape))) is None:
                    with torch.inference_mode(False):
                        old = self.places[role, name, new.shape] = new.detach().clone()
                elif old is not new:
                    old.copy_(new)
                setattr(state, name, old)

    def _frames_of(self, keys: Tensor) -> int:
        n, rest = divmod(keys.shape[2], self.tokens)
        if rest or not n:
            raise ShapeError(
                f"{keys.shape[2]} new tokens are no whole number of frames of {self.tokens} tokens; frames keep their "
                f"size. Use another cache for another resolution."
            )
        return n
