"""Machine code of the programs that caches ask for: no spills, and a budget of instructions in the loop over tiles."""

import pytest

import packedkv
from packedkv.codecs.ghost import Ghost
from packedkv.errors import UnsupportedError
from packedkv.kernels.cuda import build, encode, launch, prefill
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda.launch import machine_of
from packedkv.kernels.spec import DecodeSpec, decode_spec, encode_spec
from packedkv.kernels.spec import encoder as encoder_of
from tests.kernels.offline import ARCHITECTURES, Kernel, compile_kernels, opcode
from tests.kernels.test_head_dims import OF_80, READ

OFTEN = {
    *(("saw-int4", 128, 100), ("octopus-4", 128, 86), ("hqmq-s24_r3", 128, 89), ("hqmq-s96_r4", 128, 120)),
    *(("hqmq-s192_r4", 128, 80), ("ghost-3", 128, 90), ("kivi-g128-4", 256, 90), ("saw-int4", 512, 90)),
}
"""Presets and head_dims compiled in every run, and for which architecture; the others are wide."""
OF_512 = ("saw-int4", "int-4", "int-8", "fp8", "turboquant-4", "ultraquant", "hqmq-s96_r4")


def pair_of(preset: str, dim: int, pairs: int = 0) -> DecodeSpec:
    scheme = packedkv.get(preset)
    return decode_spec(scheme.key, scheme.value, dim, scheme.page_layout(dim).page_tokens, pairs)


@pytest.mark.parametrize(
    ("preset", "dim", "arch"),
    [
        pytest.param(preset, dim, arch, marks=[] if (preset, dim, arch) in OFTEN else [pytest.mark.wide])
        for dim, presets in ((128, READ), (80, OF_80), (256, ["kivi-g128-4"]), (512, OF_512))
        for preset in presets
        for arch in ARCHITECTURES
    ],
)
def test_nothing_is_spilled(preset: str, dim: int, arch: int) -> None:
    """In attention over many long sequences, in unpacking (up to 256 channels) and in encoding."""
    pair, there, scheme = pair_of(preset, dim), machine_of(f"sm_{arch}"), packedkv.get(preset)
    config = launch.config_for(pair, 256, 32768, there, heads=4)
    found = list(compile_kernels(attention.program(pair, config, heads=pair.heads(4)).source, arch).values())
    assert {"kv_decode", "kv_combine"} <= {kernel.name for kernel in found}
    if dim < 512:
        found += compile_kernels(prefill.program(pair, *prefill.config_for(pair, there)).source, arch).values()
    target = encode_spec(scheme.key, scheme.value, dim, scheme.page_layout(dim).page_tokens)
    for program in encode.programs(target).values():
        found += compile_kernels(program.source, arch, fma=False).values()
    for kernel in found:
        assert kernel.stack == 0, kernel.name
        assert not kernel.spills(), kernel.name


TERMS = [(preset, arch) for preset in ("ghost-3", "ghost-4") for arch in (86, 89, 120)][:-1]


@pytest.mark.parametrize(
    ("preset", "arch"), [("ghost-4", 120), *(pytest.param(*x, marks=pytest.mark.wide) for x in TERMS)]
)
@pytest.mark.parametrize(("units", "heads"), [(256, 4), (256, 8), (4, 8)])
def test_ghost_with_a_mean_spills_nothing_in_its_loop(preset: str, arch: int, units: int, heads: int) -> None:
    """On 99 KB of shared memory, and at most what few instructions take before the loop."""
    pair = pair_of(preset, 128, 64)
    config = launch.config_for(pair, units, 65536, machine_of(f"sm_{arch}"), heads=heads)
    assert config.resident_warps >= 7
    kernel = compile_kernels(attention.program(pair, config, dense=1, heads=heads).source, arch)["kv_decode"]
    assert not [x for x in kernel.loop_with("HMMA", "LDGSTS").code if opcode(x) in ("LDL", "STL")]
    assert len(kernel.spills()) <= 60


BUDGETS = {
    ("saw-int4", 0): 1.75,
    ("saw-int4", 64): 2.99,
    ("kivi-4", 0): 1.73,
    ("kivi-tq-4", 0): 1.88,
    ("turboquant-3", 0): 2.46,
    ("ultraquant", 0): 2.4,
    ("octopus-3", 0): 2.31,
    ("hqmq-s24_r3", 0): 2.38,
    ("hqmq-s96_r4", 0): 3.16,
    ("ghost-3", 0): 2.51,
    ("int-4:outliers=3", 0): 1.66,
}
"""By preset and pairs of channels with a mean: instructions for a number of the cache, on a tile's shortest way."""


def instructions(kernel: Kernel, tile: int) -> float:
    """Of a warp, for the numbers of a tile of 128 channels in keys and values, over 32 lanes."""
    ways = [loop.shortest("HMMA", tile) for loop in kernel.loops_with("HMMA", "LDGSTS")]
    return min(map(len, ways)) * 32 / (2 * tile * 128)


@pytest.mark.parametrize(("preset", "pairs"), BUDGETS)
def test_a_tile_takes_few_instructions(preset: str, pairs: int) -> None:
    pair = pair_of(preset, 128, pairs)
    config = launch.config_for(pair, 256, 32768, launch.H200, heads=8)
    kernel = compile_kernels(attention.program(pair, config, heads=pair.heads(8)).source)["kv_decode"]
    assert instructions(kernel, config.tile) <= BUDGETS[preset, pairs]


ROW_BUDGETS = {
    # 64k tokens of 4 heads, keys and values, are 524288 rows, and 132 SMs issue 290 instructions of each in 164 us
    "Role<EncodeGroupInt<128, 4, 0, false>>": 90,
    "Role<EncodeGroupInt<128, 2, 32, false>>": 100,
    "Role<EncodeGroupInt<128, 3, 32, false>>": 100,
    "Role<EncodeGroupInt<128, 8, 0, true>>": 90,
    "Role<EncodeSaw<128>>": 87,
    "Role<EncodeSaw<128>, 128>": 155,
    "Role<EncodeFp8<128, true>>": 75,
    "Role<EncodeUltraquant<128, 0x3fc3f7ced916872bull>>": 97,
    "Role<EncodeUltraquant<128, 0x3fc3f7ced916872bull>, 128>": 165,
    "Role<EncodeInnerq<128, 3, LITERAL>, 1, FACTOR_INVERSE>": 107,
    "EncodeTokensInt<128, 2, 32, false>": 105,
    "EncodeTokensInnerq<128, 3, LITERAL, false>": 100,
    "EncodeTokensInnerq<128, 2, LITERAL, true>": 220,
}
"""By encoder: instructions for a row of 128 channels, loads and stores included."""


def test_a_row_is_encoded_with_few_instructions() -> None:
    lines = [f'#include "encode_{name}.cuh"' for name in ("saw", "fp8", "ultraquant", "innerq", "blocks")]
    lines.append("using namespace kv;")
    for i, kind in enumerate(ROW_BUDGETS):
        role = kind.startswith("Role")
        call, threads = ("encode_side", "ENCODE_THREADS") if role else ("encode_blocks", f"T{i}::THREADS")
        lines.append(f"using T{i} = {kind};")
        lines.append(
            f"KV_KERNEL void KV_BOUNDS({threads}, 1) kernel_{i}(KV_GRID_CONSTANT EncodeArgs args) "
            f"{{ {call}<T{i}>(args, args.key); }}"
        )
    kernels = compile_kernels("\n".join(lines), 90, fma=False)
    for i, (kind, budget) in enumerate(ROW_BUDGETS.items()):
        # a way around the loop stores codes; a warp does four rows, eight warps do the 32 of a block
        stores = 1 if "Fp8" in kind else 4
        ways = [len(loop.shortest("STG", stores)) / 4 for loop in kernels[f"kernel_{i}"].loops_with("LDG", "STG")]
        assert ways, kind
        assert max(ways) <= budget, f"{kind}: {max(ways)} instructions a row"


@pytest.mark.parametrize("bits", [2, 3, 4.5])
def test_ghost_tries_two_scales_with_few_instructions(bits: float) -> None:
    encoder = encoder_of(Ghost(bits), 128, "key")
    source = f"""
        #include "{encoder.header}"
        KV_KERNEL void KV_BOUNDS(kv::TABLE_THREADS, {encoder.resident}) kv_encode(KV_GRID_CONSTANT kv::EncodeArgs a) {{
          kv::encode_with_table<kv::Role<{encoder.type}, 1, kv::FACTOR_TIMES>>(a, kv::block_z() ? a.value : a.key);
        }}
    """
    # 32 numbers, nine instructions each; those of the least cost and the next
    assert len(compile_kernels(source, fma=False)["kv_encode"].loop_with("SHFL", "FMNMX").code) <= 360


@pytest.mark.parametrize("arch", [103, 121])
def test_architectures_that_the_disassembler_does_not_know(arch: int) -> None:
    pytest.importorskip("cuda.core")
    try:
        build.compiler_version()
    except UnsupportedError as error:
        pytest.skip(str(error))
    pair = pair_of("hqmq-s96_r4", 128)
    config = launch.config_for(pair, 256, 32768, machine_of(f"sm_{arch}"), heads=4)
    assert build._nvrtc(attention.program(pair, config, heads=4), f"sm_{arch}").startswith(b"\x7fELF")
