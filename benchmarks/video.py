"""Rollouts of a causal video model with packed rolling caches, beside its rollouts in 16 bit.

    python benchmarks/video.py --out FOLDER [--seconds 150] [--frames 300] [--prompts 32] [--specs ...]

Trains the model of ``video_model.py`` for so many seconds (fixed seeds; as many steps as the machine makes) and leaves
it in ``FOLDER/model.pt``; a second call goes on with what lies there. Then rolls it on: 12 true frames, then as many of
its own as ``--frames`` says, each a threshold at 1/2 and the next one's input. The cache of each layer is a
``FrameCache`` of 12 frames; the newest frame is in 16 bit (a residual window of one frame, as OCTOPUS has it), every
other one is packed, in all layers. Per preset, against the 16-bit rollout of the same prompt, the mean over the frames,
and of it the least, mean and largest over the prompts:

- ``psnr`` (dB, at most 60) and ``ssim`` (7 x 7 windows);
- ``feature``: 1 - cosine of the model's own states of a frame alone, averaged over its tokens;
- ``alike``: frames until more than 1 % of the pixels differ;
- ``truth``: share of pixels that are those of the true world, which goes on as it begun;

and ``drift``: PSNR by time, the mean over the prompts and the frames from the one before up to each of ``DRIFT``.

``--specs paper`` are the names of ``parts.py``, at OCTOPUS's protocol. Rows go to ``FOLDER/NAME.json``, frames of 8
prompts to ``FOLDER/NAME.npz``.
"""

import argparse
import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import PAPER, paper_scheme, part_of, whole_scheme
from torch import Tensor
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits
from video_model import TOKENS, WINDOW, VideoModel, frame_mask, videos

import kvcodec
from kvcodec.cache.fused import FusedLayerCache, fused_refusal
from kvcodec.cli.stamp import stamp
from kvcodec.scheme import KVScheme

DENSE = "dense"
SPECS = (
    "int-8,saw-int4,kivi-4:group=32,octopus-4,octopus-3,octopus-2,turboquant-4,turboquant-3,turboquant-2,"
    "turboquant-qjl-4,turboquant-qjl-3,turboquant-qjl-2,octopus-qjl-2,hqmq-s96_r4,int-4,int-3,int-2"
)
GROUP = 32
"""Channels of a value that share a scale in the paper's video rows."""
DRIFT = (1, 3, 10, 30, 100, 300)
"""Frames by which a rollout's time is divided."""
FRAMES = 24
"""Frames of a video that is learned from."""
NOISE = 0.02
"""Largest share of a training video's pixels that are wrong in what the model sees: it is to mend its mistakes."""


def train(model: VideoModel, seconds: float, batch: int, device: torch.device) -> dict[str, Any]:
    """Learn for so many seconds; the rate rises over 3 % of them and falls as a cosine."""
    rate = 6e-4
    generator = torch.Generator(device).manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.05)
    mask, begun, steps, lost = frame_mask(FRAMES, TOKENS, WINDOW, device), time.monotonic(), 0, math.nan
    while (share := (time.monotonic() - begun) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(share / 0.03 + 1e-3, 1.0) * (0.02 + 0.98 * math.cos(share * math.pi / 2) ** 2)
        clean = videos(batch, FRAMES + 1, generator)
        wrong = torch.rand(batch, 1, 1, 1, generator=generator, device=device) * NOISE
        flipped = torch.rand(clean.shape, generator=generator, device=device) < wrong
        with torch.autocast(device.type, torch.bfloat16):
            logits = model((clean - flipped.float()).abs()[:, :-1], 0, mask)
        # the first frames do not tell the speed
        loss = binary_cross_entropy_with_logits(logits[:, 2:].float(), clean[:, 3:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 100 == 0:
            lost = float(loss.detach())
            print(f"step {steps}, {time.monotonic() - begun:.0f} s, loss {lost:.5f}", file=sys.stderr, flush=True)
    return {"steps": steps, "loss": lost, "seconds": seconds, "batch": batch}


def scheme_of(name: str) -> KVScheme:
    """A preset, or a name of ``parts.py``, with the newest frame in 16 bit."""
    return paper_scheme(name, TOKENS, GROUP) if part_of(name)[1] else whole_scheme(name, TOKENS)


@torch.inference_mode()
def rollout(model: VideoModel, prompts: Tensor, frames: int, scheme: KVScheme) -> tuple[Tensor, dict[str, Any]]:
    """Frames behind the prompts ``[B, 12, 32, 32]``, 0 and 1: ``[B, frames, 32, 32]``; and what the caches hold."""
    why = fused_refusal(scheme, 64, prompts.device)
    caches = [
        kvcodec.FrameCache(
            (kvcodec.LayerCache if why else FusedLayerCache)(scheme, layer=i), tokens=TOKENS, frames=WINDOW
        )
        for i in range(len(model.blocks))
    ]
    given, found = list(prompts.split(1, 1)), []
    for number in range(prompts.shape[1] + frames - 1):
        frame = given[number] if number < prompts.shape[1] else found[-1]
        with torch.autocast(frame.device.type, torch.bfloat16):
            logits = model(frame, number, None, caches)
        if number >= prompts.shape[1] - 1:
            found.append((logits > 0).float())
    held = [sum(cache.cache.nbytes().values()) for cache in caches]
    elements = sum(cache.cache.elements() for cache in caches)
    about = {
        "bytes": sum(held) / len(prompts), "effective_bits": 8 * sum(held) / elements, "fused": not why,
        "key_bits": scheme.key_bits(64), "value_bits": scheme.value_bits(64),
    }  # fmt: skip
    return torch.cat(found, 1), about


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity of pictures ``[N, 1, 32, 32]`` in 0..1, ``[N]`` (Wang et al. 2004, even 7 x 7 windows)."""
    mean_a, mean_b = avg_pool2d(a, 7, 1), avg_pool2d(b, 7, 1)
    var_a, var_b = avg_pool2d(a * a, 7, 1) - mean_a**2, avg_pool2d(b * b, 7, 1) - mean_b**2
    both, c1, c2 = avg_pool2d(a * b, 7, 1) - mean_a * mean_b, 0.01**2, 0.03**2
    like = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return like.mean((1, 2, 3))


@torch.inference_mode()
def features(model: VideoModel, frames: Tensor) -> Tensor:
    """States of frames ``[N, 32, 32]``, each alone, averaged over its tokens: ``[N, width]``."""
    return torch.cat([model.states(part[:, None]).mean(1) for part in frames.split(512)])


def compared(model: VideoModel, found: Tensor, wanted: Tensor, truth: Tensor) -> dict[str, Any]:
    """Least, mean and largest over the prompts of each metric."""
    batch, frames = found.shape[:2]
    wrong = (found != wanted).float().mean((2, 3))
    psnr = (-10 * wrong.clamp_min(1e-6).log10()).clamp_max(60)
    likeness = ssim(found.flatten(0, 1)[:, None], wanted.flatten(0, 1)[:, None]).view(batch, frames)
    pair = [features(model, x.flatten(0, 1)) for x in (found, wanted)]
    apart = 1 - torch.cosine_similarity(*pair, dim=-1).view(batch, frames)
    differ = wrong > 0.01
    alike = torch.where(differ.any(1), differ.float().argmax(1), frames).float()
    metrics = {
        "psnr": psnr.mean(1), "ssim": likeness.mean(1), "feature": apart.mean(1), "alike": alike,
        "truth": (found == truth).float().mean((1, 2, 3)),
    }  # fmt: skip
    spread = {name: [float(x.min()), float(x.mean()), float(x.max())] for name, x in metrics.items()}
    ends = [end for end in DRIFT if end <= frames]
    drift = {str(end): float(psnr[:, begin:end].mean()) for begin, end in pairwise([0, *ends])}
    return {**spread, "drift": drift}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which no rollout begins")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--specs", default=SPECS, help="comma-separated; paper: those of parts.py")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--name", default="video", help="of the files that are written")
    given = parser.parse_args()
    begun = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = VideoModel(given.layers, given.heads).to(device)
    shape = {"layers": given.layers, "heads": given.heads}
    if (weights := given.out / "model.pt").exists():
        kept_model = torch.load(weights, device)
        about = kept_model["about"]
        if (found_shape := {name: about[name] for name in shape}) != shape:
            sys.exit(f"{weights} holds a model of {found_shape}, not of {shape}; choose another folder.")
        model.load_state_dict(kept_model["weights"])
    else:
        about = {"parameters": sum(p.numel() for p in model.parameters()), **shape}
        about |= train(model, given.seconds, given.batch, device)
        torch.save({"about": about, "weights": model.state_dict()}, weights)
    model.eval()
    world = videos(given.prompts, WINDOW + given.frames, torch.Generator(device).manual_seed(1))
    prompts, truth = world[:, :WINDOW], world[:, WINDOW:]
    wanted, _ = rollout(model, prompts, given.frames, scheme_of(DENSE))
    rows, kept = [], {"truth": _bits(truth)}
    for spec in (DENSE, *(PAPER if given.specs == "paper" else given.specs).split(",")):
        if time.monotonic() - begun > given.deadline:
            print(f"no time for {spec}", flush=True)
            continue
        started = time.monotonic()
        try:
            found, sizes = rollout(model, prompts, given.frames, scheme_of(spec))
        except kvcodec.KVError as error:
            print(f"{spec}: {error}", flush=True)
            continue
        took = time.monotonic() - started
        rows.append({"spec": spec, **sizes, **compared(model, found, wanted, truth), "seconds": took})
        kept[spec] = _bits(found)
        shown = ("psnr", "ssim", "alike", "truth")
        numbers = " ".join(f"{name} {'/'.join(f'{x:.3g}' for x in rows[-1][name])}" for name in shown)
        print(f"{spec:20} {rows[-1]['effective_bits']:5.2f} bits {took:5.1f} s  {numbers}", flush=True)
        options = {"frames": given.frames, "prompts": given.prompts, "model": about}
        whole = {**stamp(device, 0), "options": options, "rows": rows}
        (given.out / f"{given.name}.json").write_text(json.dumps(whole, indent=1) + "\n")
        np.savez_compressed(given.out / f"{given.name}.npz", **kept)


def _bits(frames: Tensor) -> np.ndarray[Any, Any]:
    return np.packbits(frames[:8].cpu().numpy().astype(bool), axis=-1)


if __name__ == "__main__":
    main()
