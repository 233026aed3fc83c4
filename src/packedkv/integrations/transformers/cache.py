"""A packed KV cache for Hugging Face ``generate``: ``cache_for``, ``KVCache``, ``load_cache``."""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, EncoderDecoderCache

from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.codec import Dense
from packedkv.errors import FitError, FormatError, SpecError, UnsupportedError, nearest
from packedkv.files.container import BROKEN_JSON
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.argument import unwrapped
from packedkv.integrations.transformers.attention import packedkv_attention, packedkv_mask
from packedkv.integrations.transformers.attention_hooks import restore_attention as restore_attention
from packedkv.integrations.transformers.attention_hooks import use
from packedkv.integrations.transformers.build import Parts, Request, build
from packedkv.integrations.transformers.layers import CrossCache, PackedCacheLayer, Prefill
from packedkv.integrations.transformers.plan import ATTENTION_NAME, Attention, ModelPlan, decoder_config
from packedkv.integrations.transformers.rope import hook_of
from packedkv.key_bias import Probe, probe_option
from packedkv.registry import from_json, get
from packedkv.scheme import KVScheme

HELD_ELSEWHERE = "state held as transformers does"
NOTHING_HELD = "nothing to hold, the layer has no attention or borrows K and V of an earlier one"

logger = logging.getLogger("packedkv")

AttentionInterface.register(ATTENTION_NAME, packedkv_attention)
AttentionMaskInterface.register(ATTENTION_NAME, packedkv_mask)


class KVCache(Cache):  # type: ignore[misc]
    """The packed cache of a model; made by ``cache_for``, passed as ``past_key_values`` or ``cache``.

    Everything that transformers does to a cache works on the packed bytes: beam reordering, cropping, batch selection
    and repetition, reset, further conversation turns. Each token is encoded once.
    """

    def __init__(self, parts: Parts) -> None:
        Cache.__init__(self, layers=parts.layers)
        _, self.scheme, self.plan, self.options, self.probe, self.unfused = parts
        self.layer_class_to_replicate = partial(_refuse_layer, self.plan.name, len(parts.layers))  # beyond them

    @property
    def packed_layers(self) -> list[PackedCacheLayer]:
        """The layers that hold packed K and V."""
        return [layer for layer in self.layers if isinstance(layer, PackedCacheLayer)]

    @property
    def layer_caches(self) -> list[LayerCache]:
        """The LayerCache of every packed layer."""
        self.settle()
        return [layer.cache for layer in self.packed_layers]

    def settle(self) -> None:
        """Check what a forward pass that stopped half-way has left (one synchronization); called before every read.

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504 in its tokens; they are dropped.
        """
        for packed in self.packed_layers[:1]:
            packed.deferred.settle()

    def report(self) -> dict[str, Any]:
        """Measure what the cache holds.

        Returns
        -------
        dict
            ``spec, model, tokens, batch`` (tokens: seen per sequence);
            ``bytes`` by part and ``layers`` (a list: layer, note, tokens, bytes by part, total_bytes, prefill and
            attention calls that ran, the kernels that serve it);
            ``total_bytes``: all bytes held for the sequences; ``constant_bytes``: constants, not in ``total_bytes``;
            ``effective_bits``: total_bytes x 8 / elements held; ``key_bits, value_bits``: of the codecs, from the
            layout (None while head_dim is unknown, or where layers differ in it);
            ``ratio_to_16bit``: bytes of the same tokens in 16 bit / total_bytes;
            ``workspace_bytes``: upper bound of what the largest call so far needed beside the cache, whether it read
            a layer or made its pages grow (the copies made while encoding a prefill are not included);
            ``prefill, attention``: as chosen; ``unfused``: why not ``fused``, where that was left to ``cache_for``;
            ``paths``: number of calls by path; ``keys``: the outlier probe;
            ``mean``: ``pre`` or ``post`` if some layers' keys are held without their mean, else ``none``. Each layer
            says its own (``mean``) and where it comes from (``mean_from``: params, weights or first tokens).
        """
        self.settle()
        layers = [_layer_report(layer) for layer in self.packed_layers]
        total = sum(layer["total_bytes"] for layer in layers)
        elements = sum(cache.elements() for cache in self.layer_caches)
        stores = [c.store for cache in self.layer_caches for c in (cache, cache.recent) if c is not None]
        workspaces = [layer.workspace_bytes for layer in self.packed_layers]
        workspaces += [store.growth_bytes for store in stores if store is not None]
        parts, paths = Counter[str](), Counter[str]()
        for layer in layers:
            parts.update(layer["bytes"])
            paths.update(layer["calls"])
        held = {cache.roles["key"].site.head_dim for cache in self.layer_caches if cache.roles}
        dim = self.plan.head_dim if not held else held.pop() if len(held) == 1 else None
        return {
            "spec": str(self.scheme),
            "model": self.plan.name,
            "tokens": int(self.get_seq_length()),
            "batch": max((cache.batch for cache in self.layer_caches), default=0),
            "bytes": dict(parts),
            "total_bytes": total,
            "constant_bytes": sum(cache.constant_bytes() for cache in self.layer_caches),
            "effective_bits": total * 8 / elements if elements else 0.0,
            "key_bits": self.scheme.key_bits(dim) if dim else None,
            "value_bits": self.scheme.value_bits(dim) if dim else None,
            "ratio_to_16bit": elements * 2 / total if elements else 0.0,
            "workspace_bytes": max(workspaces, default=0),
            "mean": "+".join(sorted({layer["mean"] for layer in layers} - {"none"})) or "none",
            "prefill": self.options["prefill"],
            "attention": self.options["attention"],
            "unfused": self.unfused,
            "paths": dict(paths),
            "compiled": any(layer.compiled for layer in self.packed_layers),
            "keys": self.probe.report() if self.probe else {},
            "layers": layers,
            "unpacked_layers": [
                {"layer": i, "note": f"{planned.type}: {HELD_ELSEWHERE if planned.holds_state else NOTHING_HELD}"}
                for i, planned in enumerate(self.plan.layers)
                if not planned.holds_kv
            ],
        }

    def __repr__(self) -> str:
        seen = self.report()
        held = "empty"
        if seen["total_bytes"]:
            held = (
                f"{seen['batch']} x {seen['tokens']} tokens, {seen['total_bytes'] / 2**20:.2f} MiB, "
                f"{seen['effective_bits']:.2f} bits, {seen['ratio_to_16bit']:.2f}x smaller than 16-bit"
            )
        return (
            f"{type(self).__name__}({seen['spec']!r}, {len(self.layers)} layers, {held}; prefill={seen['prefill']!r}, "
            f"attention={seen['attention']!r})"
        )

    def save(self, path: str | Path) -> None:
        """Write the packed cache to one safetensors file; ``load_cache`` reads it.

        Raises
        ------
        UnsupportedError
            If the model has layers whose state is not packed (linear attention), or the cache is empty.
        """
        from packedkv.files.caches import save_layers

        if kinds := sorted({layer.type for layer in self.plan.layers if layer.holds_state}):
            raise UnsupportedError(
                f"{self.plan.name}: {', '.join(kinds)} layers hold a state that is not packed; save is not offered."
            )
        if not all(layer.filled for layer in self.packed_layers):
            raise UnsupportedError("the cache is empty: run the model with it before saving.")
        meta = {
            "integration": "transformers",
            "model": self.plan.name,
            "scheme": self.scheme.to_json(),
            "spec": str(self.scheme),
            "options": self.options,
            "layers": _described(self.plan),
            "seen": [int(layer.get_seq_length()) for layer in self.packed_layers],
        }
        save_layers(path, self.layer_caches, meta)


class EncoderDecoderKVCache(KVCache, EncoderDecoderCache):  # type: ignore[misc]
    """The packed caches of an encoder-decoder model; ``layers`` and the report have those of cross-attention last."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        own = sum(not layer.is_cross for layer in self.plan.layers)
        EncoderDecoderCache.__init__(self, Cache(layers=parts.layers[:own]), CrossCache(parts.layers[own:]))
        for half in (self.self_attention_cache, self.cross_attention_cache):
            half.layer_class_to_replicate = partial(_refuse_layer, self.plan.name, own)

    @property
    def cross_attention_cache(self) -> Cache:
        """The cross-attention's layers."""
        return self._cross

    @cross_attention_cache.setter
    def cross_attention_cache(self, given: Cache) -> None:
        if given.layers or not hasattr(self, "_cross"):
            self._cross = given

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: packed caches are cropped, selected and repeated as ``DynamicCache`` is."""


def cache_for(
    model_or_config: Any,
    spec: str | KVScheme,
    *,
    prefill: Prefill = "exact",
    attention: Attention | None = None,
    seed: int = 0,
    params: LayerParams | str | Path | None = None,
    page_tokens: int | None = None,
    max_len: int | None = None,
    probe: Probe | bool = "refuse",
) -> KVCache:
    """Make an empty packed cache for a model.

    The cache of an encoder-decoder model (Whisper) also holds K and V of the encoder's output, which are written once;
    it is an ``EncoderDecoderCache`` of transformers. Call its ``reset`` before another input.

    Parameters
    ----------
    model_or_config : PreTrainedModel or PreTrainedConfig
        Of a ``PeftModel``, ``torch.compile``, ``DataParallel``, DDP or FSDP the model inside is taken.
    spec : str or KVScheme
        E.g. ``"saw-int4"``, ``"kivi-2:window=64"``.
    prefill : {"exact", "decoded"}
        ``exact``: the call that fills the empty cache attends the fresh K and V; every later call attends what is
        stored. ``decoded``: every call attends what is stored, as papers evaluate.
    attention : {"decoded", "streamed", "fused"}, optional
        ``fused``: kernels for NVIDIA GPUs and for CPUs attend over the packed pages. ``streamed``: PyTorch reads the
        pages a chunk at a time. Both set the attention implementation ``packedkv`` on the model, which computes plain
        tensors and other caches with SDPA; ``restore_attention`` sets the former one. ``decoded``: K and V of a layer
        are dequantized for the time of its attention, which is any implementation. Default: ``fused`` if kernels serve
        every layer and the model's attention is not ``eager``, else ``decoded``; the report's ``unfused`` and the
        logger ``packedkv`` (INFO) say why.
    seed : int
        The random constants derive from it and from layer, role and head.
    params : path or mapping, optional
        Fitted constants: a file that ``packedkv fit`` wrote, or ``{layer: {"key": Params, "value": Params}}``. Without
        them codecs that need a sample are fitted on each prefill. Cross-attention layers are counted on behind the
        decoder's own. Where they are given, ``mean=auto`` subtracts the mean among them, or none.
    page_tokens : int, optional
        Tokens of a page; default 64, rounded up to whole blocks.
    max_len : int, optional
        Tokens to allocate for at once; more are refused. With ``fused`` the cache is then static: a decode step neither
        synchronizes nor allocates, so it can be captured in a CUDA graph.
    probe : {"refuse", "warn", "off"} or bool
        What to do if the codec breaks on this model's keys: on large key biases, read from the weights, or on outlier
        channels of the first prefill. ``refuse`` or True: raise, and name presets that hold; a refused prefill leaves
        the cache empty. ``warn``: warn and go on. ``off`` or False: do not check.

    Raises
    ------
    SpecError
        Unknown spec or option.
    ShapeError
        If a codec cannot take the model's head_dim.
    FormatError
        If the params file is damaged, or was fitted for another scheme, model or seed.
    FitError
        If the constants need the model's queries and no params are given, or params are given for layers or roles
        that the model does not have.
    UnsupportedError
        If the model or one of its layers cannot be served; the text names the layer and the reason.
    BrokenPresetError
        If the codec breaks on the model's key biases; see ``probe``.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> cache_for(LlamaConfig(num_hidden_layers=2), "saw-int4")
    KVCache('saw-int4', 2 layers, empty; prefill='exact', attention='decoded')
    """
    _check_option("prefill", prefill, get_args(Prefill))
    if attention is not None:
        _check_option("attention", attention, get_args(Attention))
    if max_len is not None and (not isinstance(max_len, int) or max_len < 1):
        raise SpecError(f"max_len={max_len!r}: expected a whole number of tokens, at least 1, or None.")
    options = {"prefill": prefill, "seed": seed, "page_tokens": page_tokens, "attention": attention}
    model, scheme, action = unwrapped(model_or_config), get(spec), probe_option(probe)
    parts = build(Request(model, options, params, max_len, action), scheme)
    _use_attention(model, parts)
    made = (EncoderDecoderKVCache if len(parts.plan.stacks) > 1 else KVCache)(parts)
    if made.probe is not None:
        made.probe.undo = made.reset
    return made


def _use_attention(model: Any, parts: Parts) -> None:
    """Set the attention that a cache needs on its model, and log once what serves its layers."""
    serves, used = parts.options["attention"], None
    if serves != "decoded" and isinstance(model, torch.nn.Module):
        used = use(model, decoder_config(model.config), ATTENTION_NAME)
    where = f" on {model.device}" if isinstance(model, torch.nn.Module) else ""
    text = f"{parts.plan.name}, {parts.scheme}: {serves} attention serves {len(parts.plan.kv_layers)} layers{where}"
    if used:
        text += f"; attention {used!r} is now {ATTENTION_NAME!r}, restore_attention(model) undoes it"
    _log_once(text + (f"; not fused: {parts.unfused}" if parts.unfused else ""))


@lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    logger.info(text)


def load_cache(path: str | Path, model_or_config: Any, *, attention: Attention | None = None) -> KVCache:
    """Read a cache that ``KVCache.save`` wrote.

    Parameters
    ----------
    path : str or Path
    model_or_config : PreTrainedModel or PreTrainedConfig
    attention : {"decoded", "streamed"}, optional
        Default as saved; one saved with ``fused`` is loaded with ``streamed``.

    Raises
    ------
    SpecError, UnsupportedError
        Another ``attention``, or one that the model does not run.
    FormatError
        If the file is cut, altered, foreign or newer, or does not fit the model; the text says which.
    """
    from packedkv.files.caches import load_layers

    if attention == "fused":
        raise UnsupportedError("a saved cache is not loaded into the fused path; use 'streamed' or 'decoded'.")
    if attention is not None:
        _check_option("attention", attention, ("decoded", "streamed"))
    model_or_config = unwrapped(model_or_config)
    held, meta = load_layers(path, device=getattr(model_or_config, "device", "cpu"))
    if meta.get("integration") != "transformers":
        raise FormatError(f"{path}: holds no transformers cache; load_cache reads what KVCache.save wrote.")
    try:
        options, scheme = dict(meta["options"]), from_json(meta["scheme"])
        saved, seen = meta["layers"], [int(n) for n in meta["seen"]]
        saved_attention = options.pop("attention")
        way = attention or ("streamed" if saved_attention == "fused" else saved_attention)
        # the constants come from the file, layer by layer
        fitted = {layer.site.layer: layer.site.fitted for layer in held}
        cache = cache_for(model_or_config, scheme, attention=way, params=fitted, probe="warn", **options)
    except (*BROKEN_JSON, FitError) as error:
        raise FormatError(f"{path}: its description of the cache is damaged ({error}); save it again.") from error
    try:
        _check_saved(cache.plan, held, saved, seen)
    except FormatError as error:
        raise FormatError(
            f"{path} does not fit this model: {error}. Load it with the model it was saved from."
        ) from error
    for layer, layer_cache, count in zip(cache.packed_layers, held, seen, strict=True):
        mean = layer.cache.site.mean  # which the file does not hold
        if (layer_cache.site.mean is None) != (mean is None):
            raise FormatError(
                f"{path}: the keys of layer {layer.index} were saved with mean={layer_cache.scheme.mean}, which this "
                f"model does not give; load it with the model it was saved from."
            )
        layer_cache.give_mean(mean)
        layer.cache = layer_cache
        follows = layer_cache.places_tokens and not layer.is_cross
        layer.hook = hook_of(model_or_config) if follows else None
        layer.filled = layer.is_initialized = True
        layer.dropped = count - len(layer_cache)
    if isinstance(cache, EncoderDecoderKVCache):  # the model is not to fill the cross-attention's layers again
        cache.is_updated = dict.fromkeys(cache.is_updated, True)
    return cache


def _check_saved(plan: ModelPlan, held: Sequence[LayerCache], saved: Any, seen: Sequence[int]) -> None:
    """Raise FormatError unless loaded layer caches are of a model's layers and sizes, and of one forward pass."""
    layers = plan.kv_layers
    if len(held) != len(layers):
        raise FormatError(f"the file holds {len(held)} layers, {plan.name} caches {len(layers)}")
    for cache, layer in zip(held, layers, strict=True):
        if cache.store is not None:
            site = cache.roles["key"].site
            sizes = {"KV heads": (site.num_heads, layer.heads), "head_dim": (site.head_dim, layer.head_dim)}
            for what, (came, want) in sizes.items():
                if want is not None and came != want:
                    raise FormatError(f"layer {layer.index} of the file has {came} {what}, {plan.name} has {want}")
    if saved != _described(plan):
        raise FormatError(f"its layer types differ from those of {plan.name}")
    if len(seen) != len(held):
        raise FormatError(f"it states {len(seen)} lengths for {len(held)} layers")
    lengths, batches = [len(cache) for cache in held], {cache.batch for cache in held}
    counts = list(zip(layers, seen, lengths, strict=True))
    fit = all(n >= length if layer.window else n == length for layer, n, length in counts)
    if not fit or len({n for layer, n, _ in counts if not layer.is_cross}) > 1:
        raise FormatError(f"its layers have seen {seen} tokens and hold {lengths}")
    if len(batches) > 1:
        raise FormatError(f"its layers hold {sorted(batches)} sequences")


def _described(plan: ModelPlan) -> list[dict[str, Any]]:
    # the other layers depend on transformers' version
    return [{"type": layer.type, "window": layer.window} for layer in plan.kv_layers]


def _refuse_layer(name: str, layers: int) -> Any:
    raise UnsupportedError(
        f"this cache was made for {name} with {layers} layers, and the model has more: make one with cache_for(model)."
    )


def _check_option(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SpecError(f"{name}={value!r}: expected one of {', '.join(allowed)}.{nearest(str(value), allowed)}")


def _layer_report(layer: PackedCacheLayer) -> dict[str, Any]:
    cache, note = layer.cache, "full attention"
    parts, mean = cache.nbytes(), cache.site.mean
    if layer.is_cross:
        note = "cross-attention, written once, no sink and no window"
    elif layer.window:
        note = f"{layer.kind}, window {layer.window}: the newest {layer.window - 1} tokens, no sink"
    if cache.roles:
        if mean is not None:
            note += f", keys without their mean {'before' if mean.kind == 'pre' else 'after'} RoPE ({mean.source})"
        if not cache.is_fitted:
            note += f", dense until {cache.site.fit_tokens} tokens have come"
        if cache.recent is not None:
            note += f", the newest {len(cache.recent)} tokens in {cache.scheme.recent}"
        note += "".join(f", {role} dense" for role, state in cache.roles.items() if isinstance(state.codec, Dense))
    return {
        "layer": layer.index,
        "note": note,
        "tokens": len(cache),
        "mean": "none" if mean is None else mean.kind,
        "mean_from": None if mean is None else mean.source,
        "bytes": parts,
        "total_bytes": sum(parts.values()),
        "calls": {path: count for path, count in layer.calls.items() if count},
        "kernels": cache.kernels() if isinstance(cache, FusedLayerCache) else {},
    }
