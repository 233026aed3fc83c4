"""Every option of vLLM that concerns KV caches is honored or refused; one of a newer vLLM fails the first test."""

import dataclasses
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packedkv.attention import Seen
from packedkv.errors import KVError, SpecError, UnsupportedError
from packedkv.integrations.vllm.options import read_options
from packedkv.registry import LayerChoice, write_recipe
from tests.serve.engines import engine, generate, layers, library, prompts

IDS = prompts(40, 7, 33)
SAW = {"preset": "saw-int4"}
CONCERNS = re.compile(
    r"kv_|cache|block|prefix|sliding|mamba|attention|attn_backend|context_parallel|sleep|cumem|offload|dbo|ubatch|"
    r"gpu_memory|weight_transfer|speculative|^dtype$|quantization|additional|watermark$|replayssm|swa_"
)
"""Names of options that may concern KV caches."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8"}, r"--kv-cache-dtype fp8 .* leave it out"),
    "decode_context_parallel_size": ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode context"),
    "prefill_context_parallel_size": ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
    "enable_dbo": ({"enable_dbo": True, "tensor_parallel_size": 2}, "dual-batch overlap"),
    "enable_sleep_mode": ({"enable_sleep_mode": True}, r"--enable-sleep-mode frees memory"),
    "kv_sharing_fast_prefill": ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    "additional_config": ({"additional_config": {"packedkvs": SAW}}, r"has 'packedkvs'\. Did you mean 'packedkv'"),
}
"""A value, and the sentence."""
HONORED = {
    "block_size": "a multiple of 16 tokens; others are refused, below",
    "kv_cache_dtype_skip_layers": "below",
    "enable_prefix_caching": "test_engine",
    "num_gpu_blocks_override": "test_engine: preemption",
    "kv_cache_memory_bytes": "test_server: the number of blocks",
    "gpu_memory_utilization": "vLLM divides the memory by the bytes of a packed token",
    "prefix_match_unit": "vLLM refuses it where groups of layers do not agree; packed blocks are found whole",
    "prefix_caching_hash_algo": "of tokens, not of pages",
    "prefix_cache_retention_interval": "which whole blocks stay",
    "kv_transfer_config": "test_connectors",
    "kv_offloading_size": "becomes a kv_transfer_config, below",
    "kv_offloading_backend": "becomes a kv_transfer_config, below",
    "kv_events_config": "events of whole blocks",
    "kv_cache_metrics": "counts whole blocks",
    "kv_cache_metrics_sample": "counts whole blocks",
    "disable_hybrid_kv_cache_manager": "sliding windows are masked by attention as well",
    "disable_sliding_window": "shortens the longest request",
    "attention_config": "check_backend: a backend of vLLM's own on a GPU is refused, below; a CPU has one backend",
    "attention_backend": "as attention_config",
    "speculative_config": "test_speculation",
    "dtype": "of keys and values before they are encoded",
    "quantization": "of weights; a KV cache that it brings is replaced, below",
    "quantization_config": "as quantization",
    "weight_transfer_config": "new weights bind the layers again (test_means)",
    "mm_encoder_attn_backend": "encoders keep no cache",
}
NO_EFFECT = {
    "mamba": r".*mamba_.*|replayssm_.*|use_replayssm",  # recurrent states
    "context parallelism": r"dcp_kv_cache_interleave_size|cp_kv_cache_interleave_size",  # which is refused
    "overlap": r"ubatch_size|dbo_.*_token_threshold",  # which is refused
    "sleep mode": r"sleep_.*",  # which is refused
    "weights": r"(cpu_)?offload_.*|allow_deprecated_quantization|safetensors_prefetch_.*|enable_cumem_allocator",
    "images": r"mm_processor_cache_.*|mm_shm_cache_.*|mm_ipc_gpu_memory_gb",
    "scheduling": r"watermark",
    "DeepSeek-V4.1": r"swa_bounded_replay",
    "set by vLLM itself": r"skip_page_size_padded|simple_cpu_offload_num_blocks",
}
"""Options that do not reach the packed layers."""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``engines.engine``: vLLM looks at a model's class without another process."""
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


def config_of(folder: Path, given: Any = SAW, **options: Any) -> Any:
    """The engine's config, as a server makes it before any other process starts."""
    from vllm.engine.arg_utils import EngineArgs

    own = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "skip_tokenizer_init": True}
    additional = {} if given is None else {"packedkv": given}
    return EngineArgs(
        **{"model": str(folder), "additional_config": additional, **own, **options}
    ).create_engine_config()


def test_every_option_has_a_verdict() -> None:
    from vllm.config import CacheConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {own.name for own in dataclasses.fields(AsyncEngineArgs)}
    mapped = {"cache_dtype": "kv_cache_dtype", "is_attention_free": "", "sliding_window": ""}  # "": the model's
    cache = {own.name for own in dataclasses.fields(CacheConfig) if own.init}
    concerned = {name for name in fields if CONCERNS.search(name)} | {mapped.get(name, name) for name in cache} - {""}
    without = {name for name in concerned if any(re.fullmatch(own, name) for own in NO_EFFECT.values())}
    verdicts = [set(REFUSED), set(HONORED), without]
    assert concerned - set.union(*verdicts) == set(), "say in this file what becomes of these options"
    assert set.union(*verdicts) - concerned == set()
    assert sum(map(len, verdicts)) == len(set.union(*verdicts))


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_in_the_first_process(name: str, llama: Any) -> None:
    options, sentence = REFUSED[name]
    with pytest.raises(KVError, match=sentence) as error:
        config_of(llama.folder, **options)
    assert str(error.value).startswith("packedkv: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"preset": "saw-int5"}, r"unknown codec 'saw-int5'\. Did you mean 'saw-int4'"),
        ({"preset": "kivi-2"}, r'keeps the newest 128 tokens dense.*; give "window": 0'),
        ({"preset": "innerq-base", "window": 0, "sink": 0}, r"each sequence's own tokens.*run packedkv fit"),
        ({**SAW, "draft": "int-8"}, '"draft" is the preset of a draft model'),
    ],
    ids=str,
)
def test_a_preset_is_refused_in_the_first_process(given: dict[str, Any], sentence: str, llama: Any) -> None:
    with pytest.raises(KVError, match=sentence):
        config_of(llama.folder, given)


def test_a_model_without_attention(tmp_path: Path) -> None:
    """A preset that packs nothing is an option without effect."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"num_heads": 4, "head_dim": 32, "hidden_size": 64, "state_size": 16, "n_groups": 1, "vocab_size": 128}
    Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=2, expand=2, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"has no attention, so saw-int4 would pack nothing; serve it without"):
        config_of(tmp_path)
    assert config_of(tmp_path, None).model_config.is_attention_free


@pytest.mark.parametrize(
    "additional",
    [
        *({key: SAW} for key in ("packedkvs", "PackedKV", "packed_kv", "packed-kv", "pakedkv", "PACKEDKV ", "kvcodec")),
        {"vllm_packedkv": {}},
        {"kv": SAW},
        {"preset": "saw-int4"},
        {"packedkv": None},
        {"packedkv": "saw-int4"},
        {"packedkv": SAW, "seed": 3},
        {"packedkv": SAW, "packedkv2": SAW},
        *({"packedkv": {**SAW, "params": path}} for path in (5, "", None, True, ["a"])),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_are_meant_for_us_are_not_passed_over(additional: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^packedkv: .*(Did you mean|outside of|expected an object|params=)"):
        read_options(additional)


def test_keys_of_other_plugins_are_left_alone(llama: Any, told: list[str]) -> None:
    others = {"kv_cache": {"preset": "fast"}, "window": 8, "gdn_prefill_backend": "triton", "vcore": 1}
    assert read_options(others) is None
    assert read_options({"packedkv": SAW, "vcore": 1}) is not None
    config_of(llama.folder, additional_config=others)
    assert told == ["packedkv is installed, no preset named: 16 bit"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sixteen_bit_cache_dtype_is_the_models(dtype: str, llama: Any) -> None:
    assert config_of(llama.folder, dtype=dtype, kv_cache_dtype=dtype).cache_config.packedkv_preset == "saw-int4"
    other = {"bfloat16": "float16", "float16": "bfloat16"}[dtype]
    with pytest.raises(UnsupportedError, match=rf"--kv-cache-dtype {other}: the model runs in {dtype}, .*leave it out"):
        config_of(llama.folder, dtype=dtype, kv_cache_dtype=other)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "format": "dense",
    "ignore": [],
    "quantization_status": "compressed",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}


def with_scheme(folder: Path, to: Path, scheme: dict[str, Any]) -> Path:
    """A checkpoint that says how its KV cache is quantized."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    return to


def test_a_checkpoints_own_kv_cache_is_replaced(llama: Any, tmp_path: Path, told: list[str]) -> None:
    """vLLM takes its dtype from the checkpoint; the user gave none."""
    folder = with_scheme(llama.folder, tmp_path, COMPRESSED)
    with engine(folder, SAW, max_num_batched_tokens=16, block_size=16) as llm:
        assert generate(llm, IDS) == [library(llama.model, "saw-int4", ids) for ids in IDS]
    asked = r"packedkv: the checkpoint asks for another KV cache \(kv_cache_scheme .*\), which saw-int4"
    assert re.match(asked, told[0])
    for dtype in ("fp8", "fp8_e4m3"):  # this one was given
        two = rf"--kv-cache-dtype {dtype} and the preset saw-int4 are two KV caches"
        with pytest.raises(UnsupportedError, match=two):
            config_of(folder, kv_cache_dtype=dtype)


@pytest.mark.parametrize("scheme", [COMPRESSED, MODELOPT], ids=lambda scheme: scheme["quant_method"])
@pytest.mark.parametrize("drafts", [False, True])
def test_schemes_of_models_and_drafts(scheme: Any, drafts: bool, llama: Any, saved: Any, tmp_path: Path) -> None:
    found = with_scheme((saved("llama-mqa") if drafts else llama).folder, tmp_path, scheme)
    speculative = {"method": "draft_model", "model": str(found), "num_speculative_tokens": 2}
    more = {"speculative_config": speculative} if drafts else {}
    config = config_of(llama.folder if drafts else found, dtype="bfloat16", kv_cache_dtype="auto", **more)
    assert config.cache_config.cache_dtype == "bfloat16"


def test_offloading_becomes_a_connector(llama: Any) -> None:
    config = config_of(llama.folder, kv_offloading_size=1, kv_offloading_backend="native")
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"


def test_skipped_layers_stay_in_16_bit(llama: Any, tmp_path: Path) -> None:
    """As a recipe that names them."""
    from packedkv.integrations.vllm.identity import digest_of

    recipe, kinds = tmp_path / "recipe.json", ["dense", "saw-int4", "saw-int4", "dense", "saw-int4", "saw-int4"]
    write_recipe(recipe, [LayerChoice(kind, kind) for kind in kinds])
    plain = read_options({"packedkv": SAW})
    with engine(llama.folder, SAW, block_size=16, kv_cache_dtype_skip_layers=["3", "0"]) as llm:
        assert generate(llm, IDS) == [library(llama.model, str(recipe), ids) for ids in IDS]
        impls = {name: layer.impl for name, layer in layers(llm).items()}
        assert [str(impl.packed.scheme) for impl in impls.values()] == kinds
        assert len({layer.kv_cache[0].numel() for layer in layers(llm).values()}) == 2
        impl, config = next(iter(impls.values())), llm.llm_engine.vllm_config
        assert impl.digest != digest_of(plain, 64, impl.packed.dtype, ("none",) * 6)
        for names, sentence in (
            (["9"], r"skip-layers 9 is no layer of this model .* from 0 to 5"),
            (["sliding_window"], r"skip-layers sliding_window is no layer"),
            ([str(i) for i in range(6)], "leaves no layer to pack"),
        ):
            config.cache_config.kv_cache_dtype_skip_layers = names
            with pytest.raises(UnsupportedError, match=sentence):
                impl.model.skipping(plain)
        impl.rules = impl.rules._replace(seen=Seen(window=40))
        config.cache_config.kv_cache_dtype_skip_layers = ["sliding_window"]
        mixed = impl.model.skipping(plain).scheme
        assert [str(own) for own in mixed.layer_schemes] == ["dense"] + ["saw-int4"] * 5


def test_on_a_gpu_a_backend_that_ignores_the_preset_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the preset is named in a command, in a file or in Python."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from packedkv.integrations.vllm import engine_args

    config = config_of(llama.folder)
    monkeypatch.setattr(engine_args, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    options = read_options({"packedkv": SAW})
    attention, cache = config.attention_config, config.cache_config
    own, flash = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASH_ATTN
    add, other = "serve 16 bit; add --attention-backend CUSTOM", r"backend_per_kind gives .* \(sliding_window\)"
    for backend, dtype, skipped, per_kind, refusal in (
        (None, "auto", None, {}, add),
        (flash, "auto", None, {}, add),
        (None, "packedkv", None, {}, ""),  # no other backend takes it
        (None, "packedkv", ["0"], {}, add),  # which vLLM gives the dtype auto
        (own, "packedkv", ["0"], {}, ""),
        (own, "auto", None, {"sliding_window": flash}, other),
    ):
        attention.backend, attention.backend_per_kind = backend, per_kind
        cache.cache_dtype, cache.kv_cache_dtype_skip_layers = dtype, skipped
        with pytest.raises(UnsupportedError, match=refusal) if refusal else nullcontext():
            engine_args.check_backend(config, options)


# -- what is known only when layers are built --------------------------------------------------------------------------

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
UNBUILT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "block size": (
        *("llama-gqa", {"preset": "saw-int4"}, {"block_size": 24}),
        r"--block-size 24; pages are multiples of 16",
    ),
    "sink and block": (
        *("llama-gqa", {"preset": "int-8:sink=20"}, {"block_size": 16}),
        r"the first 20 tokens lie in one page, give as",
    ),
    "group and block": (
        *("llama-gqa", {"preset": "kivi-2:window=0"}, {"block_size": 48}),
        r"--block-size 48; kivi-2.* encodes 32 tokens together and pages are multiples of 32 tokens, give one of these",
    ),
    "group and connector": (
        *("llama-gqa", {"preset": "kivi-2:window=0"}, {"kv_transfer_config": NIXL}),
        r"in whole blocks only, and NixlConnector is not known to do so; use one of ExampleConnector",
    ),
    # vLLM cuts such requests into several; a layer of its own tables must not be served by the plain ones
    "chunked attention": (
        *("llama4", {"preset": "saw-int4"}, {"dtype": "bfloat16", "load_format": "dummy"}),
        r"attention of a kind of its own .*; serve the model without",
    ),
    # the CPU platform has other backends for it, which would serve it unpacked
    "latent attention": (
        *("deepseek-v3", {"preset": "saw-int4"}, {"dtype": "bfloat16"}),
        r"multi-head latent attention.*; serve it without packedkv",
    ),
    "drafts and group": (
        *("llama-gqa", {"preset": "kivi-2:window=0"}, {"speculative_config": {**NGRAMS, "num_speculative_tokens": 32}}),
        r"32 tokens together, and a request may have fewer drafts than that",
    ),
    "group of a draft model": (
        *("llama-gqa", {"preset": "saw-int4", "draft": "kivi-2:window=0"}, {"speculative_config": NGRAMS}),
        r'the layers of a draft model .* give "draft" a preset',
    ),
    "head size": ("llama-gqa", {"preset": "q4_0"}, {}, r"q4_0: head_dim=80 is not a multiple of 32; use"),
    "first tokens of a hybrid": (
        *("falcon-h1", {"preset": "int-8:sink=4"}, {"dtype": "bfloat16"}),
        r'first 4 tokens dense.*hybrid model.*; give "sink": 0 to serve it without',
    ),
}


@pytest.mark.parametrize("case", UNBUILT)
def test_the_engine_does_not_start(case: str, saved: Any) -> None:
    name, given, options, sentence = UNBUILT[case]
    folder = saved(name, **({"head_dim": 80} if case == "head size" else {})).folder
    with pytest.raises(KVError, match=sentence) as error, engine(folder, given, **options):
        pass
    assert "\n" not in str(error.value)
