"""Engines load models under another default dtype; constants, bytes and tables must not depend on it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import packedkv
from packedkv.codec import ROLES, Params, Role, Sample, Site
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import constants_for
from packedkv.kernels.spec import encoder, reader

HEADS, DIM, TOKENS = 2, 128, 128
VARIANTS = (
    *(
        "saw-int4:rotate=kv",
        "saw-int4:zero=float",
        "ultraquant:scale=real",
        "ultra-tq:norm=block",
        "ultra-tq:table=sphere",
    ),
    *("turboquant-3:norm=fp32", "octopus-3:rounding=full", "hqmq-s24_r3:outliers=3", "hqmq-s96_r4:packing=radix"),
    *("innerq-base:norm=false", "fp8:scale=none"),
)
SPECS = (*packedkv.presets(), *VARIANTS)


def made(spec: str, role: Role, x: torch.Tensor) -> dict[str, Any]:
    """Everything that is derived from a spec: constants, bytes, what they mean, the kernels' tables."""
    codec = packedkv.get(spec).for_layer(3, 8).codec(role).for_dtype(x.dtype)
    site = Site(3, role, HEADS, DIM, 0, torch.device("cpu"))
    params: Params = (
        codec.settle([codec.fit(site, Sample(x.float(), x.float()))])[0] if codec.needs else codec.fit(site)
    )
    payload = codec.encode(codec.to_code(x.float(), params), params)
    found = {f"constant {name}": value for name, value in params.items()}
    found |= {f"field {name}": value for name, value in payload.items()}
    found["decoded"] = codec.decode(payload, params)
    for what, find in (("encoder", encoder), ("reader", reader)):
        try:
            side = find(codec, DIM, role)
        except UnsupportedError:
            continue
        tables, factor, _, matrix = constants_for(side, params, HEADS, DIM)
        found |= {f"{what}'s tables": tables, f"{what}'s factor": factor, f"{what}'s matrix": matrix}
    return found


def everything(spec: str) -> dict[str, Any]:
    """``made`` for keys and values."""
    x = torch.randn(1, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16()
    return {f"{role}: {name}": value for role in ROLES for name, value in made(spec, role, x).items()}


def main(path: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    torch.save({spec: everything(spec) for spec in SPECS}, path)


def test_nothing_depends_on_the_default_dtype(tmp_path: Path) -> None:
    """Compared with a process whose default dtype is bfloat16: one of its own, because much is computed once."""
    code = f"from tests.kernels.test_default_dtype import main; main({str(tmp_path / 'found.pt')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    elsewhere = torch.load(tmp_path / "found.pt")
    assert torch.get_default_dtype() == torch.float32
    different = []
    for spec in SPECS:
        for name, value in everything(spec).items():
            other = elsewhere[spec][name]
            same = other is None if value is None else other.dtype == value.dtype and torch.equal(other, value)
            different += [] if same else [(spec, name)]
    assert different == []
