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


def _latent(backend: Any) -> Any:
    if current_options() is not None:
        raise UnsupportedError(
            "packedkv: the model has multi-head latent attention: it caches one latent and one RoPE key instead of K "
            "and V per head, which these codecs do not take; serve it without packedkv in --additional-config."
        )
    return backend.get_impl_cls()


class ReferenceLatent(CPUMLABackend):  # type: ignore[misc]
    """``CPU_MLA``; refused with a preset."""

    @staticmethod
    def get_impl_cls() -> Any:
        return _latent(CPUMLABackend)


class TiledLatent(AMXMLABackend):  # type: ignore[misc]
    """``AMX_MLA``; refused with a preset."""

    @staticmethod
    def get_impl_cls() -> Any:
        return _latent(AMXMLABackend)
