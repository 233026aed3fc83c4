"""Machine code of the programs that caches ask for: no spills, and a budget of instructions in the loop over tiles.

NVRTC compiles, as for users. The disassembler is the one in triton's wheel, which the extra "test" pins; budgets are
written against that and NVRTC 13.0.
"""

import collections
import functools
import heapq
import importlib.util
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import NamedTuple
from unittest import mock

import pytest

import packedkv
from packedkv.codecs.ghost import Ghost
from packedkv.errors import UnsupportedError
from packedkv.kernels.cuda import build, encode, launch, prefill
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda.build import Program, compile_program
from packedkv.kernels.cuda.launch import machine_of
from packedkv.kernels.spec import DecodeSpec, decode_spec, encode_spec
from packedkv.kernels.spec import encoder as encoder_of
from tests.kernels.harness import CACHE
from tests.kernels.test_machines import OF_80, READ

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""sm_103 and sm_121 are compiled, but the disassembler does not know them."""


class Kernel(NamedTuple):
    """A compiled kernel.

    Registers of a thread, its bytes of local memory (spilled registers, or arrays with computed indices), instructions
    in order without the padding behind the last one, and loops, smallest first.
    """

    name: str
    registers: int
    stack: int
    code: list[str]
    loops: list["Loop"]

    def spills(self) -> list[str]:
        """Instructions that read or write a thread's local memory."""
        return [x for x in self.code if opcode(x) in ("LDL", "STL")]

    def loops_with(self, *opcodes: str) -> list["Loop"]:
        """Innermost loops that hold all of ``opcodes``, e.g. ``"HMMA", "LDGSTS"``."""
        found = [x for x in self.loops if set(opcodes) <= set(mix(x.code))]
        return [x for x in found if not any(y.blocks < x.blocks for y in found)]

    def loop_with(self, *opcodes: str) -> "Loop":
        """The only innermost loop that holds all of ``opcodes``."""
        found = self.loops_with(*opcodes)
        assert len(found) == 1, f"{self.name}: {len(found)} loops with {', '.join(opcodes)}"
        return found[0]


class Loop(NamedTuple):
    """A loop: all blocks from which its head can be reached again, through no other entry; inner loops included.

    A block has the number of its first instruction; ``flow``: instructions and successors of the kernel's blocks.
    """

    head: int
    blocks: frozenset[int]
    flow: "dict[int, tuple[list[str], list[int]]]"

    @property
    def code(self) -> list[str]:
        """Instructions in the order of the program, those of rare branches too."""
        return [x for block in sorted(self.blocks) for x in self.flow[block][0]]

    def shortest(self, name: str, count: int = 1) -> list[str]:
        """Instructions of the shortest way around with at least ``count`` of ``name``: rare branches are not taken.

        Raises
        ------
        AssertionError
            No way around has that many; inner loops may be taken more than once.
        """
        start = (self.head, 0)
        queue: list[tuple[int, tuple[int, int], tuple[int, ...]]] = [(0, start, ())]
        seen: set[tuple[int, int]] = set()
        while queue:
            length, (block, have), path = heapq.heappop(queue)
            if block == self.head and path and have >= count:
                return [x for passed in path for x in self.flow[passed][0]]
            if (block, have) in seen and path:
                continue
            seen.add((block, have))
            code, successors = self.flow[block]
            have = min(count, have + sum(opcode(x) == name for x in code))
            for after in successors:
                if after in self.blocks and (after != self.head or have >= count):
                    heapq.heappush(queue, (length + len(code), (after, have), (*path, block)))
        raise AssertionError(f"no way around the loop has {count} {name}")


def opcode(instruction: str) -> str:
    """The first word without predicate and modifiers: ``@!P0 LDS.128 R4, [R2]`` -> ``LDS``."""
    return re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0].split(".")[0]


def mix(code: list[str]) -> dict[str, int]:
    """How often each operation occurs, most frequent first."""
    return dict(collections.Counter(map(opcode, code)).most_common())


@functools.cache
def compile_kernels(source: str, arch: int = 90, fma: bool = True) -> dict[str, Kernel]:
    """Compile for ``sm_<arch>`` and return the kernels by name.

    Skips the test, with the reason, when there is no compiler or disassembler. ``source`` includes headers of csrc;
    ``fma``: whether a multiply and an add may become one operation.
    """
    disassembler, reader = _tool("nvdisasm"), _tool("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder, "kernel.cubin")
        try:
            with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(CACHE)):  # not the user's
                cubin.write_bytes(compile_program(Program(source, fma=fma), f"sm_{arch}"))
        except UnsupportedError as error:  # not installed
            pytest.skip(str(error))
        usage = _run(reader, "-res-usage", str(cubin))
        text = _run(disassembler, str(cubin))
    return {
        name: Kernel(name, *_usage(usage, name), *_code(body))
        for name, body in re.findall(r"^\s*\.section\s+\.text\.(\w+),(.*?)(?=^\s*\.section\s|\Z)", text, re.M | re.S)
    }


def _tool(name: str) -> str:
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        bundled = pathlib.Path(spec.origin).parent / "backends/nvidia/bin" / name
        if bundled.exists():
            return str(bundled)
    if found := shutil.which(name):
        return found
    return pytest.skip(f"needs {name}, which comes with triton")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-20000:]}"
    return done.stdout + done.stderr


def _usage(text: str, name: str) -> tuple[int, int]:
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _code(text: str) -> tuple[list[str], list[Loop]]:
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))
    while code and opcode(code[-1]) == "NOP":
        code.pop()
    return code, _loops(_blocks(code, labels))


def _blocks(code: list[str], labels: dict[str, int]) -> dict[int, tuple[list[str], list[int]]]:
    """Runs of instructions without a branch, by the first one's number, and what each may continue with."""
    ends: dict[int, list[int]] = {}
    for i, x in enumerate(code):
        name, follows = opcode(x), [i + 1]
        if name == "BRA" and ".DIV" not in x:  # that one goes where a warp has diverged: never in kernels that may not
            target = re.search(r"`\((\.L_\w+)\)", x)
            assert target, x
            conditional = x.startswith("@") or not re.match(r"BRA\S* `", x)
            follows = [labels[target.group(1)], *([i + 1] if conditional else [])]
        elif name in ("EXIT", "RET"):
            follows = [i + 1] if x.startswith("@") else []
        elif name == "BRX":
            follows = [labels[target] for target in re.findall(r"\.L_\w+", x)]
            assert follows, x
        elif name == "JMX":
            raise NotImplementedError(f"a jump by table: {x}")
        if follows != [i + 1]:
            ends[i] = [t for t in follows if t < len(code)]
    starts = sorted({0, *(t for targets in ends.values() for t in targets), *(i + 1 for i in ends)} - {len(code)})
    blocks = {}
    for first, after in itertools.pairwise([*starts, len(code)]):
        blocks[first] = code[first:after], ends.get(after - 1, [after] if after < len(code) else [])
    return blocks


def _loops(flow: dict[int, tuple[list[str], list[int]]]) -> list[Loop]:
    reached, stack = {0}, [0]
    while stack:
        new = set(flow[stack.pop()][1]) - reached
        reached |= new
        stack += new
    before: dict[int, set[int]] = {b: set() for b in reached}
    for b in reached:
        for after in flow[b][1]:
            before[after].add(b)
    # blocks that every way to a block passes
    passed = {b: set(reached) for b in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for b in sorted(reached - {0}):
            common = {b} | set.intersection(*(passed[p] for p in before[b]))
            changed |= common != passed[b]
            passed[b] = common
    bodies: dict[int, set[int]] = {}
    for b in reached:
        for head in flow[b][1]:
            # a branch to itself ends a program
            if head not in passed[b] or (head == b and len(flow[b][0]) == 1):
                continue
            body, stack = bodies.setdefault(head, {head}), [b]
            while stack:
                if (block := stack.pop()) not in body:
                    body.add(block)
                    stack += before[block]
    loops = [Loop(head, frozenset(body), flow) for head, body in bodies.items()]
    return sorted(loops, key=lambda x: (len(x.code), x.head))


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
def test_architectures_that_the_disassembler_does_not_know(arch: int, compiler: None) -> None:
    pair = pair_of("hqmq-s96_r4", 128)
    config = launch.config_for(pair, 256, 32768, machine_of(f"sm_{arch}"), heads=4)
    assert build._nvrtc(attention.program(pair, config, heads=4), f"sm_{arch}").startswith(b"\x7fELF")


SOURCE = """
#include "platform.cuh"
using namespace kv;
// one loop in another: tensor core inside, a reduction outside
KV_KERNEL void KV_BOUNDS(128, 1) nested(const uint32_t* x, float* y, int n, int m) {
  KV_DYNAMIC_SHARED(shared);
  float total = 0;
  KV_NO_UNROLL
  for (int i = 0; i < n; ++i) {
    copy16(shared + thread() * 16, x + i * 512 + thread() * 4);
    copy_commit();
    copy_wait<0>();
    sync_threads();
    float d[4] = {0, 0, 0, 0};
    KV_NO_UNROLL
    for (int k = 0; k < m; ++k) {
      uint32_t a = ((const uint32_t*)shared)[(k * 32 + thread()) % 512];
      mma(d, a, a, a, a, transpose8(a), a);
    }
    total += exp2_fast(shfl_xor(d[0] + d[3], 1));
    sync_threads();
  }
  y[thread()] = total;
}
// a rare branch does more of the same; votes make the compiler provide for a warp that has diverged
KV_KERNEL void KV_BOUNDS(128, 1) branching(const uint32_t* x, float* y, int n) {
  float d[4] = {0, 0, 0, 0};
  KV_NO_UNROLL
  for (int i = 0; i < n; ++i) {
    const uint32_t a = x[i * 128 + thread()];
    if (kv::any(a == 7)) {
      KV_UNROLL
      for (int k = 0; k < 3; ++k) mma(d, a + k, a, a, a, shfl_xor(a, 1 + k), a);
    } else {
      mma(d, a, a, a, a, shfl_xor(a, 16), a);
    }
  }
  y[thread()] = d[0] + d[1] + d[2] + d[3];
}
KV_KERNEL void straight(float* y) { y[thread()] = add(mul(y[thread()], 3.0f), 1.0f); }
// 200 numbers that live at once and 64 registers to hold them
KV_KERNEL void KV_BOUNDS(1024, 1) spilling(const float* x, float* y) {
  float r[200];
  KV_UNROLL
  for (int i = 0; i < 200; ++i) r[i] = x[i * 1024 + thread()];
  sync_threads();
  float sum = 0;
  KV_UNROLL
  for (int i = 0; i < 200; ++i) sum = sum * r[199 - i] + r[i];
  y[thread()] = sum;
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_and_loops_are_told_right(arch: int) -> None:
    """As the budgets above need it."""
    kernels = compile_kernels(SOURCE, arch)
    assert set(kernels) == {"nested", "branching", "straight", "spilling"}
    spilling, nested, straight = (kernels[name] for name in ("spilling", "nested", "straight"))
    assert (len(nested.loops), nested.spills(), nested.stack, straight.loops) == (2, [], 0, [])
    assert spilling.registers <= 64
    assert spilling.stack > 4 * 100
    assert len(spilling.spills()) > 100
    inner, outer = nested.loop_with("HMMA").code, nested.loop_with("LDGSTS").code
    assert (mix(inner)["HMMA"], mix(inner)["MOVM"]) == (1, 1)
    assert not {"LDGSTS", "MUFU"} & set(mix(inner))
    assert {"LDGSTS", "MUFU", "SHFL", "HMMA"} <= set(mix(outer))
    assert 5 < len(inner) < len(outer) < len(nested.code)
    assert [x.code for x in nested.loops_with("HMMA", "LDGSTS")] == [outer]
    loop = kernels["branching"].loop_with("HMMA", "VOTE")
    once, often = loop.shortest("HMMA"), loop.shortest("HMMA", 2)
    assert [mix(code)["HMMA"] for code in (once, often, loop.code)] == [1, 3, 4]
    assert 8 < len(once) < len(often) < len(loop.code)
    with pytest.raises(AssertionError, match="no way around the loop has 5 HMMA"):
        loop.shortest("HMMA", 5)
