"""Device code of the decode-attention skeleton; see `kvcodec.kernels.triton.decode_attention`."""

# ruff: noqa: SIM108 -- a statement on a constexpr is resolved when compiling, an expression is not

from typing import NamedTuple

import triton.language as tl

import triton
from kvcodec.kernels.triton._common import butterfly, fold8, gdc_launch_dependents, gdc_wait, hadamard, sqrt_order


class Hooks(NamedTuple):
    """The jit functions with which a codec fills the skeleton; see the module's docstring."""

    load_q: object
    prepare: object
    load_k: object
    score: object
    load_v: object
    init: object
    accumulate: object
    finish: object


@triton.jit
def _page_of(table_row, i, BN: tl.constexpr, P: tl.constexpr):
    """Return the page id of block i: a scalar, or one id per row when a block spans pages."""
    if BN <= P:
        page = tl.load(table_row + (i * BN) // P)
    else:
        page = tl.load(table_row + i * (BN // P) + tl.arange(0, BN) // P)
    return page


@triton.jit
def _prefetch(pages32, page, heads, head, PAGE_BYTES: tl.constexpr):
    """Ask the L2 for a page, so that its way from memory runs beside the rotation of the query."""
    at = pages32 + (page.to(tl.int64) * heads + head) * (PAGE_BYTES // 4)
    lines = tl.arange(0, 128)
    for i in tl.static_range((PAGE_BYTES + 16383) // 16384):
        line = tl.minimum(i * 128 + lines, (PAGE_BYTES - 1) // 128)
        tl.inline_asm_elementwise(
            "{prefetch.global.L2 [$1]; mov.b32 $0, 0;}", "=r,l", [at + line * 32], tl.int32, False, 1
        )


@triton.jit
def _block(
    i, page, q, m, l, acc, pages16, pages32, head, n_lo, n_hi, heads,
    D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
    MASKED: tl.constexpr, LOAD_K: tl.constexpr, SCORE: tl.constexpr, LOAD_V: tl.constexpr,
    ACCUMULATE: tl.constexpr, PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """Fold block i into the running softmax state (m, l, acc)."""
    row = tl.arange(0, BN)
    slot = (i * BN) % P + row if BN <= P else row % P
    # a pool passes 2**31 bytes soon
    unit = page.to(tl.int64) * heads + head
    at16 = pages16 + unit * (PAGE_BYTES // 2)
    at32 = pages32 + unit * (PAGE_BYTES // 4)
    token = i * BN + row
    live = (token >= n_lo) & (token < n_hi)
    kw, ks = LOAD_K(at16, at32, slot, live, D, DQ, P, MASKED)
    vw, vs = LOAD_V(at16, at32, slot, live, D, DQ, P, MASKED)
    s = SCORE(q, kw, ks, ASM)
    if MASKED:
        s = tl.where(live[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[None, :])
    l = l * alpha[None, :] + fold8(p)
    acc = ACCUMULATE(acc, p, alpha, vw, vs, ASM)
    return m_new, l, acc


@triton.jit
def _dense_part(
    q_ptr, qrow, rows_ok, dense_k, dense_v, dlo, dhi, b, h, skb, skh, skn, svb, svh, svn, scale2,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, M: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Plain attention over the dense tokens [dlo, dhi) of one sequence and head, model basis."""
    d = tl.arange(0, DP)
    row = tl.arange(0, BN)
    # the interpreter multiplies bf16 wrongly, so its operands are widened
    narrow: tl.constexpr = ASM and dense_k.dtype.element_ty != tl.float32
    dt: tl.constexpr = dense_k.dtype.element_ty if narrow else tl.float32
    q = tl.load(q_ptr + qrow[:, None] + d[None, :], rows_ok[:, None] & (d < D)[None, :], other=0.0)
    q = q.to(tl.float32).to(dt)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    o = tl.zeros([M, DP], tl.float32)
    k_at = dense_k + b.to(tl.int64) * skb + h * skh
    v_at = dense_v + b.to(tl.int64) * svb + h * svh
    for n0 in tl.range((dlo // BN) * BN, dhi, BN, num_stages=1):
        n = n0 + row
        live = (n >= dlo) & (n < dhi)
        ok = live[:, None] & (d < D)[None, :]
        k = tl.load(k_at + n[:, None] * skn + d[None, :], ok, other=0.0)
        v = tl.load(v_at + n[:, None] * svn + d[None, :], ok, other=0.0)
        if not narrow:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        s = tl.where(live[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(p, 1)
        o = tl.dot(p.to(dt), v, o * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, l, o


@triton.jit(do_not_specialize=["heads", "group", "num_splits", "stride_table", "width", "capacity"])
def _split_kernel(
    q_ptr, pages16, pages32, table, seq_lens, start, part_o, part_m, part_l,
    dense_k, dense_v, dense_lens, dense_start,
    stride_qb, stride_qh, stride_table, skb, skh, skn, svb, svh, svn,
    heads, group, scale2, num_splits, width, capacity,
    D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, NH: tl.constexpr,
    MT: tl.constexpr, DENSE: tl.constexpr, BND: tl.constexpr, KBLOCK: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr, PAGE_BYTES: tl.constexpr, LOAD_Q: tl.constexpr, PREPARE: tl.constexpr, LOAD_K: tl.constexpr,
    SCORE: tl.constexpr, LOAD_V: tl.constexpr, INIT: tl.constexpr, ACCUMULATE: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Write the partial (m, l, o) of one split; the last split index is the dense part if DENSE."""
    split = tl.program_id(0)
    unit = tl.program_id(1)
    mt = unit % MT
    h = (unit // MT) % heads
    b = unit // (MT * heads)
    if PDL:
        gdc_launch_dependents()

    r = tl.arange(0, NH) + mt * NH
    rows_ok = r < group
    hq = h * group + r
    qrow = b.to(tl.int64) * stride_qb + hq * stride_qh
    g = tl.arange(0, DQ)
    slots = tl.num_programs(0)
    out = (b.to(tl.int64) * heads * group + hq) * slots + split
    o_at = part_o + out * (4 * DQ)
    ok = rows_ok[None, :] & (g < D // 4)[:, None]

    if DENSE and split == num_splits:
        DP: tl.constexpr = 4 * DQ
        dlo = 0
        dhi = width
        if dense_lens is not None:
            dhi = tl.minimum(tl.load(dense_lens + b), width)
        if dense_start is not None:
            dlo = tl.load(dense_start + b)
        dm, dl, do = _dense_part(
            q_ptr, qrow, rows_ok, dense_k, dense_v, dlo, dhi, b, h, skb, skh, skn, svb, svh, svn,
            scale2, D, DP, BND, NH, ASM,
        )  # fmt: skip
        d = tl.arange(0, DP)
        at = o_at[:, None] + ((d % 4) * DQ + d // 4)[None, :]
        tl.store(at, do, rows_ok[:, None] & (d < D)[None, :])
        tl.store(part_m + out, dm, rows_ok)
        tl.store(part_l + out, dl, rows_ok)
    else:
        # four memory latencies follow one another here (length, page id, tile, and the query beside
        # them), so each is started as early as it can be
        # a length beyond the table (a captured step of a full cache) must not be followed
        n_hi = tl.minimum(tl.load(seq_lens + b), capacity)
        n_lo = 0
        if start is not None:
            n_lo = tl.load(start + b)
        x = LOAD_Q(q_ptr, qrow, rows_ok, D, DQ)
        first = n_lo // BN
        count = tl.maximum(tl.cdiv(n_hi, BN) - first, 0)
        lo = first + (split * count) // num_splits
        hi = first + ((split + 1) * count) // num_splits
        m = tl.full([NH], float("-inf"), tl.float32)
        l = tl.zeros([8, NH], tl.float32)
        if lo < hi:
            # only the blocks at the two ends of the live range can hold dead tokens
            head_edge = (n_lo > lo * BN).to(tl.int32)
            tail_edge = ((n_hi < hi * BN) & (hi - lo > head_edge)).to(tl.int32)
            table_row = table + b.to(tl.int64) * stride_table
            last = hi - tail_edge
            page = _page_of(table_row, tl.minimum(lo + head_edge, hi - 1), BN, P)
            if ASM and BN <= P:
                second = _page_of(table_row, tl.minimum(lo + head_edge + 1, hi - 1), BN, P)
                _prefetch(pages32, page, heads, h, PAGE_BYTES)
                _prefetch(pages32, second, heads, h, PAGE_BYTES)
            q = PREPARE(x, scale2, DQ, KBLOCK, ASM)
            acc = INIT(NH, DQ)
            for i in tl.range(lo + head_edge, last):
                # read one block ahead: the id is there when its tile is asked for
                ahead = _page_of(table_row, tl.minimum(i + 1, hi - 1), BN, P)
                m, l, acc = _block(
                    i, page, q, m, l, acc, pages16, pages32, h, n_lo, n_hi, heads, D, DQ, P, BN,
                    ASM, False, LOAD_K, SCORE, LOAD_V, ACCUMULATE, PAGE_BYTES,
                )  # fmt: skip
                page = ahead
            for e in tl.range(0, head_edge + tail_edge, num_stages=1):
                i = tl.where(e < head_edge, lo, hi - 1)
                page = _page_of(table_row, i, BN, P)
                m, l, acc = _block(
                    i, page, q, m, l, acc, pages16, pages32, h, n_lo, n_hi, heads, D, DQ, P, BN,
                    ASM, True, LOAD_K, SCORE, LOAD_V, ACCUMULATE, PAGE_BYTES,
                )  # fmt: skip
            o0, o1, o2, o3 = FINISH(acc)
            tl.store(o_at[None, :] + g[:, None], o0, ok)
            tl.store(o_at[None, :] + DQ + g[:, None], o1, ok)
            tl.store(o_at[None, :] + 2 * DQ + g[:, None], o2, ok)
            tl.store(o_at[None, :] + 3 * DQ + g[:, None], o3, ok)
        tl.store(part_m + out, m, rows_ok)
        tl.store(part_l + out, tl.sum(l, 0), rows_ok)


@triton.jit
def _combine_plane(part_o, row, j, w, s, live, g, slots, D: tl.constexpr, DQ: tl.constexpr):
    """Return sum_s w[s] * o[s, plane j, :]; slots that were not written count as zero."""
    at = part_o + (row * slots + s[:, None]) * (4 * DQ) + j * DQ + g[None, :]
    # loaded before the weights are known, hence the selection afterwards
    o = tl.load(at, (s < slots)[:, None] & (g < D // 4)[None, :], other=0.0)
    return tl.sum(tl.where(live[:, None], o * w[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["num_q_heads", "slots"])
def _combine_kernel(
    part_o, part_m, part_l, sinks, o_ptr, lse_ptr, stride_ob, stride_oh, num_q_heads, slots,
    D: tl.constexpr, DQ: tl.constexpr, SB: tl.constexpr,
    DENSE: tl.constexpr, VBLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partials of one (sequence, query head); four programs, or one that un-rotates."""
    row = tl.program_id(0).to(tl.int64)
    hq = row % num_q_heads
    if PDL:
        gdc_wait()
    s = tl.arange(0, SB)
    m = tl.load(part_m + row * slots + s, s < slots, other=float("-inf"))
    l = tl.load(part_l + row * slots + s, s < slots, other=0.0)
    top = tl.max(m, 0)
    if sinks is not None:
        # a learned sink is one more logit with no value
        sink = tl.load(sinks + hq).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    live = m > float("-inf")
    w = tl.where(live, tl.exp2(m - top), 0.0)
    total = tl.sum(w * l, 0)
    if sinks is not None:
        total += tl.where(sink > float("-inf"), tl.exp2(sink - top), 0.0)
    inv = tl.where(total > 0.0, 1.0 / total, 0.0)
    w = w * inv
    g = tl.arange(0, DQ)
    o_at = o_ptr + (row // num_q_heads) * stride_ob + hq * stride_oh
    if VBLOCK == 1:
        j = tl.program_id(1)
        x = _combine_plane(part_o, row, j, w, s, live, g, slots, D, DQ)
        tl.store(o_at + 4 * g + j, x.to(o_ptr.dtype.element_ty), g < D // 4)
    else:
        codes = live & (s < slots - DENSE)
        x0 = _combine_plane(part_o, row, 0, w, s, codes, g, slots, D, DQ)
        x1 = _combine_plane(part_o, row, 1, w, s, codes, g, slots, D, DQ)
        x2 = _combine_plane(part_o, row, 2, w, s, codes, g, slots, D, DQ)
        x3 = _combine_plane(part_o, row, 3, w, s, codes, g, slots, D, DQ)
        x0, x1, x2, x3 = butterfly(x0, x1, x2, x3, VBLOCK)
        if VBLOCK >= 8:
            hm = hadamard(DQ, VBLOCK // 4)
            x0 = tl.sum(hm * x0[None, :], 1)
            x1 = tl.sum(hm * x1[None, :], 1)
            x2 = tl.sum(hm * x2[None, :], 1)
            x3 = tl.sum(hm * x3[None, :], 1)
        c = sqrt_order(VBLOCK)
        x0, x1, x2, x3 = x0 * c, x1 * c, x2 * c, x3 * c
        if DENSE:
            # dense values were never rotated
            rest = live & (s == slots - 1)
            x0 += _combine_plane(part_o, row, 0, w, s, rest, g, slots, D, DQ)
            x1 += _combine_plane(part_o, row, 1, w, s, rest, g, slots, D, DQ)
            x2 += _combine_plane(part_o, row, 2, w, s, rest, g, slots, D, DQ)
            x3 += _combine_plane(part_o, row, 3, w, s, rest, g, slots, D, DQ)
        ty: tl.constexpr = o_ptr.dtype.element_ty
        tl.store(o_at + 4 * g, x0.to(ty), g < D // 4)
        tl.store(o_at + 4 * g + 1, x1.to(ty), g < D // 4)
        tl.store(o_at + 4 * g + 2, x2.to(ty), g < D // 4)
        tl.store(o_at + 4 * g + 3, x3.to(ty), g < D // 4)
    if tl.program_id(1) == 0:
        lse = tl.where(total > 0.0, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + row, lse)
