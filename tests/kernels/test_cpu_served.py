"""An engine's layers on the CPU kernels against the same layers on the codecs: bytes, decode steps, prompts, groups."""

from pathlib import Path

import pytest
import torch

import kvcodec
from kvcodec.integrations.vllm.layer import Live
from kvcodec.integrations.vllm.servable import group_tokens, preferred_page, refusal
from kvcodec.kernels.cpu import library
from kvcodec.kernels.cpu.engine import CpuEngine
from tests.integrations import test_groups as groups
from tests.integrations import test_serving as single
from tests.integrations.test_serving import BLOCK, CPU, DIM, HEADS, ROW, RULES, TOKENS
from tests.kernels.test_grouped_layer import CASES, Batch
from tests.kernels.test_packed_layer import filled

pytestmark = pytest.mark.usefixtures("compiled")


def bare(name: str) -> str:
    """A preset without the dense tokens that a server does not keep, and without a fit."""
    scheme = kvcodec.get(name)
    options = [f"{option}=0" for option in ("window", "sink") if getattr(scheme, option)]
    options += ["norm=false"] if name.startswith(("innerq-base", "innerq-small")) else []
    return name + ":" * bool(options) + ",".join(options)


SERVED = [spec for spec in map(bare, kvcodec.presets()) if not refusal(kvcodec.get(spec).for_layer(3, 8), DIM)]
"""All that a server serves."""
READ = [s for s in SERVED if not kvcodec.kernels.choose.refusal(kvcodec.get(s).for_layer(3, 8), DIM, CPU)]
"""Those that the CPU kernels read."""
ALONE = [s for s in READ if group_tokens(kvcodec.get(s).for_layer(3, 8)) == 1]
SUNK = ["saw-int4:sink=4", "turboquant-4:sink=3", "octopus-3:window=0,sink=1"]
"""With first tokens in 16 bit."""
GROUPS = [*(s for s in READ if s not in ALONE), "innerq-hybrid:window=0,sink=0"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_every_method_with_readers_is_served() -> None:
    assert len(READ) >= 40
    left = {s.partition(":")[0].partition("-")[0] for s in SERVED} - {s.partition("-")[0] for s in READ}
    assert left == {"additive", "e8", "kvarn", "polarquant"}


@pytest.mark.parametrize("spec", ALONE + SUNK)
def test_the_kernels_write_the_codecs_bytes(spec: str) -> None:
    """A prompt cut anywhere, single tokens of a batch in any order, and none where a token has no slot."""
    for dtype in DTYPES if spec in ("saw-int4", "dense", "saw-int4:sink=4") else (torch.float16,):
        layer = single.made(spec, dtype=dtype)
        want, found, (k, v) = single.pool(layer), single.pool(layer), (x.to(dtype) for x in single.rows())
        layer.write(k, v, want, single.slots(0, TOKENS))
        for first, last in ((0, 1), (1, 20), (20, 41)):
            layer.encode_chunk(k[first:last], v[first:last], found, ROW, last)
        order = 41 + torch.randperm(TOKENS - 41, generator=torch.Generator().manual_seed(1))
        where = torch.cat([single.slots(0, TOKENS)[order], torch.tensor([-1, -1])])
        padded = torch.cat([order, order[:2]])
        layer.encode(k[padded], v[padded], found, where)
        assert torch.equal(found, want)


def test_what_cannot_be_stored_is_zero_bytes() -> None:
    layer = single.made("saw-int4", dtype=torch.float32)
    want, found, (k, v) = single.pool(layer), single.pool(layer), single.rows()
    k, v = k.float(), v.float()
    k[5, 1, 3], v[6, 0, 2], v[7, 1, 1] = torch.nan, 1e6, 65510.0  # the last one rounds to fp16's largest number
    layer.write(k, v, want, single.slots(0, TOKENS))
    layer.encode_chunk(k, v, found, ROW, TOKENS)
    assert torch.equal(found, want)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("spec", ALONE + SUNK)
def test_attention_is_the_references(spec: str, rules: str) -> None:
    """Decode steps of three requests, one of them without tokens, and chunks of a prompt, with pages freed."""
    layer, rule = single.made(spec), RULES[rules]
    cache, lengths = filled(layer), [TOKENS, 0, 17]
    table = torch.zeros(3, 6, dtype=torch.int32)
    table[0, :5], table[2, :5] = ROW, ROW
    if rule.window and rule.window < TOKENS - 2 * BLOCK:
        table[0, :2] = 0
    q = torch.randn(3, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).half()
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    found = layer.decode(q, cache, table, seq_lens, rule, Live.of(seq_lens, layer.sink, rule.window))
    for i, length in enumerate(lengths):
        if length:
            want = layer.attend(q[i : i + 1], cache, table[i], length, rule)
            torch.testing.assert_close(found[i : i + 1], want, rtol=2e-3, atol=2e-3)
    assert bool((found[1] == 0).all())
    for n, length in ((1, TOKENS), (7, 41), (TOKENS, TOKENS)):
        q = torch.randn(n, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(n)).half()
        found = layer.prefill(q, cache, ROW, length, rule)
        torch.testing.assert_close(found, layer.attend(q, cache, ROW, length, rule), rtol=2e-3, atol=2e-3)
    assert isinstance(layer.engine(BLOCK), CpuEngine)


@pytest.mark.parametrize("rules", groups.RULES)
@pytest.mark.parametrize("spec", GROUPS)
def test_chunks_over_groups_are_the_references(spec: str, rules: str) -> None:
    """However the prompt is cut; bytes too."""
    layer = groups.made(spec)
    want_pages, pages = groups.pool(layer), groups.pool(layer)
    want = groups.fed(layer, want_pages, groups.CUTS["across"], groups.RULES[rules])
    for cut in ("across", "at once", "at edges"):
        pages.fill_(0xFF)
        found = groups.fed(layer, pages, groups.CUTS[cut], groups.RULES[rules], kernels=True)
        torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)
        assert torch.equal(pages, want_pages)


@pytest.mark.parametrize(("spec", "rules"), [*CASES, *((s, "plain") for s in GROUPS if s not in dict(CASES))])
def test_decode_steps_over_groups_are_the_references(spec: str, rules: str) -> None:
    first = [61, 31, 1] if groups.made(spec).unit == 32 else [125, 63, 1]
    batch = Batch(spec, groups.RULES[rules], first)
    assert isinstance(batch.layer.engine(groups.block_of(batch.layer)), CpuEngine)
    for step in range(6):
        batch.step([[0, 1, 2], [2, 0], [1]][step % 3], padding=step % 2)


def test_constants_of_a_file_and_heads_of_a_process_are_used() -> None:
    """InnerQ's fitted norms; the second half of the heads, whose signs are others."""
    whole = groups.made("innerq-base:window=0,sink=0")
    assert whole.engine(64).reading["key"].factor is not None
    first, second = (single.made("turboquant-4", first_head=n) for n in (0, 2))
    (k, v), caches = single.rows(), []
    for layer in (first, second):
        caches.append(single.pool(layer))
        layer.encode_chunk(k, v, caches[-1], ROW, TOKENS)
        want = single.pool(layer)
        layer.write(k, v, want, single.slots(0, TOKENS))
        assert torch.equal(caches[-1], want)
    assert not torch.equal(*caches)


def test_why_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = single.made("saw-int4")
    layer.find_kernels(BLOCK)
    assert layer.unserved == ""
    left = single.made("polarquant-3")
    left.find_kernels(BLOCK)
    assert left.unserved.startswith("polarquant-3: no CPU kernel reads PolarQuant")
    monkeypatch.setattr(library, "chosen", lambda: Path("missing.so"))
    layer = single.made("saw-int4")
    layer.find_kernels(BLOCK)
    assert "the CPU kernels are not compiled (missing.so is missing)" in layer.unserved


def test_the_page_that_kernels_read_fastest() -> None:
    assert [preferred_page(kvcodec.get(s)) for s in ("saw-int4", "kivi-4:window=0", "kivi-tq-4")] == [64, 64, 128]
