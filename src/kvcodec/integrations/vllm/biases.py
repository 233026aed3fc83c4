"""A preset that breaks on the model's key biases does not start: what ``key_bias`` says, of vLLM's modules.

vLLM hands a backend the attention layer alone. The modules around it are seen as the model is built: torch tells of
every module that becomes part of another.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from kvcodec.errors import BrokenPresetError
from kvcodec.files.params import FittedParams
from kvcodec.integrations.vllm.options import Options
from kvcodec.key_bias import KeyBiases, KeyLayer, key_layer

ALTERNATIVES = ("kivi-4:window=0", "octopus-4:window=0", "int-8")
"""What is tried where a preset breaks, as a server takes it."""


class Around:
    """The modules around the attention layer of an implementation: the one with its projections, and that one's.

    Parameters
    ----------
    impl
        vLLM's name of what an attention layer calls; the layer has it as ``impl``.
    """

    def __init__(self, impl: Any) -> None:
        self.modules: list[nn.Module] = []
        self._impl = weakref.ref(impl)
        self._hook = register_module_module_registration_hook(self._seen)

    def _seen(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        if len(self.modules) == 1 and child is self.modules[0]:
            self.modules.append(parent)
        impl = self._impl()
        if not self.modules and impl is not None and getattr(child, "impl", None) is impl:
            self.modules.append(parent)

    def end(self) -> None:
        """See no more."""
        self._hook.remove()


def check_biases(
    options: Options,
    name: str,
    text_config: Any,
    order: Sequence[int],
    impls: Mapping[int, Any],
    params: FittedParams | None = None,
) -> list[str]:
    """Refuse a preset that breaks on the key biases of a model's layers.

    Parameters
    ----------
    options : Options
    name : str
        The model's.
    text_config
        Of the model in words of transformers.
    order : sequence of int
        The layers that cache keys.
    impls : mapping
        By layer, what has ``around, num_heads, head_size, scale``: those of this process.
    params : FittedParams, optional
        If they are of these heads.

    Returns
    -------
    list of str
        What to say: that the preset breaks, or why nothing is known.

    Raises
    ------
    BrokenPresetError
    """
    if options.probe == "off":
        return []
    try:
        layers = [own for index, impl in impls.items() if (own := _layer(index, impl, text_config)) is not None]
        biases = KeyBiases(name, layers, order)
    except Exception as error:  # projections of any form and quantization are called here
        return [f"key biases are not known, for the projections cannot be called by themselves ({error})"]
    why = biases.refusal(
        options.scheme, params=params, alternatives=ALTERNATIVES, further='give "probe": "warn" to serve it'
    )
    if why and options.probe == "refuse":
        raise BrokenPresetError(f"kvcodec: {why}")
    return [why] if why else []


def _layer(index: int, impl: Any, text_config: Any) -> KeyLayer | None:
    if not (held := impl.around.modules):
        raise LookupError(f"the module around the attention of layer {index} was not seen")
    return key_layer(
        held[0],
        held[1] if len(held) > 1 else None,
        index,
        text_config,
        query_heads=impl.num_heads,
        head_dim=impl.head_size,
        scale=impl.scale,
    )
