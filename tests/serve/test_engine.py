"""The real engine on the CPU, in this process: the library's tokens, whatever the scheduler does with the requests."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.host import LayerCache
from packedkv.codec import ROLES
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.vllm.layer import Rules
from packedkv.kernels.cpu import library
from packedkv.store.pages import PageStore
from tests.serve.engines import NEW, engine, generate, layers, metric, prompts

SERVED = {
    "saw-int4": {},
    "int-8": {},
    "fp8": {},
    "ultraquant": {},
    "ultra-tq": {},
    "turboquant-4": {},
    "octopus-3": {"window": 0},
    "hqmq-s24_r3": {},
}
EVERY_RUN = ("saw-int4", "octopus-3", "hqmq-s24_r3")
"""The others are nightly: how their codes differ from these is not the engine's business."""
IDS = prompts(40, 7, 33)


def generated(model: Any, spec: str, ids: list[int]) -> list[int]:
    """What the library's own cache generates, every query reading what is stored."""
    cache = packedkv.cache_for(model, spec, prefill="decoded", probe=False)
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), **passing(model, cache), max_new_tokens=NEW, do_sample=False)
    return out[0, len(ids) :].tolist()


def spec_of(preset: str) -> str:
    return ":".join([preset, *(f"{k}={v}" for k, v in SERVED[preset].items())])


@pytest.mark.parametrize(
    "preset", [p if p in EVERY_RUN else pytest.param(p, marks=pytest.mark.nightly) for p in SERVED]
)
def test_the_engine_generates_what_the_library_does(preset: str, llama: Any) -> None:
    """In one call per prompt or in chunks of 16 tokens, with others or alone, and with a prefix that is cached."""
    want = [generated(llama.model, spec_of(preset), ids) for ids in IDS]
    with engine(llama.folder, {"preset": preset, **SERVED[preset]}, max_num_batched_tokens=16, block_size=16) as llm:
        assert generate(llm, IDS) == want
        assert metric(llm, "prefix_cache_hits") == 0
        assert generate(llm, IDS[:1]) == want[:1]
        assert metric(llm, "prefix_cache_hits") == 32  # whole blocks of its 40 tokens
        scheme, context = packedkv.get(spec_of(preset)), layers(llm)
        for i in range(6):
            cache, own = context[f"model.layers.{i}.self_attn.attn"].kv_cache, scheme.for_layer(i, 6)
            own = packedkv.KVScheme(own.key.for_dtype(torch.float32), own.value.for_dtype(torch.float32))
            assert cache.dtype == torch.uint8
            assert cache.shape[1:3] == (2, 16)
            assert cache[0].numel() == 2 * own.page_layout(64, 16).page_bytes  # two heads


@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mistral", "qwen2"))]
)
def test_windows_and_hybrids(name: str, saved: Any) -> None:
    """Sliding and full layers in groups of their own; sliding ones alone; keys with a large bias."""
    made, preset = saved(name), "int-8:sink=4" if name == "gemma3" else "int-8"
    want = [generated(made.model, preset, ids) for ids in IDS]
    with engine(made.folder, {"preset": preset}, max_num_batched_tokens=16, block_size=16) as llm:
        assert generate(llm, IDS) == want
        assert generate(llm, IDS) == want


@pytest.mark.parametrize("grouped", [False, True])
def test_prompts_are_put_together_for_each_window(grouped: bool) -> None:
    """As a GPU's builder does for layers that share blocks; too long ones are left alone."""
    from packedkv.integrations.vllm.backend import PackedBuilder, PackedImpl, PackedMetadata
    from packedkv.integrations.vllm.pending import PendingGroups

    builder = PackedBuilder.__new__(PackedBuilder)  # without an engine
    builder.windows, builder.kv_cache_spec = {0, 40}, SimpleNamespace(block_size=32)
    builder.first = SimpleNamespace(batched=True, most_tokens=lambda longest: longest)
    lengths = SimpleNamespace(max_model_len=150), SimpleNamespace(max_num_batched_tokens=64)
    builder.vllm_config = SimpleNamespace(model_config=lengths[0], scheduler_config=lengths[1])
    builder.pending = PendingGroups(4, 32, 32, 4, torch.device("cpu")) if grouped else None
    chunks = [(0, 0, 7, 140), (1, 7, 20, 90), (2, 20, 30, 10)]
    found = builder._prompts([*chunks, (3, 30, 31, 170)], torch.arange(24, dtype=torch.int32).view(4, 6))
    parts = {window: [(one.first, one.last) for one in own.together] for window, own in found.items()}
    assert parts == {0: [(0, 7), (7, 30)], 40: [(0, 30), (30, 31)]}
    assert [found[window].alone for window in (0, 40)] == [[(3, 30, 31, 170)], []]
    first, second = found[40].together
    # the block of the first token that a first query sees
    assert [*first.table[:, 0].tolist(), *second.table[:, 0].tolist()] == [2, 7, 12, 22]
    rooms = [[one.room for one in own.together] for own in found.values()]
    assert rooms[0] == rooms[1]
    assert len({*rooms[0]}) == (2 if grouped else 1)  # own tokens of all groups are held at once
    impl = PackedImpl.__new__(PackedImpl)
    metadata = PackedMetadata(0, chunks, *[torch.empty(0)] * 3, found)
    for window, softcap, want in (0, 0.0, found[0]), (40, 0.0, found[40]), (40, 2.0, ([], chunks)):
        impl.rules = Rules(0.125, window, softcap)
        layer = SimpleNamespace(takes_chunks=lambda rules: not rules.softcap)
        assert impl._chunks(layer, metadata) == want


def test_preemption_loses_nothing(llama: Any) -> None:
    """A pool for fewer tokens than the requests grow to: some are thrown out, and computed again."""
    ids = prompts(30, 30, 30, 30, seed=3)
    with engine(llama.folder, {"preset": "saw-int4"}, block_size=16) as llm:
        want = generate(llm, ids, 40)
        assert metric(llm, "num_preemptions") == 0
    with engine(
        llama.folder, {"preset": "saw-int4"}, block_size=16, num_gpu_blocks_override=12, max_model_len=128
    ) as llm:
        assert generate(llm, ids, 40) == want
        assert metric(llm, "num_preemptions") > 0


@pytest.mark.parametrize("preset", ["saw-int4", "octopus-3"])
def test_attention_and_bytes_are_the_librarys(preset: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of two layers: what the engine hands over, what it gets back, what its blocks hold."""
    from packedkv.integrations.vllm.backend import PackedImpl

    seen: dict[int, list[Any]] = {}
    forward = PackedImpl.forward

    def watched(
        self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, meta: Any, output: Any, **more: Any
    ) -> Any:
        found = forward(self, layer, query, key, value, cache, meta, output, **more)
        if meta is not None:
            index = int(layer.layer_name.split(".")[2])
            n = meta.chunks[-1][2] if meta.chunks else meta.decodes
            seen.setdefault(index, []).append(
                (query[:n].clone(), key[:n].clone(), value[:n].clone(), output.view(-1, 4, 64)[:n].clone())
            )
            rows[index] = meta.table[0].clone()
        return found

    rows: dict[int, Any] = {}
    monkeypatch.setattr(PackedImpl, "forward", watched)
    with engine(llama.folder, {"preset": preset, **SERVED[preset]}, max_num_batched_tokens=16, block_size=32) as llm:
        generate(llm, IDS[:1])
        for index in (0, 3):
            q, k, v, out = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*seen[index], strict=True))
            tokens = k.shape[2]
            assert tokens == 40 + NEW - 1
            scheme = packedkv.get(spec_of(preset)).for_layer(index, 6)
            own = LayerCache(scheme, layer=index, page_tokens=32)
            own.append(k, v)
            torch.testing.assert_close(out, own.attend(q), rtol=1e-5, atol=1e-5)
            store = own.store
            assert store is not None
            cache = layers(llm)[f"model.layers.{index}.self_attn.attn"].kv_cache
            held = PageStore(store.layout, 1, 2, cache.device)
            held.pages, held.table = cache.flatten(2), rows[index][None, :2]
            for role in ROLES:
                for name, field in store.read(role, 0, tokens).items():
                    assert torch.equal(held.read(role, 0, tokens)[name], field), (role, name)


@pytest.mark.parametrize("preset", ["saw-int4", pytest.param("octopus-3", marks=pytest.mark.nightly)])
def test_without_compiled_kernels_the_reference_serves_and_says_so(
    preset: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packedkv.integrations.vllm import backend

    told: list[str] = []
    monkeypatch.setattr(backend.logger, "info", lambda text, *given: told.append(text % given))
    monkeypatch.setattr(backend.logger, "warning", lambda text, *given: told.append(text % given))
    want = [generated(llama.model, spec_of(preset), ids) for ids in IDS]
    given = {"preset": preset, **SERVED[preset]}
    for compiled in (True, False):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(library, "chosen", lambda: Path("missing.so"))
            with engine(llama.folder, given, max_num_batched_tokens=16, block_size=16) as llm:
                assert generate(llm, IDS) == want
        said = " ".join(told)
        assert f"packedkv: preset {preset}: " in said
        assert said.count("x as many tokens as 16 bit") == 1
        assert re.search(
            r"seed 0, params none, 0 of 6 layers hold keys without their mean, identity [0-9a-f]{12}-16", said
        )
        assert ("are served by the kernels 'cpu" in said) == compiled
        assert ("layers are served by the reference, which is slow: " in said) != compiled
        assert ("the CPU kernels are not compiled (missing.so is missing)" in said) != compiled
        told.clear()


def test_without_a_preset_the_engine_is_as_it_was(llama: Any) -> None:
    with engine(llama.folder) as llm:
        cache = layers(llm)["model.layers.0.self_attn.attn"].kv_cache
        assert cache.dtype == torch.float32
        assert len(generate(llm, IDS[:1])[0]) == NEW
