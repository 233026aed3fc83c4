"""FrameCache: a rolling cache of frames, for causal video and streaming encoders, on top of a layer's cache.

A frame is a block of tokens that see each other and every frame held. A rollout appends frame after frame; the oldest
are evicted, but for the first ones (sinks). Video diffusion passes a frame several times while it is denoised:
``replace`` puts the newest frame anew.

Keys keep the positions by which the model turned them, whatever is evicted: ``seen`` counts frames from the beginning.
Nothing is held here but numbers: tokens go through ``append``, ``crop`` and ``evict`` of the layer's cache.
"""

from torch import Tensor

from kvcodec.cache.device import DeviceCache
from kvcodec.cache.host import LayerCache
from kvcodec.cache.static import StaticCache
from kvcodec.codec import check_tensors
from kvcodec.errors import ShapeError, UnsupportedError


class FrameCache:
    """The rolling cache of one layer.

    Parameters
    ----------
    cache : LayerCache
        Empty; packed or fused, of any preset. Its scheme's window is the newest tokens held in 16 bit: ``window=F``
        for one frame of F tokens. Its scheme's sink is the first tokens, alike.
    tokens : int
        Tokens of a frame, F.
    frames : int
        Frames held at most, the newest and the sinks included.
    sinks : int
        First frames, which are never evicted.

    Raises
    ------
    ShapeError
        Numbers that do not fit each other, or a cache that holds tokens.
    UnsupportedError
        A static cache, which does not use evicted slots again; keys without their mean before RoPE; or sinks that the
        fused kernels cannot keep.

    Examples
    --------
    >>> import kvcodec, torch
    >>> video = FrameCache(kvcodec.LayerCache(kvcodec.get("saw-int4")), tokens=16, frames=4, sinks=1)
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
        if isinstance(cache, StaticCache):
            raise UnsupportedError(
                "a static cache (capacity) does not use evicted slots again; a rolling one grows and frees pages."
            )
        if cache.site.mean is not None and cache.site.mean.kind == "pre":
            raise UnsupportedError(
                "the cache holds keys without their mean before RoPE, which is put back by positions in one dimension; "
                "frames have positions of their own. Use mean=post or mean=none."
            )
        if isinstance(cache, DeviceCache) and cache.scheme.sink != sinks * tokens:
            raise UnsupportedError(
                f"the fused kernels read one run of packed tokens, so they keep first frames in 16 bit only: the "
                f"scheme's sink is {cache.scheme.sink} tokens, and {sinks} frames of {tokens} are {sinks * tokens}. "
                f"Set sink={sinks * tokens} in the spec, or use LayerCache."
            )
        self.cache, self.tokens, self.frames, self.sinks, self.seen = cache, tokens, frames, sinks, 0

    def __len__(self) -> int:
        """Frames held."""
        return len(self.cache) // self.tokens

    @property
    def held(self) -> list[int]:
        """Numbers of the frames held, the oldest first; 0 is the first that was appended."""
        first = min(self.sinks, self.seen, len(self))
        return [*range(first), *range(self.seen - len(self) + first, self.seen)]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add frames, and evict the oldest of those that no longer fit.

        Parameters
        ----------
        keys, values : Tensor ``[B, H, F * n, D]``
            n whole frames; keys after the model's RoPE, at positions of its own.

        Raises
        ------
        ShapeError
            A frame of another size, or more new frames than are held beside the sinks.
        ValueError
            As ``LayerCache.append``; nothing has changed then.
        """
        n = self._frames_of(keys)
        if n > self.frames - min(self.sinks, self.seen):
            raise ShapeError(
                f"{n} new frames at once, and {self.frames} are held, {self.sinks} of them sinks: the new ones would "
                f"be evicted before they are seen. Append fewer at a time."
            )
        self.cache.append(keys, values)
        self.seen += n
        if (over := len(self) - self.frames) > 0:
            self.evict(over)

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Put the newest frames anew: those of the last denoising pass, in place of noisier ones.

        Parameters
        ----------
        keys, values : Tensor ``[B, H, F * n, D]``
            Of the newest n frames.

        Raises
        ------
        ShapeError
            A frame of another size, or more frames than are held beside the sinks.
        ValueError
            As ``LayerCache.append``; nothing has changed then.
        """
        n = self._frames_of(keys)
        if n > len(self) or (self.seen > len(self) and n > len(self) - self.sinks):
            raise ShapeError(f"replace: {n} frames, and {len(self)} are held, {self.sinks} of them sinks; pass fewer.")
        check_tensors(keys, values)  # before the older ones are gone
        self.cache.check_shapes(keys, values)
        self.cache.crop(len(self.cache) - n * self.tokens)
        self.cache.append(keys, values)

    def evict(self, n: int) -> None:
        """Drop the oldest ``n`` frames behind the sinks.

        Raises
        ------
        ShapeError
            More frames than are held there.
        """
        loose = max(len(self) - self.sinks, 0)
        if not 0 <= n <= loose:
            raise ShapeError(f"evict({n}): {len(self)} frames are held, {len(self) - loose} of them sinks; 0..{loose}.")
        if n:
            self.cache.evict(n * self.tokens, keep=self.sinks * self.tokens)

    def attend(self, q: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention of the newest frames' queries over every token held, their own included.

        Parameters
        ----------
        q : Tensor ``[B, HQ, n, D]``
        scale : float, optional
            Default ``D ** -0.5``.

        Returns
        -------
        Tensor ``[B, HQ, n, D]``
        """
        return self.cache.attend(q, scale=scale, causal=False)

    def reset(self) -> None:
        """Forget every frame."""
        self.cache.reset()
        self.seen = 0

    def _frames_of(self, keys: Tensor) -> int:
        n, rest = divmod(keys.shape[2], self.tokens)
        if rest or not n:
            raise ShapeError(
                f"{keys.shape[2]} new tokens are no whole number of frames of {self.tokens} tokens; frames keep their "
                f"size. Use another cache for another resolution."
            )
        return n
