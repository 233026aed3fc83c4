"""Why a server does not serve a scheme."""

from typing import Any

import packedkv
from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.servable import check_layer


def refusal(scheme: packedkv.KVScheme, *given: Any, **options: Any) -> str:
    """Return the message of ``check_layer``, or ``""`` if a server does serve it."""
    try:
        check_layer(scheme, *given, **options)
    except UnsupportedError as error:
        return str(error)
    return ""
