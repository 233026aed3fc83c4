"""Compile for sm_90 without a GPU and read the machine code: no spills, an instruction budget.

The budgets are counts of issued instructions per element of K and V in the main loop (resp. in the
whole encoding program), with a few percent of room.
"""

import os
import pathlib
import re
import subprocess

import pytest

triton = pytest.importorskip("triton", reason="the kernels need triton")
if triton.__version__.split(".")[:2] != ["3", "6"]:
    pytest.skip(f"budgets are for triton 3.6, not {triton.__version__}", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

# ruff: noqa: E402 -- imports that need triton come after the check that it is there
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcodec.kernels.triton import _decode, _int4_encode, group_int, saw_int4
from kvcodec.kernels.triton._common import next_pow2

BIN = pathlib.Path(nvidia.__file__).parent / "bin"
INT = "i32"


def compiled(kernel, types, constants, warps, stages, tmp_path):
    """Return (SASS instructions, loops as index pairs, registers)."""
    aligned = [n for n, t in types.items() if t[0] == "*" or n.startswith(("stride_q", "sk", "sv"))]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    constants = {n: constants.get(n) for n in kernel.arg_names if n not in types}
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages}
    )
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    run = {"capture_output": True, "text": True, "check": True}
    text = subprocess.run([BIN / "nvdisasm", cubin], **run).stdout
    usage = subprocess.run([BIN / "cuobjdump", "-res-usage", cubin], **run)
    labels, code, loops = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction.group(1))
    for i, x in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", x)
        if target and labels.get(target.group(1), i + 1) <= i:
            loops.append((labels[target.group(1)], i))
    return code, loops, int(re.search(r"REG:(\d+)", usage.stdout + usage.stderr).group(1))


def decode(tmp_path, dim, tile=8, block=64, warps=1, stages=3, dense=0, codec=saw_int4):
    types = {
        "q_ptr": "*bf16", "pages16": "*i16", "pages32": "*i32", "table": "*i32", "seq_lens": "*i32",
        "part_o": "*fp32", "part_m": "*fp32", "part_l": "*fp32", "stride_qb": INT, "stride_qh": INT,
        "stride_table": INT, "heads": INT, "group": INT, "scale2": "fp32", "num_splits": INT, "width": INT,
        "capacity": INT,
    }  # fmt: skip
    if dense:
        types |= {"dense_k": "*bf16", "dense_v": "*bf16", "dense_lens": "*i32"}
        types |= dict.fromkeys(("skb", "skh", "skn", "svb", "svh", "svn"), INT)
    block_of_keys = dim & -dim if codec is saw_int4 else 1
    constants = {
        "skb": 0, "skh": 0, "skn": 0, "svb": 0, "svh": 0, "svn": 0, "D": dim, "DQ": next_pow2(dim // 4), "P": 64,
        "BN": block, "NH": tile, "MT": 1, "DENSE": dense > 0, "BND": 32, "KBLOCK": block_of_keys, "ASM": True,
        "PDL": True,
        "PAGE_BYTES": codec.page_bytes(dim, 64),
        **{name.upper(): hook for name, hook in codec.HOOKS._asdict().items()},
    }  # fmt: skip
    return compiled(_decode._split_kernel, types, constants, warps, stages, tmp_path)


def encode(tmp_path, dim, pointer="*i64", kind=0, codec=saw_int4):
    rows, warps = _int4_encode.ENCODE_CONFIG
    types = dict.fromkeys(("k_ptr", "v_ptr"), pointer) | {
        "pages16": "*i16", "pages32": "*i32", "table": "*i32", "start": "*i32", "bad": "*i32", "n": INT,
        "heads": INT, "skb": INT, "skh": INT, "skn": INT, "svb": INT, "svh": INT, "svn": INT, "stride_table": INT,
        "slots": INT,
    }  # fmt: skip
    constants = {"D": dim, "DQ": next_pow2(dim // 4), "P": 64, "BT": rows,
                 "KBLOCK": dim & -dim if codec is saw_int4 else 1, "VBLOCK": 1, "KIND": kind, "ASM": True,
                 "PAIRED": codec.PAIRED, "QUANTIZE": codec.quantize}  # fmt: skip
    return compiled(_int4_encode._encode_kernel, types, constants, warps, 1, tmp_path)


def opcode(instruction):
    return re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0].split(".")[0]


def spills(code):
    return [x for x in code if opcode(x) in ("LDL", "STL")]


@pytest.mark.parametrize(
    ("codec", "dim", "budget"),
    [
        pytest.param(saw_int4, 128, 1.72, id="saw-int4-128"),
        pytest.param(saw_int4, 64, 2.35, id="saw-int4-64"),
        pytest.param(group_int, 128, 1.76, id="int-4-128"),
        pytest.param(group_int, 64, 2.57, id="int-4-64"),
    ],
)
def test_decode_loop(tmp_path, codec, dim, budget):
    code, loops, registers = decode(tmp_path, dim, codec=codec)
    bodies = [code[a : b + 1] for a, b in loops]
    # the pipelined loop is the one that copies to shared memory asynchronously and multiplies
    main = [b for b in bodies if any(opcode(x) == "HMMA" for x in b) and any(opcode(x) == "LDGSTS" for x in b)]
    assert len(main) == 1, f"{len(main)} main loops"
    kinds = {opcode(x) for x in main[0]}
    assert not kinds & {"LDL", "STL", "I2F", "I2FP", "HGMMA"}, kinds
    assert any("LDSM" in x and ".MT88" in x for x in main[0]), "values are not read transposed"
    per_element = len(main[0]) * 32 / (64 * dim * 2)
    assert per_element <= budget, f"{per_element:.3f} instructions per element"
    assert registers <= 255 if dim == 128 else registers <= 168
    # 16-byte asynchronous copies: two code planes; and two small ones of scales
    wide = [x for x in main[0] if opcode(x) == "LDGSTS" and ".128" in x]
    assert len(wide) == 2 * 64 * dim // 2 // 512, len(wide)


def test_decode_loop_counts_more_without_assembly(tmp_path, monkeypatch):
    """The budget can fail: the plain form of the same loop is well above it."""
    from triton.compiler import ASTSource as Source

    original = Source.__init__

    def plain(self, fn, signature, constexprs=None, attrs=None):
        original(self, fn, signature, {**constexprs, "ASM": False, "PDL": False}, attrs)

    monkeypatch.setattr(Source, "__init__", plain)
    _, loops, _ = decode(tmp_path, 128)
    worst = max(b - a + 1 for a, b in loops) * 32 / (64 * 128 * 2)
    assert worst > 2.2, worst


@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (128, {"dense": 128}),
        (128, {"tile": 16, "warps": 2}),
        (256, {"warps": 2, "stages": 2}),
        (256, {"warps": 2, "stages": 2, "tile": 16, "block": 32}),
        (128, {"dense": 128, "codec": group_int}),
        (256, {"warps": 2, "stages": 2, "codec": group_int}),
    ],
)  # fmt: skip
def test_decode_does_not_spill(tmp_path, dim, options):
    code, _, _ = decode(tmp_path, dim, **options)
    assert not spills(code), spills(code)[:4]
    assert not any(opcode(x) == "HGMMA" for x in code)


@pytest.mark.parametrize(
    ("codec", "pointer", "kind", "budget"),
    [
        pytest.param(saw_int4, "*i64", 0, 24.0, id="saw-int4-bf16"),
        pytest.param(saw_int4, "*i64", 1, 24.0, id="saw-int4-fp16"),
        pytest.param(saw_int4, "*fp32", 2, 31.0, id="saw-int4-fp32"),
        pytest.param(group_int, "*i64", 0, 22.5, id="int-4-bf16"),
    ],
)
def test_encode(tmp_path, codec, pointer, kind, budget):
    code, _, registers = encode(tmp_path, 128, pointer, kind, codec)
    assert not spills(code), spills(code)[:4]
    assert registers <= 255
    rows, warps = _int4_encode.ENCODE_CONFIG
    # both branches (K rotated, V not) are in the program, and each runs one
    per_element = len(code) * 32 * warps / (2 * rows * 128)
    assert per_element <= budget, f"{per_element:.2f} instructions per element"
