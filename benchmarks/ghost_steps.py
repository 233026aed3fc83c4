"""What each step of `ghost` gains: one row of `kvcodec compare` for each, on the windows of one text.

    python benchmarks/ghost_steps.py MODEL [--bits 3] [--params FILE] [--device cuda] [--dtype bfloat16] --out FILE

Steps that no option takes away are taken away here, in the reference: the query's weights and the scales tried. With a
file of `kvcodec fit MODEL ghost-3:transform=klt` the last step is measured too. `docs/ghost.md` has the table.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvcodec.cli.measure.compare import Settings, compare
from kvcodec.cli.measure.rows import Row, write_json
from kvcodec.codecs import ghost
from kvcodec.files.params import read_params
from kvcodec.models.loading import load, load_text
from kvcodec.progress import Progress

ALIKE = {"query_cost": lambda energy: torch.ones_like(energy, dtype=torch.float64)}
ONE_SCALE = {"TRIED": (0,)}
"""The scale nearest to the token's root mean square."""


def steps(bits: str, fitted: bool) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, spec and what is replaced in the codec's module, of each step; then what is taken away from the last.

    >>> [name for name, _, _ in steps("3", fitted=False)][:3]
    ['rotation, one width', 'keys without their mean before RoPE', 'channels, bits by size']
    """
    own = f"ghost-{bits}"
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("rotation, one width", f"turboquant-{bits}:mean=none,sink=4", {}),
        ("keys without their mean before RoPE", f"turboquant-{bits}:mean=pre,sink=4", {}),
        ("channels, bits by size", own, ALIKE | ONE_SCALE),
        ("bits by size and queries", own, ONE_SCALE),
        ("a scale of six", own, {}),
        ("uncorrelated channels, fitted", f"{own}:transform=klt", {}),
        ("a scale of six, mean after RoPE", f"{own}:mean=post", {}),
        ("a scale of six, keys with their mean", f"{own}:mean=none", {}),
        ("a scale of six, first tokens encoded", f"{own}:sink=0", {}),
    ]
    return [step for step in found if fitted or "klt" not in step[1]]


@contextmanager
def replaced(names: dict[str, Any]) -> Iterator[None]:
    """Other values of the codec's module for the block."""
    before = {name: getattr(ghost, name) for name in names}
    try:
        for name, value in names.items():
            setattr(ghost, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(ghost, name, value)


def main() -> None:
    """Measure and write; the file holds what is measured after each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--bits", default="3")
    parser.add_argument("--params", type=Path, help="of transform=klt")
    parser.add_argument("--text", help="default: the packaged head of WikiText-2")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--window-tokens", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    text, progress = load_text(args.text), Progress()
    klt = read_params(args.params) if args.params else None
    settings = Settings(
        windows=args.windows,
        window_tokens=args.window_tokens,
        new_tokens=0,
        queries=0,
        text_name=text.name,
        text_sha256=text.sha256,
        probe="warn",
    )
    model = load(args.model, device=args.device, dtype=args.dtype, progress=progress)
    rows: list[Row] = []
    for name, spec, names in steps(args.bits, klt is not None):
        params = [klt] if klt is not None and "klt" in spec else []
        with replaced(names):
            rows += [{"step": name, **row} for row in compare(model, [spec], text.text, settings, params=params)]
        write_json(args.out, rows)
        print(f"{name}: KL {rows[-1]['kl']:.4f} at {rows[-1]['effective_bits']:.2f} bits", flush=True)


if __name__ == "__main__":
    main()
