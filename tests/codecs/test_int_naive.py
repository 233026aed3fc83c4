"""Facts of group-wise integers: errors on Gaussian tokens, the grid by definition, fp16's edges, bits; int + Med3."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packedkv
from packedkv.codec import Codec
from packedkv.codecs.group_int import GroupInt, interleave
from packedkv.codecs.outliers import Med
from packedkv.codecs.saw_int4 import SawInt4
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
        ("q4_0", "none", "none"),
    ],
)
def test_which_kernels_read_which_configuration(spec, decode, encode):
    assert packedkv.describe(spec)["kernels"] == {"encode": encode, "decode": decode}
    refused = cuda_refusal(packedkv.get(spec), 128)
    assert bool(refused) == (decode == "none")
    if decode == "none":
        assert refused.startswith(
            (
                "the kernels read outliers beside",
                "in groups the kernels read asymmetric integers",
                "no CUDA kernel reads",
            )
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
