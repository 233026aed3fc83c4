"""The real engine on the CPU, in this process: the library's tokens, however the scheduler splits the requests."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import packedkv
from packedkv.attention import Seen
from packedkv.cache.layer import LayerCache
from packedkv.kernels.cpu import library as cpu_library
from packedkv.kernels.tokens import Rules
from tests.serve.engines import (
    NEW,
    Biased,
    check_blocks,
    engine,
    generate,
    joined,
    layers,
    library,
    metric,
    prompts,
    spec_of,
    watched,
)

SERVED: dict[str, dict[str, Any]] = {
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
"""The others are nightly: the engine does not depend on how their codes differ from these."""
IDS = prompts(40, 7, 33)
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 16, "block_size": 16}


def nightly(names: Any, every_run: Any) -> list[Any]:
    return [name if name in every_run else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("preset", nightly(SERVED, EVERY_RUN))
def test_the_engine_generates_what_the_library_does(preset: str, llama: Any) -> None:
    """In one call per prompt or in chunks of 16 tokens, with others or alone, and with a cached prefix."""
    given = {"preset": preset, **SERVED[preset]}
    want = [library(llama.model, spec_of(given), ids) for ids in IDS]
    with engine(llama.folder, given, **CHUNKS) as llm:
        assert generate(llm, IDS) == want
        assert metric(llm, "prefix_cache_hits") == 0
        assert generate(llm, IDS[:1]) == want[:1]
        assert metric(llm, "prefix_cache_hits") == 32  # whole blocks of its 40 tokens


@pytest.mark.parametrize("name", nightly(("gemma3", "gemma3 in one group", "mistral", "qwen2"), ("gemma3",)))
def test_windows_and_hybrids(name: str, saved: Any) -> None:
    """Sliding and full layers in groups of their own or in one; sliding ones alone; keys with a large bias."""
    name, _, together = name.partition(" ")
    made, preset = saved(name), "int-8:sink=4" if name == "gemma3" else "int-8"
    want = [library(made.model, preset, ids) for ids in IDS]
    more = {"disable_hybrid_kv_cache_manager": True} if together else {}
    with engine(made.folder, {"preset": preset}, **CHUNKS, **more) as llm:
        assert generate(llm, IDS) == want
        assert generate(llm, IDS) == want


@pytest.mark.parametrize("grouped", [False, True])
def test_prompts_are_put_together_for_each_window(grouped: bool) -> None:
    """As a GPU's builder does for layers that share blocks; too long ones are left alone."""
    from packedkv.integrations.vllm.backend import PackedBuilder, PackedImpl, PackedMetadata
    from packedkv.integrations.vllm.pending import PendingGroups

    builder = PackedBuilder.__new__(PackedBuilder)  # without an engine
    builder.windows, builder.page_tokens = {0, 40}, 32
    builder.first = SimpleNamespace(batched=True, most_tokens=lambda longest: longest)
    lengths = SimpleNamespace(max_model_len=150), SimpleNamespace(max_num_batched_tokens=64)
    builder.vllm_config = SimpleNamespace(model_config=lengths[0], scheduler_config=lengths[1])
    builder.pending = PendingGroups(4, 32, 32, 4, torch.device("cpu")) if grouped else None
    chunks = [(0, 0, 7, 140), (1, 7, 20, 90), (2, 20, 30, 10)]
    found = builder._prompts([*chunks, (3, 30, 31, 170)], torch.arange(24, dtype=torch.int32).view(4, 6))
    (every, long), (windowed, none) = found[0], found[40]
    assert [(one.first, one.last) for one in every] == [(0, 7), (7, 30)]
    assert [(one.first, one.last) for one in windowed] == [(0, 30), (30, 31)]
    assert (long, none) == ([(3, 30, 31, 170)], [])
    # the block of the first token that a first query sees
    assert torch.cat([one.table[:, 0] for one in windowed]).tolist() == [2, 7, 12, 22]
    assert [one.room for one in every] == [one.room for one in windowed]
    assert len({one.room for one in every}) == (2 if grouped else 1)  # own tokens of all groups are held at once
    impl = PackedImpl.__new__(PackedImpl)
    metadata = PackedMetadata(0, chunks, *[torch.empty(0)] * 3, found)
    layer = SimpleNamespace(takes_chunks=lambda rules: not rules.seen.softcap)
    for window, softcap, want in (0, 0.0, found[0]), (40, 0.0, found[40]), (40, 2.0, ([], chunks)):
        impl.rules = Rules(0.125, Seen(window=window, softcap=softcap))
        assert impl._chunks(layer, metadata) == want


@pytest.mark.parametrize("preset", ["saw-int4", "ghost-3", "kivi-2"])
def test_preemption_loses_nothing(preset: str, llama: Any, biased: Biased, tmp_path: Path) -> None:
    """A pool for fewer tokens than the requests grow to: the engine preempts some, and computes them again."""
    ids, given, model, block = prompts(30, 30, 30, 30, seed=3), {"preset": preset}, llama, 16
    if preset == "ghost-3":
        given["params"], model = str(tmp_path / "fitted.safetensors"), biased
        biased.fitted(preset, tmp_path / "fitted.safetensors")
    if preset == "kivi-2":
        given["window"], block = 0, 32
    with engine(model.folder, given, block_size=block) as llm:
        want = generate(llm, ids, 40)
        assert metric(llm, "num_preemptions") == 0
    few = {"num_gpu_blocks_override": 192 // block, "max_model_len": 128}
    with engine(model.folder, given, block_size=block, **few) as llm:
        assert generate(llm, ids, 40) == want
        assert metric(llm, "num_preemptions") > 0


@pytest.mark.parametrize("preset", ["saw-int4", "octopus-3"])
def test_attention_and_bytes_are_the_librarys(preset: str, llama: Any) -> None:
    """In two layers: tensors that the engine passes and receives, and bytes of its blocks."""
    given = {"preset": preset, **SERVED[preset]}
    with watched(0, 3) as steps, engine(llama.folder, given, max_num_batched_tokens=16, block_size=32) as llm:
        generate(llm, IDS[:1])
        for index in (0, 3):
            seen = [step for step in steps if step.layer == index]
            q, k, v, out = joined(seen)
            assert k.shape[2] == 40 + NEW - 1
            own = LayerCache(packedkv.get(spec_of(given)).for_layer(index, 6), layer=index, page_tokens=32)
            own.append(k, v)
            torch.testing.assert_close(out, own.attend(q), rtol=1e-5, atol=1e-5)
            check_blocks(llm, index, seen[-1].meta.block_table[:1, :2], own, k.shape[2])


@pytest.mark.parametrize("preset", nightly(("saw-int4", "octopus-3"), ("saw-int4",)))
def test_without_compiled_kernels_the_reference_serves_and_says_so(
    preset: str, llama: Any, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"preset": preset, **SERVED[preset]}
    want = [library(llama.model, spec_of(given), ids) for ids in IDS]
    for compiled in (True, False):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(cpu_library, "chosen", lambda: Path("missing.so"))
            with engine(llama.folder, given, **CHUNKS) as llm:
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


HYBRIDS = {"qwen3-next": 3, "granite-hybrid": 1, "nemotron-h": 2, "falcon-h1": 1}
"""A layer with attention of each; the preset keeps outer layers dense, but not in a hybrid model."""


@pytest.mark.parametrize("name", nightly(HYBRIDS, ("qwen3-next", "granite-hybrid")))
def test_a_hybrid_repeats_and_attends_as_the_library(name: str, saved: Any, told: list[str]) -> None:
    ids, options = prompts(40, 7), {"dtype": "bfloat16", "max_num_batched_tokens": 512}
    with watched(HYBRIDS[name]) as steps, engine(saved(name).folder, {"preset": "ultraquant"}, **options) as llm:
        first = generate(llm, ids[:1])
        q, k, v, out = joined(steps)
        assert generate(llm, ids[:1]) == first
        assert generate(llm, ids)[0] == first[0]
    own = LayerCache(packedkv.get("ultraquant").for_layer(2, 6), layer=HYBRIDS[name])
    own.append(k, v)
    assert k.shape[2] == 40 + len(first[0]) - 1
    torch.testing.assert_close(out.float(), own.attend(q).float(), rtol=2e-2, atol=2e-2)
    assert any("the prefix cache finds whole blocks" in line for line in told)


def adapter_of(model: Any, folder: Path) -> Path:
    """Write an adapter of rank 4 for keys and values, large enough to change every token."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if name.endswith((".k_proj", ".v_proj")):
            out, inner = module.weight.shape
            for side, shape in (("A", (4, inner)), ("B", (out, 4))):
                weights[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.nightly
def test_an_adapter_and_the_model_have_pages_of_their_own(llama: Any, tmp_path: Path) -> None:
    """The same prompts by turns; vLLM 0.32's operators on a CPU mix up adapters within a batch, so one at a time."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("own", 1, str(adapter_of(llama.model, tmp_path / "adapter")))
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def ask(llm: Any, which: Any) -> list[list[int]]:
        outs = [
            llm.generate([{"prompt_token_ids": p}], greedy, lora_request=which, use_tqdm=False)[0]
            for p in prompts(70, 40)
        ]
        return [list(out.outputs[0].token_ids) for out in outs]

    given, block = {"preset": "saw-int4"}, {"block_size": 32}
    with engine(llama.folder, given, **block) as llm:
        plain = ask(llm, None)
    with engine(llama.folder, given, **block, enable_lora=True, max_lora_rank=8) as llm:
        turns = [(ask(llm, None), ask(llm, adapter)) for _ in range(2)]
        assert metric(llm, "prefix_cache_hits") == 2 * (64 + 32)  # in the second turn, of both
    assert turns[0] == turns[1]
    assert turns[0][0] == plain
    assert turns[0][1] != plain
