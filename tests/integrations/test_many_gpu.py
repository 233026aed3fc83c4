"""Several query tokens over a fused cache on a GPU: no preset that has kernels is streamed, whatever a model asks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.attention import Seen
from packedkv.description import kernels_for
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels import flash
from packedkv.kernels.cuda import prefill
from packedkv.kernels.flash import score
from tests.conftest import tiny_model
from tests.integrations.test_generate import padded, prompt
from tests.kernels.test_fused import Reference

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FEW = ("int-8", "saw-int4", "kivi-2", "turboquant-qjl-3")
"""Without a rotation, with one, blocks with a window, a sketch with a factor."""


def with_kernels(head_dim: int) -> list[str]:
    return [
        s for s in packedkv.presets() if kernels_for(packedkv.get(s), head_dim)["decode"] == "cuda" or s == "saw-int4"
    ]


@functools.cache
def model_on(name: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    model = tiny_model(name, **changed).to(DEVICE, dtype)
    model.set_attn_implementation("packedkv")
    model.generation_config.disable_compile = True
    return model


def made(model: Any, way: str, spec: str, **options: Any) -> Any:
    """Return a cache; tokens leave the window of a streamed one as they do in a fused one, keys and values together."""
    cache = cache_for(model, spec, attention=way, probe=False, **options)
    if way == "streamed":
        for layer in cache.packed_layers:
            layer.cache.__class__ = Reference
    return cache


def chunked(model: Any, way: str, spec: str, ids: Tensor, cuts: tuple[int, ...], **options: Any) -> tuple[Tensor, Any]:
    """Logits of a prompt in chunks, and the paths that ran."""
    mask = options.pop("mask", None)
    cache = made(model, way, spec, **options)
    logits, at = [], 0
    with torch.no_grad():
        for end in (*cuts, ids.shape[1]):
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            logits.append(model(ids[:, at:end], **passing(model, cache), **given).logits.float())
            at = end
    return torch.cat(logits, 1), cache.report()["paths"]


def same(found: Tensor, wanted: Tensor, spec: str, dtype: torch.dtype = torch.float32) -> None:
    """Compare tokens by the error of half of them.

    Coarse codes amplify: where a difference of rounding moves a later layer's key over an edge, it is a whole step off,
    and a router of experts may choose another one.
    """
    off = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-3)).flatten()
    limit = 0.06 if spec != "int-8" or dtype == torch.bfloat16 else 0.01
    assert float(off.median()) < limit, off


def check_chunks(
    model: Any, spec: str, ids: Tensor, cuts: tuple[int, ...], limit: float = 0.015, **options: Any
) -> Any:
    """Compare with the reference, which is streamed; return the paths."""
    max_len, mask = options.pop("max_len", None), options.get("mask")
    wanted, _ = chunked(model, "streamed", spec, ids, cuts, **options)
    found, paths = chunked(model, "fused", spec, ids, cuts, max_len=max_len, **options)
    assert "streamed" not in paths
    live = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    same(found[live], wanted[live], spec, model.dtype)
    return paths


OTHER_DIMS = [(s, d) for d in (96, 256) for s in ("int-4", "turboquant-4", "octopus-qjl-3", "saw-int4")]


@pytest.mark.parametrize(
    ("spec", "dim"),
    [*((s, d) for d in (64, 128) for s in with_kernels(d)), *((s, d) for s, d in OTHER_DIMS if s in with_kernels(d))],
)
def test_prompt_chunks_with_every_preset(spec: str, dim: int) -> None:
    long, short = (180, 133) if packedkv.get(spec).key.fit_tokens == 1 else (700, 653)  # what a fit waits for
    model, (ids, mask) = model_on("llama-gqa", head_dim=dim), (x.to(DEVICE) for x in padded(long, short))
    layers = model.config.num_hidden_layers
    paths = check_chunks(model, spec, ids, (70, 150), prefill="decoded")
    assert paths == {"staged": 3 * layers}
    assert check_chunks(model, spec, ids, (70, 150), mask=mask) == {"exact": layers, "staged": 2 * layers}


@pytest.mark.parametrize("spec", FEW)
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss", "gemma2", "llama4"])
def test_windows_sinks_soft_caps_and_chunks(name: str, spec: str) -> None:
    """Calls shorter and longer than windows of 12 tokens, and padding before them."""
    if name == "gemma3" and spec == "turboquant-qjl-3":
        pytest.skip("one head_dim of 256 is enough")
    model, (ids, mask) = model_on(name), (x.to(DEVICE) for x in padded(90, 71))
    for options in ({}, {"mask": mask}, {"prefill": "decoded"}):
        paths = check_chunks(model, spec, ids, (20, 28, 29, 60), **options)
        assert ("scored" in paths) == (name == "gemma2" or (name == "llama4" and "mask" in options))


@pytest.mark.parametrize("spec", FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_a_static_cache(spec: str, dtype: torch.dtype) -> None:
    model, (ids, mask) = model_on("llama-mqa", dtype), (x.to(DEVICE) for x in padded(150, 90))
    for max_len in (None, 200):
        for options in ({}, {"mask": mask}):
            check_chunks(model, spec, ids, (60, 61, 140), max_len=max_len, **options)


@pytest.mark.parametrize("spec", FEW)
def test_ways_to_generate_on_growing_and_static_caches(spec: str) -> None:
    model = model_on("llama-gqa")
    ids = prompt(1, 8).repeat(1, 5).to(DEVICE)
    common = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    kinds: tuple[dict[str, Any], ...] = (
        {"prompt_lookup_num_tokens": 3},
        {"num_beams": 3, "output_logits": False, "output_scores": True},
        {"prefill_chunk_size": 16},
        {},
    )
    for options in kinds:
        for max_len in (None, 128) if "prompt_lookup_num_tokens" not in options else (None,):
            outs = {}
            for way in ("streamed", "fused"):
                cache = made(model, way, spec, max_len=max_len if way == "fused" else None)
                first = model.generate(ids, **passing(model, cache), **{**common, **options})
                if "num_beams" in options:
                    outs[way] = first.sequences_scores[None]
                    continue
                longer = torch.cat([ids, prompt(1, 20, seed=5).to(DEVICE)], 1)
                cache.crop(-4)
                more = torch.cat([longer[:, : cache.get_seq_length()], prompt(1, 20, seed=5).to(DEVICE)], 1)
                second = model.generate(more, **passing(model, cache), **{**common, **options})
                outs[way] = torch.stack([*first.logits[:1], *second.logits[:1]])
            assert "streamed" not in cache.report()["paths"]
            same(outs["fused"], outs["streamed"], spec)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch, of a graph between two breaks
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # and of float32 models on newer GPUs
def test_a_compiled_prompt_in_chunks() -> None:
    model = tiny_model("llama-gqa").to(DEVICE)
    model.set_attn_implementation("packedkv")
    ids, wanted = prompt(1, 48).to(DEVICE), None
    for disable in (True, False):
        model.generation_config.disable_compile = disable
        cache = cache_for(model, "int-4", attention="fused", probe=False, max_len=128)
        out = model.generate(ids, **passing(model, cache), max_new_tokens=8, do_sample=False, prefill_chunk_size=16)
        assert "streamed" not in cache.report()["paths"]
        wanted = out if wanted is None else wanted
    assert torch.equal(out[:, :49], wanted[:, :49])


RULES_OF = {
    "causal": Seen(),
    "all": Seen(causal=False),
    "window": Seen(window=10),
    "no window": Seen(window=4001),
    "window of the earlier": Seen(causal=False, window=101),
    "padding": Seen(start=(30, 0)),
    "padding behind queries": Seen(start=(250, 7)),
    "nothing seen": Seen(start=(260, 3)),
    "padding and window": Seen(window=21, start=(195, 210)),
}


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", RULES_OF)
def test_flash_attention_follows_the_rules(name: str, dim: int) -> None:
    """The operator against scores in float32: masks end at the last key, windows, sequences in a larger room."""
    tokens, rules, gen = 260, RULES_OF[name], torch.Generator(DEVICE).manual_seed(0)
    for n in (1, 2, 77, 200):
        if n == 1 and rules.start:
            continue  # decode attention's
        q = torch.randn(2, n, 6, dim, device=DEVICE, generator=gen).half().transpose(1, 2)
        k, v = prefill._room(2, tokens, 2, dim, torch.device(DEVICE))
        for x in (k, v):
            x.copy_(torch.randn(x.shape, device=DEVICE, generator=gen))
        k, v = k[:, :, 5:], v[:, :, 5:]
        found, want = score(q, k, v, 0.1, rules), flash._by_rows(q.float(), k.float(), v.float(), 0.1, rules)
        assert found.out.dtype == torch.float16
        torch.testing.assert_close(found.out.float(), want.out, rtol=0, atol=4e-3)
        torch.testing.assert_close(found.lse, want.lse, rtol=0, atol=4e-3)


@pytest.mark.parametrize("spec", ["int-8", "turboquant-qjl-3"])
def test_a_history_in_parts(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STAGING_BYTES", 64 * 4 * 2 * 2 * 64)
    for name in ("llama-gqa", "mistral", "gemma2"):
        ids, mask = (x.to(DEVICE) for x in padded(300, 180))
        for options in ({}, {"mask": mask}):
            check_chunks(model_on(name, sliding_window=100) if name != "llama-gqa" else model_on(name), spec, ids,
                         (140, 200), **options)  # fmt: skip


def test_what_a_call_needs_is_bounded() -> None:
    """The report's bound of a call's memory holds, and the buffers of unpacked pages go back to the allocator."""
    model, ids = model_on("llama-gqa", head_dim=128), prompt(1, 3000).to(DEVICE)
    for spec in ("int-4", "kivi-2"):
        cache = cache_for(model, spec, attention="fused", probe=False)
        with torch.no_grad():
            model(ids[:, :2800], **passing(model, cache))
            layer = cache.packed_layers[0].cache
            q = torch.randn(1, 4, 200, 128, device=DEVICE, dtype=torch.bfloat16)
            layer.attend(q)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = layer.attend(q)
            torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before <= out.nbytes + 512
        assert torch.cuda.max_memory_allocated() - before <= layer.chunk_workspace_bytes(q) + out.nbytes
