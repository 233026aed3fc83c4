"""vLLM's own options, checked before other processes start: each one is honored, or refused with the reason.

``tests/serve/test_engine_args.py`` lists all options that concern KV caches.
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.options import DTYPE, Options, read_options
from packedkv.integrations.vllm.servable import check_scheme, group_tokens

logger = init_logger("vllm.packedkv")

SIXTEEN_BIT = ("float16", "bfloat16")
"""``--kv-cache-dtype`` of vLLM's own caches without quantization."""
SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of a quantized checkpoint that name a KV-cache dtype: compressed-tensors' and ModelOpt's."""
WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that run no draft model."""


def check_arguments() -> None:
    """Wrap ``EngineArgs.create_engine_config``, once in a process."""
    create = EngineArgs.create_engine_config
    if hasattr(create, "packedkv"):
        return

    @wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **more: Any) -> VllmConfig:
        options = before(self)
        config = create(self, *args, **more)
        after(self, config, options)
        return config

    create_engine_config.packedkv = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def before(args: EngineArgs) -> Options | None:
    """Check what needs no model; return ``read_options``, with its errors."""
    options = read_options(args.additional_config, args.kv_cache_dtype)
    if options is None:
        return None
    if not leaves_bytes_to_us(args.kv_cache_dtype):
        raise UnsupportedError(
            f"packedkv: --kv-cache-dtype {args.kv_cache_dtype} and the preset {options.scheme} are two KV caches; "
            f"leave it out."
        )
    check_scheme(options.scheme, fitted=options.fitted)
    # options that change the layout of the cache, or free memory of packed layers
    refused = {
        "decode context parallelism (--decode-context-parallel-size)": args.decode_context_parallel_size > 1,
        "prefill context parallelism (--prefill-context-parallel-size)": args.prefill_context_parallel_size > 1,
        "dual-batch overlap (--enable-dbo)": args.enable_dbo,
        "--kv-sharing-fast-prefill": args.kv_sharing_fast_prefill,
    }
    for option, is_set in refused.items():
        if is_set:
            raise UnsupportedError(f"packedkv: {option} is not supported with packed pages; leave it out.")
    if args.enable_sleep_mode:
        raise UnsupportedError(
            "packedkv: --enable-sleep-mode frees memory that holds constants of packed layers, and vLLM does not "
            "restore them; leave it out."
        )
    return options


def after(args: EngineArgs, config: VllmConfig, options: Options | None) -> None:
    """Check what needs the model's config, and complete the engine's config."""
    given, cache, model = args.kv_cache_dtype, config.cache_config, config.model_config
    scheme = checkpoint_scheme(config)
    if given == "auto" and cache.cache_dtype != "auto":
        scheme = scheme or f"--kv-cache-dtype {cache.cache_dtype}"
    if options is None:
        plain = given == "auto" and not scheme
        logger.info("packedkv is installed, no preset named: %s", "16 bit" if plain else "vLLM's own KV cache")
        return
    dtype = str(model.dtype).removeprefix("torch.")
    if given in SIXTEEN_BIT and given != dtype and not scheme:
        raise UnsupportedError(
            f"packedkv: --kv-cache-dtype {given}: the model runs in {dtype}, and {options.scheme} decides what its "
            f"pages hold; leave it out, or give --dtype {given}."
        )
    check_engine(config, options)
    check_backend(config, options)
    if given == "auto" and scheme:
        # a dtype that the user gives wins over the checkpoint's, and so does this one
        cache.cache_dtype = "float16" if model.dtype == torch.float16 else "bfloat16"
        logger.info(
            "packedkv: the checkpoint asks for another KV cache (%s), which %s replaces", scheme, options.scheme
        )
    # labels of vLLM's metric cache_config_info
    cache.packedkv_preset, cache.packedkv_seed = str(options.scheme), options.seed
    cache.packedkv_params = "none" if options.params is None else options.params.sha256[:12]


def leaves_bytes_to_us(cache_dtype: str | None) -> bool:
    """Return whether a KV-cache dtype leaves the meaning of the bytes to the backend."""
    return cache_dtype in (None, "auto", *SIXTEEN_BIT) or str(cache_dtype).startswith(DTYPE)


def checkpoint_scheme(config: VllmConfig) -> str:
    """Return how the checkpoint of the model, or of its draft model, quantizes KV caches; '' if it does not."""
    drafts = config.speculative_config
    models = [config.model_config, *([] if drafts is None else [drafts.draft_model_config])]
    return next((scheme for model in models if model is not None for scheme in _schemes_of(model)), "")


def _schemes_of(model: ModelConfig) -> list[str]:
    parts = [
        getattr(part, "quantization_config", None) for part in (model.hf_config, model.hf_config.get_text_config())
    ]
    parts += [part.get("quantization") for part in parts if isinstance(part, Mapping)]
    return [f"{key} {part[key]}" for part in parts if isinstance(part, Mapping) for key in SCHEMES if part.get(key)]


def check_backend(config: VllmConfig, options: Options) -> None:
    """Raise if vLLM would serve some layers of a GPU by another backend, in 16 bit."""
    attention, cache, custom = config.attention_config, config.cache_config, AttentionBackendEnum.CUSTOM
    if current_platform.is_cpu():
        return
    others = [kind for kind, backend in attention.backend_per_kind.items() if backend != custom]
    if others:
        raise UnsupportedError(
            f"packedkv: backend_per_kind gives layers to another backend ({', '.join(others)}), which would serve "
            f"16 bit; leave it out."
        )
    by_dtype = cache.cache_dtype.startswith(DTYPE) and not cache.kv_cache_dtype_skip_layers
    if attention.backend != custom and not by_dtype:
        raise UnsupportedError(
            f"packedkv: {options.scheme} is named, but vLLM would choose an attention backend of its own and serve "
            f"16 bit; add --attention-backend CUSTOM."
        )


def check_engine(config: VllmConfig, options: Options) -> None:
    """Raise for models and drafts that the backend does not support."""
    model, drafts = config.model_config, config.speculative_config
    # the model, then its drafts, then the preset's first tokens
    if model.is_attention_free:
        raise UnsupportedError(
            f"packedkv: {model.model} has no attention, so {options.scheme} would pack nothing; serve it without "
            f"packedkv in --additional-config."
        )
    if drafts is not None:
        if group_tokens(options.draft) > 1:
            raise UnsupportedError(
                f"packedkv: {options.draft} encodes {group_tokens(options.draft)} tokens together, and the layers of a "
                f'draft model are served without; give "draft" a preset that encodes each token alone, such as int-8.'
            )
        least = min((unit for layer in options.scheme.layer_schemes if (unit := group_tokens(layer)) > 1), default=0)
        if least and drafts.num_speculative_tokens >= least:
            raise UnsupportedError(
                f"packedkv: {options.scheme} encodes {least} tokens together, and a request may have fewer drafts than "
                f"that in a step, not {drafts.num_speculative_tokens}."
            )
    if options.names_draft and (drafts is None or drafts.method in WITHOUT_LAYERS):
        raise UnsupportedError(
            'packedkv: "draft" is the preset of a draft model\'s layers, and --speculative-config names no draft '
            "model; leave it out."
        )
    sink = next((layer for layer in options.scheme.layer_schemes if layer.sink), None)
    if sink is not None and model.is_hybrid:
        raise UnsupportedError(
            f"packedkv: {sink} keeps the first {sink.sink} tokens dense, for which each block has room, and vLLM "
            f'counts the blocks of a hybrid model in tokens of equal size; give "sink": 0 to serve it without.'
        )
