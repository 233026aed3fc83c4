"""How a transformers model turns keys by their positions, for caches that hold keys without their mean.

Frequencies and scaling are those of the model's rotary embedding, pairs of channels those of the function
``apply_rotary_pos_emb`` of its attention; what ``Rotary`` makes of them is compared with the model's own result before
it is used. The positions of a forward pass are those that the rotary embedding was called with.
"""

import inspect
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from kvcodec.cache.positions import shared
from kvcodec.errors import UnsupportedError
from kvcodec.key_layer import changing_rope
from kvcodec.ops.rope import Rotary

PLACES = (0, 1, 7, 100, 1000)
"""Positions at which a ``Rotary`` is compared with the model."""
ALIKE = 1e-2
"""Largest difference there, where numbers are of size 1: float32 angles of the model are good to 1e-4."""


class Rope:
    """The rotary embedding of one model; ``positions`` are those of the newest forward pass.

    Parameters
    ----------
    model : PreTrainedModel

    Raises
    ------
    UnsupportedError
        The model has no rotary embedding that all layers share and that is called with positions.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        found = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
        if len(found) != 1 or list(inspect.signature(found[0].forward).parameters)[:2] != ["x", "position_ids"]:
            raise UnsupportedError(
                f"{self.name}: mean=pre needs one rotary embedding that all layers share and that is called with "
                f"position_ids; this model has {len(found) or 'none'}. Use mean=post or mean=none."
            )
        self.embedding, self.config = found[0], getattr(model, "config", None)
        self.positions = torch.empty(1, 0, dtype=torch.long)
        self._rotaries: dict[str, Rotary] = {}
        self._attentions: dict[int, weakref.ref[nn.Module]] = {}
        this = weakref.ref(self)

        def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            rope, positions = this(), args[1] if len(args) > 1 else options.get("position_ids")
            if rope is not None and isinstance(positions, Tensor):
                positions = positions.detach()
                rope.positions = positions if torch.compiler.is_compiling() else shared(positions)

        self._hook = self.embedding.register_forward_pre_hook(note, with_kwargs=True)

    def attention(self, layer: int, model: Any) -> nn.Module | None:
        """Return the attention of a layer, which knows the layer's number; None: none does.

        The model is searched once for all layers, as a search takes longer than everything else of a new cache.
        """
        known = self._attentions.get(layer)
        found = None if known is None else known()
        if found is None or getattr(found, "layer_idx", None) != layer:
            own: dict[int, weakref.ref[nn.Module]] = {}
            for module in model.get_decoder().modules():
                number = getattr(module, "layer_idx", None)
                if isinstance(number, int):
                    own.setdefault(number, weakref.ref(module))
            self._attentions = own
            known = own.get(layer)
            found = None if known is None else known()
        return found

    def rotary(self, attention: nn.Module) -> Rotary:
        """How the keys of a layer are turned.

        Parameters
        ----------
        attention : Module
            Of the layer; its module has ``apply_rotary_pos_emb``.

        Raises
        ------
        UnsupportedError
            The frequencies change with the length, positions are not one number per token, or the model turns its keys
            in a way that is not known here.
        """
        module = type(attention).__module__
        if module not in self._rotaries:
            if why := changing_rope(self.config):
                raise UnsupportedError(
                    f"{self.name}: mean=pre needs keys that are turned by fixed frequencies; {why}. Use mean=post or "
                    f"mean=none."
                )
            self._rotaries[module] = self._compared(getattr(sys.modules[module], "apply_rotary_pos_emb", None))
        return self._rotaries[module]

    def _compared(self, turn: Any) -> Rotary:
        frequencies: Tensor = self.embedding.inv_freq.detach().float()  # type: ignore[operator]
        scaling = float(getattr(self.embedding, "attention_scaling", 1.0))
        noted = self.positions  # this call is none of the model's
        places = torch.tensor([PLACES], device=frequencies.device)
        x = torch.linspace(-1, 1, 2 * len(PLACES) * len(frequencies), device=frequencies.device)
        x = x.view(1, 1, len(PLACES), -1).sin()
        try:
            cos, sin = self.embedding(x, places)
            wanted = turn(x, x, cos, sin)[1]
        except Exception:  # a function of another kind, or none
            wanted = None
        self.positions = noted
        for interleaved in (False, True):
            rotary = Rotary(frequencies, scaling, interleaved)
            if wanted is not None and wanted.shape == x.shape and _alike(rotary.turn(x, places), wanted):
                return rotary
        raise UnsupportedError(
            f"{self.name}: mean=pre takes pairs of channels turned by the frequencies of the rotary embedding, and "
            f"this model turns its keys in another way. Use mean=post or mean=none."
        )


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool((a - b.float()).abs().amax() < ALIKE)


_ropes: "weakref.WeakKeyDictionary[nn.Module, Rope]" = weakref.WeakKeyDictionary()


def rope_of(model: nn.Module) -> Rope:
    """Return the model's ``Rope``, made once.

    Raises
    ------
    UnsupportedError
        See ``Rope``.
    """
    if (known := _ropes.get(model)) is None:
        known = _ropes[model] = Rope(model)
    return known


def listening(model_or_config: Any) -> Rope | None:
    """Return the ``Rope`` that records positions of new tokens; None: no module of the model is called with them."""
    try:
        return rope_of(model_or_config) if isinstance(model_or_config, nn.Module) else None
    except UnsupportedError:
        return None
