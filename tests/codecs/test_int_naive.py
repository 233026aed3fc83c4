"""Facts of group-wise integers: errors on Gaussian tokens, the grid by definition, fp16's edges, bits; int + Med3."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codecs.group_int import RUN, GroupInt, deinterleave, interleave
from packedkv.ops.bitpack import packed_bytes, unpack

from .support import error, normal_fp16

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "expected"),
    [
        (2, 0, False, 0.251),
        (3, 0, False, 0.0457),
        (4, 0, False, 0.0099),
        (2, 32, False, 0.154),
        (3, 32, False, 0.0281),
        (4, 32, False, 0.00612),
        (2, 32, True, 0.433),
        (3, 32, True, 0.0513),
        (4, 32, True, 0.00941),
        (4, 0, True, 0.0138),
    ],
)
def test_relative_mse_on_gaussian_tokens(bits, group, symmetric, expected):
    x = normal_fp16(1, 1, 2048, 128)
    assert error(GroupInt(bits, group, "channels", symmetric), x) == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_interleaved_rows_hold_what_their_groups_hold_one_by_one(head_dim, bits, symmetric):
    """Each group of 32 as a row of its own, which nothing interleaves, has the same codes and scales."""
    codec, x = GroupInt(bits, 32, symmetric=symmetric), normal_fp16(1, 2, 30, head_dim, seed=bits)
    x[..., :16] *= 8
    payload = codec.encode(x, {})
    filled = torch.cat([x, x[..., -1:].expand(1, 2, 30, -head_dim % 32)], -1)
    single = codec.encode(filled.view(1, 2, -1, 32), {})
    assert codec.layout(32).version == 1
    codes = unpack(single["codes"], bits, 32).view(1, 2, 30, -1)[..., :head_dim].to(torch.uint8)
    interleaved = bits in (2, 3) and head_dim in (128, 256)
    assert codec.layout(head_dim).version == (2 if interleaved else 1)
    if interleaved:
        assert torch.equal(payload["codes"], interleave(codes, bits))
    else:
        assert torch.equal(unpack(payload["codes"], bits, head_dim).to(torch.uint8), codes)
    assert all(torch.equal(payload[n].flatten(), single[n].flatten()) for n in payload if n != "codes")
    expected = codec.decode(single, {}).view(1, 2, 30, -1)[..., :head_dim]
    assert torch.equal(codec.decode(payload, {}), expected)


def groups_of(codec: GroupInt, tokens: int, dim: int):
    """Index of every group's elements, and of its scale: (tokens, channels), (block, place)."""
    if codec.along == "tokens":
        for block in range(tokens // codec.group):
            for channel in range(dim):
                yield (slice(block * codec.group, (block + 1) * codec.group), channel), (block, channel)
    else:
        width = codec.group or dim
        for token in range(tokens):
            for place in range(-(-dim // width)):
                yield (token, slice(place * width, min((place + 1) * width, dim))), (token, place)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    grouping=st.sampled_from([("channels", 0), ("channels", 16), ("tokens", 8)]),
    symmetric=st.booleans(),
    kind=st.sampled_from(["normal", "one-sided", "outlier", "constant", "integers", "subnormal", "extreme"]),
    power=st.integers(-10, 10),
    seed=st.integers(0, 999),
)
def test_codes_and_scales_by_definition(bits, grouping, symmetric, kind, power, seed):
    """int and KIVI: every level of a group's grid is tried; only codes within 1e-6 of the best may differ."""
    codec = GroupInt(bits, grouping[1], grouping[0], symmetric)
    x = normal_fp16(1, 1, 16, 24, seed=seed)
    if kind == "one-sided":
        x += 30
    elif kind == "outlier":
        x[..., 5] *= 200
    elif kind == "constant":
        x[:] = float(x[0, 0, 0, 0])
    elif kind == "integers":  # half a step away from two codes, often
        x = (x * 2).round()
    x = (x * 2.0**power).clamp(-65504, 65504).half().float()
    if kind == "subnormal":
        x = (normal_fp16(1, 1, 16, 24, seed=seed) * 3).round() * 2.0**-24
    elif kind == "extreme":
        x = torch.where(x > 0, 65504.0, -65504.0)
    payload = codec.encode(x, {})
    codes = unpack(payload["codes"][0, 0], bits, 24).reshape(16, 24).long() - (2 ** (bits - 1) if symmetric else 0)
    decoded = codec.decode(payload, {})[0, 0].double()
    levels = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    grid = torch.arange(-levels if symmetric else 0, levels + 1).double()
    for at, held in groups_of(codec, 16, 24):
        values = x[0, 0][at].double()
        s = payload["scale"][0, 0][held]
        z = 0.0 if symmetric else float(payload["zero"][0, 0][held])
        assert symmetric or z == float(values.min().half())
        span = float(values.abs().max()) if symmetric else float(values.max()) - z
        _check_scale(s, span / levels, z, levels)
        loss = (values[:, None] - (float(s) * grid + z)).abs()
        best, chosen = loss.min(1), codes[at] - int(grid[0])
        near = best.values + 1e-6 * float(values.abs().max())
        assert bool((loss.gather(1, chosen[:, None])[:, 0] <= near).all())
        tied = (loss <= near[:, None]).sum(1) > 1
        assert torch.equal(chosen[~tied], best.indices[~tied])
        torch.testing.assert_close(decoded[at], float(s) * grid[chosen] + z, rtol=1e-6, atol=1e-6 * span)


def _check_scale(held: torch.Tensor, exact: float, zero: float, levels: int) -> None:
    """The fp16 number nearest to ``exact``, at least the smallest; one below where the top would leave fp16."""
    below, above = ((held.view(torch.int16) + step).view(torch.float16) for step in (-1, 1))
    if exact <= 2.0**-24:
        assert float(held) == 2.0**-24
    elif zero + levels * float(above) > 65504 and float(held) < exact:
        assert float(above) > exact
        assert zero + levels * float(held) <= 65504
    else:
        assert abs(float(held) - exact) <= min(abs(float(n) - exact) for n in (below, above)) + 1e-6 * exact


# -- int + Med3 ------------------------------------------------------------------------------------------------------


# -- interleaved codes -------------------------------------------------------------------------------------------------


def random_codes(bits: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def place(channel: int, bit: int, bits: int) -> tuple[int, int]:
    """Word of a run and bit of the word that hold a bit of a channel's code, by the definition."""
    q, g, p = channel // 32, channel % 32 // 4, channel % 4
    k, per = 4 * q + p, 16 // bits
    unit, at = (k // per, bits * (k % per) + bit) if k < per * bits else (bit, 15)
    return 8 * unit + g, at


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_bit_lies_where_the_definition_has_it(bits):
    places = [place(c, bit, bits) for c in range(RUN) for bit in range(bits)]
    assert sorted(places) == [(w, b) for w in range(8 * bits) for b in range(16)], "each bit of the run has one owner"
    for run in (0, 1):
        codes = torch.zeros(RUN * bits, 2 * RUN, dtype=torch.uint8)  # row: one bit of one channel
        for row in range(RUN * bits):
            codes[row, RUN * run + row // bits] = 1 << row % bits
        packed = interleave(codes, bits)
        assert packed.shape == (RUN * bits, 2 * 16 * bits)
        for row, (word, at) in enumerate(places):
            byte = 16 * bits * run + 2 * word + at // 8
            assert packed[row].nonzero().flatten().tolist() == [byte]
            assert packed[row, byte] == 1 << at % 8


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    bits=st.sampled_from([2, 3, 4]),
    runs=st.integers(1, 3),
    lead=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    seed=st.integers(0, 999),
)
def test_deinterleave_inverts_interleave(bits, runs, lead, dtype, seed):
    codes = random_codes(bits, *lead, runs * RUN, seed=seed)
    packed = interleave(codes.to(dtype), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*lead, packed_bytes(runs * RUN, bits))
    back = deinterleave(packed, bits)
    assert back.dtype == torch.uint8
    assert torch.equal(back, codes)
    for run in range(runs):  # runs know nothing of each other
        part = slice(16 * bits * run, 16 * bits * (run + 1))
        assert torch.equal(packed[..., part], interleave(codes[..., RUN * run : RUN * (run + 1)], bits))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_at_an_odd_address_and_apart(bits):
    codes = random_codes(bits, 2, 3, RUN)
    held = torch.zeros(2, 3, 16 * bits + 3, dtype=torch.uint8)
    part = held[..., 1 : 16 * bits + 1]
    part.copy_(interleave(codes, bits))
    assert torch.equal(deinterleave(part, bits), codes)
    rows = codes.transpose(0, 1)  # neither are codes contiguous
    assert torch.equal(interleave(rows, bits), interleave(rows.contiguous(), bits))
