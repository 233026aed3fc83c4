"""The cases of int-4: the checks of `kernel_cases` where they fit, and equality of every byte."""

import torch
from kernel_cases import (
    BF16,
    FP16,
    FP32,
    Pool,
    check_append,
    check_attention,
    check_bad,
    check_cuda_graph,
    check_graph_break_free,
    check_same_bits,
    nibbles,
    reference,
)


def check_equal_bytes(device, dim, dtype, page, tokens=100, batch=1):
    """int-4 rotates nothing and sums nothing: every byte is the reference's."""
    pool = Pool(device, batch=batch, dim=dim, dtype=dtype, page=page, tokens=tokens, codec="group_int").encode()
    for role, x in (("key", pool.k), ("value", pool.v)):
        want, _ = reference(x, 1, "group_int")
        got = pool.payload(role)
        assert set(got) == set(want) == {"codes", "scale", "zero"}
        for name in want:
            assert torch.equal(got[name], want[name]), f"{role} {name}: {(got[name] != want[name]).sum()} differ"
    used = torch.zeros(pool.pages.shape[0], dtype=torch.bool)
    used[pool.table.cpu()[:, : -(-tokens // page)].flatten().long()] = True
    assert (pool.pages.cpu()[~used] == 255).all(), "a page that no token belongs to was written"


def check_int4_formulas(device):
    """int-4 where fp16 bites: constants, the range's ends, subnormal scales, an offset above the minimum."""
    pool = Pool(device, batch=1, heads=1, tokens=16, dim=64, codec="group_int")
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    rows[0] = 0.0
    rows[1] = 3.0
    rows[2] = -1e-3
    rows[3] = 65504.0
    rows[4] = -65504.0
    rows[5] = 1000.3  # fp16 holds 1000.5: each channel lies below the offset
    rows[12] = torch.linspace(1000.3, 1000.6, 64)  # and here some do, by many steps
    rows[6] *= 1e-6
    rows[7] = rows[7].clamp(-1, 1) * 65504
    rows[8, :2] = torch.tensor([65504.0, -60000.0])
    rows[9] = rows[9].abs() + 100.0
    rows[10] = torch.linspace(0.0, 65504.0, 64)  # 15 steps, rounded, reach beyond the range
    rows[11, 7] = 1e4
    pool.k[0, 0] = rows.to(device)
    pool.encode()
    zero = rows.amin(-1, keepdim=True).half()
    scale = ((rows.amax(-1, keepdim=True) - zero.float()) / 15).clamp_min(2.0**-24).half()
    beyond = zero.float() + 15 * scale.float() > 65504
    assert beyond.any(), "no row tries the smaller step"
    scale = torch.where(beyond, (scale.view(torch.int16) - 1).view(torch.float16), scale)
    got = pool.payload("key")
    assert torch.equal(got["zero"][0, 0], zero), "offsets"
    assert torch.equal(got["scale"][0, 0], scale), "scales"
    code = torch.round((rows - zero.float()) / scale.float()).clamp(0, 15)
    assert torch.equal(nibbles(got["codes"])[0, 0].float(), code), "codes"
    want, _ = reference(rows, 1, "group_int")
    assert torch.equal(got["codes"][0, 0], want["codes"]), "codes of the reference"


def int4_attention(**options):
    return lambda device: check_attention(device, codec="group_int", **options)


INT4_GPU_ONLY = {
    "int4-cuda-graph": lambda d: check_cuda_graph(d, "group_int", 1),
    "int4-compile-inductor": lambda d: check_graph_break_free(d, "inductor", "group_int"),
    "int4-bytes-128-bf16-long": lambda d: check_equal_bytes(d, 128, torch.bfloat16, 64, tokens=8000),
    "int4-bytes-80-fp16-long": lambda d: check_equal_bytes(d, 80, torch.float16, 16, tokens=8000),
    "int4-bytes-256-fp32-long": lambda d: check_equal_bytes(d, 256, torch.float32, 64, tokens=8000),
    "int4-attention-bf16-4096": int4_attention(group=8, lens=(4096, 1000), dtype=torch.bfloat16, heads=2),
    "int4-attention-bf16-80": int4_attention(dim=80, group=4, lens=(1000, 63), dtype=torch.bfloat16),
    "int4-attention-bf16-256-group-16": int4_attention(
        dim=256, group=16, lens=(700, 64), dtype=torch.bfloat16, dense=(100, (0, 3), (100, 70))
    ),
    "int4-attention-bf16-one-long-split": int4_attention(lens=(16384, 16384), dtype=torch.bfloat16, splits=1),
    "int4-attention-bf16-offset": int4_attention(lens=(4096, 1000), dtype=torch.bfloat16, offset=3.0),
}

INT4_CASES = {
    "int4-bytes-64-fp32": lambda d: check_equal_bytes(d, 64, FP32, 64, tokens=17),
    "int4-bytes-80-bf16": lambda d: check_equal_bytes(d, 80, BF16, 16, tokens=33),
    "int4-bytes-128-bf16": lambda d: check_equal_bytes(d, 128, BF16, 64, tokens=17, batch=2),
    "int4-bytes-256-fp16": lambda d: check_equal_bytes(d, 256, FP16, 48, tokens=18),
    "int4-formulas": check_int4_formulas,
    "int4-append": lambda d: check_append(d, "group_int", 1),
    "int4-bad-input": lambda d: check_bad(d, "group_int"),
    "int4-same-bits-64": lambda d: check_same_bits(d, 64, "group_int"),
    "int4-same-bits-80": lambda d: check_same_bits(d, 80, "group_int"),
    "int4-attention-64-group-1": int4_attention(dim=64, group=1, lens=(0, 1, 63), splits=3),
    "int4-attention-80-group-4": int4_attention(dim=80, page=16, lens=(63, 17), splits=2),
    "int4-attention-128-group-8": int4_attention(group=8, lens=(1000, 63), splits=2),
    "int4-attention-256-group-12": int4_attention(dim=256, group=12, page=16, lens=(40, 1), splits=2),
    "int4-attention-two-heads-start": int4_attention(dim=64, heads=2, start=(5, 33), lens=(130, 33), splits=2),
    "int4-attention-dense": int4_attention(dim=64, lens=(30, 0), page=16, dense=(40, (0, 3), (40, 20)), splits=2),
    "int4-attention-sinks": int4_attention(
        dim=64, lens=(20, 9), page=16, dense=(8, (0, 0), (8, 0)), sinks=True, splits=1
    ),
    "int4-attention-small-values": int4_attention(dim=64, value_scale=1e-5, page=16, lens=(30, 9), splits=1),
    "int4-attention-large-values": int4_attention(dim=64, value_scale=1e4, page=16, lens=(30, 9), splits=1),
    "int4-attention-large-query": int4_attention(dim=64, q_scale=30.0, page=16, lens=(30, 9), splits=1),
    "int4-attention-offset": int4_attention(dim=64, offset=3.0, page=16, lens=(63, 9), splits=1),
    "int4-attention-page-48": int4_attention(dim=64, page=48, lens=(60, 9), splits=1),
}
