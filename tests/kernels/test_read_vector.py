"""Readers of octopus and hqmq: every code at every place of a row, then whole decoders."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Payload, Site
from packedkv.codecs.hqmq import RADII, SIZES, Hqmq
from packedkv.codecs.octopus import JOINT_BITS, Octopus, pack_split
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.kernels.spec import reader as reader_of
from tests.kernels.decode_cases import CASES, Case, Geometry, check_all, each_in_turn, two_dims_in_turn
from tests.kernels.unpacking import unpacked

DIMS = [64, 96, 128, 192, 256, 512]


def codes_everywhere(count: int, places: int) -> tuple[Tensor, int]:
    """Codes ``[1, 1, tokens, places]`` that take every value at every place, and how many tokens that takes."""
    tokens = -(-count // 16) * 16
    return ((torch.arange(tokens)[:, None] + 37 * torch.arange(places)) % count)[None, None], tokens


def numbers(tokens: int) -> Tensor:
    """Scales over the whole range of fp16: ``[1, 1, tokens, 1]``."""
    return (
        torch.exp2(torch.arange(tokens) % 29 - 14.0).mul(1 + torch.arange(tokens) % 7 / 8).half()[None, None, :, None]
    )


OCTOPUS = [
    Octopus(3, 1),
    Octopus(4, 2),
    Octopus(5, 3, norm="fp32"),
    Octopus(3, 2),
    Octopus(4, 3),
    Octopus(2, 6),
    Octopus(5, 4),
    Octopus(1, 1),
]


@pytest.mark.parametrize(("codec", "dim"), two_dims_in_turn(OCTOPUS, (64, 96, 192)), ids=str)
def test_octopus_codes(codec: Octopus, dim: int) -> None:
    params = codec.fit(Site(1, "key", 1, dim))
    codes, tokens = codes_everywhere(2**codec.code_bits, -(-dim // 3))
    if dim not in (64, 96) and codec.code_bits > JOINT_BITS:  # each 15th of many: every bit of each place still varies
        codes = codes[:, :, ::15]
        tokens = codes.shape[2] // 16 * 16
        codes = codes[:, :, :tokens]
    norm = numbers(tokens) if codec.norm == "fp16" else numbers(tokens).float() * 1.1
    payload = {**pack_split(codes, codec.code_bits, codec.low_bits), "norm": norm}
    want = codec.decode(payload, params)[0, 0]
    got = unpacked(codec, dim, payload, params, tokens, "key")
    steps = 1 if codec.code_bits <= JOINT_BITS else 3  # a direction, a length and their product are rounded
    scale = norm[0, 0].float()
    torch.testing.assert_close(got / scale, want / scale, rtol=steps * 2.0**-11 * 1.001, atol=1e-6)
    unpacked(codec, dim, None, params, tokens, "key")  # dead slots hold any bits: reads outside of shared memory fault


HQMQ = [Hqmq(s, r, codebook="int8" if (s, r) == (48, 3) else "fp16") for s in SIZES for r in RADII]


def hqmq_payload(codec: Hqmq, dim: int) -> tuple[Payload, int]:
    """All codes at all places, with all radii, and how many tokens that takes."""
    codes, tokens = codes_everywhere(24 * codec.s, dim // 4)
    radii = (torch.arange(tokens)[:, None] // 3 + 5 * torch.arange(dim // 4)) % 2**codec.r
    return {**codec.pack(codes, radii[None, None]), "scale": numbers(tokens)}, tokens


def assert_decoded(codec: Hqmq, payload: Payload, params: Params, got: Tensor) -> None:
    scale = payload["scale"][0, 0].float()
    want = codec.decode(payload, params)[0, 0] / scale
    rounded = 2 if codec.codebook == "int8" else 1  # the product, and the table
    torch.testing.assert_close(got / scale, want, rtol=2.0**-11 * (rounded + 0.001), atol=2.0**-14)


@pytest.mark.parametrize(("codec", "dim"), [*each_in_turn(HQMQ, DIMS), (Hqmq(96, 3), 128)], ids=str)
def test_hqmq_codes(codec: Hqmq, dim: int) -> None:
    for role in ROLES:
        params = codec.fit(Site(1, role, 1, dim))
        payload, tokens = hqmq_payload(codec, dim)
        assert_decoded(codec, payload, params, unpacked(codec, dim, payload, params, tokens, role))
        unpacked(codec, dim, None, params, tokens, role)  # any bits


@pytest.mark.parametrize(
    "codec", [*OCTOPUS[:5], *(codec for codec in HQMQ if codec.s in (24, 96) and codec.r != 3)], ids=str
)
def test_fewer_copies_of_tables_give_the_same_numbers(codec: Codec) -> None:
    """As GPUs with less shared memory have them."""
    dim = 64
    for role in ROLES if isinstance(codec, Hqmq) else ROLES[:1]:
        params = codec.fit(Site(1, role, 1, dim))
        if isinstance(codec, Octopus):
            codes, tokens = codes_everywhere(2**codec.code_bits, -(-dim // 3))
            norm = numbers(tokens).float() if codec.norm == "fp32" else numbers(tokens)
            payload: Payload = {**pack_split(codes, codec.code_bits, codec.low_bits), "norm": norm}
        else:
            assert isinstance(codec, Hqmq)
            payload, tokens = hqmq_payload(codec, dim)
        usual = unpacked(codec, dim, payload, params, tokens, role)
        table_shrink = len(reader_of(codec, dim, role).fewer)
        assert torch.equal(unpacked(codec, dim, payload, params, tokens, role, table_shrink), usual)
        unpacked(codec, dim, None, params, tokens, role, table_shrink)  # any bits


SAW = SawInt4()


@pytest.mark.parametrize(("codec", "dim"), each_in_turn(OCTOPUS[:3], [64, 96, 128, 192, 256]), ids=str)
def test_octopus_decode(codec: Octopus, dim: int) -> None:
    check_all(codec, SAW, dim, CASES)


@pytest.mark.parametrize(
    ("codec", "dim"), each_in_turn(map(Hqmq, (24, 48, 96, 192, 24), (3, 4, 4, 6, 4)), (64, 96, 128, 192, 256))
)
def test_hqmq_decode(codec: Hqmq, dim: int) -> None:
    # scores in the hundreds: two keys nearly tie, and chance says whose rounding tells them apart better
    cases = [replace(case, slack=2.0) if case.spread else case for case in CASES]
    check_all(codec, codec, dim, cases)


@pytest.mark.parametrize(
    ("codec", "table_shrink", "dim"), [(Hqmq(24, 4), 2, 64), (Hqmq(96, 4), 2, 128), (Hqmq(192, 6), 1, 96)], ids=str
)
def test_hqmq_decode_with_fewer_copies(codec: Hqmq, table_shrink: int, dim: int) -> None:
    check_all(codec, codec, dim, CASES[:5], Geometry(tile=16, stages=1, table_shrink=table_shrink))


@pytest.mark.parametrize(
    ("codec", "teams", "warps", "stages"),
    [
        pytest.param(
            codec, teams, warps, stages, marks=[] if (teams + stages + (codec.s == 48)) % 2 else [pytest.mark.wide]
        )
        for codec in (Hqmq(24, 3), Hqmq(48, 4))
        for teams, warps in ((2, 2), (3, 1))
        for stages in (1, 2, 3)
    ],
    ids=str,
)
def test_teams_share_tables(codec: Hqmq, teams: int, warps: int, stages: int) -> None:
    """More pieces than teams, pieces with fewer tiles than stages, pieces of dense tokens alone."""
    cases = (
        Case((130, 7, 64, 0, 200, 33, 1), heads=2, group=8),
        Case((130, 7, 64, 300), heads=2, group=3, splits=2, dense=(3, 0, 17, 1), sinks=True, order=5),
    )
    check_all(codec, codec, 64, cases, Geometry(tile=16, warps=warps, teams=teams, stages=stages))
