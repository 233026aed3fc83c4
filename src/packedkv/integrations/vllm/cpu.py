"""The CPU platform's backends, replaced by packed pages if the options name a preset."""

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.backend import PackedImpl, current_options


class Attention(CPUAttentionBackend):  # type: ignore[misc]
    """``CPU_ATTN``; a bound layer has its own backend (``bind.ServedModel``)."""

    @staticmethod
    def get_impl_cls() -> Any:
        return CPUAttentionBackend.get_impl_cls() if current_options() is None else PackedImpl


class _Latent:
    """Multi-head latent attention; refused with a preset."""

    @classmethod
    def get_impl_cls(cls) -> Any:
        if current_options() is not None:
            raise UnsupportedError(
                "packedkv: the model has multi-head latent attention: it caches one latent and one RoPE key instead of "
                "K and V per head, which these codecs do not take; serve it without packedkv in --additional-config."
            )
        return super().get_impl_cls()  # type: ignore[misc]


class ReferenceLatent(_Latent, CPUMLABackend):  # type: ignore[misc]
    """``CPU_MLA``."""


class TiledLatent(_Latent, AMXMLABackend):  # type: ignore[misc]
    """``AMX_MLA``."""
