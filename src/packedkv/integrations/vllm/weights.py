"""Key biases, RoPE and key means of a served model, all read from its weights before the first token.

Requests with the same prefix share pages, so a mean must not come from a request: it is that of the weights' biases, or
that of a file. A token's index in its request is its position.
"""

import gc
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from packedkv.codec import Params
from packedkv.errors import BrokenPresetError, UnsupportedError
from packedkv.files.params import FittedParams
from packedkv.integrations.transformers.rope import PLACES
from packedkv.integrations.vllm.options import Options
from packedkv.kernels.mean import MOST_POSITIONS
from packedkv.key_bias import KeyBiases
from packedkv.key_layer import key_layer
from packedkv.ops.rope import Rotary
from packedkv.registry import with_option
from packedkv.scheme import KVScheme, Mean
from packedkv.store.site import MEAN, MeanRemoval

logger = logging.getLogger("vllm.packedkv")

ALTERNATIVES = ("kivi-tq-4", "kivi-4:window=0", "octopus-4:window=0", "int-8")
"""Presets to try where one breaks, with the options that a server needs."""
ALIKE = 0.02
"""Largest difference there, relative to the length of a key; angles in bf16 are good to 0.006."""
MEASURED = 2048
"""Positions over which keys after RoPE are averaged."""
STATES, POSITIONS, ANGLES = ("hidden_states", "x"), ("positions", "position_ids"), "position_embeddings"
"""Names of arguments of attention modules; every other required argument is None."""


def find_modules(impls: Iterable[Any]) -> None:
    """Find the modules around attention layers, ``impl.modules``: the parent, which has the projections, and all above.

    vLLM passes only the attention layer to a backend, so the modules are found among the objects of the process.
    """
    missing = {id(impl): impl for impl in impls if not impl.modules}
    if not missing:  # new weights in the same modules
        return
    parents: dict[int, nn.Module] = {}
    layers: dict[int, nn.Module] = {}
    for node in gc.get_objects():
        if issubclass(type(node), nn.Module):
            parents |= {id(child): node for child in node.__dict__.get("_modules", {}).values() if child is not None}
            layers[id(node.__dict__.get("impl"))] = node
    for key, impl in missing.items():
        module = layers.get(key)
        while module is not None and (module := parents.get(id(module))) is not None and module not in impl.modules:
            impl.modules.append(module)


@contextmanager
def _any_error() -> Iterator[None]:
    """Turn errors of the model's own code, which may be of any class, into ``UnsupportedError``."""
    try:
        yield
    except Exception as error:
        raise UnsupportedError(str(error)) from error


# -- biases ------------------------------------------------------------------------------------------------------------


def find_biases(name: str, text_config: Any, order: Sequence[int], impls: Mapping[int, Any]) -> KeyBiases:
    """Read the key biases of a model's layers, or raise UnsupportedError.

    ``order``: layers that cache keys; ``impls``: this process's, by layer.
    """
    with _any_error():
        find_modules(impls.values())
        layers = []
        for index, impl in impls.items():
            if not (around := impl.modules):
                raise UnsupportedError(f"the module around the attention of layer {index} was not seen")
            sizes = {"query_heads": impl.num_heads, "head_dim": impl.head_size, "scale": impl.scale}
            layers.append(key_layer(around[0], around[1] if len(around) > 1 else None, index, text_config, **sizes))
        biases = KeyBiases(name, filter(None, layers), order)
    if biases.unread:
        why = next(iter(biases.unread.values()))
        raise UnsupportedError(f"the projections cannot be called by themselves ({why})")
    return biases


def check_biases(
    options: Options,
    biases: KeyBiases,
    params: FittedParams | None = None,
    starts: Callable[[str], bool] = lambda spec: True,
) -> None:
    """Check a preset against the key biases of a model's layers; with ``"probe": "warn"`` log a warning instead.

    ``params``: only if they are for these heads. ``starts``: whether this engine can serve another spec.
    """
    if options.probe == "off":
        return
    further = 'give "probe": "warn" to serve it'
    try:
        biases.check(options.scheme, params=params, alternatives=ALTERNATIVES, starts=starts, further=further)
    except BrokenPresetError as error:
        if options.probe == "refuse":
            raise BrokenPresetError(f"packedkv: {error}") from None
        logger.warning("packedkv: %s", error)


# -- calling a layer's attention module --------------------------------------------------------------------------------


class _Keys(Exception):
    """Ends a layer's forward pass where its keys, the argument, are known."""


def keys_at(impl: Any, states: Tensor, positions: Tensor) -> Tensor:
    """Compute the keys ``[n, H, D]`` of states ``[n, hidden]`` at ``positions [n]``, float32.

    The layer's attention module is called as its model calls it, and ends where it calls its attention layer.
    UnsupportedError if it takes other arguments than states, positions, and cosines and sines of the positions.
    """
    if not (around := impl.modules):
        raise UnsupportedError("the module around a layer's attention was not seen")
    attention: nn.Module = around[0]
    inner = next(child for child in attention.children() if getattr(child, "impl", None) is impl)

    def stop(query: Tensor, key: Tensor, *rest: Any, **more: Any) -> None:
        raise _Keys(key)

    inner.forward = stop
    try:
        with torch.no_grad():
            attention(**_arguments(around, states, positions))
    except _Keys as result:
        keys: Tensor = result.args[0]
        return keys.detach().reshape(len(positions), -1, impl.head_size).float()
    finally:
        del inner.forward
    raise UnsupportedError(f"{type(attention).__name__} does not call its attention layer")


def _arguments(around: Sequence[nn.Module], states: Tensor, positions: Tensor) -> dict[str, Any]:
    """Arguments of an attention module by name; modules of transformers take a batch."""
    attention, given = around[0], dict[str, Any]()
    taken = inspect.signature(attention.forward).parameters
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    if str(implementation).startswith("vllm"):  # the name under which vLLM registers its attention with transformers
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
        embeddings = [m for m in module.children() if hasattr(m, "_compute_cos_sin_cache") or hasattr(m, "inv_freq")]
        if embeddings:
            return embeddings
    return []


# -- RoPE --------------------------------------------------------------------------------------------------------------


class Rotaries:
    """Rotary embeddings of this process's layers, and their means of keys after RoPE; both computed on demand.

    ``mean_after(layer)`` gives the mean after RoPE of keys of random states at the first positions, float32
    ``[1, H, D]`` on the CPU. As ``rotary(layer)``, it raises ``UnsupportedError`` if it is not known.

    ``impls``: the implementations by layer. ``hidden, dtype``: of the states. ``most``: tokens of the longest request.
    ``axes``: whether a token has positions on several axes (M-RoPE).
    """

    def __init__(self, impls: Mapping[int, Any], hidden: int, dtype: torch.dtype, most: int, axes: bool) -> None:
        self.impls, self.hidden, self.dtype, self.most, self.axes = impls, hidden, dtype, most, axes
        self.rotary, self.mean_after, self._read = cache(self._rotary), cache(self._mean_after), cache(_read)

    def removable(self, layers: Iterable[int]) -> Mean:
        """Which mean the keys of all these layers can be encoded without."""
        indices, ways = list(layers), {"pre": self.rotary, "post": self.mean_after}
        kind: Mean
        for kind in ("pre", "post"):
            with suppress(UnsupportedError):
                for index in indices:
                    ways[kind](index)
                return kind
        return "none"

    def _rotary(self, index: int) -> Rotary:
        if self.axes:
            raise UnsupportedError("a token has positions on several axes here (M-RoPE)")
        if self.most > MOST_POSITIONS:
            raise UnsupportedError(
                f"kernels turn means to {MOST_POSITIONS} positions, and --max-model-len is {self.most}"
            )
        with _any_error():
            return self._verified(self.impls[index])

    def _verified(self, impl: Any) -> Rotary:
        around, last = impl.modules, self.most - 1
        name = type(around[0] if around else nn.Module()).__name__
        embeddings = _embeddings(around)
        if len(embeddings) != 1:
            raise UnsupportedError(f"{name} has {len(embeddings) or 'no'} rotary embeddings beside it")
        module, device = embeddings[0], next(around[0].parameters()).device
        # one state at several positions, the last one included: its first key, rotated, must give the others
        places = torch.tensor([*(p for p in PLACES if p < last), last], device=device)
        states = self._states(1, device).expand(len(places), -1).contiguous()
        keys = keys_at(impl, states, places).transpose(0, 1)[None]  # [1, H, n, D]
        for rotary in self._read(module, device):
            rotated = rotary.turn(rotary.turn_back(keys[:, :, :1], places[None, :1]), places[None])
            if bool(((rotated - keys).norm(dim=-1) <= ALIKE * keys.norm(dim=-1)).all()):
                return rotary
        raise UnsupportedError(f"{name} turns its keys in another way than {type(module).__name__}")

    def _mean_after(self, index: int) -> Tensor:
        with _any_error():
            impl, count = self.impls[index], min(self.most, MEASURED)
            attention, *above = impl.modules
            device = next(attention.parameters()).device
            h = self._states(count, device)
            states = torch.cat([h, -h])  # each with its negative: averaging over both leaves the bias
            norm = next((m for m in above[0].children() if "norm" in type(m).__name__.lower()), None) if above else None
            if norm is not None:
                states = norm(states)
            return keys_at(impl, states, torch.arange(count, device=device).repeat(2)).mean(0)[None].cpu()

    def _states(self, count: int, device: torch.device) -> Tensor:
        return torch.randn(count, self.hidden, generator=torch.Generator().manual_seed(0)).to(device, self.dtype)


def _read(module: Any, device: torch.device) -> list[Rotary]:
    """Frequencies and scaling of a rotary embedding, once for each pairing of channels that it may use.

    vLLM's embeddings name the pairing. Their frequencies are read from the table of cosines and sines, in float32.
    """
    if not hasattr(module, "_compute_cos_sin_cache"):
        scaling = float(getattr(module, "attention_scaling", 1.0))
        return [Rotary(module.inv_freq.detach().float().to(device), scaling, pairs) for pairs in (False, True)]
    try:
        cosines, sines = module._compute_cos_sin_cache()[:2].double().cpu().chunk(2, -1)
    except Exception as error:  # a class with other tables
        raise UnsupportedError(f"{type(module).__name__} has no table of cosines and sines ({error})") from error
    scaling, frequencies = float(cosines[0, 0]), torch.atan2(sines[1], cosines[1]).float()
    for name in ("base", "scaling_factor"):  # the table is made of these numbers, which are more exact
        with suppress(Exception):
            exact = module._compute_inv_freq(getattr(module, name)).float().cpu()
            if exact.shape == frequencies.shape and torch.allclose(exact, frequencies, rtol=1e-4, atol=1e-9):
                frequencies = exact
    scaling = round(scaling, 6) if math.isclose(scaling, 1.0, abs_tol=1e-6) else scaling
    return [Rotary(frequencies.to(device), scaling, not module.is_neox_style)]


# -- means -------------------------------------------------------------------------------------------------------------


def decided(
    scheme: KVScheme, order: Sequence[int], biases: KeyBiases | None, params: Mapping[int, Mapping[Any, Params]] | None
) -> list[Mean]:
    """``mean`` of every layer's scheme; a file's constants decide ``auto``, or the key biases if they are known."""
    if params is None and biases:
        return biases.means(scheme)
    auto: list[Mean] = ["pre" if MEAN in (params or {}).get(index, {}).get("key", {}) else "none" for index in order]
    named = [scheme.for_layer(place, len(order)).mean for place in range(len(order))]
    return [kind if mean == "auto" else mean for mean, kind in zip(named, auto, strict=True)]


def means_of(
    scheme: KVScheme,
    kinds: Mapping[int, Mean],
    biases: KeyBiases | None,
    params: Mapping[int, Mapping[Any, Params]] | None,
    rotaries: Rotaries,
    starts: Callable[[str], bool] = lambda spec: True,
) -> dict[int, MeanRemoval]:
    """Means of this process's layers that encode keys without one.

    ``kinds``: ``mean`` of all layers in order, decided. ``biases``, and ``params`` of a file: of this process's heads.
    ``starts``: whether this engine can serve another spec; errors name no others.
    """
    means, order = dict[int, MeanRemoval](), list(kinds)
    for index in rotaries.impls:
        if (kind := kinds[index]) not in ("pre", "post"):
            continue
        given = None if params is None else params[index].get("key", {}).get(MEAN)
        rotary = None
        if kind == "pre":
            try:
                rotary = rotaries.rotary(index)
            except UnsupportedError as error:
                cure = _cure(scheme, starts) if given is None else "fit the constants again with mean=post"
                raise UnsupportedError(
                    f"packedkv: {scheme}, layer {index}: mean=pre cannot be followed: {error}; {cure}."
                ) from error
        if given is not None:
            means[index] = MeanRemoval(kind, rotary, given.float(), "params")
            continue
        if not biases:
            raise UnsupportedError(
                f"packedkv: {scheme}, layer {index}: mean={kind} needs a mean that is independent of requests, "
                f'and the weights add no large bias to keys; run packedkv fit MODEL "{scheme}" --text TEXT -o FILE '
                f'and pass that file, {{"params": FILE}}, or let the server do so at its start, {{"params": "fit"}}, '
                f"or use mean=none."
            )
        named = scheme.for_layer(order.index(index), len(order)).mean in ("pre", "post")
        if index not in biases.known or (named and index not in biases.layers):
            continue  # with a mean that the spec names, keys with a small bias keep it
        if kind == "pre":
            mean = biases.known[index].mean[None]
        else:
            try:
                mean = rotaries.mean_after(index)
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"packedkv: {scheme}, layer {index}: mean=post is not known: {error}; {_cure(scheme, starts)}."
                ) from error
        means[index] = MeanRemoval(kind, rotary, mean, "weights")
    return means


def _cure(scheme: KVScheme, starts: Callable[[str], bool]) -> str:
    named = scheme.spec and not scheme.layers
    variants = [with_option(scheme.spec, "mean", mean) for mean in ("post", "none")] if named else []
    specs = [spec for spec in (*variants, *ALTERNATIVES) if starts(spec)]
    return f"use {' or '.join(map(repr, specs))}" if specs else "serve the model without packedkv"
