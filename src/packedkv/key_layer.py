"""Keys and queries of one layer of a model, made from its weights alone: its norm, projections and RoPE.

Modules are called instead of their weights read, so quantized and offloaded weights work as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from packedkv.codec import Codec, Params, Sample, Site, roundtrip, storage_dtype
from packedkv.ops.rope import Rotary
from packedkv.scheme import Mean

TOKENS, QUERIES, RANKED = 256, 64, 8
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
"""Projections that give queries, keys and values at once, as models name them."""

Project = Callable[[Tensor], tuple[Tensor, Tensor]]
"""States ``[n, hidden]`` to queries ``[n, HQ, D]`` and keys ``[n, H, D]``, before RoPE."""


@dataclass(eq=False)
class KeyLayer:
    """Where one layer's keys and queries come from."""

    index: int  # layer of the model
    project: Project  # its input norm, its projections, and norms of queries and keys where it has them
    hidden: int  # width of the states
    scale: float  # of the scores
    frequencies: Tensor | None  # of RoPE, [R / 2] for the first R channels; None: no RoPE
    dtype: torch.dtype  # of the states that ``project`` takes
    device: torch.device
    biases: list[Tensor]  # the parameters that it adds
    _errors: dict[tuple[Codec, Mean], float] = field(default_factory=dict, init=False)

    def _project(self, tokens: int, seed: int, *, mirrored: bool = False) -> tuple[Tensor, Tensor]:
        h = torch.randn(tokens, self.hidden, generator=torch.Generator().manual_seed(seed))
        if mirrored:  # each state with its negative: averaging over both leaves the bias
            h = torch.cat([h, -h])
        with torch.no_grad():
            q, k = self.project(h.to(self.device, self.dtype))
        return q.float().cpu(), k.float().cpu()

    @cached_property
    def _ranked(self) -> tuple[Tensor, Tensor, float]:
        """Mean key ``[H, D]``, standard deviation of the keys ``[H]``, and size of bias times query."""
        q, k = self._project(RANKED, 0, mirrored=True)
        mean = k.mean(0)
        spread = (k - mean).pow(2).sum(-1).mean(0).sqrt()
        size = mean.norm(dim=-1) * q.unflatten(1, (mean.shape[0], -1)).pow(2).sum(-1).mean((0, 2)).sqrt()
        return mean, spread, float(size.max()) * self.scale

    @cached_property
    def _sampled(self) -> tuple[Tensor, Tensor]:
        """Queries ``[n, HQ, D]`` and keys ``[n, H, D]`` of random states, before RoPE."""
        return self._project(QUERIES, 2)[0], self._project(TOKENS, 1)[1]

    @property
    def mean(self) -> Tensor:
        """Mean key of each head before RoPE, float32 ``[H, D]`` on the CPU: the bias, where nothing follows it."""
        return self._ranked[0]

    @property
    def size(self) -> float:
        """Largest norm of a head's bias times that of its queries, in nats; 0: below the spread of the keys."""
        mean, spread, size = self._ranked
        return size if bool((mean.norm(dim=-1) > spread).any()) else 0.0

    def where(self) -> tuple[int, int, float, float]:
        """KV head and channel with the largest ratio of bias to the head's spread; the bias and that ratio."""
        mean, spread, _ = self._ranked
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
        q, k = self._sampled
        tokens = max(TOKENS // codec.block_tokens, 1) * codec.block_tokens
        k = k.repeat(-(-tokens // TOKENS), 1, 1)[:tokens]
        k = self._rotate(k - self._ranked[0] if mean == "pre" else k, 0)
        k = k - k.mean(1, keepdim=True) if mean == "post" else k
        keys, queries = k.to(storage_dtype(self.dtype)).float()[None], self._rotate(q, tokens)[None]
        site = Site(self.index, "key", keys.shape[1], keys.shape[3])
        if params is None:
            params = codec.fit(site, Sample(keys, queries if "queries" in codec.needs else None))
        else:
            params = {name: x.cpu() for name, x in params.items()}
        lost = roundtrip(codec, keys, params) - keys
        e = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3) @ lost.transpose(2, 3) * self.scale
        error = float((e - e.mean(-1, keepdim=True)).pow(2).mean().sqrt())
        self._errors[known] = error
        return error

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        """``[n, H, D]`` to ``[H, n, D]`` with RoPE from position ``first`` on.

        Pairs are (i, i + R/2). Where a model pairs neighbouring channels, the biases rotate as far, in other pairs.
        """
        x = x.transpose(0, 1)
        if self.frequencies is None:
            return x
        return Rotary(self.frequencies).turn(x[None], torch.arange(first, first + x.shape[1])[None])[0]


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
    """Find the key bias of one layer; None where no bias is added, or the projections have an unknown form.

    ``attention`` holds the projections, ``q_proj`` and ``k_proj`` or one for queries, keys and values; ``parent`` holds
    ``attention`` and the norm before it. ``config`` is the text model's. ``query_heads`` and ``head_dim`` are those of
    this process.
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
    norms = {
        side: next((m for name, m in children.items() if name.startswith(side) and _is_norm(m)), None) for side in "qk"
    }
    weights = [p for m in (before, *adding) if m is not None for p in m.parameters() if p.is_floating_point()]
    if not weights:
        return None
    # weights on meta are brought by hooks of their modules when these are called (accelerate's offload), states as well
    device = next((p.device for p in weights if not p.is_meta), torch.device("cpu"))

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
        _frequencies(config, head_dim),
        weights[0].dtype if weights[0].dtype.itemsize > 1 else torch.float32,
        device,
        biases,
    )


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


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


def _frequencies(config: Any, head_dim: int) -> Tensor | None:
    """Frequencies of RoPE by pair of channels, without scaling for long contexts; None: no RoPE."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = next((r for r in rope.values() if isinstance(r, dict)), rope)  # by type of layer
    if not (theta := rope.get("rope_theta")):
        return None
    rotary = int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) // 2 * 2
    return float(theta) ** (-torch.arange(0, rotary, 2).float() / rotary)
