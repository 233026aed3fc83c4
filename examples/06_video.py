"""Roll out a video with packed caches: a frame-causal transformer from bare tensors to pictures.

Tokens of a frame see each other and the frames in the cache. The oldest frames are evicted, the first frame stays, and
the newest frame is in 16 bit. The weights are random and the pictures meaningless; a real model uses the same caches.

Run: python examples/06_video.py [FOLDER]       (writes one picture per preset, frames side by side)
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import packedkv

SIDE, PATCH, WIDTH, HEADS = 16, 4, 128, 2
TOKENS = (SIDE // PATCH) ** 2  # tokens of a frame
HELD, FRAMES = 6, 24  # frames a cache holds; frames of the rollout


class Layer(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, cache: packedkv.FrameCache) -> Tensor:
        """Append a frame ``[B, TOKENS, WIDTH]`` to the cache and return its next states."""
        normed = torch.nn.functional.layer_norm(x, (WIDTH,))
        q, k, v = self.qkv(normed).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        cache.append(k, v)  # a real model first rotates q and k by RoPE, at its own positions (cache.seen)
        x = x + self.out(cache.attend(q).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Video(nn.Module):
    """Predict the pixels of the next frame."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.place = nn.Linear(PATCH**2, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, PATCH**2)

    def forward(self, frame: Tensor, caches: list[packedkv.FrameCache]) -> Tensor:
        """Return the pixels ``[B, SIDE, SIDE]`` in 0..1 of the frame after ``frame``."""
        n = SIDE // PATCH
        parts = frame.unflatten(1, (n, PATCH)).unflatten(3, (n, PATCH)).transpose(2, 3).flatten(3).flatten(1, 2)
        x = self.into(parts) + self.place
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        grid = self.head(x).sigmoid().unflatten(2, (PATCH, PATCH)).unflatten(1, (n, n))
        return grid.transpose(2, 3).flatten(3).flatten(1, 2)


@torch.no_grad()
def rollout(model: Video, spec: str) -> tuple[Tensor, list[packedkv.FrameCache]]:
    """Return frames ``[FRAMES, SIDE, SIDE]`` that follow a noisy frame, and the final caches."""
    scheme = replace(packedkv.get(spec), dense_key_layers=0, dense_value_layers=0, window=TOKENS, sink=TOKENS)
    caches = [
        packedkv.FrameCache(packedkv.LayerCache(scheme, layer=i), tokens=TOKENS, frames=HELD, sinks=1)
        for i in range(len(model.layers))
    ]
    frames = [torch.rand(1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))]
    for _ in range(FRAMES - 1):
        frames.append(model(frames[-1], caches))
    return torch.cat(frames), caches


def main(folder: str = "") -> None:
    """Roll out with each preset and compare with 16 bit."""
    torch.manual_seed(0)
    model = Video().eval()
    wanted, _ = rollout(model, "dense")
    for spec in ("dense", "saw-int4", "octopus-3", "octopus-2"):
        found, caches = rollout(model, spec)
        off, held = float((found - wanted).square().mean().clamp_min(1e-12)), caches[0]
        size = sum(sum(cache.cache.nbytes().values()) for cache in caches)
        print(f"{spec}: frames {held.held} of {held.seen}, {size} bytes, PSNR {-10 * torch.tensor(off).log10():.1f} dB")
        if folder:
            strip = (torch.cat(list(found), 1) * 255).round().byte()
            header = f"P5 {strip.shape[1]} {strip.shape[0]} 255\n".encode()
            (Path(folder) / f"{spec}.pgm").write_bytes(header + strip.numpy().tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
