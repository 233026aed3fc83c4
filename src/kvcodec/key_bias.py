"""Key biases: does a preset survive the bias that a model adds to every key?

Qwen2 and Qwen2.5, GPT-2, Phi, Pythia, StarCoder2 and others add a bias to every key. It can be a hundred times as large
as the differences between tokens. A codec that encodes each token alone then spends most of its levels on the bias, and
attention becomes noise. The bias is part of the weights, so it is known before the first token.

What is measured, per layer: states h ~ N(0, I) go through the model's own norm and projections and through RoPE at
consecutive positions, which gives keys k and queries q with the model's biases, and k^ by the codec itself. The error
of the scores, centred over the tokens because softmax does not see a constant::

    e = scale * q . (k^ - k),     error = sqrt(mean over heads, queries and tokens of (e - mean over tokens of e)^2)

in nats: a key's weight in attention is wrong by a factor of about exp(error). The same error without the biases is the
codec's baseline. A preset breaks where the error is at least ``LIMIT`` and at least twice the one without biases.
On Qwen2.5-Coder-1.5B this error is within a factor of 2.3 of that on the keys and queries of a text, and orders
presets as their perplexity does.

Layers whose biases are smaller than the differences between tokens are skipped; of the others, those with the largest
product of bias and query are measured. A model without biases costs one walk over its modules. A norm of the keys after
the projection (QK-norm) is applied as in the model. Modules are called instead of their weights read, so quantized
weights work as well. If a module cannot be called, nothing is reported, and only the probe of the prefill remains.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from kvcodec.codec import Codec, Dense, Params, Site, roundtrip, storage_dtype
from kvcodec.errors import ShapeError, SpecError, UnsupportedError, nearest
from kvcodec.registry import get, with_option
from kvcodec.scheme import KVScheme, Mean, Mix

Probe = Literal["refuse", "warn", "off"]
"""What to do about a preset that breaks on a model's keys: ``refuse`` it, ``warn``, or skip the check (``off``)."""
LIMIT = 3.0
"""Error in nats from which a preset breaks. Measured on Qwen2.5-Coder-1.5B: octopus-3, the worst that holds (perplexity
14.1; uncompressed 13.1), has 2.8; fp8 (16.7) has 3.5; all that lose more have 4.8 or above."""
ALTERNATIVES = ("kivi-tq-4", "kivi-4", "octopus-4", "int-8")
"""Presets tried, in this order, where one breaks; octopus-4 keeps the outer layers' keys dense."""
LAYERS = 4
"""How many of the layers that share a codec are measured: those where bias times query is largest."""
TOKENS, QUERIES, RANKED = 256, 64, 8
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
"""Projections that give queries, keys and values at once, as models name them."""


def probe_option(given: bool | str) -> Probe:
    """Read the option ``probe``: True is ``refuse``, False is ``off``.

    Raises
    ------
    SpecError

    Examples
    --------
    >>> probe_option(True), probe_option("warn"), probe_option(False)
    ('refuse', 'warn', 'off')
    """
    if isinstance(given, bool):
        return "refuse" if given else "off"
    if given not in get_args(Probe):
        allowed = ", ".join(get_args(Probe))
        raise SpecError(f"probe={given!r}: expected one of {allowed}.{nearest(str(given), get_args(Probe))}")
    return given  # type: ignore[return-value]


Project = Callable[[Tensor], tuple[Tensor, Tensor]]
"""States ``[n, hidden]`` to queries ``[n, HQ, D]`` and keys ``[n, H, D]``, before RoPE."""


@dataclass(eq=False)
class KeyLayer:
    """Where one layer's keys and queries come from.

    Parameters
    ----------
    index : int
        Layer of the model.
    project : callable
        The layer's input norm, its projections, and norms of queries and keys where it has them.
    hidden : int
        Width of the states.
    scale : float
        Of the scores.
    frequencies : Tensor or None
        Of RoPE, ``[R / 2]`` for the first R channels; None: no RoPE.
    dtype, device
        Of the states that ``project`` takes.
    biases : list of Tensor
        The parameters that it adds.
    attention : Module
        The layer's attention.
    """

    index: int
    project: Project
    hidden: int
    scale: float
    frequencies: Tensor | None
    dtype: torch.dtype
    device: torch.device
    biases: list[Tensor]
    attention: nn.Module
    _ranked: tuple[Tensor, Tensor, float] | None = field(default=None, init=False)
    _drawn: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    _errors: dict[tuple[Codec, Mean], float] = field(default_factory=dict, init=False)

    def _project(self, tokens: int, seed: int, *, mirrored: bool = False) -> tuple[Tensor, Tensor]:
        h = torch.randn(tokens, self.hidden, generator=torch.Generator().manual_seed(seed))
        if mirrored:  # each state with its negative: averaging over both leaves the bias
            h = torch.cat([h, -h])
        with torch.no_grad():
            q, k = self.project(h.to(self.device, self.dtype))
        return q.float().cpu(), k.float().cpu()

    def _rank(self) -> tuple[Tensor, Tensor, float]:
        """Mean key ``[H, D]``, standard deviation of the keys ``[H]``, and size of bias times query."""
        if self._ranked is None:
            q, k = self._project(RANKED, 0, mirrored=True)
            mean = k.mean(0)
            spread = (k - mean).pow(2).sum(-1).mean(0).sqrt()
            size = mean.norm(dim=-1) * q.unflatten(1, (mean.shape[0], -1)).pow(2).sum(-1).mean((0, 2)).sqrt()
            self._ranked = mean, spread, float(size.max()) * self.scale
        return self._ranked

    @property
    def mean(self) -> Tensor:
        """Mean key of each head before RoPE, float32 ``[H, D]`` on the CPU: the bias, where nothing follows it."""
        return self._rank()[0]

    @property
    def size(self) -> float:
        """Largest norm of a head's bias times that of its queries, in nats; 0: below the spread of the keys."""
        mean, spread, size = self._rank()
        return size if bool((mean.norm(dim=-1) > spread).any()) else 0.0

    def where(self) -> tuple[int, int, float, float]:
        """KV head and channel with the largest ratio of bias to the head's spread; the bias and that ratio."""
        mean, spread, _ = self._rank()
        share = mean.abs() / (spread / mean.shape[1] ** 0.5).clamp_min(1e-12)[:, None]
        head, channel = divmod(int(share.argmax()), mean.shape[1])
        return head, channel, float(mean[head, channel]), float(share[head, channel])

    def error(self, codec: Codec, params: Params | None = None, *, mean: Mean = "none") -> float:
        """Root mean square error of the scores in nats.

        ``mean``: what the codec does not see of the keys; with ``pre``, as if there were no bias.
        """
        known = (codec, mean)
        if params is None and known in self._errors:
            return self._errors[known]
        if self._drawn is None:
            (_, k), (q, _) = self._project(TOKENS, 1), self._project(QUERIES, 2)
            self._drawn = q, k
        q, k = self._drawn
        tokens = max(TOKENS // codec.block_tokens, 1) * codec.block_tokens
        k = k.repeat(-(-tokens // TOKENS), 1, 1)[:tokens]
        k = self._rotate(k - self._rank()[0] if mean == "pre" else k, 0)
        k = k - k.mean(1, keepdim=True) if mean == "post" else k
        q = self._rotate(q, tokens)
        keys = k.to(storage_dtype(self.dtype)).float()[None]
        queries = q[None]
        site = Site(self.index, "key", keys.shape[1], keys.shape[3])
        if params is None:
            params = codec.calibrate(site, keys, queries) if codec.needs_queries else _fit(codec, site, keys)
        else:
            params = {name: x.cpu() for name, x in params.items()}
        lost = roundtrip(codec, keys, params) - keys
        e = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3) @ lost.transpose(2, 3) * self.scale
        found = float((e - e.mean(-1, keepdim=True)).pow(2).mean().sqrt())
        self._errors[known] = found
        return found

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        """``[n, H, D]`` to ``[H, n, D]`` with RoPE from position ``first`` on.

        Pairs are (i, i + R/2). Where a model pairs neighbouring channels, the biases rotate as far, in other pairs.
        """
        if self.frequencies is not None:
            half = self.frequencies.shape[0]
            angle = torch.arange(first, first + x.shape[0])[:, None, None] * self.frequencies
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            x = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)
        return x.transpose(0, 1)


def _fit(codec: Codec, site: Site, keys: Tensor) -> Params:
    return codec.fit(site, keys if codec.needs_sample else None)


@dataclass(frozen=True)
class BiasError:
    """Errors of one layer's attention scores under a codec, in nats, with the key biases and without."""

    layer: int
    error: float
    plain: float

    @property
    def broken(self) -> bool:
        """Whether the codec fails because of the biases."""
        return not self.error < LIMIT and not self.error < 2 * self.plain  # NaN counts as broken


class KeyBiases:
    """The biased layers of one model.

    Parameters
    ----------
    name : str
        The model's.
    layers : iterable of KeyLayer
        Layers that add a bias to their keys.
    order : sequence of int
        All layers that cache keys: a scheme may treat outer layers differently.
    turned : bool
        Whether keys are turned by fixed frequencies, as ``mean=pre`` needs; otherwise ``auto`` becomes ``post``.
    """

    def __init__(self, name: str, layers: Iterable[KeyLayer], order: Sequence[int], turned: bool = True) -> None:
        self.name, self.order, self.turned, known = name, list(order), turned, list(layers)
        self.layers = {layer.index: layer for layer in known if layer.size > 0}
        self.known = {layer.index: layer for layer in known}
        self._parameters = [b for layer in known for b in layer.biases]

    def versions(self) -> tuple[Any, ...]:
        """Return a key that changes when the biases are written to or moved."""
        return tuple((b.data_ptr(), 0 if b.is_inference() else b._version) for b in self._parameters)

    def __bool__(self) -> bool:
        """Whether any bias is larger than the differences between tokens."""
        return bool(self.layers)

    def at(self, layer: int, codec: Codec, params: Params | None = None, *, mean: Mean = "none") -> BiasError | None:
        """Errors of one layer, whose keys are encoded without this mean; None: small biases or dense keys."""
        if layer not in self.layers or isinstance(codec, Dense):
            return None
        own = self.layers[layer]
        error = own.error(codec, params, mean=mean)
        # the error without biases is measured only where it decides
        return BiasError(layer, error, own.error(codec, params, mean="pre") if not error < LIMIT else 0.0)

    def holds(self, layer: int, codec: Codec, mean: Mean = "none") -> bool:
        """Whether the scores of one layer are known to be nearly right; False: they are not, or it is unknown."""
        found = self.at(layer, codec, mean=mean)
        return found is not None and found.error < LIMIT

    def worst(self, scheme: KVScheme, params: Mapping[int, Mapping[Any, Params]] | None = None) -> BiasError | None:
        """Return the largest error of a scheme, a broken layer before others; None: no layer has one.

        ``mean=auto`` is decided as ``means`` does.
        """
        found = [
            max(errors, key=_badness)
            for (codec, mean), members in self._groups(scheme).items()
            if (errors := self._errors(codec, self._decided(codec, mean, members, params), members, params))
        ]
        return max(found, key=_badness, default=None)

    def means(self, scheme: KVScheme, params: Mapping[int, Mapping[Any, Params]] | None = None) -> list[Mean]:
        """``mean`` of every layer's scheme, in order; ``auto`` is decided.

        By codec: where it breaks on one of its layers, those whose biases are large encode keys without their mean,
        before RoPE if the model's frequencies are fixed. Everywhere else keys keep it.
        """
        own = [scheme.for_layer(place, len(self.order)) for place in range(len(self.order))]
        decided: dict[int, Mean] = {}
        for (codec, mean), members in self._groups(scheme).items():
            found = self._decided(codec, mean, members, params)
            for index in members:  # with age tiers a layer has two codecs: one that breaks decides
                decided[index] = decided.get(index, found) if found == "none" else found
        kept: list[Mean] = ["none" if of.mean == "auto" else of.mean for of in own]
        return [decided.get(index, mean) for index, mean in zip(self.order, kept, strict=True)]

    def _groups(self, scheme: KVScheme) -> dict[tuple[Codec, Mean], list[int]]:
        """Layers with large biases whose keys are encoded alike; with age tiers by each of two codecs."""
        groups: dict[tuple[Codec, Mean], list[int]] = {}
        for place, index in enumerate(self.order):
            own = scheme.for_layer(place, len(self.order))
            for codec in (own.key,) if own.recent is None else (own.key, own.recent.key):
                if index in self.layers and not isinstance(codec, Dense):
                    groups.setdefault((codec, own.mean), []).append(index)
        return groups

    def _decided(
        self, codec: Codec, mean: Mean, members: Sequence[int], params: Mapping[int, Mapping[Any, Params]] | None
    ) -> Mean:
        if mean != "auto":
            return mean
        if not codec.without_mean and not any(e.broken for e in self._errors(codec, "none", members, params)):
            return "none"
        return "pre" if self.turned else "post"

    def _errors(
        self, codec: Codec, mean: Mean, members: Sequence[int], params: Mapping[int, Mapping[Any, Params]] | None
    ) -> list[BiasError]:
        """Errors of those of the layers where bias times query is largest."""
        measured = sorted(members, key=lambda i: -self.layers[i].size)[:LAYERS]
        fitted = params if params and (codec.needs_sample or codec.needs_queries) else {}
        given = [(fitted.get(index) or {}).get("key") for index in measured]
        found = [self.at(index, codec, own, mean=mean) for index, own in zip(measured, given, strict=True)]
        return [error for error in found if error is not None]

    def refusal(
        self,
        scheme: KVScheme,
        *,
        params: Mapping[int, Mapping[Any, Params]] | None = None,
        alternatives: Sequence[str] | None = None,
        further: str = "pass probe='warn' to go on",
    ) -> str:
        """Say how a scheme breaks on the biases and which specs do not; ``""`` if it does not break.

        Parameters
        ----------
        scheme : KVScheme
        params : mapping, optional
            Fitted constants by layer and role.
        alternatives : sequence of str, optional
            Specs to try behind the scheme's own with another mean; default: ``ALTERNATIVES``.
        further : str
            How to use the scheme anyway.
        """
        if not self or (worst := self.worst(scheme, params)) is None or not worst.broken:
            return ""
        head, channel, bias, share = self.layers[worst.layer].where()
        text = (
            f"{scheme} breaks on the key biases of {self.name}: in layer {worst.layer}, KV head {head}, channel "
            f"{channel}, {bias:.0f} is added to every key, {share:.0f} times what differs between tokens, and encoding "
            f"moves attention scores by {worst.error:.1f} nats (without biases by {worst.plain:.1f}; up to {LIMIT:g} "
            f"does little harm)."
        )
        own = _without_mean(scheme, "pre" if self.turned else "post")
        tried = (*own, *(ALTERNATIVES if alternatives is None else alternatives))
        holding = [f"{spec!r} ({e})" for spec in tried if (e := self._holds(spec)) is not None]
        if not holding:
            return f"{text} Every preset tried does; use 'dense', or {further}."
        return f"{text} Use {' or '.join(holding)}, or {further}."

    def _holds(self, spec: str) -> str | None:
        scheme = get(spec)
        try:
            worst = self.worst(scheme)
        except ShapeError:
            return None
        if worst is None or worst.broken:
            return None if worst else "outer layers dense"
        dense = "outer layers dense, " if scheme.dense_key_layers else ""
        return f"{dense}{worst.error:.1f} nats"


def _badness(error: BiasError) -> tuple[bool, float]:
    return error.broken, error.error


def _without_mean(scheme: KVScheme, mean: Mean) -> tuple[str, ...]:
    """Spec of the same scheme that encodes keys without their mean; empty for a recipe and where it does so already."""
    if not scheme.spec or isinstance(scheme, Mix) or scheme.mean != "none":
        return ()
    return (with_option(scheme.spec, "mean", mean),)


# -- finding the biases of a model -------------------------------------------------------------------------------------


def key_layer(
    attention: nn.Module,
    parent: nn.Module | None,
    index: int,
    config: Any,
    *,
    query_heads: int,
    head_dim: int,
    scale: float,
) -> KeyLayer | None:
    """Find the key bias of one layer.

    Parameters
    ----------
    attention : Module
        Holds the projections: ``q_proj`` and ``k_proj``, or one for queries, keys and values.
    parent : Module or None
        Holds ``attention`` and the norm before it.
    index : int
    config
        The text model's config.
    query_heads, head_dim : int
        Of this process.
    scale : float
        Of the scores.

    Returns
    -------
    KeyLayer or None
        None where no bias is added, or the projections have an unknown form.
    """
    children = dict(attention.named_children())
    fused = next((name for name in _FUSED if name in children), None)
    if {"q_proj", "k_proj"} <= children.keys():
        adding = [children["k_proj"]]
    elif fused is not None:
        adding = [children[fused]]
    else:
        return None
    before = next((m for m in parent.children() if _is_norm(m)), None) if parent is not None else None
    biases = [b for m in (*adding, before) if isinstance(b := getattr(m, "bias", None), Tensor)]
    if not biases:
        return None
    # there the rows of a KV head's queries, key and value are adjacent, unless vLLM has reordered them
    interleaved = fused == "query_key_value" and type(children[fused]).__name__ != "QKVParallelLinear"
    norms = {side: _qk_norm(children, side) for side in "qk"}
    held = [p for m in (before, *adding) if m is not None for p in m.parameters() if p.is_floating_point()]
    if not held or any(p.is_meta for p in held):
        return None

    def project(h: Tensor) -> tuple[Tensor, Tensor]:
        x = h if before is None else _called(before, h)
        if fused is None:
            q, k = _called(children["q_proj"], x), _called(children["k_proj"], x)
        else:
            y = _called(children[fused], x)
            kv_heads = (y.shape[-1] // head_dim - query_heads) // 2
            if interleaved:
                y = y.unflatten(-1, (kv_heads, -1, head_dim))
                q, k = y[:, :, :-2].flatten(1), y[:, :, -2].flatten(1)
            else:
                q, k = y[:, : query_heads * head_dim], y[:, query_heads * head_dim :][:, : kv_heads * head_dim]
        q, k = q.unflatten(-1, (-1, head_dim)), k.unflatten(-1, (-1, head_dim))
        return _normed(norms["q"], q), _normed(norms["k"], k)

    return KeyLayer(
        index,
        project,
        int(config.hidden_size),
        scale,
        frequencies_of(config, head_dim),
        held[0].dtype if held[0].dtype.itemsize > 1 else torch.float32,
        held[0].device,
        biases,
        attention,
    )


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _qk_norm(children: Mapping[str, nn.Module], side: str) -> nn.Module | None:
    return next((m for name, m in children.items() if name.startswith(side) and _is_norm(m)), None)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Apply a norm of queries or keys ``[n, H, D]``: over each head, or over all of them."""
    if norm is None:
        return x
    weight = getattr(norm, "weight", None)
    over_all = isinstance(weight, Tensor) and weight.numel() == x.shape[1] * x.shape[2] != x.shape[2]
    return _called(norm, x.flatten(1)).view_as(x) if over_all else _called(norm, x)


def _called(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module; vLLM's linear layers return a pair."""
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


def frequencies_of(config: Any, head_dim: int) -> Tensor | None:
    """Frequencies of RoPE by pair of channels, without scaling for long contexts; None: no RoPE."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = next((r for r in rope.values() if isinstance(r, dict)), rope)  # by type of layer
    if not (theta := rope.get("rope_theta")):
        return None
    rotary = int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) // 2 * 2
    return float(theta) ** (-torch.arange(0, rotary, 2).float() / rotary)


CHANGING = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length: an earlier key was turned by others than a later one."""


def changing_rope(config: Any) -> str:
    """Why a model's keys are not turned by fixed frequencies and one position per token; ``""``: they are."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or {}
    for own in [rope, *(r for r in rope.values() if isinstance(r, dict))]:
        if (kind := own.get("rope_type", "default")) in CHANGING:
            return f"those of rope_type {kind!r} change with the length"
        if "mrope_section" in own:
            return "a token has positions on several axes here (M-RoPE)"
    return ""


_known: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], KeyBiases]]" = weakref.WeakKeyDictionary()


def biases_of(model: Any, plan: Any) -> KeyBiases | None:
    """Return the key biases of a transformers model; None: unknown, because it is a config or has another structure.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
    plan : ModelPlan
        Its name, and the layers that cache keys.
    """
    order = [layer.index for layer in plan.kv_layers]
    if not isinstance(model, nn.Module):
        return None
    if model in _known and _known[model][0] == _known[model][1].versions():
        return _known[model][1]
    try:
        found = KeyBiases(plan.name, _layers_of(model, set(order)), order, not changing_rope(model.config))
    except Exception:  # a projection that cannot be called by itself: offloaded, distributed or adapted
        return None
    _known[model] = found.versions(), found
    return found


def _layers_of(model: Any, wanted: set[int]) -> list[KeyLayer]:
    decoder, found = model.get_decoder(), []
    config = model.config.get_text_config(decoder=True)
    modules = dict(decoder.named_modules())
    for name, module in modules.items():
        if (index := getattr(module, "layer_idx", None)) not in wanted:
            continue
        head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        own = key_layer(
            module,
            modules.get(name.rpartition(".")[0]) if name else None,
            index,
            config,
            query_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=float(getattr(module, "scaling", None) or head_dim**-0.5),
        )
        found += [own] if own is not None else []
    if len({layer.index for layer in found}) != len(found):
        raise UnsupportedError("two attention modules of one layer")
    return found
