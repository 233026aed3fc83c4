"""Why the CUDA kernels do not read a scheme, on a machine without a GPU as well."""

import packedkv
from packedkv.errors import UnsupportedError
from packedkv.kernels.spec import decode_spec


def cuda_refusal(scheme: packedkv.KVScheme, head_dim: int, page_tokens: int | None = None) -> str:
    """Return the reason, or ``""`` if they read it."""
    tokens = page_tokens or scheme.page_layout(head_dim).page_tokens
    try:
        decode_spec(scheme.key, scheme.value, head_dim, tokens)
    except UnsupportedError as error:
        return str(error)
    return ""
