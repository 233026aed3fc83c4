"""Change the weights of a loaded model in place, channel by channel, and put them back bit for bit."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from packedkv.errors import UnsupportedError


class ChangedWeights:
    """Weights that were scaled in place, with a copy of the originals; a ``with`` block restores them at its end."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        """Keep the changes for the ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo."""
        self.undo()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of what was changed."""
        return {part.dtype for part, _ in self._before}

    def scale(self, part: Tensor, factor: Tensor, cause: str, *, offset: float = 0.0, remedy: str = "") -> None:
        """Set ``part`` to ``(part + offset) * factor - offset``, computed in float32 at least.

        Parameters
        ----------
        part : Tensor
            A parameter, or a view of some of its rows.
        factor : Tensor
            Broadcasts against ``part``.
        cause : str
            What the error names as the operation, e.g. ``"LlamaForCausalLM: folding"``.
        offset : float
            What the model itself adds to the weight, e.g. 1 for Gemma's ``x (1 + w)``.
        remedy : str
            Further advice for the error, e.g. ``"pass a smaller factor, or "``.

        Raises
        ------
        UnsupportedError
            If a value leaves the dtype's range; ``part`` is then unchanged.
        """
        wide = torch.promote_types(part.dtype, torch.float32)
        with torch.no_grad():
            scaled = ((part.to(wide) + offset) * factor.to(part.device, wide) - offset).to(part.dtype)
            if not bool(scaled.isfinite().all()):
                raise UnsupportedError(
                    f"{cause} would push a {part.dtype} weight beyond its range; {remedy}load the model in bfloat16 "
                    f"or float32."
                )
            self._before.append((part, part.detach().clone()))
            part.copy_(scaled)

    def undo(self) -> None:
        """Put the weights back, bit for bit; a second call does nothing. Undo the later of two changes first."""
        with torch.no_grad():
            for part, before in reversed(self._before):
                part.copy_(before)
        self._before.clear()


def attention_modules(decoder: nn.Module, layer: int, *projections: set[str]) -> list[Any]:
    """Return the modules of a layer that have all children of one of ``projections``."""
    return [
        module
        for module in decoder.modules()
        if getattr(module, "layer_idx", None) == layer
        and any(names <= dict(module.named_children()).keys() for names in projections)
    ]


def check_linear(where: str, decoder: nn.Module, name: str, linear: Any) -> None:
    """Validate that the rows of a projection can be scaled in place.

    Raises
    ------
    UnsupportedError
        If it is not a plain ``nn.Linear`` in memory, or its weight is shared with another module.
    """
    if type(linear) is not nn.Linear or linear.weight.is_meta or linear.weight.dtype.itemsize < 2:
        weight = getattr(linear, "weight", None)
        held = f" with {weight.dtype} weights on {weight.device}" if isinstance(weight, Tensor) else ""
        raise UnsupportedError(
            f"{where}: {name} is {type(linear).__name__}{held}; only a plain nn.Linear of 16 bits or more in memory "
            f"can be changed. Load the model without quantization, adapters or offloading."
        )
    if sum(p is linear.weight for _, p in decoder.named_parameters(remove_duplicate=False)) != 1:
        raise UnsupportedError(f"{where}: the weight of {name} serves another place as well, which would change too.")


def rotated_share(config: Any) -> float:
    """Fraction of a head's channels that RoPE rotates, the smallest of all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    return float(min((r.get("partial_rotary_factor") or 1.0 for r in nested), default=1.0))
