"""Golden bytes: what was written once decodes the same for ever. A golden that is missing fails.

``pytest tests/conformance/test_golden.py --regen-golden`` writes them from the code as it is. Bytes that changed need a
higher ``Layout.version`` and a line in the changelog; the old golden stays, under the preset's name and version.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import packedkv
from packedkv.codec import Codec, Params, Role

from .conftest import VARIANTS
from .support import (
    dim_of,
    fit,
    payload_equal,
    raw,
    refusal,
    relative_mse,
    same_bits,
    sides,
    site_of,
    supported_dims,
)

LARGE = 128
"""A head_dim at which some codecs have other bytes than at the smallest one."""
MANY = 256
"""Tokens whose bytes a golden knows by their digest."""
INPUTS = "inputs.safetensors"
"""What the goldens' tokens are, ``role.tokens.head_dim``: the same for all codecs."""
ROOT = Path(__file__).parents[1] / "golden"
BUDGET = 600_000
"""Bytes that all goldens together may take."""


def golden_input(role: Role, tokens: int, dim: int) -> torch.Tensor:
    """Values that excite every branch: normal rows, an outlier channel, a zero row, a one-sided row; fp16."""
    generator = torch.Generator().manual_seed(2026 + (role == "value"))
    x = torch.randn(1, 1, tokens, dim, generator=generator)
    x[..., 5] *= 30
    x[:, :, 1] = 0
    x[:, :, -1] += 8
    return x.half()


def exact_input(role: Role, dim: int) -> torch.Tensor:
    """``MANY`` tokens of nearly normal values and an outlier channel: whole numbers over 2^8, so exact everywhere."""
    generator = torch.Generator().manual_seed(2027 + (role == "value"))
    x = torch.randint(-128, 129, (12, 1, 1, MANY, dim), generator=generator).sum(0) / 256
    x[..., 5] *= 32
    return x.half().float()


def digests(codec: Codec, role: Role, dim: int, params: Params) -> dict[str, str]:
    """Of the bytes of many tokens, by head_dim; constants fitted on a sample are there for ``dim`` alone."""
    found = {}
    for d in {dim} if "tensor" in codec.needs else sorted({dim, *supported_dims(codec)}):
        own = params if d == dim else fit(codec, site_of(role, heads=1, dim=d))
        payload = codec.encode(codec.to_code(exact_input(role, d), own), own)
        bytes_ = b"".join(name.encode() + raw(payload[name]).numpy().tobytes() for name in sorted(payload))
        found[str(d)] = hashlib.sha256(bytes_).hexdigest()[:16]
    return found


def tokens_of(codec: Codec) -> int:
    return max(4, codec.block_tokens)


def make(codec: Codec, role: Role, dim: int) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Tensors and description of one role's golden."""
    x = golden_input(role, tokens_of(codec), dim)
    params = fit(codec, site_of(role, heads=1, dim=dim))
    payload = codec.encode(codec.to_code(x.float(), params), params)
    decoded = codec.from_code(codec.decode(payload, params), params)
    layout = codec.layout(dim)
    tensors = {f"{role}.decoded": decoded.half()}
    tensors |= {f"{role}.payload.{name}": t.contiguous() for name, t in payload.items()}
    if "tensor" in codec.needs:
        tensors |= {f"{role}.params.{name}": t for name, t in params.items()}
    fields = [{"name": f.name, "dtype": f.dtype, "shape": list(f.shape)} for f in layout.fields]
    about = {"version": layout.version, "block_tokens": layout.block_tokens, "fields": fields}
    return tensors, about | {"digests": digests(codec, role, dim, params)}


def write(folder: Path, spec: str, dim: int) -> None:
    scheme = packedkv.get(spec)
    config: dict[str, object] = {"spec": spec, "scheme": json.loads(scheme.to_json()), "head_dim": dim}
    tensors: dict[str, torch.Tensor] = {}
    inputs = load_file(folder.parent / INPUTS)
    for role, codec in sides(scheme):
        found, config[role] = make(codec, role, dim)
        tensors |= found
        inputs.setdefault(f"{role}.{tokens_of(codec)}.{dim}", golden_input(role, tokens_of(codec), dim))
    save_file(inputs, folder.parent / INPUTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "data.safetensors")


def goldens() -> dict[str, tuple[str, int]]:
    """Folder to spec and head_dim: the smallest, and a larger one where bytes have another version there."""
    found = {}
    for spec in (*packedkv.presets(), *VARIANTS):
        scheme, folder = packedkv.get(spec), re.sub(r"[:=,]", "_", spec)
        dim = dim_of(scheme)
        found[folder] = (spec, dim)
        codecs = [codec for _, codec in sides(scheme)]
        if any(not refusal(c, LARGE) and c.layout(LARGE).version != c.layout(dim).version for c in codecs):
            found[f"{folder}_head_dim_{LARGE}"] = (spec, LARGE)
    return found


@pytest.fixture(scope="module", params=goldens())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def spec(name) -> str:
    """Of the golden; in the place of the suite's."""
    return goldens()[name][0]


@pytest.fixture(scope="module")
def golden(name, request: pytest.FixtureRequest) -> Path:
    (spec, dim), folder = goldens()[name], ROOT / name
    if request.config.getoption("--regen-golden", default=False):
        write(folder, spec, dim)
    assert (folder / "config.json").is_file(), (
        f"no golden for {spec}: run pytest tests/conformance/test_golden.py --regen-golden and commit {folder}"
    )
    return folder


def roles(folder: Path):
    """Role, codec as saved, params, tensors and description of each side of a golden."""
    config = json.loads((folder / "config.json").read_text())
    scheme = packedkv.from_json(json.dumps(config["scheme"]))
    tensors, inputs = load_file(folder / "data.safetensors"), load_file(folder.parent / INPUTS)
    for role, codec in sides(scheme):
        tensors[f"{role}.input"] = inputs[f"{role}.{tokens_of(codec)}.{config['head_dim']}"]
        params: Params = fit(codec, site_of(role, heads=1, dim=config["head_dim"]))
        if "tensor" in codec.needs:
            mark = f"{role}.params."
            params = {n.removeprefix(mark): t for n, t in tensors.items() if n.startswith(mark)}
        mark = f"{role}.payload."
        payload = {n.removeprefix(mark): t for n, t in tensors.items() if n.startswith(mark)}
        yield role, codec, params, payload, tensors, config


def test_golden_bytes_are_read_and_written_as_ever(golden):
    """Decoded values, the bytes of the same input, and the digests of many tokens, on every machine."""
    for role, codec, params, payload, tensors, config in roles(golden):
        assert codec.layout(config["head_dim"]).version == config[role]["version"], "keep the old golden, add a new one"
        decoded = codec.from_code(codec.decode(payload, params), params)
        expected = tensors[f"{role}.decoded"]
        # held as fp16 to stay small: the last bit may round either way on another machine
        torch.testing.assert_close(decoded, expected.float(), rtol=2**-10, atol=1e-6)
        again = codec.encode(codec.to_code(tensors[f"{role}.input"].float(), params), params)
        for name, field in again.items():
            assert same_bits(field.contiguous(), payload[name]), f"{role}.{name}: other bytes than the golden's"
        assert payload_equal(again, payload)
        assert digests(codec, role, config["head_dim"], params) == config[role]["digests"], f"{role}: other bytes"


def test_golden_describes_the_layout_and_the_preset(golden, spec):
    """Its values resemble the input, which ``golden_input`` draws: a broken codec's golden would pass for ever."""
    config = json.loads((golden / "config.json").read_text())
    assert config["spec"] == spec
    stored = packedkv.from_json(json.dumps(config["scheme"]))
    assert packedkv.get(spec).allows(stored), "the preset means something else now"
    for role, codec, _, _, tensors, _ in roles(golden):
        fields = codec.layout(config["head_dim"]).fields
        described = [{"name": f.name, "dtype": f.dtype, "shape": list(f.shape)} for f in fields]
        assert described == config[role]["fields"], role
        x, drawn = tensors[f"{role}.input"], golden_input(role, tokens_of(codec), config["head_dim"])
        # up to the last bit: torch.randn takes another logarithm where a machine has other instructions
        torch.testing.assert_close(x, drawn, rtol=2**-10, atol=1e-6)
        assert relative_mse(x.float(), tensors[f"{role}.decoded"].float()) < 0.5, role


def test_no_golden_is_lost_or_too_large():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir()}
    assert folders >= set(goldens())
    for folder in folders:  # those of presets that are gone must still load
        config = json.loads((ROOT / folder / "config.json").read_text())
        packedkv.from_json(json.dumps(config["scheme"]))
    assert sum(p.stat().st_size for p in ROOT.rglob("*") if p.is_file()) < BUDGET
