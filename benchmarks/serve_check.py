"""What an engine served against the library, in one of its layers: the bytes in its blocks, and what it attended to.

``Recorder`` writes down what comes to a layer and what leaves it; ``compare`` encodes the same keys and values with the
codecs themselves on the CPU, under the constants that the library draws or that the params file has, and attends over
these bytes with the reference.
"""

from typing import Any

import torch
from torch import Tensor

from kvcodec.codec import ROLES, storage_dtype
from kvcodec.integrations.vllm.groups import GroupedLayer
from kvcodec.integrations.vllm.layer import EngineLayer
from kvcodec.store.kept_rows import kept_rows
from kvcodec.store.pages import read_blocks


def served_layers(engine: Any) -> list[Any]:
    """Layers of an engine, or of one of its workers, that packed pages serve."""
    layers = engine.vllm_config.compilation_config.static_forward_context
    return [layer for layer in layers.values() if getattr(getattr(layer, "impl", None), "packed", None)]


class Recorder:
    """Keeps what one layer's attention is called with, on the CPU, as long as it is entered.

    Parameters
    ----------
    engine
        vLLM's, or one of its workers.
    index : int, optional
        Of the layers served from packed pages in this process; default: the one in the middle.
    """

    def __init__(self, engine: Any, index: int | None = None) -> None:
        served = served_layers(engine)
        at = len(served) // 2 if index is None else index
        self.layer = served[at] if served else None
        self.calls: list[dict[str, Any]] = []

    def __enter__(self) -> "Recorder":
        if self.layer is not None:
            impl = self.layer.impl
            self.forward, impl.forward = impl.forward, self.record
        return self

    def __exit__(self, *error: object) -> None:
        if self.layer is not None:
            del self.layer.impl.forward

    def record(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, m: Any, output: Tensor, **more: Any
    ) -> Any:
        """Take the place of the layer's ``forward``."""
        kept = [x.detach().to("cpu", copy=True) for x in (q, k, v)]  # the engine uses its memory again
        found = self.forward(layer, q, k, v, cache, m, output, **more)
        if m is not None:
            out = output.detach().view(q.shape[0], -1, q.shape[-1]).to("cpu", copy=True)
            rows = [(i, i, i + 1, n) for i, n in enumerate(m.seq_lens[: m.decodes].tolist())] + m.chunks
            self.calls.append({"rows": rows, "table": m.table.to("cpu", copy=True), "qkv": kept, "out": out})
        return found


def compare(recorder: Recorder) -> dict[str, float]:
    """Of every request whose tokens were all recorded: shares of bytes that are the codecs', errors of attention.

    Returns
    -------
    dict
        ``bytes``: how many were compared; ``bytes_equal``: the share; ``blocks_given_away``: left out, because the
        engine gave them to another request when theirs had ended; ``prompt_error``, ``step_error``: the largest
        ``|served - reference| / |reference|`` of a request's queries. Empty if no layer is served from packed pages.
    """
    layer = recorder.layer
    if layer is None:
        return {}
    packed, rules = layer.impl.packed, layer.impl.rules
    rules = rules._replace(sinks=None if rules.sinks is None else rules.sinks.cpu())
    requests: dict[int, list[tuple[int, int, Tensor, tuple[Tensor, ...]]]] = {}
    owner: dict[int, int] = {}
    block = layer.kv_cache.shape[2]
    for call in recorder.calls:
        for row, first, last, length in call["rows"]:
            table = call["table"][row]
            owner.update(dict.fromkeys(table[: -(-length // block)].tolist(), int(table[0])))
            own = tuple(x[first:last] for x in (*call["qkv"], call["out"]))
            requests.setdefault(int(table[0]), []).append((length - (last - first), length, table, own))
    found = {
        "requests": 0, "bytes": 0, "bytes_equal": 0.0, "blocks_given_away": 0, "prompt_error": 0.0, "step_error": 0.0
    }  # fmt: skip
    for name, calls in requests.items():
        if [begin for begin, *_ in calls] != [0] + [end for _, end, *_ in calls[:-1]]:
            continue  # it began in the prefix cache, or a graph took some of its steps
        found["requests"] += 1
        table = calls[-1][2][: -(-calls[-1][1] // block)]
        kept = torch.tensor([owner[number] == name for number in table.tolist()])
        one = _one(packed, rules, calls, layer.kv_cache, kept)
        for error in ("prompt_error", "step_error"):
            found[error] = max(found[error], one[error])
        found["bytes"] += int(one["bytes"])
        found["blocks_given_away"] += int((~kept).sum())
        found["bytes_equal"] += one["equal"]
    found["bytes_equal"] /= max(1, found["bytes"])
    return found


def _one(packed: EngineLayer, rules: Any, calls: Any, cache: Tensor, kept: Tensor) -> dict[str, float]:
    """The same of one request, the bytes of the blocks that it has kept."""
    length, table = calls[-1][1], calls[-1][2]
    _, k, v, out = (torch.cat(parts) for parts in zip(*(own for *_, own in calls), strict=True))
    blocks = -(-length // cache.shape[2])
    there = cache[table[:blocks].long().to(cache.device)].cpu()
    own, here, row = _twin(packed), torch.zeros_like(there), torch.arange(blocks, dtype=torch.int32)
    unit = own.unit if isinstance(own, GroupedLayer) else 1
    whole = length // unit * unit
    found = {"bytes": 0.0, "equal": 0.0, "prompt_error": 0.0, "step_error": 0.0}
    for role, x in zip(ROLES, (k, v), strict=True):
        step = own.scheme.codec(role).block_tokens
        slots = torch.arange(0, whole, step)[None]
        own._put(role, x[:whole].transpose(0, 1)[None], here, slots, torch.arange(whole)[None])
        layout, pages = own.pages(here)
        slots = slots[:, kept[slots[0] // cache.shape[2]]]
        for name, field in read_blocks(layout, pages, role, slots).items():
            same = read_blocks(layout, own.pages(there)[1], role, slots)[name].contiguous().view(torch.uint8)
            found["bytes"] += same.numel()
            found["equal"] += int((same == field.contiguous().view(torch.uint8)).sum())
    if own.sink:
        both = [kept_rows(*own.pages(x), own.sink, storage_dtype(own.dtype))[kept] for x in (here, there)]
        written = min(own.sink, length - (blocks - 1) * cache.shape[2])  # of the last block
        for block, (a, b) in enumerate(zip(*both, strict=True)):
            last = own.sink if block < len(both[0]) - 1 or not kept[-1] else written
            same = (a[:, :, :last] == b[:, :, :last]).sum()
            found["bytes"] += 2 * a[:, :, :last].numel()
            found["equal"] += 2 * int(same)
    for begin, end, _, (part, *_) in [calls[0], calls[-1]]:
        if isinstance(own, GroupedLayer):
            first = begin // unit * unit
            held = storage_dtype(own.dtype)
            dense = {role: x[first:end].transpose(0, 1)[None].to(held) for role, x in zip(ROLES, (k, v), strict=True)}
            want = own.attend_own(part.float(), here, row, end, rules, dense)
        else:
            want = own.attend(part.float(), here, row, end, rules)
        error = float((out[begin:end].float() - want).norm() / want.norm())
        name = "prompt_error" if begin == 0 else "step_error"
        found[name] = max(found[name], error)
    return found


def _twin(packed: EngineLayer) -> EngineLayer:
    """A layer on the CPU that the library makes from the same words."""
    site = packed.site
    params = {role: {n: x.cpu() for n, x in own.items()} for role, own in site.fitted.items()}
    given = {
        "layer": site.layer, "heads": packed.heads, "head_dim": packed.head_dim, "dtype": packed.dtype,
        "device": torch.device("cpu"), "first_head": site.first_head, "seed": site.seed, "params": params or None,
    }  # fmt: skip
    if isinstance(packed, GroupedLayer):
        return GroupedLayer(packed.scheme, slots=1, **given)
    return EngineLayer(packed.scheme, **given, mean=site.mean)
