"""Register with vLLM: backends by dotted path, KV-cache dtypes, and checks of the engine's options."""

from contextlib import suppress
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.engine_args import check_arguments
from packedkv.integrations.vllm.options import DTYPE

HERE = "packedkv.integrations.vllm"


def register_backends() -> None:
    """Register the backends of this platform, the KV-cache dtypes where vLLM takes new ones, and the checks."""
    register_dtypes()
    check_arguments()
    if current_platform.is_cpu():
        # that platform's backends are built in; ours behave the same until the options name a preset
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{HERE}.cpu.Attention")
        register_backend(AttentionBackendEnum.CPU_MLA, f"{HERE}.cpu.ReferenceLatent")
        register_backend(AttentionBackendEnum.AMX_MLA, f"{HERE}.cpu.TiledLatent")
    else:
        register_backend(AttentionBackendEnum.CUSTOM, f"{HERE}.backend.PackedBackend")


def register_dtypes() -> None:
    """Make ``--kv-cache-dtype packedkv`` and ``packedkv:PRESET`` valid (vLLM 0.33), which no other backend accepts."""
    try:
        from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    except ImportError:  # 0.32
        return
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    from packedkv.integrations.vllm.servable import check_scheme
    from packedkv.registry import get, presets

    class PackedBytes:
        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            # not CUSTOM: in 0.33.0 that is an alias of OCTAVE_K3V4
            return KVQuantMode.NONE

    names = [DTYPE]
    for preset in presets():
        with suppress(UnsupportedError):
            check_scheme(get(preset))
            names.append(f"{DTYPE}:{preset}")
    for name in names:
        if not is_known_kv_cache_dtype(name):
            register_kv_cache_dtype(name)(type("PackedBytes", (PackedBytes,), {"name": name}))
