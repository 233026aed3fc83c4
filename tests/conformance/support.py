"""Inputs and sites of the conformance tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, Codec, Params, Payload, Role, Sample, Site
from packedkv.files import container
from packedkv.files.container import Kind
from packedkv.scheme import KVScheme

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
quick = settings(settings.get_profile("conformance"))


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Normal values of ``dtype``, the same on every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def kv(tokens: int, *, batch: int = 2, heads: int = 2, dim: int = 64, seed: int = 0, dtype=torch.float16):
    """Keys and values ``[B, H, N, D]``."""
    both = gaussian(2, batch, heads, tokens, dim, seed=seed, dtype=dtype)
    return both[0], both[1]


def site_of(role: Role = "key", *, layer: int = 0, heads: int = 2, dim: int = 64, seed: int = 0) -> Site:
    return Site(layer, role, heads, dim, seed)


def refusal(codec: Codec, dim: int) -> str:
    """What a codec says against a head_dim; empty when it takes it."""
    try:
        codec.layout(dim)
    except packedkv.ShapeError as error:
        return str(error)
    return ""


def supported_dims(codec: Codec) -> list[int]:
    """The head_dims of real models that a codec takes."""
    return [dim for dim in HEAD_DIMS if not refusal(codec, dim)]


def dim_of(scheme: KVScheme) -> int:
    """Smallest head_dim that both roles take: tests that do not vary D stay small."""
    both = [supported_dims(scheme.key), supported_dims(scheme.value)]
    return min(set(both[0]) & set(both[1]))


def fit(codec: Codec, site: Site) -> Params:
    """Constants of a site; codecs that need data see a fixed Gaussian sample, of uneven queries too if need be."""
    sample = gaussian(1, site.num_heads, 256, site.head_dim, seed=99).float() if codec.needs else None
    if "queries" not in codec.needs:
        return codec.fit(site, Sample(sample))
    queries = gaussian(1, 2 * site.num_heads, 256, site.head_dim, seed=98) * torch.logspace(1, -1, site.head_dim)
    return codec.fit(site, Sample(sample, queries @ torch.linalg.qr(gaussian(*[site.head_dim] * 2, seed=97).float()).Q))


def given_params(scheme: KVScheme, *, layer: int = 0, heads: int = 2, dim: int = 64, seed: int = 0):
    """``params=`` for compress and LayerCache: only for roles that cannot fit without data."""
    return {
        role: fit(scheme.codec(role), Site(layer, role, heads, dim, seed)) for role in ROLES if scheme.codec(role).needs
    }


def cache_of(scheme: KVScheme, *, heads: int = 2, dim: int = 64, **options) -> packedkv.LayerCache:
    """A LayerCache whose constants do not depend on what is appended."""
    layer, seed = options.get("layer", 0), options.get("seed", 0)
    params = given_params(scheme, layer=layer, heads=heads, dim=dim, seed=seed)
    return packedkv.LayerCache(scheme, params=params, **options)


def sides(scheme: KVScheme) -> Iterator[tuple[Role, Codec]]:
    for role in ROLES:
        yield role, scheme.codec(role)


def block_of(scheme: KVScheme) -> int:
    return max(scheme.key.block_tokens, scheme.value.block_tokens)


def edge_lengths(scheme: KVScheme) -> list[int]:
    """Lengths at which a schedule can go wrong: around blocks, sink and window."""
    g, dense = block_of(scheme), scheme.sink + scheme.window
    edges = {0, 1, g - 1, g, g + 1, scheme.sink, dense, dense + 1, dense + g - 1, dense + g, dense + g + 1}
    return sorted(edges)


def payload_equal(a: Payload, b: Payload) -> bool:
    """Bit for bit: NaN patterns count as bits."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(raw(a[n]), raw(b[n])) for n in a)


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return x.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def assert_alike(a: LayerCache, b: LayerCache, where: str = "") -> None:
    """Same tokens, bytes and constants; same split into sink, pages and window."""
    assert (a.scheme, len(a), a.start, a.batch) == (b.scheme, len(b), b.start, b.batch), where
    assert (a.store is None) == (b.store is None), where
    if a.store is not None:
        assert all(same_bits(x, y) for x, y in zip(a.decode(), b.decode(), strict=True)), where
    for role, state in a.roles.items():
        other = b.roles[role]
        assert (state.runs, state.params is None) == (other.runs, other.params is None), f"{where}, {role}"
        assert all(same_bits(x, other.params[name]) for name, x in (state.params or {}).items()), f"{where}, {role}"
        for part in ("sink", "window"):
            x, y = getattr(state, part), getattr(other, part)
            assert same_bits(x, y) if isinstance(x, Tensor) else x == y, f"{where}, {role}, {part}"


def contents(path: Path, kind: Kind) -> tuple[dict, dict[str, Tensor]]:
    """Header and tensors of a file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][kind.mark]), load_file(path)


def signed(path: Path, kind: Kind, header: dict, tensors: dict[str, Tensor]) -> None:
    """Write a changed file with a fitting sha256."""
    header = {name: value for name, value in header.items() if name != "sha256"}
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    header["sha256"] = container.digest(header, tensors)
    save_file(tensors, path, metadata={kind.mark: json.dumps(header, sort_keys=True)})


def relative_mse(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().sum() / x.double().square().sum())


SMALLEST = 2.0**-24
KINDS = ("normal", "zero", "constant", "outlier", "extreme", "largest", "subnormal", "one-sided", "alternating")


def row_block(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Values of one kind, float32 but exact in fp16."""
    x = gaussian(*shape, seed=seed).float()
    if kind == "zero":
        x = torch.zeros(shape)
    elif kind == "constant":
        x = torch.full(shape, float(x.flatten()[0]) if x.numel() else 1.0)
    elif kind == "outlier":
        x[..., 3] = 1e4
    elif kind == "extreme":
        x = torch.where(x > 0, 65504.0, -65504.0)
    elif kind == "largest":  # a rotation gathers the whole row in one channel
        x = torch.full(shape, 65504.0)
    elif kind == "subnormal":
        x = (x * 3).round() * SMALLEST
    elif kind == "one-sided":
        x = 1000.0 + x
    elif kind == "alternating":
        x = torch.where(torch.arange(shape[-1]) % 2 == 0, 65504.0, -SMALLEST).expand(shape)
    return x.half().float().clone()


@st.composite
def mixtures(draw, batch: int, heads: int, tokens: int, dim: int) -> Tensor:
    """``[B, H, N, D]`` float32 (exact in fp16): each run of tokens of another kind and magnitude."""
    parts, left = [], tokens
    least = max(1, tokens // 128)  # so that the simplest input, runs of the least length, stays small
    while left:
        n = draw(st.integers(min(least, left), left))
        kind = draw(st.sampled_from(KINDS))
        x = row_block(kind, (batch, heads, n, dim), draw(st.integers(0, 2**16)))
        if kind == "normal":
            x = (x * 2.0 ** draw(st.integers(-14, 13))).half().float()
        parts.append(x)
        left -= n
    return torch.cat(parts, 2) if parts else torch.zeros(batch, heads, 0, dim)
