"""What a server's layers subtract from keys: means that are known before the first token, from weights or a file.

A page belongs to all requests with the same tokens before it, so a mean must not come from one of them. The engine
gives keys after RoPE, and a token's place in its request is its position. How a layer turns its keys is read from the
rotary embedding beside it, and compared with the keys that the layer makes of one state at several positions; where
they differ, or a token has several positions (M-RoPE), only a mean after RoPE is taken.
"""

import inspect
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvcodec.cache.site import MEAN, MeanRemoval
from kvcodec.codec import Params
from kvcodec.errors import UnsupportedError
from kvcodec.kernels.mean import MOST_POSITIONS
from kvcodec.key_bias import KeyBiases
from kvcodec.ops.rope import Rotary
from kvcodec.scheme import KVScheme, Mean

PLACES = (0, 1, 7, 100, 1000)
"""Positions at which a ``Rotary`` is compared with the layer, and the last one."""
ALIKE = 0.02
"""Largest difference there, of the length of a key; angles in bf16 are good to 0.006."""
MEASURED = 2048
"""Positions over which a mean after RoPE is taken of a bias before it."""
KINDS: tuple[Mean, ...] = ("none", "post", "pre")


class _Seen(Exception):
    """Ends a layer's forward pass where its keys are known."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def keys_at(impl: Any, states: Tensor, positions: Tensor) -> Tensor:
    """Keys ``[n, H, D]`` that a layer makes of states ``[n, hidden]`` at ``positions [n]``, float32.

    Parameters
    ----------
    impl
        The layer's implementation, with ``around`` and ``head_size``.

    Raises
    ------
    UnsupportedError
        The layer is called with something else than states and positions.
    """
    if not (held := impl.around.modules):
        raise UnsupportedError("the module around a layer's attention was not seen")
    attention: nn.Module = held[0]
    inner = next(child for child in attention.children() if getattr(child, "impl", None) is impl)
    taken = inspect.signature(attention.forward).parameters
    needed = {name for name, p in taken.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if needed != {"positions", "hidden_states"}:
        raise UnsupportedError(f"{type(attention).__name__} takes {', '.join(taken)}, not positions and hidden_states")

    def stop(query: Tensor, key: Tensor, *rest: Any, **more: Any) -> None:
        raise _Seen(key)

    inner.forward = stop
    try:
        with torch.no_grad():
            attention(positions=positions, hidden_states=states)
    except _Seen as seen:
        return seen.keys.detach().view(len(positions), -1, impl.head_size).float()
    finally:
        del inner.forward
    raise UnsupportedError(f"{type(attention).__name__} does not call its attention layer")


_rotaries: "weakref.WeakKeyDictionary[nn.Module, Rotary]" = weakref.WeakKeyDictionary()


def rotary_beside(impl: Any, last: int, hidden: int, dtype: torch.dtype) -> Rotary:
    """How a layer turns its keys; layers that share a rotary embedding share the result.

    Parameters
    ----------
    impl
    last : int
        The last position.
    hidden : int
        Width of the states.
    dtype : torch.dtype
        Of the states.

    Raises
    ------
    UnsupportedError
        In a way that is not known here.
    """
    attention = impl.around.modules[0] if impl.around.modules else nn.Module()
    found = [m for m in attention.children() if hasattr(m, "_compute_cos_sin_cache")]
    if len(found) != 1:
        raise UnsupportedError(f"{type(attention).__name__} has {len(found) or 'no'} rotary embeddings beside it")
    module, device = found[0], next(p for p in attention.parameters()).device
    if (known := _rotaries.get(module)) is None:
        known = _rotaries[module] = _read(module, device)
    places = torch.tensor([*(p for p in PLACES if p < last), last], device=device)
    state = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    keys = keys_at(impl, state.expand(len(places), -1).contiguous(), places).transpose(0, 1)[None]  # [1, H, n, D]
    turned = known.turn(known.turn_back(keys[:, :, :1], places[None, :1]), places[None])
    if not bool(((turned - keys).norm(dim=-1) <= ALIKE * keys.norm(dim=-1)).all()):
        raise UnsupportedError(f"{type(attention).__name__} turns its keys in another way than {type(module).__name__}")
    return known


def _read(module: Any, device: torch.device) -> Rotary:
    """Frequencies and scaling of a rotary embedding, from the table of cosines and sines that it makes in float32."""
    try:
        cosines, sines = module._compute_cos_sin_cache()[:2].double().cpu().chunk(2, -1)
    except Exception as error:  # a class with tables of another kind
        raise UnsupportedError(f"{type(module).__name__} has no table of cosines and sines ({error})") from error
    scaling, frequencies = float(cosines[0, 0]), torch.atan2(sines[1], cosines[1]).float()
    for name in ("base", "scaling_factor"):  # the numbers that the table was made of, where they can be had
        try:
            exact = module._compute_inv_freq(getattr(module, name)).float().cpu()
        except Exception:
            continue
        if exact.shape == frequencies.shape and torch.allclose(exact, frequencies, rtol=1e-4, atol=1e-9):
            frequencies = exact
    scaling = round(scaling, 6) if math.isclose(scaling, 1.0, abs_tol=1e-6) else scaling
    return Rotary(frequencies.to(device), scaling, not module.is_neox_style)


def decided(
    scheme: KVScheme, order: Sequence[int], biases: KeyBiases | None, params: Mapping[int, Mapping[Any, Params]] | None
) -> list[Mean]:
    """``mean`` of every layer's scheme; ``auto`` is decided by constants given, or the key biases.

    Parameters
    ----------
    scheme : KVScheme
    order : sequence of int
        The layers that cache keys.
    biases : KeyBiases or None
        None: they are not known.
    params : mapping or None
        Constants of a file.
    """
    own = [scheme.for_layer(place, len(order)).mean for place in range(len(order))]
    if params is None and biases:
        return biases.means(scheme)
    given = [MEAN in (params or {}).get(index, {}).get("key", {}) for index in order]
    return [mean if mean != "auto" else "pre" if there else "none" for mean, there in zip(own, given, strict=True)]


def means_of(
    scheme: KVScheme,
    kinds: Mapping[int, Mean],
    impls: Mapping[int, Any],
    biases: KeyBiases | None,
    params: Mapping[int, Mapping[Any, Params]] | None,
    rotaries: "Rotaries",
    asked: frozenset[int],
) -> dict[int, MeanRemoval]:
    """Means of the layers of this process that hold keys without one.

    Parameters
    ----------
    scheme : KVScheme
    kinds : mapping
        ``mean`` by layer, decided.
    impls : mapping
        The implementations by layer.
    biases : KeyBiases or None
        Of this process's heads.
    params : mapping or None
        Constants of a file, of this process's heads.
    rotaries : Rotaries
    asked : frozenset of int
        Layers whose mean the spec names, so that it was not decided: one with a small bias keeps its mean.

    Raises
    ------
    UnsupportedError
        ``mean=pre`` cannot be followed, or nothing gives the mean.
    """
    means: dict[int, MeanRemoval] = {}
    for index in impls:
        if (kind := kinds[index]) not in ("pre", "post"):
            continue
        given = None if params is None else params[index].get("key", {}).get(MEAN)
        rotary = rotaries.of(index) if kind == "pre" else None
        if isinstance(rotary, str):
            cure = "use mean=post or mean=none" if given is None else "fit the constants again with mean=post"
            raise UnsupportedError(f"kvcodec: {scheme}, layer {index}: mean=pre cannot be followed: {rotary}; {cure}.")
        if given is not None:
            means[index] = MeanRemoval(kind, rotary, given.float(), "params")
        elif not biases:
            raise UnsupportedError(
                f"kvcodec: {scheme}, layer {index}: mean={kind} needs a mean that does not depend on a request, and "
                f'the weights add no large bias to keys; run kvcodec fit MODEL "{scheme}" --text TEXT -o FILE and pass '
                f'that file, {{"params": FILE}}, or let the server do so at its start, {{"params": "fit"}}, or use '
                f"mean=none."
            )
        elif index in biases.known and (index not in asked or index in biases.layers):
            mean = biases.known[index].mean[None] if kind == "pre" else rotaries.mean_after(index)
            means[index] = MeanRemoval(kind, rotary, mean, "weights")
    return means


class Rotaries:
    """How the layers of this process turn keys, looked up when asked for.

    Parameters
    ----------
    impls : mapping
        The implementations by layer.
    hidden : int
    dtype : torch.dtype
    most : int
        Tokens of the longest request.
    axes : bool
        Whether a token has positions on several axes (M-RoPE).
    """

    def __init__(self, impls: Mapping[int, Any], hidden: int, dtype: torch.dtype, most: int, axes: bool) -> None:
        self.impls, self.hidden, self.dtype, self.most, self.axes = impls, hidden, dtype, most, axes
        self._found: dict[int, Rotary | str] = {}

    def of(self, index: int) -> Rotary | str:
        """How a layer turns its keys, or why that is not known."""
        if index not in self._found:
            self._found[index] = self._look(index)
        return self._found[index]

    def _look(self, index: int) -> Rotary | str:
        if self.axes:
            return "a token has positions on several axes here (M-RoPE)"
        if self.most > MOST_POSITIONS:
            return f"kernels turn means to {MOST_POSITIONS} positions, and --max-model-len is {self.most}"
        try:
            return rotary_beside(self.impls[index], self.most - 1, self.hidden, self.dtype)
        except Exception as error:  # the model's own code is called
            return str(error)

    def mean_after(self, index: int) -> Tensor:
        """Mean after RoPE of the keys of random states at the first positions, float32 ``[1, H, D]`` on the CPU."""
        impl, count = self.impls[index], min(self.most, MEASURED)
        attention, *outer = impl.around.modules
        device = next(p for p in attention.parameters()).device
        h = torch.randn(count, self.hidden, generator=torch.Generator().manual_seed(0)).to(device, self.dtype)
        states = torch.cat([h, -h])  # each with its negative: averaging over both leaves the bias
        before = next((m for m in outer[0].children() if "norm" in type(m).__name__.lower()), None) if outer else None
        if before is not None:
            states = before(states)
        return keys_at(impl, states, torch.arange(count, device=device).repeat(2)).mean(0)[None].cpu()
