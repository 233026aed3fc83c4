"""Facts of group-wise integers: errors on Gaussian tokens, the grid by definition, fp16's edges, bits; int + Med3."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packedkv
from packedkv.codec import Codec
from packedkv.codecs.group_int import GroupInt, deinterleave, interleave
from packedkv.codecs.outliers import Med
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import ShapeError, SpecError
from packedkv.ops.bitpack import unpack
from tests.codecs.cuda_refusal import cuda_refusal
from tests.codecs.draws import normal_fp16

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def there_and_back(codec: GroupInt, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x, {}), {})


def relative_mse(codec: GroupInt, x: torch.Tensor) -> float:
    y = there_and_back(codec, x)
    return float((y - x).square().sum() / x.square().sum())


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
    assert relative_mse(GroupInt(bits, group, "channels", symmetric), x) == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("along", ["channels", "tokens"])
def test_groups_along_either_axis_cost_the_same_error_on_gaussian_data(along):
    assert relative_mse(GroupInt(2, 32, along), normal_fp16(1, 2, 1024, 128)) == pytest.approx(0.1544, rel=0.015)


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("along", ["channels", "tokens"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_element_comes_back_within_half_a_step(head_dim, bits, along, symmetric):
    codec = GroupInt(bits, 32, along, symmetric)
    x = normal_fp16(2, 2, 64, head_dim)
    payload = codec.encode(x, {})
    step = payload["scale"].float()
    step = step.repeat_interleave(32, 2) if along == "tokens" else step.repeat_interleave(32, -1)[..., :head_dim]
    # the held step is within 2^-11 of the exact one, and that adds up over the codes
    slack = 1 + codec.steps * 2**-10
    assert ((codec.decode(payload, {}) - x).abs() <= step / 2 * slack).all()


def test_one_token_by_hand():
    # min -1, max 2 at 2 bits: step 1, codes (x + 1) rounded to even
    x = torch.tensor([-1.0, 2.0, 0.0, 1.0, 0.4, 0.6, -0.5, 0.5]).view(1, 1, 1, 8)
    payload = GroupInt(2, 0).encode(x, {})
    assert payload["zero"].item() == -1.0
    assert payload["scale"].item() == 1.0
    assert unpack(payload["codes"], 2, 8).flatten().tolist() == [0, 3, 1, 2, 1, 2, 0, 2]
    assert payload["codes"].flatten().tolist() == [0b10_01_11_00, 0b10_00_10_01]


def test_symmetric_codes_are_offset_binary_and_never_zero():
    x = torch.tensor([-3.0, 3.0, 0.0, 1.0, -1.0, 2.0, -2.0, 0.4]).view(1, 1, 1, 8)
    payload = GroupInt(3, 0, symmetric=True).encode(x, {})
    assert unpack(payload["codes"], 3, 8).flatten().tolist() == [1, 7, 4, 5, 3, 6, 2, 4]
    many = GroupInt(3, 32, symmetric=True).encode(normal_fp16(1, 1, 512, 128), {})
    assert deinterleave(many["codes"], 3).unique().tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("value", [0.0, 3.140625, -65504.0, 65504.0, 2.0**-24])
@pytest.mark.parametrize("along", ["channels", "tokens"])
def test_a_constant_group_comes_back_exactly(along, value):
    x = torch.full((1, 1, 32, 64), value)
    assert torch.equal(there_and_back(GroupInt(2, 32, along), x), x)


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_whole_fp16_range_in_one_group_stays_within_fp16(bits, symmetric):
    # max - min = 131008 is no fp16 number, and 65504 / 3 rounded up would decode to 65520, infinity in fp16
    x = normal_fp16(1, 1, 64, 128).sign() * 65504
    y = there_and_back(GroupInt(bits, 32, symmetric=symmetric), x)
    assert y.half().isfinite().all()
    assert (y - x).abs().max() <= 65504 * 2**-9


@pytest.mark.parametrize("magnitude", [1e-7, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_steps_that_fp16_cannot_hold_lose_at_most_what_fp16_loses(bits, magnitude):
    x = (normal_fp16(1, 1, 64, 128) * magnitude).half().float()
    payload = GroupInt(bits, 32).encode(x, {})
    assert (payload["scale"] > 0).all()
    error = (GroupInt(bits, 32).decode(payload, {}) - x).abs().max()
    assert error <= payload["scale"].max() / 2 + 2**bits * 2.0**-25


def test_a_range_inside_the_spacing_of_fp16_subnormals_is_exact():
    # multiples of the smallest fp16 number: a step of 2^-24 reaches each of 16 of them
    x = torch.arange(16.0).repeat(4).view(1, 1, 1, 64) * 2**-24
    assert torch.equal(there_and_back(GroupInt(4, 32), x), x)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bits_are_the_bytes_of_the_groups_that_are_there(head_dim, bits):
    keys = normal_fp16(1, 2, 32, head_dim)
    for group, scales in ((0, 1), (32, -(-head_dim // 32))):
        held = packedkv.compress(f"int-{bits}:group={group}" if group else f"int-{bits}", keys, keys)
        assert held.effective_bits == pytest.approx(bits + 32 * scales / head_dim)
        assert sum(held.nbytes.values()) == 2 * 2 * 32 * (head_dim * bits // 8 + 4 * scales)


def test_bits_at_head_dim_128():
    scheme = packedkv.get("int-4")
    assert (scheme.key_bits(128), scheme.value_bits(128), scheme.nominal_bits(128)) == (4.25, 4.25, 4)
    assert packedkv.get("int-4:group=32").key_bits(128) == 5.0
    assert packedkv.get("int-4:symmetric=true,group=32").key_bits(128) == 4.5


def test_a_short_last_group_has_a_scale_of_its_own():
    # 80 channels in groups of 32: the last 16 are tiny and must not share the step of their neighbours
    x = normal_fp16(1, 1, 8, 80)
    x[..., :64] *= 100
    x[..., 64:] *= 0.01
    last = x[..., 64:]
    step = (last.amax(-1) - last.amin(-1)) / 15
    error = (there_and_back(GroupInt(4, 32), x)[..., 64:] - last).abs().amax(-1)
    assert (error <= step * 0.51).all()
    assert GroupInt(4, 32).layout(80).field("scale").shape == (3,)


def test_blocks_of_tokens_are_packed_token_by_token():
    codec = GroupInt(4, 32, "tokens")
    field = codec.layout(128).field("codes")
    assert (codec.block_tokens, field.shape) == (32, (32, 64))
    ramp = torch.arange(32.0).view(1, 1, 32, 1).expand(1, 1, 32, 128)  # code of token t is round(t * 15 / 31)
    rows = unpack(codec.encode(ramp, {})["codes"][0, 0, 0], 4, 128)
    assert (rows == rows[:, :1]).all()
    assert rows[[0, 31], 0].tolist() == [0, 15]


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


@pytest.mark.parametrize("codec", [GroupInt(2, 0), GroupInt(3, 64), GroupInt(2, 16), GroupInt(2, 32, "tokens")])
def test_other_groups_are_not_interleaved(codec):
    assert codec.layout(128).version == 1
    x = normal_fp16(1, 1, 32, 128)
    payload = codec.encode(x, {})
    axis, width = (2, 32) if codec.along == "tokens" else (3, codec.group or 128)
    scale, zero = (payload[name].float().repeat_interleave(width, axis) for name in ("scale", "zero"))
    codes = unpack(payload["codes"], codec.bits, 128).view(1, 1, 32, 128)
    assert torch.equal(codes.float(), ((x - zero) / scale).round().clamp(0, codec.steps))


def test_the_version_of_interleaved_codes_goes_through_outliers():
    assert Med(GroupInt(2, 32)).layout(128).version == 2
    assert Med(GroupInt(2, 32)).layout(64).version == 1
    assert [packedkv.get("octopus-2").value.layout(d).version for d in (64, 96, 128, 256)] == [1, 1, 2, 2]
    assert packedkv.get("octopus-4").value.layout(128).version == 1


def test_one_outlier_channel_takes_the_resolution_of_its_token_not_of_its_neighbours():
    x = normal_fp16(1, 1, 64, 128)
    x[0, 0, 7, 5] = 1e4
    y = there_and_back(GroupInt(8, 0), x)
    rest = [t for t in range(64) if t != 7]
    assert relative_mse(GroupInt(8, 0), x[:, :, rest]) < 1e-4
    assert torch.equal(y[:, :, rest], there_and_back(GroupInt(8, 0), x[:, :, rest]))
    assert (y - x)[0, 0, 7].abs().max() <= 1e4 / 255


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5 is not allowed; use 2, 3, 4 or 8"),
        ({"group": -1}, "group=-1 along channels is not allowed; use a positive number, e.g. 32, or 0"),
        ({"group": 0, "along": "tokens"}, "group=0 along tokens is not allowed; use a positive number"),
        ({"along": "heads"}, "along='heads' is not allowed; use 'channels' or 'tokens'"),
    ],
)
def test_options_that_make_no_codec_say_what_does(options, message):
    with pytest.raises(SpecError, match=message):
        GroupInt(**options)


def test_a_head_dim_that_leaves_half_bytes_is_refused():
    with pytest.raises(ShapeError, match="head_dim=20 is not a multiple of 8; use 64, 80"):
        GroupInt(3).layout(20)


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


def test_outliers_of_the_recipe_are_med_around_the_integers():
    scheme = packedkv.get("int-4:outliers=5,slots=1,symmetric=true,group=32")
    assert scheme.key == scheme.value == Med(GroupInt(4, 32, "channels", True), 5, 1)
    assert str(scheme) == "int-4:symmetric=true,group=32,outliers=5,slots=1"
    assert packedkv.get("int-4").key == GroupInt(4, 0)
    options = {o["name"]: o["choices"] for o in packedkv.describe("int-4")["options"]}
    assert options["outliers"] == ["off", 3, 4, 5]


@pytest.mark.parametrize(("spec", "expected"), [("int-4:symmetric=true", 0.0135), ("int-4", 0.0098)])
def test_a_long_chunk_costs_the_others_nothing_with_med3(spec, expected):
    x = normal_fp16(1, 2, 512, 128)
    x[..., 20:24] *= 100
    x = x.half().float()
    bulk = torch.ones(128, dtype=torch.bool)
    bulk[20:24] = False

    def error(spec: str) -> float:
        y = packedkv.compress(spec, x, x).decode()[0]
        return float((y - x)[..., bulk].square().sum() / x[..., bulk].square().sum())

    assert error(spec) > 0.99
    more = "," if ":" in spec else ":"
    assert error(f"{spec}{more}outliers=3,slots=1") == pytest.approx(expected, rel=0.03)
    packed = packedkv.compress(f"{spec}{more}outliers=3,slots=1", x, x)
    assert packed.effective_bits == packedkv.get(spec).effective_bits(128) + 0.25 + 0.5
    assert torch.equal(packed.decode()[0][..., ~bulk], x[..., ~bulk])


@pytest.mark.parametrize(
    ("spec", "decode", "encode"),
    [
        ("int-4", "cuda", "cuda"),
        ("int-2", "cuda", "cuda"),
        ("int-3", "cuda", "cuda"),
        ("int-8", "cuda", "cuda"),
        ("int-4:symmetric=true", "cuda", "cuda"),
        ("int-4:group=32", "cuda", "cuda"),
        ("int-4:group=16", "none", "none"),
        ("int-4:outliers=3", "cuda", "none"),
        ("int-4:group=32,outliers=3", "none", "none"),
        ("kivi-4", "cuda", "cuda"),
    ],
)
def test_which_kernels_read_which_configuration(spec, decode, encode):
    assert packedkv.describe(spec)["kernels"] == {"encode": encode, "decode": decode}
    refused = cuda_refusal(packedkv.get(spec), 128)
    assert bool(refused) == (decode == "none")
    if decode == "none":
        assert refused.startswith(
            ("the kernels read outliers beside", "in groups the kernels read asymmetric integers")
        )


def test_keys_and_values_of_two_kernels_go_to_cuda():
    mixed = packedkv.KVScheme(key=SawInt4(), value=GroupInt(4, 0))
    assert not cuda_refusal(mixed, 128)
    assert packedkv.description.kernels_for(mixed) == {"encode": "cuda", "decode": "cuda"}


def test_a_codec_of_another_package_is_not_taken_for_ours():
    class Stranger(Codec):
        layout = encode = decode = GroupInt.layout

    scheme = packedkv.KVScheme(key=Stranger(), value=Stranger())
    assert cuda_refusal(scheme, 128, page_tokens=64) == f"no CUDA kernel reads {Stranger()}"
