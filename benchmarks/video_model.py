"""A small causal video transformer and the world it learns: two digits that move and bounce.

Frames are 32 x 32 binary pixels, 64 tokens of 4 x 4. Tokens of a frame see each other and the frames of a window before
it; the model gives each pixel of the next frame a logit. Keys and queries are turned by the frame's number (RoPE over
half of the channels), so a rollout goes on for ever. 8 layers, 6 heads of 64, 14 million parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

SIDE, PATCH = 32, 4
TOKENS = (SIDE // PATCH) ** 2
"""Tokens of a frame."""
WINDOW = 12
"""Frames that a frame sees, itself included."""
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
"""Digits of 5 x 7 pixels, drawn twice as large."""


def videos(batch: int, frames: int, generator: torch.Generator) -> Tensor:
    """Draw ``[batch, frames, 32, 32]`` of 0 and 1: two digits each, 1 or 2 pixels a frame in both directions."""
    device = generator.device
    glyphs = torch.tensor([[[float(c) for c in row] for row in g.split()] for g in GLYPHS], device=device)
    glyphs = glyphs.repeat_interleave(2, 1).repeat_interleave(2, 2)  # [10, 14, 10]

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    digit = drawn(0, 10, batch, 2)
    room = torch.tensor([SIDE - glyphs.shape[1], SIDE - glyphs.shape[2]], device=device)  # of the upper left corner
    begun = (torch.rand(batch, 2, 2, generator=generator, device=device) * (room + 1)).long()
    speed = drawn(1, 3, batch, 2, 2) * (2 * drawn(0, 2, batch, 2, 2) - 1)
    t = torch.arange(frames, device=device)[:, None, None, None]
    folded = (begun + speed * t) % (2 * room)  # a triangle wave: reflected at both walls
    corner = torch.where(folded > room, 2 * room - folded, folded)  # [frames, batch, 2, 2]
    canvas = torch.zeros(frames, batch, SIDE, SIDE, device=device)
    rows, columns = (torch.arange(n, device=device) for n in glyphs.shape[1:])
    at = torch.arange(frames, device=device)[:, None, None, None], torch.arange(batch, device=device)[:, None, None]
    for i in range(2):
        y = corner[:, :, i, 0, None, None] + rows[:, None]
        x = corner[:, :, i, 1, None, None] + columns
        ink = glyphs[digit[:, i]].expand(frames, -1, -1, -1)
        canvas[at[0], at[1], y, x] = torch.maximum(canvas[at[0], at[1], y, x], ink)
    return canvas.transpose(0, 1)


def patches(frames: Tensor) -> Tensor:
    """``[..., 32, 32]`` to ``[..., 64, 16]``."""
    n = SIDE // PATCH
    return frames.unflatten(-2, (n, PATCH)).unflatten(-1, (n, PATCH)).transpose(-3, -2).flatten(-4, -3).flatten(-2)


def pictures(tokens: Tensor) -> Tensor:
    """Undo ``patches``."""
    n = SIDE // PATCH
    return tokens.unflatten(-1, (PATCH, PATCH)).unflatten(-3, (n, n)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def frame_mask(frames: int, tokens: int, window: int, device: Any) -> Tensor:
    """What a token sees, ``[frames * tokens] * 2``: its own frame and those of the window before it."""
    number = torch.arange(frames, device=device).repeat_interleave(tokens)
    back = number[:, None] - number
    return (back >= 0) & (back < window)


class Attention(nn.Module):
    """Attention over all frames at once, or over those of a cache."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = _turned(q, *turn), _turned(k, *turn)
        if cache is None:
            o = sdpa(q, k, v, mask)
        else:
            cache.append(k, v)
            o = cache.attend(q)
        return self.out(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first half of the channels ``[B, H, n, D]``, turned in pairs."""
    a, b, rest = x.tensor_split((x.shape[-1] // 4, x.shape[-1] // 2), -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention, self.behind = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any) -> Tensor:
        x = x + self.attention(self.before(x), turn, mask, cache)
        return x + self.feed(self.behind(x))  # type: ignore[no-any-return]


class VideoModel(nn.Module):
    """Logits of the next frame's pixels."""

    def __init__(self, layers: int = 8, heads: int = 6, head_dim: int = 64) -> None:
        super().__init__()
        width = heads * head_dim
        self.into, self.place = nn.Linear(PATCH**2, width), nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, PATCH**2)
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(head_dim // 4) * 4 / head_dim), persistent=False)

    def forward(self, frames: Tensor, first: int = 0, mask: Tensor | None = None, caches: Sequence[Any] = ()) -> Tensor:
        """Logits ``[B, T, 32, 32]`` of what follows each of ``frames [B, T, 32, 32]``, numbered from ``first`` on."""
        return pictures(self.head(self.norm(self.states(frames, first, mask, caches))).unflatten(1, (-1, TOKENS)))

    def states(self, frames: Tensor, first: int = 0, mask: Tensor | None = None, caches: Sequence[Any] = ()) -> Tensor:
        """States of the last layer, ``[B, T * 64, width]``."""
        x = (self.into(patches(frames)) + self.place).flatten(1, 2)
        number = torch.arange(first, first + frames.shape[1], device=x.device).repeat_interleave(TOKENS)
        angle = number[:, None] * self.frequencies
        turn = angle.cos(), angle.sin()
        for i, block in enumerate(self.blocks):
            x = block(x, turn, mask, caches[i] if caches else None)
        return x  # type: ignore[no-any-return]
