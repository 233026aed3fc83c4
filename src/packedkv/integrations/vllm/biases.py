"""The check of ``key_bias`` on vLLM's modules: a preset that breaks on the model's key biases is not served.

vLLM passes only the attention layer to a backend. The modules around it are found while the model is built: a torch
hook reports every module that becomes a child of another. Models of the Transformers backend exist before their
attention layers do; there the modules around are found among the objects of the process.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from packedkv.errors import BrokenPresetError
from packedkv.files.params import FittedParams
from packedkv.integrations.vllm.options import Options
from packedkv.key_bias import KeyBiases
from packedkv.key_layer import KeyLayer, key_layer

logger = logging.getLogger("vllm.packedkv")

ALTERNATIVES = ("kivi-tq-4", "kivi-4:window=0", "octopus-4:window=0", "int-8")
"""Presets to try where one breaks, in forms that a server takes."""


class Around:
    """The modules around an implementation's attention layer: its parent, which has the projections, and those above.

    Parameters
    ----------
    impl
        The implementation that vLLM's attention layer calls, its attribute ``impl``.
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
        """Remove the hook."""
        self._hook.remove()


def complete(arounds: Sequence[Around]) -> None:
    """Find the modules above those that had a parent before they had an attention layer."""
    if not (short := [around for around in arounds if len(around.modules) == 1]):
        return
    parents: dict[int, nn.Module] = {}
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            parents |= {id(child): found for child in found.__dict__.get("_modules", {}).values() if child is not None}
    for around in short:
        while (above := parents.get(id(around.modules[-1]))) is not None and above not in around.modules:
            around.modules.append(above)


def find_biases(name: str, text_config: Any, order: Sequence[int], impls: Mapping[int, Any]) -> KeyBiases | str:
    """Return the key biases of a model's layers, or why they are not known.

    Parameters
    ----------
    name : str
        The model's.
    text_config
        The text model's transformers config.
    order : sequence of int
        The layers that cache keys.
    impls : mapping
        By layer, the implementations of this process, with ``around, num_heads, head_size, scale``.
    """
    try:
        complete([impl.around for impl in impls.values()])
        layers = [own for index, impl in impls.items() if (own := _layer(index, impl, text_config)) is not None]
        found = KeyBiases(name, layers, order)
    except Exception as error:  # modules of any form
        return f"key biases are not known ({error})"
    if found.unread:
        why = next(iter(found.unread.values()))
        return f"key biases are not known, for the projections cannot be called by themselves ({why})"
    return found


def check_biases(
    options: Options,
    biases: KeyBiases | str,
    params: FittedParams | None = None,
    starts: Callable[[str], bool] = lambda spec: True,
) -> list[str]:
    """Check a preset against the key biases of a model's layers.

    Parameters
    ----------
    options : Options
    biases : KeyBiases or str
        Of ``find_biases``.
    params : FittedParams, optional
        Only if they are for these heads.
    starts : callable
        Whether this engine can serve another spec; others are not named.

    Returns
    -------
    list of str
        Messages to log: that the preset breaks, or why this is unknown.

    Raises
    ------
    BrokenPresetError
    """
    if options.probe == "off":
        return []
    if isinstance(biases, str):
        return [biases]
    why = biases.refusal(
        options.scheme,
        params=params,
        alternatives=ALTERNATIVES,
        starts=starts,
        further='give "probe": "warn" to serve it',
    )
    if why and options.probe == "refuse":
        raise BrokenPresetError(f"packedkv: {why}")
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
