"""Checks of the kernels against the reference codec, on any device.

Run on a CPU in Triton's interpreter (`test_interpreter.py`, a process of its own, because the
choice is made when the kernels are imported) and on a GPU (`test_gpu.py`). Each case raises
AssertionError with what it saw. The cases of this file are saw-int4's.
"""

import math

import torch

P_DEFAULT = 64


def codec_of(stem, block):
    """Return the reference codec of a kernel module."""
    from kvcodec.codecs.group_int import GroupInt
    from kvcodec.codecs.saw_int4 import SawInt4

    return SawInt4(block) if stem == "saw_int4" else GroupInt(4, 0)


def reference(x, block, stem="saw_int4"):
    """Return the payload and the decoded rows (model basis, fp32) of the reference codec."""
    codec = codec_of(stem, block)
    payload = codec.encode(codec.to_code(x.cpu().float(), {}), {})
    return payload, codec.from_code(codec.decode(payload, {}), {})


def own_reference(y):
    """Codes, scale and zero of rotated rows, written out once more from the formulas."""
    top = y.abs().amax(-1, keepdim=True)
    exponent = torch.where(top > 0, torch.floor(torch.log2(top.double())), torch.tensor(-99.0).double())
    floor = torch.clamp(2.0 ** (exponent - 9), min=2.0**-24).float()
    s = torch.maximum((y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 15, floor)
    s = s.clamp(max=65504.0).half().float()
    z = torch.round(-y.amin(-1, keepdim=True) / s)
    return (torch.round(y / s) + z).clamp(0, 15), s, z


class Pool:
    """Keys, values and a poisoned, permuted page pool that holds their encoding."""

    def __init__(self, device, *, batch=2, heads=2, tokens=100, dim=128, page=P_DEFAULT, key_block=None,
                 value_block=1, dtype=torch.float32, seed=0, value_scale=0.3, codec="saw_int4"):  # fmt: skip
        from kvcodec.kernels.triton.decode_attention import CODECS

        g = torch.Generator().manual_seed(seed)
        self.dim, self.page, self.heads, self.tokens, self.batch = dim, page, heads, tokens, batch
        self.codec, self.kernels = codec, CODECS[codec]
        whole = dim & -dim if codec == "saw_int4" else 1
        self.key_block = whole if key_block is None else key_block
        self.value_block = value_block
        columns = -(-tokens // page) + 1
        shape = (batch, heads, tokens, dim)
        self.k = torch.randn(shape, generator=g).mul(torch.rand(dim, generator=g) + 0.2).to(dtype).to(device)
        self.v = torch.randn(shape, generator=g).mul(value_scale).to(dtype).to(device)
        # poison: scales of NaN, so that a read of a slot that was never written shows
        self.pages = torch.full(
            (batch * columns + 1, heads, self.kernels.page_bytes(dim, page)), 255, dtype=torch.uint8, device=device
        )
        order = torch.randperm(batch * columns + 1, generator=g)[: batch * columns]
        self.table = order.view(batch, columns).int().to(device)
        self.sizes = {"key_block": self.key_block, "value_block": value_block, "page_tokens": page}

    def layout(self):
        """Return where the reference lays every plane of a page."""
        from kvcodec.layout import PageLayout

        blocks = (self.key_block, self.value_block)
        return PageLayout(*(codec_of(self.codec, block).layout(self.dim) for block in blocks), self.page)

    def encode(self, first=0, last=None, bad=None):
        last = self.tokens if last is None else last
        start = torch.full((self.batch,), first, dtype=torch.int32, device=self.k.device)
        self.kernels.encode_to_pages(
            self.k[:, :, first:last], self.v[:, :, first:last], self.pages, self.table, start, bad=bad, **self.sizes
        )
        return self

    def fill(self):
        """Write the pages with the reference codec, so that attention is tested alone."""
        layout = self.layout()
        table, token = self.table.cpu().long(), torch.arange(self.tokens)
        pages = self.pages.cpu()
        for role, x, block in (("key", self.k, self.key_block), ("value", self.v, self.value_block)):
            payload, _ = reference(x, block, self.codec)
            for plane in layout.planes:
                if plane.role == role:
                    view = layout.view(pages, plane)
                    at = (table[:, token // self.page], slice(None), (token % self.page).expand(self.batch, -1))
                    view[at] = payload[plane.field.name].transpose(1, 2)
        self.pages.copy_(pages)
        return self

    def payload(self, role):
        """Read one role's fields back, [B, H, T, ...] on the CPU."""
        layout = self.layout()
        pages, table = self.pages.cpu(), self.table.cpu().long()
        assert layout.page_bytes == pages.shape[-1]
        token = torch.arange(self.tokens)
        out = {}
        for plane in layout.planes:
            if plane.role == role:
                view = layout.view(pages, plane)
                got = view[table[:, token // self.page], :, (token % self.page).expand(self.batch, -1)]
                out[plane.field.name] = got.transpose(1, 2)
        return out

    def decoded(self, role):
        """Decode the bytes in the pages with the reference codec, model basis."""
        codec = codec_of(self.codec, self.key_block if role == "key" else self.value_block)
        return codec.from_code(codec.decode(self.payload(role), {}), {})

    def attend(self, q, lens, **options):
        from kvcodec.kernels.triton.decode_attention import decode_attention

        lens = torch.as_tensor(lens, dtype=torch.int32, device=q.device)
        options = {"scale": self.dim**-0.5, **options}
        return decode_attention(
            q, self.pages, self.table, lens, num_kv_heads=self.heads, return_lse=True, codec=self.codec, **self.sizes,
            **options,
        )  # fmt: skip


def nibbles(codes):
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def exact_attention(q, k, v, scale, sinks=None):
    """Float64 softmax attention of q [HQ, D] over k, v [H, T, D]; returns o [HQ, D], lse [HQ]."""
    group = q.shape[0] // k.shape[0]
    k, v = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    s = torch.einsum("hd,htd->ht", q.double(), k) * scale
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None]], 1)
    lse = s.logsumexp(-1) if s.shape[1] else torch.full((q.shape[0],), -math.inf).double()
    w = torch.exp(s - lse[:, None]) if s.shape[1] else s
    return torch.einsum("ht,htd->hd", w[:, : k.shape[1]], v), lse


def relative(got, want):
    return ((got.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm()).item()


def check_bytes(device, dim, dtype, page, value_block=1, tokens=100, key_block=None, batch=1):
    """Codes equal in >= 99.99 %, each other one a tie; (s, z) equal but for rounding ties of s."""
    pool = Pool(
        device,
        batch=batch,
        dim=dim,
        dtype=dtype,
        page=page,
        value_block=value_block,
        tokens=tokens,
        key_block=key_block,
    ).encode()
    for role, x, block in (("key", pool.k, pool.key_block), ("value", pool.v, value_block)):
        want, _ = reference(x, block)
        got = pool.payload(role)
        same_scale = (got["scale_zero"] == want["scale_zero"]).all(-1)
        assert same_scale.float().mean() >= 0.999, f"{role}: (s, z) equal in {same_scale.float().mean():.6f} of rows"
        a, b = nibbles(got["codes"]), nibbles(want["codes"])
        differ = (a != b) & same_scale[..., None]
        ties = [(tuple(i.tolist()), int(a[tuple(i)]), int(b[tuple(i)])) for i in differ.nonzero()]
        share = 1 - (a != b).float().mean().item()
        assert share >= 0.9999, f"{role}: {share:.6f} of the codes equal; ties {ties[:10]}"
        step = (a.int() - b.int()).abs()[same_scale]
        assert step.max() <= 1, f"{role}: a code is {int(step.max())} off; ties {ties[:10]}"
    used = torch.zeros(pool.pages.shape[0], dtype=torch.bool)
    used[pool.table.cpu()[:, : -(-tokens // page)].flatten().long()] = True
    assert (pool.pages.cpu()[~used] == 255).all(), "a page that no token belongs to was written"


def check_formulas(device):
    """The kernel against the formulas themselves: outliers, constants, zeros, one-sided rows."""
    pool = Pool(device, batch=1, heads=1, tokens=16, dim=64, key_block=1)
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    rows[0] = 0.0
    rows[1] = 3.0
    rows[2] = -1e-3
    rows[3] = rows[3].abs() + 100.0
    rows[4] = -rows[4].abs() - 3.0
    rows[5, 7] = 1e4
    rows[6] *= 1e-6
    rows[7] *= 1e4
    pool.k[0, 0] = rows.to(device)
    pool.encode()
    code, s, z = own_reference(rows)
    got = pool.payload("key")
    assert torch.equal(got["scale_zero"][0, 0, :, 0].float(), s[:, 0]), "scales"
    assert torch.equal(got["scale_zero"][0, 0, :, 1].float(), z[:, 0]), "zeros"
    equal = (nibbles(got["codes"])[0, 0] == code).float().mean()
    assert equal >= 0.9999, f"codes equal in {equal}"
    error = (pool.decoded("key")[0, 0, :3] - rows[:3]).abs().amax(-1)
    assert (error <= rows[:3].abs().amax(-1) * 2.0**-9 + 1e-9).all(), f"constant rows are off by {error}"


def check_append(device, codec="saw_int4", value_block=64):
    """Token by token into a NaN pool gives the bytes of one call; strided and offset inputs."""
    same = {"batch": 1, "tokens": 18, "dim": 64, "page": 16, "dtype": torch.float16}
    same |= {"value_block": value_block, "codec": codec}
    whole = Pool(device, **same).encode()
    parts = Pool(device, **same)
    parts.encode(0, 15)
    for t in range(15, 18):
        parts.encode(t, t + 1)
    for role in ("key", "value"):
        a, b = whole.payload(role), parts.payload(role)
        assert all(torch.equal(a[n], b[n]) for n in a), role
    strided = Pool(device, **same)
    wide = torch.empty(1, 18, 2, 66, dtype=torch.float16, device=device)
    wide[..., 1:65] = strided.k.transpose(1, 2)
    strided.k = wide[..., 1:65].transpose(1, 2)
    strided.v = strided.v.transpose(1, 2).contiguous().transpose(1, 2)
    strided.encode()
    a, b = whole.payload("key"), strided.payload("key")
    assert all(torch.equal(a[n], b[n]) for n in a), "strided key"


def check_bad(device, codec="saw_int4"):
    """NaN, Inf and a magnitude above 65504 raise the flag; that row reads as zeros."""
    beyond = (math.nan, math.inf, -math.inf, 66_000.0, -3e5, 1.5e6, 5e8)
    for value, expect in ((1.0, 0), (65504.0, 0), *((value, 1) for value in beyond)):
        for which in ("k", "v"):
            pool = Pool(device, batch=1, heads=1, tokens=3, dim=64, page=16, codec=codec)
            getattr(pool, which)[0, 0, 1, 5] = value
            bad = torch.zeros(1, dtype=torch.int32, device=device)
            pool.encode(bad=bad)
            assert bad.item() == expect, f"{which}={value}: flag {bad.item()}"
            row = pool.decoded("key" if which == "k" else "value")[0, 0]
            assert row.isfinite().all(), f"{which}={value}: decoded row is not finite"
            assert (row[1].abs().max() == 0) == bool(expect), f"{which}={value}: row {row[1].abs().max()}"


def check_far_pages(device):
    """Pages beyond 2 GiB of a pool are written and read at their place: offsets are 64-bit."""
    from kvcodec.kernels.triton.decode_attention import decode_attention
    from kvcodec.kernels.triton.saw_int4 import encode_to_pages, page_bytes

    size = page_bytes(64, 64)
    sizes = {"key_block": 64, "value_block": 1, "page_tokens": 64}
    pages = torch.zeros(2**31 // size + 3, 1, size, dtype=torch.uint8, device=device)  # untouched: costs no memory
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, 1, n, 64, generator=g).to(device) for n in (5, 5, 1))
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    results = []
    for place in (len(pages) - 1, 0):
        table = torch.tensor([[place]], dtype=torch.int32, device=device)
        encode_to_pages(k, v, pages, table, lens, **sizes)
        results.append(decode_attention(q, pages, table, lens + 5, scale=0.125, num_kv_heads=1, **sizes))
    assert torch.equal(pages[-1], pages[0])
    assert pages[0].count_nonzero() > 300
    assert torch.equal(*results)


def check_same_bits(device, dim, codec="saw_int4"):
    """One live token: o is its decoded value, lse its score; both from the same bits to 1e-6."""
    pool = Pool(device, batch=1, heads=1, tokens=18, dim=dim, page=16, key_block=1, value_scale=3.0, codec=codec).fill()
    k, v = pool.decoded("key")[0, 0], pool.decoded("value")[0, 0]
    for t in (0, 15, 17):
        for d in (0, 3, dim - 1):
            q = torch.zeros(1, 1, 1, dim, device=device)
            q[..., d] = 1.0
            at = torch.tensor([t], dtype=torch.int32, device=device)
            # scale ln 2 makes the factor in base 2 one, so that q = 1 is rounded exactly
            o, lse = pool.attend(q, [t + 1], start=at, scale=math.log(2))
            assert relative(o[0, 0, 0], v[t]) <= 1e-6, f"V, token {t}: {relative(o[0, 0, 0], v[t])}"
            gap = abs(lse[0, 0].item() / math.log(2) - k[t, d].item()) / k[t].abs().max().item()
            assert gap <= 1e-6, f"K, token {t}, channel {d}: {gap}"


def check_attention(device, *, dim=128, group=4, page=P_DEFAULT, value_block=1, lens=(100, 37), start=None,
                    dense=None, sinks=False, splits=None, dtype=torch.float32, key_block=None,
                    value_scale=0.3, q_scale=1.0, heads=1, codec="saw_int4", offset=0.0):  # fmt: skip
    """Error against float64 on the decoded values <= 2x that of bf16 attention in torch."""
    pool = Pool(device, batch=len(lens), heads=heads, tokens=max(*lens, 1), dim=dim, page=page,
                value_block=value_block, key_block=key_block, value_scale=value_scale, codec=codec)  # fmt: skip
    pool.k += offset
    pool.v += offset * value_scale
    pool.fill()
    g = torch.Generator().manual_seed(11)
    q = torch.randn(len(lens), heads * group, 1, dim, generator=g).mul(q_scale).to(dtype).to(device)
    options = {}
    if start is not None:
        options["start"] = torch.tensor(start, dtype=torch.int32, device=device)
    if dense is not None:
        width, first, last = dense
        dk = torch.randn(len(lens), heads, width, dim, generator=g).to(dtype).to(device)
        dv = torch.randn(len(lens), heads, width, dim, generator=g).mul(value_scale).to(dtype).to(device)
        options |= {"dense_k": dk, "dense_v": dv}
        options["dense_start"] = torch.tensor(first, dtype=torch.int32, device=device)
        options["dense_lens"] = torch.tensor(last, dtype=torch.int32, device=device)
    logits = torch.randn(heads * group, generator=g).to(device) if sinks else None
    o, lse = pool.attend(q, list(lens), sinks=logits, num_splits=splits, **options)
    assert o.dtype == dtype
    k_hat, v_hat = pool.decoded("key"), pool.decoded("value")
    for b, n in enumerate(lens):
        lo = start[b] if start is not None else 0
        k, v = k_hat[b, :, lo:n], v_hat[b, :, lo:n]
        if dense is not None:
            k = torch.cat([k, dk[b, :, first[b] : last[b]].cpu().float()], 1)
            v = torch.cat([v, dv[b, :, first[b] : last[b]].cpu().float()], 1)
        sink = None if logits is None else logits.cpu()
        want, want_lse = exact_attention(q[b, :, 0].cpu(), k, v, dim**-0.5, sink)
        if k.shape[1] == 0:
            assert (o[b] == 0).all(), "no live token, yet o is not 0"
            continue
        low = torch.nn.functional.scaled_dot_product_attention(
            q[b][None].cpu().bfloat16(), k[None].bfloat16(), v[None].bfloat16(), enable_gqa=True
        ) if sink is None else None  # fmt: skip
        # the sink only shrinks the weights, so the bound of the case without it is used there
        limit = 2 * relative(low[0, :, 0], want) if low is not None else 6e-3
        error = relative(o[b, :, 0], want)
        assert error <= limit, f"sequence {b}: error {error:.2e}, allowed {limit:.2e}"
        gap = (lse[b].cpu().double() - want_lse).abs().max().item()
        assert gap <= 2e-3 * max(1.0, q_scale), f"sequence {b}: lse is {gap} off"


def check_flip_is_seen(device):
    """One flipped code nibble must break the comparison, or the comparison is blind."""
    pool = Pool(device, batch=1, heads=1, tokens=16, dim=64, page=16).encode()
    pool.pages[pool.table[0, 0].long(), 0, 5] ^= 0x30
    want, _ = reference(pool.k, pool.key_block)
    assert not torch.equal(pool.payload("key")["codes"], want["codes"])


def check_graph_break_free(device, backend, codec="saw_int4"):
    """torch.compile traces both operators whole, and the compiled step gives the same bytes."""
    from kvcodec.kernels.triton.decode_attention import CODECS, decode_attention

    pool = Pool(device, batch=1, heads=1, tokens=18, dim=64, page=16, codec=codec)
    eager = Pool(device, batch=1, heads=1, tokens=18, dim=64, page=16, codec=codec).encode()

    def step(q, k, v, pages, table, start, lens):
        CODECS[codec].encode_to_pages(k, v, pages, table, start, **pool.sizes)
        return decode_attention(q, pages, table, lens, scale=0.125, num_kv_heads=1, codec=codec, **pool.sizes) * 2

    q = torch.randn(1, 2, 1, 64, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    lens = torch.tensor([18], dtype=torch.int32, device=device)
    got = torch.compile(step, backend=backend, fullgraph=True)(q, pool.k, pool.v, pool.pages, pool.table, start, lens)
    want, _ = eager.attend(q, [18], scale=0.125)
    assert torch.equal(pool.payload("key")["codes"], eager.payload("key")["codes"]), "bytes differ"
    assert relative(got, want * 2) <= 1e-6, relative(got, want * 2)


def check_cuda_graph(device, codec="saw_int4", value_block=128):
    """One captured decode step (append, then attend) replayed at growing lengths equals eager."""
    from kvcodec.kernels.triton.decode_attention import decode_attention, workspace_numel

    make = {"batch": 2, "tokens": 300, "dim": 128, "dtype": torch.bfloat16}
    make |= {"value_block": value_block, "codec": codec}
    pool, eager = Pool(device, **make).encode(0, 60), Pool(device, **make).encode()
    q = torch.randn(2, 14, 1, 128, device=device, dtype=torch.bfloat16)
    k, v = pool.k[:, :, :1].clone(), pool.v[:, :, :1].clone()
    at = torch.full((2,), 60, dtype=torch.int32, device=device)
    lens, bad = at + 1, torch.zeros(1, dtype=torch.int32, device=device)
    space = torch.empty(workspace_numel(2, 14, 128, 3), device=device)

    def step():
        pool.kernels.encode_to_pages(k, v, pool.pages, pool.table, at, bad=bad, **pool.sizes)
        out = decode_attention(
            q, pool.pages, pool.table, lens, scale=0.09, num_kv_heads=2, workspace=space, num_splits=3, codec=codec,
            **pool.sizes,
        )  # fmt: skip
        at.add_(1)
        lens.add_(1)
        return out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    at.fill_(60)
    lens.fill_(61)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for t in range(60, 300):
        k.copy_(pool.k[:, :, t : t + 1])
        v.copy_(pool.v[:, :, t : t + 1])
        graph.replay()
        if t in (60, 63, 64, 127, 128, 200, 299):
            want, _ = eager.attend(q, [t + 1, t + 1], scale=0.09, num_splits=3)
            assert torch.equal(out, want), f"token {t}: {relative(out, want)}"
    for role in ("key", "value"):
        a, b = pool.payload(role), eager.payload(role)
        assert all(torch.equal(a[n], b[n]) for n in a), f"{role}: appended bytes differ from one prefill"
    assert bad.item() == 0


def check_deterministic(device):
    """The same call twice gives the same bits (a race would move them)."""
    pool = Pool(device, batch=3, heads=4, tokens=4000, dim=128).encode()
    q = torch.randn(3, 28, 1, 128, device=device, dtype=torch.bfloat16)
    first, lse = pool.attend(q, [4000, 1, 2047])
    for _ in range(20):
        again, lse_again = pool.attend(q, [4000, 1, 2047])
        assert torch.equal(first, again)
        assert torch.equal(lse, lse_again)


GPU_ONLY = {
    "cuda-graph": check_cuda_graph,
    "deterministic": check_deterministic,
    "compile-inductor": lambda d: check_graph_break_free(d, "inductor"),
    "attention-bf16-4096": lambda d: check_attention(d, group=7, lens=(4096, 1000), dtype=torch.bfloat16, heads=2),
    "attention-bf16-dense": lambda d: check_attention(
        d, group=4, lens=(1000, 64), dtype=torch.bfloat16, heads=2, dense=(100, (0, 3), (100, 70)), value_block=128
    ),
    "attention-bf16-group-16": lambda d: check_attention(d, group=16, lens=(700, 64), dtype=torch.bfloat16),
    "attention-bf16-256-group-16": lambda d: check_attention(
        d, dim=256, group=16, lens=(700, 64), dtype=torch.bfloat16, dense=(100, (0, 3), (100, 70))
    ),
    "attention-bf16-256-group-8": lambda d: check_attention(d, dim=256, group=8, lens=(700, 64), dtype=torch.bfloat16),
    "attention-bf16-64-group-16": lambda d: check_attention(d, dim=64, group=16, lens=(700, 64), dtype=torch.bfloat16),
    # one split of 16384 tokens: sums that are truncated at every step would show here
    "attention-bf16-one-long-split": lambda d: check_attention(
        d, group=4, lens=(16384, 16384), dtype=torch.bfloat16, splits=1
    ),
    "attention-fp32-one-long-split-64": lambda d: check_attention(d, dim=64, group=4, lens=(30000, 8192), splits=1),
    "bytes-128-bf16-long": lambda d: check_bytes(d, 128, torch.bfloat16, 64, tokens=8000),
    "bytes-64-bf16-long": lambda d: check_bytes(d, 64, torch.bfloat16, 64, tokens=8000, value_block=64),
    "bytes-128-fp32-long": lambda d: check_bytes(d, 128, torch.float32, 64, tokens=8000),
}

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "bytes-128-bf16": lambda d: check_bytes(d, 128, BF16, 64, tokens=70, batch=2),
    "bytes-128-fp16-values-rotated": lambda d: check_bytes(d, 128, FP16, 16, value_block=128, tokens=18),
    "bytes-64-fp32": lambda d: check_bytes(d, 64, FP32, 64, tokens=17),
    "bytes-80-bf16": lambda d: check_bytes(d, 80, BF16, 16, tokens=16),
    "bytes-96-fp32": lambda d: check_bytes(d, 96, FP32, 48, value_block=32, tokens=16),
    "bytes-192-fp16": lambda d: check_bytes(d, 192, FP16, 64, tokens=16),
    "bytes-256-bf16": lambda d: check_bytes(d, 256, BF16, 16, tokens=16),
    "bytes-128-order-2": lambda d: check_bytes(d, 128, FP32, 16, key_block=2, value_block=4, tokens=16),
    "bytes-128-order-16": lambda d: check_bytes(d, 128, BF16, 128, key_block=16, tokens=16),
    "formulas": check_formulas,
    "append": check_append,
    "bad-input": check_bad,
    "pages-beyond-2-gib": check_far_pages,
    "same-bits-64": lambda d: check_same_bits(d, 64),
    "same-bits-80": lambda d: check_same_bits(d, 80),
    "attention-128-group-7": lambda d: check_attention(d, group=7, splits=2, lens=(200, 129)),
    "attention-128-two-heads": lambda d: check_attention(d, group=4, lens=(64, 30), splits=1, heads=2),
    "attention-64-group-1": lambda d: check_attention(d, dim=64, group=1, splits=3, lens=(150, 37)),
    "attention-256-group-12": lambda d: check_attention(d, dim=256, group=12, page=16, lens=(40, 5), splits=2),
    "attention-80": lambda d: check_attention(d, dim=80, page=16, lens=(30, 17), splits=2),
    "attention-96-order-16": lambda d: check_attention(d, dim=96, key_block=16, lens=(64, 1), splits=1),
    "attention-192": lambda d: check_attention(d, dim=192, lens=(65, 64), splits=1),
    "attention-group-20": lambda d: check_attention(d, dim=64, group=20, page=16, lens=(20, 33), splits=1),
    "attention-values-rotated": lambda d: check_attention(d, value_block=128, splits=2, lens=(130, 7)),
    "attention-start": lambda d: check_attention(d, dim=64, start=(5, 64), lens=(130, 70), splits=2),
    "attention-start-in-one-block": lambda d: check_attention(d, dim=64, start=(5, 33), lens=(20, 33), splits=1),
    "attention-empty": lambda d: check_attention(d, dim=64, lens=(0, 3), splits=4),
    "attention-dense": lambda d: check_attention(
        d, dim=64, lens=(30, 0), page=16, dense=(40, (0, 3), (40, 20)), value_block=64, splits=2
    ),
    "attention-dense-80": lambda d: check_attention(
        d, dim=80, lens=(20, 9), page=16, dense=(8, (0, 0), (8, 5)), splits=1
    ),
    "attention-dense-none": lambda d: check_attention(
        d, dim=64, lens=(20, 9), page=16, dense=(0, (0, 0), (0, 0)), splits=1
    ),
    "attention-sinks": lambda d: check_attention(
        d, dim=64, lens=(20, 9), page=16, dense=(8, (0, 0), (8, 0)), sinks=True, splits=1
    ),
    "attention-small-values": lambda d: check_attention(d, dim=64, value_scale=1e-5, page=16, lens=(30, 9), splits=1),
    "attention-large-values": lambda d: check_attention(d, dim=64, value_scale=1e4, page=16, lens=(30, 9), splits=1),
    "attention-large-query": lambda d: check_attention(d, dim=64, q_scale=30.0, page=16, lens=(30, 9), splits=1),
    "attention-page-128": lambda d: check_attention(d, dim=64, page=128, lens=(150, 9), splits=1),
    "attention-page-48": lambda d: check_attention(d, dim=64, page=48, lens=(60, 9), splits=1),
    "comparison-sees-a-flip": check_flip_is_seen,
}
