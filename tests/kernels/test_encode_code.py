"""Machine code of the encode kernels, compiled for GPUs that need not be there: no spills, budgets of instructions."""

import pytest

from tests.kernels import offline

BUDGETS = {
    # instructions a row of 128 channels, loads and stores included: 64k tokens of 4 heads, keys and values, are 524288
    # rows, and 132 SMs issue 290 of each in 164 us
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


def _sources() -> str:
    lines = [f'#include "encode_{name}.cuh"' for name in ("saw", "fp8", "ultraquant", "innerq", "blocks")]
    lines.append("using namespace kv;")
    for i, kind in enumerate(BUDGETS):
        role = kind.startswith("Role")
        call, threads = ("encode_side", "ENCODE_THREADS") if role else ("encode_blocks", f"T{i}::THREADS")
        lines.append(f"using T{i} = {kind};")
        lines.append(
            f"KV_KERNEL void KV_BOUNDS({threads}, 1) kernel_{i}(KV_GRID_CONSTANT EncodeArgs args) "
            f"{{ {call}<T{i}>(args, args.key); }}"
        )
    return "\n".join(lines)


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.wide), 90, 100])
def test_machine_code_neither_spills_nor_exceeds_its_budget(arch: int) -> None:
    kernels = offline.compile_kernels(_sources(), arch, fma=False)
    assert len(kernels) == len(BUDGETS)
    for i, (kind, budget) in enumerate(BUDGETS.items()):
        kernel = kernels[f"kernel_{i}"]
        assert not kernel.spills(), kind
        assert kernel.stack == 0, kind
        assert kernel.registers <= 128, kind
        if arch == 80:  # fp8 has no instruction there, and the rest is of no other make
            continue
        # a way around the loop stores codes; a warp does four rows, eight warps do the 32 of a block
        stores = 1 if "Fp8" in kind else 4
        ways = [len(loop.shortest("STG", stores)) / 4 for loop in kernel.loops_with("LDG", "STG")]
        assert ways, kind
        assert max(ways) <= budget, f"{kind}: {max(ways)} instructions a row"
