"""How far one rounding goes: the same text twice, attention's output once with noise far below a code's step.

    python benchmarks/code_tips.py [--specs A,B] [--out FILE]

A key that lies on the edge between two codes moves by a whole step when its last bit changes. The layers behind see
that step, and more of their codes tip. This measures what is left of it in the probabilities of SmolLM2-135M: of a text
that is read in one piece, the share of places at which the most likely token is another one, by how much the first was
ahead there, and the KL divergence between the two readings, beside the one between a reading and the 16-bit model.
Where it is as large as that, which of several equally right tokens comes is decided by the order of sums: by batches,
by the cut of a prompt, by the kernel. Noise is relative, one Gaussian draw for each number.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

import kvcodec
from kvcodec.cli.stamp import stamp
from kvcodec.integrations.transformers.argument import passing
from kvcodec.models.loading import load, load_text
from kvcodec.progress import Progress

SPECS = ("dense", "fp8", "int-8", "saw-int4", "turboquant-4", "octopus-3:window=0", "hqmq-s24_r3")
NOISES = (1e-6, 5e-4)
"""About what float32 sums in another order differ by, and what a kernel that multiplies in fp16 adds."""
STARTS = (0, 1500, 3000)
LENGTH = 600


class Noise:
    """Multiplies what attention leaves with ``1 + scale * Gaussian``."""

    def __init__(self, model, seed=0):
        self.scale, self.generator, self.seed = 0.0, torch.Generator(), seed
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(self)

    def __call__(self, module, args):
        (x,) = args
        return (x * (1 + self.scale * torch.randn(x.shape, generator=self.generator)),) if self.scale else args


def reading(model, ids, spec, noise, scale):
    """Log-probabilities of the next token at every place, ``[tokens, vocabulary]``."""
    noise.scale = scale
    noise.generator.manual_seed(noise.seed)
    cache = kvcodec.cache_for(model, spec, prefill="decoded", probe=False)
    with torch.no_grad():
        return model(torch.tensor([ids]), **passing(model, cache)).logits[0].log_softmax(-1)


def divergence(p, q):
    return float((p.exp() * (p - q)).sum(-1).mean())


def apart(first, second, dense):
    """Figures of two readings of one piece."""
    top = first.topk(2, -1)
    changed = second.argmax(-1) != top.indices[:, 0]
    margins = (top.values[:, 0] - top.values[:, 1])[changed]
    return {
        "changed": float(changed.float().mean()),
        "largest_margin_overturned": float(margins.max()) if len(margins) else 0.0,
        "kl": divergence(first, second),
        "kl_to_16_bit": divergence(dense, second),
    }


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--specs", type=lambda x: x.split(","), default=SPECS)
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    loaded = load("smollm2-135m")
    model, ids = loaded.model, loaded.tokenizer(load_text().text)["input_ids"]
    noise, progress, rows = Noise(model), Progress(), []
    pieces = [ids[start : start + LENGTH] for start in STARTS]
    dense = [reading(model, piece, "dense", noise, 0.0) for piece in pieces]
    for spec in args.specs:
        first = [reading(model, piece, spec, noise, 0.0) for piece in pieces]
        for scale in NOISES:
            found = []
            for piece, one, plain in zip(pieces, first, dense, strict=True):
                found.append(apart(one, reading(model, piece, spec, noise, scale), plain))
            row = {name: sum(f[name] for f in found) / len(found) for name in found[0]}
            row["largest_margin_overturned"] = max(f["largest_margin_overturned"] for f in found)
            rows.append({"spec": spec, "noise": scale, "places": LENGTH * len(pieces)} | row)
            progress.say(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    if args.out:
        about = stamp(torch.device("cpu"), noise.seed)
        args.out.write_text(json.dumps({**about, "model": "smollm2-135m", "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
