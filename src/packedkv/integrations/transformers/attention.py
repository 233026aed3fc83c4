"""The attention function ``packedkv``: transformers' attention interface over packed pages or plain tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from packedkv.attention import Seen, attend_parts
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import attend
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.integrations.transformers.layers import LAYER, PackedCacheLayer, PackedKV
from packedkv.integrations.transformers.plan import ATTENTION_NAME
from packedkv.kernels.flash import by_flash
from packedkv.kernels.tokens import Rules

START = "packedkv_start"
"""Attribute of a mask tensor: first visible token of each sequence, int32 ``[B]``."""
RULES = "packedkv_rules"
"""Attribute of a mask tensor: results of ``_seen_by``, by its arguments."""
HIDES = "packedkv_hides"
"""Attribute of a mask tensor: results of ``_hides``, by ``is_cross`` and ``is_compileable`` of the layer."""
QUERY_CHUNK = 256
"""Query rows scored at a time where SDPA cannot be used (learned sinks, soft caps)."""


def packedkv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query [B, HQ, n, D]`` over a packed layer or plain K and V: ``[B, n, HQ, D]``, and None.

    ``attention_mask [B, 1, n, N]`` is boolean (True = attend) or additive; None is causal. ``s_aux [HQ]``: learned sink
    logits (GPT-OSS). ``softcap``: scores become ``softcap * tanh(score / softcap)`` (Gemma 2). UnsupportedError for
    position biases, and for dropout over a packed layer, with sink logits or with a soft cap.
    """
    if position_bias is not None:
        raise UnsupportedError(
            f"layer {getattr(module, 'layer_idx', '?')}: position_bias is not computed by attention "
            f"{ATTENTION_NAME!r}; use attention='decoded' with the model's own attention."
        )
    if dropout and (isinstance(key, PackedKV) or s_aux is not None or softcap):
        raise UnsupportedError(
            f"attention {ATTENTION_NAME!r} has no dropout (got {dropout}); call model.eval() before generating."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and getattr(module, "is_decoder", False):
        causal = True  # ``packedkv_mask`` leaves out no other; some decoders (NLLB) do not say that they are causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules = Rules(scale, Seen(causal, softcap=softcap or 0.0), s_aux)
    if isinstance(key, PackedKV):
        return _packed(query, key.layer, attention_mask, rules).transpose(1, 2).contiguous(), None
    n, held = query.shape[2], key.shape[2]
    if attention_mask is not None:
        filled: PackedCacheLayer | None = getattr(key, LAYER, None)
        if filled is not None and not torch.compiler.is_compiling():
            filled.hides_more = _hides(attention_mask, filled)
        attention_mask = attention_mask[..., :held]  # a static cache is masked to its full capacity
    if s_aux is not None or softcap:
        return _dense(query, key, value, attention_mask, rules).transpose(1, 2).contiguous(), None
    if attention_mask is None and causal and 1 < n < held:  # torch would let the first query see one key
        attention_mask = torch.ones(n, held, dtype=torch.bool, device=query.device).tril(held - n)
    options = {"dropout": dropout, "scaling": scaling, "is_causal": causal}
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out, None


def _packed(query: Tensor, layer: PackedCacheLayer, mask: Tensor | None, rules: Rules) -> Tensor:
    """Attention over packed pages: by kernels, or by the reference, which decodes a chunk at a time."""
    cache, (scale, seen, sinks) = layer.cache, rules
    if not isinstance(cache, FusedLayerCache):
        if mask is not None:
            mask = _fit_mask(mask, len(cache), layer.is_sliding)
        out = attend(query, cache, scale=scale, mask=mask, causal=seen.causal, sinks=sinks, softcap=seen.softcap)
        layer.attended("streamed", lambda: layer.streamed_bytes(query))
        return out
    compiled = torch.compiler.is_compiling()
    unread = compiled and layer.is_cross and mask is not None  # masks of an encoder's output are not read there
    if query.shape[2] > 1 or unread or (mask is not None and _hides_more(mask, layer)):
        return (_several_apart if compiled else _several)(query, layer, mask, rules)
    start = None if mask is None else _visible_from(mask, layer)  # the newest token sees all others
    out = cache.attend_token(query, scale=scale, sinks=sinks, start=start, softcap=seen.softcap)
    layer.attended("fused", lambda: cache.workspace_bytes(query))
    return out


def _several(query: Tensor, layer: PackedCacheLayer, mask: Tensor | None, rules: Rules) -> Tensor:
    cache = layer.cache
    assert isinstance(cache, FusedLayerCache)
    cache.synchronize()
    seen = rules.seen._replace(mask=mask)
    if mask is not None and not layer.is_cross:
        seen = _seen_by(mask, layer, cache.host_tokens())._replace(softcap=seen.softcap)
    if len(seen.start) == 1:
        seen = seen._replace(start=seen.start * query.shape[0])
    out = cache.attend_chunk(query, scale=rules.scale, sinks=rules.sinks, seen=seen)
    layer.hides_more = seen.mask is not None and _hides(seen.mask, layer)
    flash = by_flash(seen, query.shape[3])
    layer.attended("staged" if flash else "scored", lambda: cache.chunk_workspace_bytes(query, flash))
    return out


_several_apart = torch.compiler.disable(_several)  # reads lengths and masks on the host


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules) -> Tensor:
    """Attention over plain tensors with learned sinks or a soft cap, some query rows at a time."""
    (scale, seen, sinks), (n, total), outs = rules, (q.shape[2], k.shape[2]), []
    causal = seen.causal and mask is None
    for first in range(0, n, QUERY_CHUNK):
        rows = q[:, :, first : first + QUERY_CHUNK]
        rows_mask = None if mask is None else mask[:, :, first : first + QUERY_CHUNK]
        last = total - n + first + rows.shape[2] if causal else total
        parts = [(k[:, :, :last], v[:, :, :last])]
        outs.append(
            attend_parts(
                rows, parts, last, scale=scale, mask=rows_mask, causal=causal, sinks=sinks, softcap=seen.softcap
            )
        )
    return torch.cat(outs, 2)


def _seen_by(mask: Tensor, layer: PackedCacheLayer, held: int) -> Seen:
    """Reduce a mask of several queries to causal, window and left padding, if it means just that.

    One synchronization per mask: the layers of a model share it, and the result is stored as its attribute.
    """
    asked, fitted = (held, layer.reach(held)), _fit_mask(mask, held, layer.is_sliding)
    known: dict[tuple[int, Seen], Seen | None] = getattr(mask, RULES, {})
    if asked not in known:
        known = {**known, asked: _read_mask(fitted, asked[1])}
        setattr(mask, RULES, known)
    return known[asked] or Seen(mask=fitted)


def _read_mask(mask: Tensor, rules: Seen) -> Seen | None:
    """Return ``rules`` and left padding if a mask hides just that: later tokens, those out of reach, and padding.

    The mask ``[B, 1, n, N]``, boolean (True = attend) or additive, is of the newest n of N tokens.
    """
    n, held = mask.shape[-2:]
    if mask.shape[1] != 1:
        return None
    visible = mask if mask.dtype == torch.bool else mask == 0
    keys = torch.arange(held, device=mask.device)
    own = keys[held - n :, None]
    wanted = keys <= own
    if rules.window:
        wanted &= keys > own - rules.window
    if rules.chunk:
        wanted &= (rules.place + keys) // rules.chunk == (rules.place + own) // rules.chunk
    ever = visible.any(2)[:, 0]  # [B, N]
    start = torch.where(ever.any(-1), ever.to(torch.uint8).argmax(-1), held)
    same = (visible == (wanted & (keys >= start[:, None, None, None]))).all()
    if mask.dtype != torch.bool:  # an additive mask must hide tokens fully, not only lower their weight
        same &= (visible | (mask < torch.finfo(mask.dtype).min / 2)).all()
    *found, fits = torch.cat([start, same[None]]).tolist()
    if not fits:
        return None
    oldest = rules.first(0, n, held)  # padding that no query reaches need not be hidden again
    padding = tuple(int(s) if s > oldest else 0 for s in found)
    return rules._replace(start=padding if any(padding) else ())


def _visible_from(mask: Tensor, layer: PackedCacheLayer) -> Tensor:
    """Turn the mask of one query token into the first visible token of each sequence, int32 ``[B]``."""
    start = getattr(mask, START, None)
    if start is None:
        start = left_padding(mask)
    # tokens that only a sliding layer's recorded past holds; a static cache is masked to its full capacity
    older = 0 if layer.is_compileable else len(layer.cache) - mask.shape[-1]
    return start + older


def _hides_more(mask: Tensor, layer: PackedCacheLayer) -> bool:
    """Whether the mask of one query token hides more than left padding, which the decode kernels do not serve.

    On a GPU the mask is read (a synchronization) in the first step after a pass of several tokens: steps of one token
    hide none.
    """
    tracing = torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    if not tracing and (layer.hides_more is None or not mask.is_cuda):
        layer.hides_more = _hides(mask, layer)
    return bool(layer.hides_more)


def _hides(mask: Tensor, layer: PackedCacheLayer) -> bool:
    """As ``_hides_more``, of the last query of a mask ``[B, 1, n, N]``; read once for all layers (synchronizes)."""
    known: dict[tuple[bool, bool], bool] = getattr(mask, HIDES, {})
    kind = layer.is_cross, layer.is_compileable
    if kind not in known:
        seen = _seen(mask[:, :, -1:])
        if layer.is_compileable and not layer.is_cross:  # masked to its full capacity: nothing behind the newest token
            last = seen.shape[1] - 1 - seen.any(0).flip(0).to(torch.uint8).argmax()
            seen = seen[:, : int(last) + 1]
        # padding of an encoder's output is on either side, so any hidden token counts there
        known[kind] = bool((~seen if layer.is_cross else seen[:, :-1] & ~seen[:, 1:]).any())
        setattr(mask, HIDES, known)
    return known[kind]


def _seen(mask: Tensor) -> Tensor:
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return visible[:, 0, 0]


def _fit_mask(mask: Tensor, held: int, sliding: bool) -> Tensor:
    """Cut the mask to the width of the tokens held, or extend it over those that a sliding layer's past records."""
    missing = held - mask.shape[-1]
    if missing < 0:  # a static cache is masked to its full capacity
        return mask[..., :held]
    if missing and not sliding:
        raise ShapeError(f"attention mask {tuple(mask.shape)} is narrower than the {held} tokens held by the cache.")
    if not missing:
        return mask
    return pad(mask, (missing, 0), value=False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


def left_padding(mask: Tensor) -> Tensor:
    """Count the tokens that a mask ``[B, 1, 1, N]`` hides before the first visible one: int32 ``[B]``."""
    return _seen(mask).to(torch.uint8).argmax(-1).to(torch.int32)


def packedkv_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' SDPA mask; None where queries see all tokens up to their own, the newest ones being theirs.

    For one query token the mask carries the starts of the sequences, which fused kernels read in every layer.
    """
    if _is_causal(kwargs):
        return None
    if getattr(kwargs.get("config"), "is_encoder_decoder", False):
        kwargs["allow_is_bidirectional_skip"] = False  # None is causal
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is not None and mask.shape[-2] == 1 and not torch.compiler.is_compiling():
        setattr(mask, START, left_padding(mask))
    return mask


def _is_causal(options: Mapping[str, Any]) -> bool:
    """Whether a mask of these options is causal and no more; False where a number of a tensor decides."""
    offset = options.get("q_offset", 0)
    return (
        options.get("allow_is_causal_skip", False)
        and not torch.compiler.is_compiling()
        and options.get("attention_mask") is None
        and options.get("local_size") is None
        and options.get("mask_function") is causal_mask_function
        and isinstance(offset, int)
        and offset + options.get("q_length", 0) == options.get("kv_offset", 0) + options.get("kv_length", 0)
    )
