"""Outlier stress: give a loaded model's keys outlier channels like those that break codecs, with unchanged outputs.

Both channels i of a rotary pair are scaled alike, so that the rotation commutes with it and no logit changes::

    k'_i = f k_i,  q'_i = q_i / f        <q', k'> = <q, k>

The factor goes where the key is last scaled channel by channel: the gains of q_norm and k_norm where there are such
norms, else the rows of W_Q and W_K with their biases. A trial verifies what attention receives, at positions far from
0, with pairs (i, i + D/2) and then (2i, 2i + 1). In keys of Qwen2.5-7B the largest chunk of four is 80 to 280 times the
median one (HQMQ, Sec. 3.4 and 4.3); the defaults give SmolLM2-135M about the same.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from packedkv.codec import Site
from packedkv.errors import SpecError, UnsupportedError
from packedkv.integrations.transformers.attention_hooks import watched
from packedkv.integrations.transformers.fold import (
    ChangedWeights,
    attention_modules,
    check_linear,
    rotated_share,
)

FACTOR = 64.0
PAIRS = 1
STREAM = 1701
"""Stream of a site's generator for drawing pairs, separate from those of the codecs."""
TRIED_TOKENS = 16
TRIED_POSITION = 4096
"""Largest position of the trial's tokens: small rotation angles would hide a wrong pairing."""
EXACT, ROUNDED = 2e-3, 0.2
"""Relative error of a channel that passes the trial, in float32 and in 16 bit; a wrong pair's is above 1."""

Pairing = Literal["halves", "neighbours"]
PAIRINGS: tuple[Pairing, ...] = ("halves", "neighbours")


class Stressed(ChangedWeights):
    """Undoes ``stress``; as a context manager at the end of the block.

    ``channels`` maps a layer to the outlier channels of each KV head, ascending. ``pairing`` says which channels a
    rotary pair is made of: (i, i + D/2) or (2i, 2i + 1).
    """

    def __init__(self, name: str, factor: float, pairs: int, seed: int, pairing: Pairing) -> None:
        super().__init__()
        self.name, self.factor, self.pairs, self.seed, self.pairing = name, factor, pairs, seed, pairing
        self.channels: dict[int, list[list[int]]] = {}

    def undo(self) -> None:
        """Put the weights back, bit for bit; a second call does nothing. Undo the later of two stresses first."""
        super().undo()
        self.channels.clear()

    def settings(self) -> dict[str, Any]:
        """The stress settings as plain values, for result rows."""
        return {"factor": self.factor, "pairs": self.pairs, "seed": self.seed, "pairing": self.pairing}


def parse_stress(text: str) -> tuple[float, int]:
    """Read ``FACTOR[:PAIRS]``, as ``--stress`` takes it.

    >>> parse_stress("64:2"), parse_stress("100")
    ((64.0, 2), (100.0, 1))
    """
    factor, colon, pairs = text.partition(":")
    try:
        numbers = float(factor), int(pairs) if colon else PAIRS
    except ValueError:
        raise SpecError(f"stress {text!r}: expected FACTOR or FACTOR:PAIRS, e.g. {FACTOR:g}:{PAIRS}.") from None
    _check(*numbers)
    return numbers


def _check(factor: float, pairs: int) -> None:
    if not 0 < factor < float("inf"):
        raise SpecError(f"stress factor {factor:g}: expected a number above 0, e.g. {FACTOR:g}.")
    if not isinstance(pairs, int) or pairs < 1:
        raise SpecError(f"stress pairs {pairs!r}: expected a whole number >= 1.")


def stress(model: Any, factor: float = FACTOR, pairs: int = PAIRS, seed: int = 0) -> Stressed:
    """Give a loaded model outlier channels in its keys, in place, without changing what it computes.

    ``pairs`` random rotary pairs per KV head grow by ``factor``. A power of two changes no logit at all; another factor
    changes them by the rounding of the weights (float32: below 1e-4). ``undo()`` of the result puts the weights back.
    ``SpecError`` for a wrong factor or more pairs than a head has; ``UnsupportedError`` if the keys of this model
    cannot be scaled so, and no weight has changed.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    ...     head_dim=32, intermediate_size=64, vocab_size=99)
    >>> with stress(LlamaForCausalLM(config), 64, pairs=1) as stressed:
    ...     [len(head) for head in stressed.channels[0]]
    [2]
    """
    from transformers import PreTrainedModel

    from packedkv.integrations.transformers.plan import plan_for
    from packedkv.models.loading import LoadedModel

    _check(factor, pairs)
    model = model.model if isinstance(model, LoadedModel) else model
    plan = plan_for(model, "decoded")
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{plan.name} has no weights to stress; pass the loaded model.")
    config = model.config.get_text_config(decoder=True)
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{plan.name}: the last {shared} layers read keys of earlier ones, so no query could be divided for them."
        )
    layers = [
        _scaled_layer(f"{plan.name}, layer {layer.index}", model.get_decoder(), layer.index, config)
        for layer in plan.kv_layers
    ]
    reasons = []
    with _evaluating(model):
        before = _seen(model, config)
        for pairing in PAIRINGS:
            done = Stressed(plan.name, float(factor), pairs, seed, pairing)
            try:
                for layer, scaled in zip(plan.kv_layers, layers, strict=True):
                    done.channels[layer.index] = scaled.draw(layer.index, pairs, seed, pairing)
                    scaled.scale(done, layer.index)
                reason = _difference(done, before, _seen(model, config))
            except BaseException:
                done.undo()
                raise
            if not reason:
                return done
            done.undo()
            reasons.append(f"pairs of {pairing}: {reason}")
    raise UnsupportedError(f"{plan.name}: keys cannot be scaled without changing the model. {'; '.join(reasons)}.")


# -- where a layer's keys and queries are scaled -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Rows ``[first, last)`` of a parameter that scale channels; ``offset`` is what the model adds to a gain."""

    parameter: Tensor
    first: int
    last: int
    offset: float = 0.0


@dataclass(frozen=True)
class _ScaledLayer:
    """Where one layer's queries and keys get their factor; ``shared``: one factor for all heads."""

    where: str
    query: tuple[_Rows, ...]
    key: tuple[_Rows, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    shared: bool

    def draw(self, layer: int, pairs: int, seed: int, pairing: Pairing) -> list[list[int]]:
        """Draw the outlier channels of each KV head."""
        half = self.rotary // 2
        if pairs > half:
            raise SpecError(f"{self.where}: {pairs} stress pairs, but a head has {half}; pass 1 to {half}.")
        site, drawn = Site(layer, "key", self.kv_heads, self.head_dim, seed), []
        for head in range(self.kv_heads):
            picked = torch.randperm(half, generator=site.generator(0 if self.shared else head, STREAM))[:pairs].tolist()
            both = [(i, i + half) if pairing == "halves" else (2 * i, 2 * i + 1) for i in picked]
            drawn.append(sorted(channel for pair in both for channel in pair))
        return drawn

    def scale(self, done: Stressed, layer: int) -> None:
        """Multiply the rows of this layer; the original values are kept in ``done``."""
        key = factors(done, layer, self.head_dim)
        query = 1 / key.repeat_interleave(self.query_heads // self.kv_heads, 0)
        for factor, parts in ((key, self.key), (query, self.query)):
            for rows in parts:
                self._multiply(done, rows, factor)

    def _multiply(self, done: Stressed, rows: _Rows, factor: Tensor) -> None:
        part = rows.parameter[rows.first : rows.last]
        if part.numel() == self.head_dim:  # one gain for all heads
            factor = factor[0]
        # a bias or gains, [D], [H D] or [H, D], or the rows of a weight
        factor = factor.reshape(part.shape if part.numel() == factor.numel() else (-1, 1))
        cause, remedy = f"{self.where}: a factor of {done.factor:g}", "pass a smaller one, or "
        done.scale(part, factor, cause, offset=rows.offset, remedy=remedy)


def factors(done: Stressed, layer: int, head_dim: int) -> Tensor:
    """Factor of every channel of a layer's keys, float64 ``[H, D]``."""
    heads = done.channels[layer]
    factor = torch.ones(len(heads), head_dim, dtype=torch.float64)
    for row, channels in zip(factor, heads, strict=True):
        row[channels] = done.factor
    return factor


def _scaled_layer(where: str, decoder: nn.Module, layer: int, config: Any) -> _ScaledLayer:
    """Find what scales the layer's queries and keys last."""
    modules = attention_modules(decoder, layer, {"q_proj", "k_proj"}, {"qkv_proj"})
    if len(modules) != 1:
        raise UnsupportedError(
            f"{where}: {len(modules)} attention modules with q_proj and k_proj, or with qkv_proj; projections in "
            f"another form (query_key_value, c_attn) are not taken apart."
        )
    attention = modules[0]
    heads, query_heads = getattr(config, "num_key_value_heads", None), config.num_attention_heads
    dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    dim, heads = dim or config.hidden_size // query_heads, heads or query_heads
    rotary = int(dim * rotated_share(config))
    sizes = {"query_heads": query_heads, "kv_heads": heads, "head_dim": dim, "rotary": rotary}
    children = dict(attention.named_children())
    if norms := {name: child for name, child in children.items() if "norm" in name}:
        query, key = _gains(where, norms, dim)
        shared = any(rows.parameter.numel() == dim for rows in (*query, *key))
        return _ScaledLayer(where, query, key, shared=shared, **sizes)
    if "qkv_proj" in children:
        rows = query_heads * dim, (query_heads + heads) * dim
        _check_rows(where, decoder, "qkv_proj", children["qkv_proj"], (query_heads + 2 * heads) * dim)
        parameters = _parameters(children["qkv_proj"])
        query = tuple(_Rows(p, 0, rows[0]) for p in parameters)
        return _ScaledLayer(where, query, tuple(_Rows(p, *rows) for p in parameters), shared=False, **sizes)
    for name, n in (("q_proj", query_heads * dim), ("k_proj", heads * dim)):
        _check_rows(where, decoder, name, children[name], n)
    query = tuple(_Rows(p, 0, query_heads * dim) for p in _parameters(children["q_proj"]))
    return _ScaledLayer(
        where, query, tuple(_Rows(p, 0, heads * dim) for p in _parameters(children["k_proj"])), shared=False, **sizes
    )


def _parameters(module: nn.Module) -> list[Tensor]:
    return [p for p in (module.weight, getattr(module, "bias", None)) if isinstance(p, Tensor)]


def _gains(where: str, norms: dict[str, nn.Module], dim: int) -> tuple[tuple[_Rows, ...], tuple[_Rows, ...]]:
    """Rows of the gains (and offsets) of the norms of q and of k."""
    rows: dict[str, tuple[_Rows, ...]] = {}
    for side in ("q", "k"):
        names = [name for name in norms if name.startswith(side)]
        parameters = _parameters(norms[names[0]]) if len(names) == 1 and hasattr(norms[names[0]], "weight") else []
        if not parameters or len(norms) != 2:
            raise UnsupportedError(
                f"{where}: {', '.join(sorted(norms))} normalises q and k and undoes any factor before it; only norms "
                f"of q and of k with gains of their own can carry one."
            )
        if any(p.is_meta or p.dtype.itemsize < 2 or p.numel() % dim for p in parameters):
            raise UnsupportedError(f"{where}: the gains of {names[0]} are not plain tensors of whole heads.")
        added = _added_to_gain(norms[names[0]], parameters)
        rows[side] = tuple(_Rows(p, 0, p.shape[0], added if i == 0 else 0.0) for i, p in enumerate(parameters))
    return rows["q"], rows["k"]


def _added_to_gain(norm: nn.Module, parameters: list[Tensor]) -> float:
    """What a norm adds to its weight: 1 for Gemma's ``x (1 + w)``, found by trying w = 0."""
    copies = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        try:
            for p in parameters:
                p.zero_()
            tried = norm(torch.ones(1, 1, *parameters[0].shape, dtype=parameters[0].dtype, device=parameters[0].device))
        finally:
            for p, before in zip(parameters, copies, strict=True):
                p.copy_(before)
    return 1.0 if bool(tried.any()) else 0.0


def _check_rows(where: str, decoder: nn.Module, name: str, linear: Any, rows: int) -> None:
    check_linear(where, decoder, name, linear)
    if linear.out_features != rows:
        raise UnsupportedError(f"{where}: {name} gives {linear.out_features} channels, {rows} were expected.")


# -- what attention received, before and after -------------------------------------------------------------------------

Seen = tuple[dict[int, tuple[Tensor, Tensor]], Tensor]
"""Layer -> (q, k) ``[1, heads, n, D]`` after RoPE, and the logits ``[n, V]``; float32."""


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _seen(model: Any, config: Any) -> Seen:
    """Run a few tokens at positions far from 0, and record what attention receives."""
    ids = torch.arange(TRIED_TOKENS, device=model.device)[None] * 7 % config.vocab_size
    options: dict[str, Any] = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        last = min(getattr(config, "max_position_embeddings", None) or TRIED_POSITION, TRIED_POSITION)
        first = max(last - TRIED_TOKENS, 0)
        options["position_ids"] = torch.arange(first, first + TRIED_TOKENS, device=model.device)[None]
    tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def see(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rest: dict[str, Any]) -> None:
        tensors[getattr(module, "layer_idx", len(tensors))] = query.float().cpu().clone(), key.float().cpu().clone()

    with watched(model, see), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **options).logits[0].float().cpu()
    return tensors, logits


def _difference(done: Stressed, before: Seen, after: Seen) -> str:
    """Describe what the factors changed besides keys and queries; ``""`` for nothing."""
    rounded = any(dtype.itemsize < 4 for dtype in done.dtypes)
    allowed = ROUNDED if rounded else EXACT
    least = torch.finfo(torch.float32).eps
    for layer, channels in done.channels.items():
        (q, k), (q_after, k_after) = before[0][layer], after[0][layer]
        factor = factors(done, layer, k.shape[-1]).float()[None, :, None]
        group = q.shape[1] // len(channels)
        wanted = (("keys", k * factor, k_after), ("queries", q / factor.repeat_interleave(group, 1), q_after))
        for name, want, got in wanted:
            error = (got - want).norm(dim=2) / want.norm(dim=2).clamp_min(least * float(want.norm()))
            if not bool((error <= allowed).all()):
                return f"the {name} of layer {layer} do not reach attention as they were scaled"
    gap, size = (after[1] - before[1]).abs().amax(), before[1].abs().amax()
    return "" if bool(gap <= allowed * size) else f"the logits change by {float(gap):.2g} of {float(size):.2g}"
