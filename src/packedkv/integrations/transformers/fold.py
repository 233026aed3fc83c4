"""Fold InnerQ's key norms into the projections of a transformers model. InnerQ, Sec. 4.

    W_K[h] <- W_K[h] / norm[h]      b_K[h] <- b_K[h] / norm[h]            rows = output channels of KV head h
    W_Q[i] <- W_Q[i] * norm[h]      b_Q[i] <- b_Q[i] * norm[h]            query head i of KV head h = i // (HQ / H)

``innerq-base:norm=false`` then does what ``innerq-base`` does with these norms. RoPE commutes with a norm that both
channels (i, i + D/2) of a pair share; models with anything else between projection and attention are refused.
"""

import sys
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from packedkv.codec import Params, Role
from packedkv.errors import FitError, ShapeError, UnsupportedError
from packedkv.integrations.transformers.argument import unwrapped
from packedkv.integrations.transformers.plan import plan_for

_HARMLESS = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense", "rotary_emb"}
"""Children of an attention module that do not change q and k."""


class ChangedWeights:
    """Weights that were scaled in place, with a copy of the originals; a ``with`` block restores them at its end."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of what was changed."""
        return {part.dtype for part, _ in self._before}

    def scale(self, part: Tensor, factor: Tensor, cause: str, *, offset: float = 0.0, remedy: str = "") -> None:
        """Set ``part``, a parameter or some of its rows, to ``(part + offset) * factor - offset``, in float32 at least.

        ``offset``: what the model itself adds to the weight, e.g. 1 for Gemma's ``x (1 + w)``. UnsupportedError, with
        ``cause`` and ``remedy``, if a value leaves the dtype's range; ``part`` is then unchanged.
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


class FoldedKeyNorms(ChangedWeights):
    """Undoes ``fold_key_norms``, bit for bit, with a copy of the original weights; ``layers`` lists what was folded."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layers = name, list[int]()

    def __repr__(self) -> str:
        return f"FoldedKeyNorms({self.name}, layers={self.layers})"

    def undo(self) -> None:
        """Put the weights back."""
        super().undo()
        self.layers.clear()

    unfold = undo


def fold_key_norms(model: Any, params: Mapping[int, Mapping[Role, Params]]) -> FoldedKeyNorms:
    """Fold fitted key norms into W_K and W_Q of a loaded model, in place.

    Parameters
    ----------
    model : PreTrainedModel
    params : mapping
        ``{layer: {"key": {"norm": [1, H, D]}}}``, as ``cache_for(params=)`` takes for ``innerq-base``. Layers that
        are missing or hold no norm are not changed.

    ``unfold()`` of the result puts the weights back; as a context manager it does so at the end of the block. If
    anything is refused, no weight has changed: FitError if ``params`` holds no norm, or one that is not positive and
    finite; ShapeError if a norm is not ``[1, H, D]``, or the two channels of a rotary pair do not share it;
    UnsupportedError if the model does more to q or k than to rotate them, or keeps its projections in another form.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    ...     head_dim=64, intermediate_size=64, vocab_size=99)
    >>> norm = torch.linspace(1, 2, 32).repeat(1, 1, 2)
    >>> fold_key_norms(LlamaForCausalLM(config), {0: {"key": {"norm": norm}}})
    FoldedKeyNorms(LlamaForCausalLM, layers=[0])
    """
    model = unwrapped(model)
    plan = plan_for(model, "decoded")
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{plan.name} has no weights to fold into; pass the loaded model.")
    config, decoder = model.config.get_text_config(decoder=True), model.get_decoder()
    norms = {layer: roles["key"]["norm"] for layer, roles in params.items() if "norm" in roles.get("key", {})}
    if not norms:
        raise FitError("params hold no key norms; pass {layer: {'key': {'norm': [1, H, D]}}} as innerq-base fits them.")
    known = {layer.index for layer in plan.kv_layers}
    if unknown := sorted(set(norms) - known):
        raise FitError(f"params hold norms of layers {unknown}; {plan.name} caches keys in layers {sorted(known)}.")
    _check_config(plan.name, config)
    found = {}
    for layer, norm in sorted(norms.items()):
        where = f"{plan.name}, layer {layer}"
        _check_norm(where, norm)
        found[layer] = _attention_of(where, decoder, layer, config.num_attention_heads, norm)
        _check_rotation(where, decoder, found[layer], norm.shape[-1])
    folded = FoldedKeyNorms(plan.name)
    try:
        for layer, attention in found.items():
            norm = norms[layer][0].double()
            group = config.num_attention_heads // norm.shape[0]
            factors = {"k_proj": 1 / norm.flatten(), "q_proj": norm.repeat_interleave(group, 0).flatten()}
            for name, factor in factors.items():
                linear = getattr(attention, name)
                folded.scale(linear.weight, factor[:, None], f"{plan.name}: folding")
                if linear.bias is not None:
                    folded.scale(linear.bias, factor, f"{plan.name}: folding")
            folded.layers.append(layer)
    except BaseException:
        folded.unfold()
        raise
    return folded


def _check_norm(where: str, norm: Tensor) -> None:
    if norm.ndim != 3 or norm.shape[0] != 1:
        batch = f": norms of {norm.shape[0]} sequences" if norm.ndim == 3 else ""
        raise ShapeError(
            f"{where}: got key norms {tuple(norm.shape)}{batch}; one set of weights takes those of one sequence, "
            f"[1, kv_heads, head_dim]. Fit on one sequence, or leave the norms to innerq-base at run time."
        )
    if not bool((norm.isfinite() & (norm > 0)).all()):
        raise FitError(f"{where}: a key norm is not positive and finite; fit them again with innerq-base.")
    half = norm.shape[-1] // 2
    if not torch.equal(norm[..., :half], norm[..., half:]):
        raise ShapeError(
            f"{where}: channels i and i + {half} of a rotary pair have different norms, which changes the logits; "
            f"share the larger one, as innerq-base fits them."
        )


def _check_config(name: str, config: Any) -> None:
    if (factor := rotated_share(config)) != 1.0:
        raise UnsupportedError(
            f"{name}: only {factor:g} of a head's channels are rotated (partial_rotary_factor), so pairs are not "
            f"(i, i + D/2) as the norms are shared; use innerq-base with norm=true."
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedError(
            f"{name}: clip_qkv={config.clip_qkv} clips keys and queries after their projections, which a norm does "
            f"not commute with; use innerq-base with norm=true."
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{name}: the last {config.num_kv_shared_layers} layers read keys of earlier ones; folding a layer would "
            f"leave their queries behind. Use innerq-base with norm=true."
        )


def _attention_of(where: str, decoder: nn.Module, layer: int, query_heads: int, norm: Tensor) -> Any:
    """Return the layer's attention module, whose q_proj and k_proj are plain and not shared."""
    found = attention_modules(decoder, layer, {"q_proj", "k_proj"})
    if len(found) != 1:
        raise UnsupportedError(
            f"{where}: {len(found)} attention modules with q_proj and k_proj of their own; fused projections "
            f"(qkv_proj, query_key_value, c_attn) are not folded. Use innerq-base with norm=true."
        )
    attention = found[0]
    if other := sorted(dict(attention.named_children()).keys() - _HARMLESS):
        reason = (
            "its gains are shared by all heads and it undoes any factor before it, so a norm per head cannot be folded"
            if any("norm" in n for n in other)
            else "what it does to q and k is unknown"
        )
        raise UnsupportedError(
            f"{where}: {type(attention).__name__} has {', '.join(other)}: {reason}. Use innerq-base with norm=true."
        )
    _, heads, dim = norm.shape
    for name, rows in (("k_proj", heads * dim), ("q_proj", query_heads * dim)):
        linear = getattr(attention, name)
        check_linear(where, decoder, name, linear)
        if linear.out_features != rows or query_heads % heads:
            raise ShapeError(
                f"{where}: {name} gives {linear.out_features} channels, norms {tuple(norm.shape)} with {query_heads} "
                f"query heads mean {rows}; pass norms that were fitted on this model."
            )
    return attention


def _check_rotation(where: str, decoder: Any, attention: Any, dim: int) -> None:
    """Verify, on random rows, that the rotary embedding commutes with norms shared by (i, i + D/2)."""
    rotate: Any = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    generator = torch.Generator().manual_seed(0)
    x, y, norm = torch.rand(3, 1, 1, 8, dim, generator=generator) + 0.5
    norm = norm[..., :1, : dim // 2].repeat(1, 1, 1, 2)
    try:
        device = next(iter(decoder.rotary_emb.buffers())).device
        x, y, norm = x.to(device), y.to(device), norm.to(device)
        cos, sin = decoder.rotary_emb(x, 37 * torch.arange(8, device=device)[None])
        plain, scaled = rotate(x, y, cos, sin), rotate(x * norm, y / norm, cos, sin)
        pairs = (plain[0] * norm, scaled[0]), (plain[1] / norm, scaled[1])
        same = all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
    except (AttributeError, TypeError, ValueError, RuntimeError, StopIteration) as error:
        raise UnsupportedError(
            f"{where}: the rotary embedding of {type(attention).__name__} could not be tried "
            f"({type(error).__name__}: {error}), so nothing is folded. Use innerq-base with norm=true."
        ) from error
    if not same:
        raise UnsupportedError(
            f"{where}: the rotary embedding of {type(attention).__name__} does not rotate the pairs "
            f"(i, i + {dim // 2}), neighbouring channels perhaps; norms are shared by those pairs, so folding would "
            f"change the logits. Use innerq-base with norm=true."
        )


def attention_modules(decoder: nn.Module, layer: int, *projections: set[str]) -> list[Any]:
    """Return the modules of a layer that have all children of one of ``projections``."""
    return [
        module
        for module in decoder.modules()
        if getattr(module, "layer_idx", None) == layer
        and any(names <= dict(module.named_children()).keys() for names in projections)
    ]


def check_linear(where: str, decoder: nn.Module, name: str, linear: Any) -> None:
    """Raise UnsupportedError unless a projection is a plain ``nn.Linear`` in memory whose weight no other shares."""
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
