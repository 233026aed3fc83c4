"""What a server's layers subtract from keys: means that are known before the first token, from weights or a file.

A page belongs to all requests with the same tokens before it, so a mean must not come from one of them. The engine
gives keys after RoPE, and a token's place in its request is its position. How a layer turns its keys is read from the
rotary embedding beside it, and compared with the keys that the layer makes of one state at several positions; where
they differ, or a token has several positions (M-RoPE), only a mean after RoPE is taken.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packedkv.codec import Params
from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.biases import ALTERNATIVES
from packedkv.kernels.mean import MOST_POSITIONS
from packedkv.key_bias import KeyBiases
from packedkv.ops.rope import Rotary
from packedkv.registry import with_option
from packedkv.scheme import KVScheme, Mean
from packedkv.store.site import MEAN, MeanRemoval

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


STATES, POSITIONS, ANGLES = ("hidden_states", "x"), ("positions", "position_ids"), "position_embeddings"
"""Names of what attention modules are called with; everything else that they require is None."""


def keys_at(impl: Any, states: Tensor, positions: Tensor) -> Tensor:
    """Keys ``[n, H, D]`` that a layer makes of states ``[n, hidden]`` at ``positions [n]``, float32.

    The layer's attention module is called as its model calls it, and ends where it calls its attention layer.

    Parameters
    ----------
    impl
        The layer's implementation, with ``around`` and ``head_size``.

    Raises
    ------
    UnsupportedError
        The module is called with something else than states, positions, and cosines and sines of the positions.
    """
    if not (held := impl.around.modules):
        raise UnsupportedError("the module around a layer's attention was not seen")
    attention: nn.Module = held[0]
    inner = next(child for child in attention.children() if getattr(child, "impl", None) is impl)

    def stop(query: Tensor, key: Tensor, *rest: Any, **more: Any) -> None:
        raise _Seen(key)

    inner.forward = stop
    try:
        with torch.no_grad():
            attention(**_arguments(held, states, positions))
    except _Seen as seen:
        return seen.keys.detach().reshape(len(positions), -1, impl.head_size).float()
    finally:
        del inner.forward
    raise UnsupportedError(f"{type(attention).__name__} does not call its attention layer")


def _arguments(around: Sequence[nn.Module], states: Tensor, positions: Tensor) -> dict[str, Any]:
    """What an attention module is called with, by name; those of transformers have a batch."""
    attention, given = around[0], dict[str, Any]()
    taken = inspect.signature(attention.forward).parameters
    set_on = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    if str(set_on).startswith("vllm"):  # the name under which vLLM registers its attention with transformers
        states, positions = states[None], positions[None]
    for name, parameter in taken.items():
        if name in STATES:
            given[name] = states
        elif name in POSITIONS:
            given[name] = positions
        elif name == ANGLES and (above := _embeddings(around)):
            with torch.no_grad():
                given[name] = above[0](states, positions)
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            given[name] = None
    if not set(STATES) & given.keys():
        raise UnsupportedError(f"{type(attention).__name__} takes {', '.join(taken)}, not {' or '.join(STATES)}")
    return given


def _embeddings(around: Sequence[nn.Module]) -> list[nn.Module]:
    """The rotary embeddings of a layer: beside its attention layer (vLLM), or of the whole decoder (transformers)."""
    for module in around:
        found = [m for m in module.children() if hasattr(m, "_compute_cos_sin_cache") or hasattr(m, "inv_freq")]
        if found:
            return found
    return []


_rotaries: "weakref.WeakKeyDictionary[nn.Module, list[Rotary]]" = weakref.WeakKeyDictionary()


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
    found = _embeddings(impl.around.modules)
    if len(found) != 1:
        raise UnsupportedError(f"{type(attention).__name__} has {len(found) or 'no'} rotary embeddings beside it")
    module, device = found[0], next(p for p in attention.parameters()).device
    if module not in _rotaries:
        _rotaries[module] = _read(module, device)
    places = torch.tensor([*(p for p in PLACES if p < last), last], device=device)
    state = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    keys = keys_at(impl, state.expand(len(places), -1).contiguous(), places).transpose(0, 1)[None]  # [1, H, n, D]
    for known in _rotaries[module]:
        turned = known.turn(known.turn_back(keys[:, :, :1], places[None, :1]), places[None])
        if bool(((turned - keys).norm(dim=-1) <= ALIKE * keys.norm(dim=-1)).all()):
            return known
    raise UnsupportedError(f"{type(attention).__name__} turns its keys in another way than {type(module).__name__}")


def _read(module: Any, device: torch.device) -> list[Rotary]:
    """Frequencies and scaling of a rotary embedding, with the pairs of channels that it may turn.

    vLLM's say which pairs. Their frequencies are read from the table of cosines and sines, made in float32.
    """
    if not hasattr(module, "_compute_cos_sin_cache"):
        scaling = float(getattr(module, "attention_scaling", 1.0))
        return [Rotary(module.inv_freq.detach().float().to(device), scaling, pairs) for pairs in (False, True)]
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
    return [Rotary(frequencies.to(device), scaling, not module.is_neox_style)]


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
    starts: Callable[[str], bool] = lambda spec: True,
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
    starts : callable
        Whether this engine can serve another spec; errors name no other.

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
            cure = _cure(scheme, starts) if given is None else "fit the constants again with mean=post"
            raise UnsupportedError(f"packedkv: {scheme}, layer {index}: mean=pre cannot be followed: {rotary}; {cure}.")
        if given is not None:
            means[index] = MeanRemoval(kind, rotary, given.float(), "params")
        elif not biases:
            raise UnsupportedError(
                f"packedkv: {scheme}, layer {index}: mean={kind} needs a mean that is independent of requests, "
                f'and the weights add no large bias to keys; run packedkv fit MODEL "{scheme}" --text TEXT -o FILE '
                f'and pass that file, {{"params": FILE}}, or let the server do so at its start, {{"params": "fit"}}, '
                f"or use mean=none."
            )
        elif index in biases.known and (index not in asked or index in biases.layers):
            mean = biases.known[index].mean[None] if kind == "pre" else rotaries.mean_after(index)
            if isinstance(mean, str):
                raise UnsupportedError(
                    f"packedkv: {scheme}, layer {index}: mean=post is not known: {mean}; {_cure(scheme, starts)}."
                )
            means[index] = MeanRemoval(kind, rotary, mean, "weights")
    return means


def _cure(scheme: KVScheme, starts: Callable[[str], bool]) -> str:
    named = scheme.spec and not scheme.layers
    own = [with_option(scheme.spec, "mean", mean) for mean in ("post", "none")] if named else []
    holding = [spec for spec in (*own, *ALTERNATIVES) if starts(spec)]
    return f"use {' or '.join(map(repr, holding))}" if holding else "serve the model without packedkv"


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
        self._after: dict[int, Tensor | str] = {}

    def removable(self, layers: Iterable[int]) -> Mean:
        """Which mean the keys of all these layers can be held without."""
        indices = list(layers)
        if all(isinstance(self.of(index), Rotary) for index in indices):
            return "pre"
        return "post" if all(isinstance(self.mean_after(index), Tensor) for index in indices) else "none"

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

    def mean_after(self, index: int) -> Tensor | str:
        """Mean of a layer's keys after RoPE, float32 ``[1, H, D]`` on the CPU, or why it is not known."""
        if index not in self._after:
            try:
                self._after[index] = self._mean_after(index)
            except Exception as error:  # the model's own code is called
                self._after[index] = str(error)
        return self._after[index]

    def _mean_after(self, index: int) -> Tensor:
        """Mean of the keys of random states at the first positions."""
        impl, count = self.impls[index], min(self.most, MEASURED)
        attention, *outer = impl.around.modules
        device = next(p for p in attention.parameters()).device
        h = torch.randn(count, self.hidden, generator=torch.Generator().manual_seed(0)).to(device, self.dtype)
        states = torch.cat([h, -h])  # each with its negative: averaging over both leaves the bias
        before = next((m for m in outer[0].children() if "norm" in type(m).__name__.lower()), None) if outer else None
        if before is not None:
            states = before(states)
        return keys_at(impl, states, torch.arange(count, device=device).repeat(2)).mean(0)[None].cpu()
