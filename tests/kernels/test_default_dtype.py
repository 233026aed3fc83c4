"""Engines load models under another default dtype; constants, bytes and tables must not depend on it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcodec
from kvcodec.codec import ROLES, Params, Role, Sample, Site
from kvcodec.errors import UnsupportedError
from kvcodec.kernels.constants import constants_for
from kvcodec.kernels.spec import encoder, reader

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
SPECS = (*kvcodec.presets(), *VARIANTS)


def made(spec: str, role: Role, x: torch.Tensor) -> dict[str, Any]:
    """Everything that is derived from a spec: constants, bytes, what they mean, the kernels' tables."""
    codec = kvcodec.get(spec).for_layer(3, 8).codec(role).for_dtype(x.dtype)
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


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds whose default dtype is bfloat16: one of its own, because much is computed once and kept."""
    path = tmp_path_factory.mktemp("bfloat16") / "found.pt"
    code = f"from tests.kernels.test_default_dtype import main; main({str(path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    found: dict[str, Any] = torch.load(path)
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_depends_on_the_default_dtype(spec: str, elsewhere: dict[str, Any]) -> None:
    assert torch.get_default_dtype() == torch.float32
    for name, value in everything(spec).items():
        other = elsewhere[spec][name]
        if value is None:
            assert other is None, name
            continue
        assert other.dtype == value.dtype, (name, other.dtype, value.dtype)
        assert torch.equal(other, value), name
