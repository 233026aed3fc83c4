"""attention="fused" inside generate: ``python -m tests.integrations.test_fused cuda [case ...]`` runs cases on a GPU.

Without one the kernels run on the emulated machine. On a GPU each case has a process of its own: one that breaks the
context is not the others' end.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.argument import passing
from tests.conftest import tiny_model
from tests.integrations.test_generate import padded, prompt
from tests.kernels.emulation import machine

__all__ = ["machine"]

ROOT = Path(__file__).parents[2]
NEW = 3
WIDE = ("llama-gqa", "llama-mha", "llama-mqa", "phi3", "mistral", "gemma3", "gpt-oss")
NARROW = ("gpt-oss",)
"""Of the emulated machine, which takes long: every feature of the others in one."""


def model_on(device: str, name: str) -> Any:
    model = tiny_model(name).to(device)
    model.set_attn_implementation("packedkv")
    model.generation_config.disable_compile = True
    return model


def run(
    model: Any, attention: str, ids: torch.Tensor, *, max_len: int | None = None, spec: str = "saw-int4", **options: Any
) -> Any:
    cache = cache_for(model, spec, attention=attention, max_len=max_len, probe=False)
    return go_on(model, cache, ids, **options), cache


def go_on(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> Any:
    mask = options.pop("attention_mask", None)
    if mask is not None:
        options["attention_mask"] = mask.to(model.device)
    given = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, **options}
    return model.generate(ids.to(model.device), **passing(model, cache), return_dict_in_generate=True, **given)


def assert_close(fused: Any, streamed: Any) -> None:
    # the kernels round queries and probabilities to 16 bit: tokens are compared through their logits
    for a, b in zip(fused.logits, streamed.logits, strict=True):
        spread = b.std()
        assert (a - b).abs().max() < 0.05 * spread, f"{(a - b).abs().max()} against a spread of {spread}"
        if not torch.equal(a.argmax(-1), b.argmax(-1)):
            top = b.topk(2, -1).values
            assert (top[:, 0] - top[:, 1]).min() < 0.1 * spread
            return  # another token from here on


def case_greedy(device: str) -> None:
    for name in WIDE if device == "cuda" else NARROW:
        model = model_on(device, name)
        fused, cache = run(model, "fused", prompt(1, 14))
        assert_close(fused, run(model, "streamed", prompt(1, 14))[0])
        layers = len(cache.layers)
        assert cache.report()["paths"] == {"exact": layers, "fused": layers * (NEW - 1)}


def case_growing_and_static(device: str) -> None:
    model = model_on(device, "llama-gqa")
    for spec in ("saw-int4", "int-4"):
        streamed, _ = run(model, "streamed", prompt(2, 10), spec=spec)
        for max_len in (None, 64) if device == "cuda" else (64,):
            fused, cache = run(model, "fused", prompt(2, 10), spec=spec, max_len=max_len)
            assert_close(fused, streamed)
            layers = len(cache.layers)
            assert cache.report()["paths"] == {"exact": layers, "fused": layers * (NEW - 1)}
            assert cache.report()["tokens"] == 10 + NEW - 1
            if max_len is not None:
                assert cache.is_compileable
                assert isinstance(cache.get_seq_length(), torch.Tensor)
        cache.reset()
        assert_close(go_on(model, cache, prompt(2, 10)), fused)


def case_static_overflow_is_refused(device: str) -> None:
    model = model_on(device, "llama-mqa")
    with pytest.raises(ShapeError, match="token 13 does not fit the static cache of max_len=12"):
        run(model, "fused", prompt(1, 10), max_len=12, max_new_tokens=8)


def case_left_padding(device: str) -> None:
    ids, mask = padded(10, 3)
    for max_len in (None, 64) if device == "cuda" else (64,):
        model = model_on(device, "llama-gqa")
        fused, _ = run(model, "fused", ids, max_len=max_len, attention_mask=mask)
        assert_close(fused, run(model, "streamed", ids, attention_mask=mask)[0])


def case_holes_are_not_attended(device: str) -> None:
    model = model_on(device, "llama-gqa")
    ids, mask = prompt(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, 5] = mask[1, :3] = 0
    for max_len in (None, 64) if device == "cuda" else (64,):
        fused, cache = run(model, "fused", ids, max_len=max_len, attention_mask=mask)
        assert_close(fused, run(model, "streamed", ids, attention_mask=mask)[0])
        assert cache.report()["paths"]["scored"]


def case_static_sliding_is_refused(device: str) -> None:
    with pytest.raises(UnsupportedError, match="sliding layers free their oldest tokens"):
        cache_for(model_on(device, "mistral"), "saw-int4", attention="fused", max_len=64)


def case_second_turn_crop_and_select(device: str) -> None:
    for max_len in (None, 96) if device == "cuda" else (96,):
        model = model_on(device, "llama-gqa" if device == "cuda" else "llama-mqa")
        caches = [
            run(model, "fused", prompt(2, 10), max_len=max_len)[1],
            run(model, "streamed", prompt(2, 10))[1],
        ]
        outs = []
        for cache in caches:
            cache.crop(-4)
            outs.append(go_on(model, cache, prompt(2, 14, seed=4)))
            assert cache.get_seq_length() == 14 + NEW - 1
        assert_close(*outs)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([1]))
    assert_close(*(go_on(model, cache, prompt(1, 22, seed=5)) for cache in caches))


def case_sink_and_window(device: str) -> None:
    """Tokens held dense join the packed ones by log-sum-exp, with learned sinks, after crops and evictions."""
    for key, value in ((SawInt4(), SawInt4(1)), (GroupInt(4, 0), GroupInt(4, 0))):
        sink_and_window(device, packedkv.KVScheme(key=key, value=value, sink=3, window=5))


def sink_and_window(device: str, scheme: packedkv.KVScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, 90, 64, generator=generator).to(device) for _ in range(2))
    q, logits = torch.randn(2, 4, 1, 64, generator=generator).to(device), torch.tensor([0.5, -1.0, 2.0, 0.0]).to(device)
    caches = [cls(scheme) for cls in (packedkv.LayerCache, FusedLayerCache)]
    for at, end in ((0, 2), (2, 7), (7, 75), *((t, t + 1) for t in range(75, 80))):
        for cache in caches:
            cache.append(k[:, :, at:end], v[:, :, at:end])
        reference, fused = (cache.attend(q, sinks=logits) for cache in caches)
        torch.testing.assert_close(fused, reference, rtol=0, atol=2e-3)
    for change in (lambda c: c.crop(70), lambda c: c.evict(20), lambda c: c.append(k[:, :, 80:], v[:, :, 80:])):
        for cache in caches:
            change(cache)
        reference, fused = (cache.attend(q) for cache in caches)
        torch.testing.assert_close(fused, reference, rtol=0, atol=2e-3)
    assert len(caches[0]) == len(caches[1]) == 60
    static = FusedLayerCache(scheme, capacity=96)
    whole = packedkv.LayerCache(scheme)
    for at, end in ((0, 70), *((t, t + 1) for t in range(70, 76))):
        for cache in (static, whole):
            cache.append(k[:, :, at:end], v[:, :, at:end])
        torch.testing.assert_close(static.attend(q), whole.attend(q), rtol=0, atol=2e-3)


def case_full_static_cache_is_flagged(device: str) -> None:
    """What a captured step writes beyond the capacity is dropped, not written elsewhere, and said by check."""
    for spec in ("saw-int4", "int-4"):
        full_static_cache(device, spec)


def full_static_cache(device: str, spec: str) -> None:
    k = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    cache = FusedLayerCache(packedkv.get(spec), capacity=64)
    cache.append(k, k)
    before = cache.store.pages.clone()
    cache.append(k[:, :, :1], k[:, :, :1])
    assert torch.equal(cache.store.pages, before)
    assert cache.attend(k[:, :, :1]).isfinite().all()
    for look in (cache.check, cache.decode, cache.nbytes):
        with pytest.raises(ShapeError, match="is full"):
            look()
    cache.crop(20)  # what did not fit is gone, and the flag with it
    assert len(cache.decode()[0][0, 0]) == 20
    with pytest.raises(ShapeError, match="does not fit a cache of batch=1"):
        cache.attend(torch.randn(2, 1, 1, 64, device=k.device))
    with pytest.raises(UnsupportedError, match="does not use evicted slots again"):
        cache.evict(10)
    cache.append(torch.full_like(k[:, :, :1], torch.nan), k[:, :, :1])
    with pytest.raises(ValueError, match="not finite"):
        cache.check()
    cache.reset()
    cache.append(k[:, :, :5], k[:, :, :5])
    cache.check()
    cache.reset()
    two = k[:, :, :5].repeat(2, 1, 1, 1)  # another batch size after a reset
    cache.append(two, two)
    assert cache.attend(two[:, :, :1]).shape[0] == 2


def case_compiled(device: str) -> None:
    model = model_on(device, "llama-gqa")
    model.generation_config.disable_compile = False
    for spec in ("saw-int4", "int-4"):
        streamed = run(model, "streamed", prompt(2, 10), max_new_tokens=24, spec=spec)[0]
        fused, cache = run(model, "fused", prompt(2, 10), max_len=128, max_new_tokens=24, spec=spec)
        assert cache.report()["compiled"]
        assert_close(fused, streamed)


def case_cuda_graph(device: str) -> None:
    model = model_on(device, "llama-gqa")
    with torch.no_grad():
        logits = []
        for captured in (False, True):
            cache = cache_for(model, "saw-int4", attention="fused", max_len=128, probe=False)
            model(prompt(2, 10).to(device), **passing(model, cache))
            token = prompt(2, 1, seed=3).to(device)
            mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device=device)  # the length is the device's
            at = torch.full((2, 1), 10, device=device)

            def step(cache: Any = cache, token: Any = token, mask: Any = mask, at: Any = at) -> torch.Tensor:
                out = model(token, **passing(model, cache), attention_mask=mask, position_ids=at).logits
                token.copy_(out.argmax(-1))
                at.add_(1)
                return out

            if not captured:
                logits.append([step().clone() for _ in range(8)])
                continue
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                first = [step().clone() for _ in range(3)]
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            for _ in range(5):
                graph.replay()
                first.append(out.clone())
            logits.append(first)
            assert cache.report()["tokens"] == 10 + 8
    for a, b in zip(*logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


CASES = {name[5:]: value for name, value in list(globals().items()) if name.startswith("case_")}
EMULATED = [name for name in CASES if name not in ("compiled", "cuda_graph", "static_sliding_is_refused")]


@pytest.mark.parametrize("case", EMULATED)
def test_fused_case_on_the_emulated_machine(case: str, machine: dict[str, Any]) -> None:
    CASES[case]("cpu")
    assert "kv_encode" in machine or case == "static_overflow_is_refused"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_fused_case_on_the_gpu(case: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.test_fused", "cuda", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok {case}" in done.stdout


def main(device: str, names: list[str]) -> None:
    for name in names or CASES:
        CASES[name](device)
        print("ok", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
