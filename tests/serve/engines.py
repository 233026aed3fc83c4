"""vLLM engines in this process over tiny random models."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES
from packedkv.files.params import FittedParams
from packedkv.fitting.fit import fit_model
from packedkv.integrations.transformers.argument import passing
from packedkv.models.loading import LoadedModel
from packedkv.store.pages import PageStore
from tests.conftest import tiny_model

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # threads of two runtimes on two cores wait for each other: 20 times slower
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "packedkv",
}
WORDS = 128
NEW = 12


def save_model(folder: Path, name: str, **changed: Any) -> Any:
    """Write a model of ``tests.conftest`` with a tokenizer of words ``t0 .. t127``; return it."""
    model = tiny_model(name, **changed)
    model.save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    return model


def tokenizer_of_words() -> Any:
    """Tokenizer of words ``t0 .. t127``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(WORDS)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", pad_token="t0")


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, WORDS, (n,), generator=generator).tolist() for n in lengths]


def _pass_over_llvmlite(dispatcher: Any) -> None:
    """Let engines start after one with n-grams: vLLM 0.32 scans all modules, and an object of llvmlite fails."""
    scan = dispatcher._rebind_kernels
    if getattr(scan, "passes_over", False):
        return

    def rebind(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
        try:
            scan(overrides)
        finally:
            sys.modules.update(hidden)

    rebind.passes_over = True  # type: ignore[attr-defined]
    dispatcher._rebind_kernels = rebind


@contextlib.contextmanager
def engine(folder: Path, packedkv: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """An ``LLM`` in this process, with the options of the plugin if there are any."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.model_executor.models import registry
    from vllm.triton_utils import dispatcher

    _pass_over_llvmlite(dispatcher)
    # a model's class that vLLM has not met yet is looked at here; the process that it starts for it imports all again
    registry._run_in_subprocess = lambda look: look()
    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 24,
        "disable_log_stats": False,
        "additional_config": {} if packedkv is None else {"packedkv": packedkv},
        **options,
    }
    llm = None
    try:
        llm = LLM(model=str(folder), skip_tokenizer_init=True, **given)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        ensure_kv_transfer_shutdown()  # an engine that did not start leaves its connector to the next one
        cleanup_dist_env_and_memory()


def generate(llm: Any, ids: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy tokens of prompts, all at once."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": p} for p in ids], greedy, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in found]


def library(model: Any, spec: str, ids: list[int], new: int = NEW, **options: Any) -> list[int]:
    """Greedy tokens of a prompt through the library's own cache, where every query reads the pages."""
    cache = packedkv.cache_for(model, spec, prefill="decoded", **{"probe": "off", **options})
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), **passing(model, cache), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def spec_of(given: dict[str, Any]) -> str:
    """The library's spec of a server's options."""
    return ":".join([given["preset"], *(f"{k}={v}" for k, v in given.items() if k != "preset")])


class Step(NamedTuple):
    """What the engine gave to one layer in a step, and got: ``[n, heads, D]``."""

    layer: int
    meta: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


@contextlib.contextmanager
def watched(*indices: int) -> Iterator[list[Step]]:
    """Record the steps of these layers, requests' own tokens only."""
    from packedkv.integrations.vllm.backend import PackedImpl

    steps: list[Step] = []
    forward = PackedImpl.forward

    def watch(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, meta: Any, output: Any, **more: Any) -> Any:
        found = forward(self, layer, q, k, v, cache, meta, output, **more)
        index = next(int(part) for part in layer.layer_name.split(".") if part.isdigit())
        if meta is not None and index in indices:
            n = meta.chunks[-1][2] if meta.chunks else meta.decodes
            meta = replace(meta, block_table=meta.block_table.clone(), seq_lens=meta.seq_lens.clone())
            rows = (x[:n].reshape(n, -1, self.head_size).clone() for x in (q, k, v, output))
            steps.append(Step(index, meta, *rows))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedImpl, "forward", watch)
        yield steps


def joined(steps: list[Step]) -> list[torch.Tensor]:
    """Query, key, value and output of one request's steps, ``[1, heads, n, D]``."""
    return [torch.cat(x).transpose(0, 1)[None] for x in zip(*(step[2:] for step in steps), strict=True)]


def check_blocks(llm: Any, layer: int, table: torch.Tensor, own: LayerCache, tokens: int) -> None:
    """Compare the engine's blocks of a request, ``table [1, M]``, with the pages of the library's cache."""
    cache = layers(llm)[f"model.layers.{layer}.self_attn.attn"].kv_cache
    held = PageStore.over(own.store.layout, cache.flatten(2), table)
    for role in ROLES:
        for name, field in own.store.read(role, 0, tokens).items():
            assert torch.equal(held.read(role, 0, tokens)[name], field), (role, name)


def metric(llm: Any, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}")


def layers(llm: Any) -> dict[str, Any]:
    """Attention layers by name."""
    config = llm.llm_engine.vllm_config
    return dict(config.compilation_config.static_forward_context)


class Biased(NamedTuple):
    """A model, where it is, and its tokenizer."""

    folder: Path
    model: Any
    tokenizer: Any

    def fitted(self, spec: str, to: Path) -> FittedParams:
        words = torch.randint(3, WORDS, (600,), generator=torch.Generator().manual_seed(7)).tolist()
        text = " ".join(f"t{i}" for i in words)
        loaded = LoadedModel(self.model, self.tokenizer, "biased", "made in the test")
        return fit_model(loaded, spec, text, windows=2, window_tokens=256).save(to)
