"""Encoders of the CPU kernels: every byte of the pages as the reference codec writes it, in every instruction set."""

from functools import cache

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.codec import FP16_MAX, ROLES, Codec, Dense, DenseDtype, Role, Sample, Site, page_layout
from packedkv.codecs.fp8 import Fp8
from packedkv.codecs.ghost import ALLOWED, Ghost
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hqmq import RADII, SIZES, Hqmq
from packedkv.codecs.innerq import InnerQ, Reading
from packedkv.codecs.octopus import Octopus
from packedkv.codecs.octopus_qjl import OctopusQJL
from packedkv.codecs.q4_0 import Q40
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.compile import HERE
from packedkv.kernels.cpu.encode import encode, prepared
from packedkv.kernels.cpu.engine import CpuEngine
from packedkv.kernels.cpu.spec import cpu_spec
from packedkv.kernels.mean import RotatedMean
from packedkv.kernels.tokens import NewTokens
from packedkv.ops.lloyd_max import midpoints
from packedkv.ops.rope import NOT_TURNED, Rotary
from packedkv.scheme import KVScheme
from packedkv.store.pages import PageStore
from tests.kernels.conftest import ABLE, use
from tests.kernels.klt import Klt

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
READINGS: tuple[Reading, ...] = ("literal", "signed")
CODECS: tuple[Codec, ...] = (
    SawInt4(),
    SawInt4(1),
    SawInt4(zero="float"),
    *(TurboQuant(bits) for bits in (1, 2, 3, 4, 5, 6)),
    TurboQuant(4, "fp32"),
    *(GroupInt(bits, group) for bits in (2, 3, 4, 8) for group in (0, 32, 64)),
    *(GroupInt(bits, 0, symmetric=True) for bits in (2, 3, 4, 8)),
    *(GroupInt(bits, 32, along="tokens") for bits in (2, 3, 4, 8)),
    GroupInt(2, 64, along="tokens"),
    *(Fp8(scaled) for scaled in (False, True)),
    *(Ghost(bits) for bits in ALLOWED),
    Klt(3, "klt"),
    *(UltraQuant(scale=scale, rotate=rotate) for scale in ("real", "pow2") for rotate in (False, True)),
    *(GroupInt(bits, 16, along="tokens", symmetric=True) for bits in (4, 8)),
    Dense("float16"),
    Dense("bfloat16"),
    Dense("float32"),
    *(Octopus(*bits) for bits in ((1, 1), (3, 1), (4, 2), (5, 3), (3, 2), (4, 3), (5, 4), (2, 6), (6, 4), (7, 2))),
    *(Octopus(4, 2, rounding) for rounding in ("scalar", "local_2x2", "full")),
    *(Octopus(*bits, norm="fp32") for bits in ((3, 1), (5, 3))),
    *(Hqmq(s, r) for s in SIZES for r in RADII),
    Hqmq(24, 4, codebook="int8"),
    *(InnerQ(bits, along, reading) for bits in (2, 3) for along in ("channels", "tokens") for reading in READINGS),
    *(InnerQ(3, along, norm=True) for along in ("channels", "tokens")),
    *(UltraTQ(norm, table) for norm in ("token", "block") for table in ("gaussian", "sphere", "calibrated")),
    *(TurboQuantQJL(bits) for bits in (2, 3, 4)),
    TurboQuantQJL(3, "fp32"),
    *(OctopusQJL(*bits) for bits in ((1, 1), (3, 1), (4, 2), (5, 3))),
    OctopusQJL(5, 4, "full", "fp32"),
    *(Q40(rotation) for rotation in ("whole", "64", "none")),
)
HEADS = 2
pytestmark = pytest.mark.usefixtures("compiled")


@cache
def _tokens(batch: int, count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Usual tokens, and extreme ones: zeros, the smallest and largest numbers, constant and one-sided rows."""
    x = torch.randn(batch, HEADS, count, dim, generator=torch.Generator().manual_seed(dim + count))
    x[..., ::7] *= 30
    special = torch.zeros(8, dim)
    special[1] = -0.0
    special[2] = 2.0**-24
    special[3, ::2], special[3, 1::2] = FP16_MAX, -FP16_MAX
    special[4] = FP16_MAX
    special[5] = torch.linspace(5, 6, dim)
    special[6] = torch.linspace(-3e-5, 2e-5, dim)  # denormal in fp16
    special[7, dim // 3] = -FP16_MAX
    x[:, :, : min(8, count)] = special[: min(8, count)]
    most = 65280.0 if dtype == torch.bfloat16 else FP16_MAX  # the largest that bf16 has below 65504
    return x.clamp(-most, most).to(dtype)


def _written(
    codec: Codec,
    x: Tensor,
    role: Role,
    first: int,
    rounded: bool = False,
    removed: tuple[Rotary, Tensor, Tensor] | None = None,
) -> tuple[Tensor, list[Tensor], set[int]]:
    """Pages of the reference, pages of each instruction set, and their flags; ``removed``: mean and positions."""
    dim, less = x.shape[3], None
    layout = page_layout(codec, codec, dim, dim)
    spec = cpu_spec(codec, codec, dim, layout.page_tokens)
    rest = x.float()
    if removed is not None:
        turn, mean, positions = removed
        less = RotatedMean(mean, *turn.angles(positions), turn.interleaved)
        rest = rest - turn.turn(mean[:, :, None], positions)
    params = codec.fit(Site(0, role, HEADS, dim), Sample(rest))
    slots = first + x.shape[2]
    store = PageStore(layout, x.shape[0], HEADS, x.device, slots)
    store.pages.copy_(torch.arange(store.pages.numel()).view(store.pages.shape) % 251)  # whatever was there
    found, flags = [store.pages.clone() for _ in ABLE], set[int]()
    clean = (x.half() if rounded else x).float().nan_to_num(0.0, 0.0, 0.0)
    if removed is not None:
        clean = clean - turn.turn(mean[:, :, None], positions)
    store.write(role, first, codec.encode(codec.to_code(clean, params), params))
    at = torch.full((x.shape[0],), first, dtype=torch.int32)
    encoder = spec.encoder(role)
    assert encoder is not None
    own = {role: constants_for(encoder, params, HEADS, dim)}
    common, rounds = prepared(spec), (role,) if rounded else ()
    for variant, pages in zip(ABLE, found, strict=True):
        bad = torch.zeros(1, dtype=torch.int32)
        with pytest.MonkeyPatch.context() as patch:
            use(variant, patch)
            new = NewTokens({role: x}, at, bad, less)
            encode(new, pages, store.table, common=common, constants=own, rounded=rounds)
        flags.add(int(bad))
    return store.pages, found, flags


def _agree(want: Tensor, found: list[Tensor], case: object = "") -> None:
    """Assert that the pages of every instruction set are the reference's."""
    assert [variant for variant, pages in zip(ABLE, found, strict=True) if not torch.equal(pages, want)] == [], case


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_bytes_are_the_references(codec: Codec) -> None:
    unit = codec.block_tokens
    for i, dim in enumerate((64, 80, 96, 128, 256)):
        if (isinstance(codec, Q40) and dim % 32) or (isinstance(codec, TurboQuantQJL | OctopusQJL) and dim & (dim - 1)):
            continue
        if isinstance(codec, Ghost) and dim * codec.total % 64:
            continue
        for batch, count in ((1, 1), (2, 37), (1, 131)):
            x = _tokens(batch, -(-count // unit) * unit, dim, DTYPES[(i + count) % 3])
            if batch == 2:  # as models give them: token by token
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            want, found, flags = _written(codec, x, ROLES[i % 2], 3 * unit)
            assert flags == {0}
            _agree(want, found, (dim, batch, count, x.dtype))


@pytest.mark.parametrize(
    ("turn", "dim"),
    [
        (Rotary(1e6 ** -(torch.arange(0, 1, 1 / 64))), 128),
        (Rotary(1e4 ** -(torch.arange(0, 1, 1 / 16)), scaling=1.2, interleaved=True), 64),
        (NOT_TURNED, 96),
    ],
    ids=["all of 128", "half of 64", "after RoPE"],
)
@pytest.mark.parametrize(
    "codec",
    [SawInt4(), TurboQuant(3), GroupInt(2, 32, along="tokens"), Octopus(), Hqmq(), Ghost(3), Fp8(), Dense("float16")],
    ids=str,
)
def test_keys_lose_their_mean(codec: Codec, turn: Rotary, dim: int) -> None:
    """To the bytes of the reference, which subtracts what RoPE's definition gives; a mean for all, or one each."""
    rng, unit = torch.Generator().manual_seed(3), codec.block_tokens
    for batch, count, dtype in ((1, 1, torch.float16), (2, 70, torch.float32), (3, 33, torch.bfloat16)):
        tokens = -(-count // unit) * unit
        mean = 40 * torch.randn(1 if batch == 2 else batch, HEADS, dim, generator=rng)
        mean[..., ::3] = 0
        positions = torch.tensor([-3, 100_000, 0][:batch])[:, None] + torch.arange(tokens)
        x = torch.randn(batch, HEADS, tokens, dim, generator=rng) + turn.turn(mean[:, :, None], positions)
        removed = (turn, mean, positions)
        want, found, flags = _written(codec, x.to(dtype), "key", unit, dtype == torch.float32, removed)
        assert flags == {0}
        _agree(want, found, (batch, count))


def test_both_roles_are_encoded_by_kernels() -> None:
    if reason := library.refusal(torch.device("cpu")):
        pytest.skip(reason)
    for name in (
        "saw-int4", "int-4", "turboquant-4", "kivi-4", "kivi-tq-4", "fp8", "ultraquant", "octopus-3", "hqmq-s96_r4",
        "ultra-tq", "innerq-base", "innerq-small", "q4_0", "dense", "octopus-qjl-3", "turboquant-qjl-3", "ghost-3",
    ):  # fmt: skip
        scheme = packedkv.get(name).for_layer(4, 8)
        engine = CpuEngine(scheme.key, scheme.value, 64, 128)
        assert {engine.written_by(role) for role in ROLES} == {engine.name}, name


def test_every_encoder_is_tested() -> None:
    named = set()
    for codec in CODECS:
        spec = cpu_spec(codec, codec, 64, page_layout(codec, codec, 64, 64).page_tokens)
        named |= {encoder.name for role in ROLES if (encoder := spec.encoder(role)) is not None}
    lines = (HERE / "encoders.h").read_text().splitlines()
    assert {line.split('"')[1] for line in lines if line.startswith('    {"')} == named


@pytest.mark.parametrize(
    "codec",
    [SawInt4(), TurboQuant(4), GroupInt(2, 32), GroupInt(2, 32, along="tokens"), Octopus(), Hqmq()],
    ids=str,
)
def test_threads_do_not_show(codec: Codec) -> None:
    x, before, pages = _tokens(2, 192, 128, torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            pages.append(torch.stack(_written(codec, x, "key", 0)[1]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(pages[0], pages[1])
    assert torch.equal(pages[0], pages[2])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 65520.0, -1e30])
@pytest.mark.parametrize(
    "codec",
    [SawInt4(), TurboQuant(4), GroupInt(3, 32, along="tokens"), Octopus(4, 2), Hqmq(24, 4)],
    ids=str,
)
def test_what_cannot_be_held_is_zero_bytes_and_flagged(codec: Codec, number: float) -> None:
    x = _tokens(1, 64, 96, torch.float32).clone()
    x[0, 1, 40, 17] = number
    _, found, flags = _written(codec, x, "key", 0)
    assert flags == {1}
    layout, unit = page_layout(codec, codec, 96, 96), codec.block_tokens
    for pages in found:
        store = PageStore.over(layout, pages, torch.zeros(1, 1, dtype=torch.int32))
        for name, field in store.read("key", 0, 64).items():
            assert not field[0, 1, 40 // unit].view(torch.uint8).any(), name
            assert field[0, 0, 40 // unit].view(torch.uint8).any(), name


def test_tokens_behind_the_pages_are_dropped(variant: str) -> None:
    codec, x = SawInt4(), _tokens(1, 37, 64, torch.float16)
    layout = page_layout(codec, codec, 64, 64)
    spec, bad = cpu_spec(codec, codec, 64, layout.page_tokens), torch.zeros(1, dtype=torch.int32)
    store = PageStore(layout, 1, HEADS, x.device, layout.page_tokens)
    first = torch.tensor([layout.page_tokens - 10], dtype=torch.int32)
    own: dict[Role, Constants] = {"key": Constants(None, None, 1)}
    encode(NewTokens({"key": x}, first, bad), store.pages, store.table, common=prepared(spec), constants=own)
    assert int(bad) == 2
    want = codec.encode(codec.to_code(x[:, :, :10].float(), {}), {})
    got = store.read("key", layout.page_tokens - 10, layout.page_tokens)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("held", ["float16", "bfloat16", "float32"])
def test_a_step_rounds_as_the_reference(held: DenseDtype, dtype: torch.dtype) -> None:
    for scheme in (KVScheme(Dense(held), SawInt4()), KVScheme(SawInt4(), Dense(held))):
        fused, plain = FusedLayerCache(scheme), LayerCache(scheme)
        for seed in range(3):
            k, v = torch.randn(2, 1, HEADS, 1, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
            fused.append(k, v)
            plain.append(k, v)
        assert set(fused.kernels().values()) == {f"cpu {library.variant()}"}
        for got, want in zip(fused.decode(), plain.decode(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_numbers_at_the_walls_between_levels(bits: int, variant: str) -> None:
    codec, dim, rows = TurboQuant(bits), 64, 200
    layout = page_layout(codec, codec, dim, dim)
    spec, params = cpu_spec(codec, codec, dim, layout.page_tokens), codec.fit(Site(0, "key", HEADS, dim))
    walls = midpoints(params["levels"][0].double())
    u = walls[torch.arange(dim) % len(walls)] * (torch.arange(dim) < 8)
    u[-1] = (1 - (u[:-1] ** 2).sum()).sqrt()  # of unit length
    lengths = torch.linspace(0.5, 20, HEADS * rows, dtype=torch.float64).view(1, HEADS, rows, 1)
    x = (u * lengths).float()
    common, encoder = prepared(spec), spec.encoder("key")
    common.key.order = 1  # rows are in the basis of the codes already
    assert encoder is not None
    own: dict[Role, Constants] = {"key": constants_for(encoder, params, HEADS, dim)._replace(factor=None)}
    store, bad = PageStore(layout, 1, HEADS, x.device, rows), torch.zeros(1, dtype=torch.int32)
    first = torch.zeros(1, dtype=torch.int32)
    encode(NewTokens({"key": x}, first, bad), store.pages, store.table, common=common, constants=own)
    want, got = codec.encode(x, params), store.read("key", 0, rows)
    assert all(torch.equal(got[name], want[name]) for name in want)
