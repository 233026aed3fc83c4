"""Make an ``EngineLayer`` for a layer of vLLM's model: its scheme and constants."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
)
from vllm.model_executor.models.utils import extract_layer_index

from packedkv.codec import ROLES, Dense, Params, Role
from packedkv.errors import KVError, UnsupportedError
from packedkv.files.params import FittedParams
from packedkv.integrations.transformers.identity import check_params
from packedkv.integrations.transformers.plan import plan_for
from packedkv.integrations.vllm.biases import check_biases, find_biases, logger
from packedkv.integrations.vllm.engine_args import check_engine
from packedkv.integrations.vllm.fitting import check_same_model
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.identity import WHOLE_BLOCKS
from packedkv.integrations.vllm.layer import EngineLayer
from packedkv.integrations.vllm.means import KINDS, Rotaries, decided, means_of
from packedkv.integrations.vllm.options import KEY, Options, read_options
from packedkv.integrations.vllm.servable import group_tokens, preferred_page, refusal
from packedkv.kernels.choose import choose
from packedkv.key_bias import KeyBiases
from packedkv.registry import get
from packedkv.scheme import KVScheme, Mean, mix_of
from packedkv.store.site import MeanRemoval


def caching_layers(config: VllmConfig, impls: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the model's layers that cache keys and values, in order.

    They are those that vLLM built, whatever else a layer holds (Falcon-H1's have a recurrent state as well). A pipeline
    stage builds only its own, so there transformers' config says which the others are.

    Parameters
    ----------
    config
        Of the engine.
    impls : mapping
        The implementations of this process, by their layers' names.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        return [layer.index for layer in plan_for(config.model_config.hf_config, "decoded").kv_layers]
    return sorted(
        {
            extract_layer_index(name)
            for name, impl in impls.items()
            if impl.kv_sharing_target_layer_name is None and not impl.draft
        }
    )


def check_weights(
    config: VllmConfig, options: Options, impls: Mapping[str, Any]
) -> tuple[list[str], dict[int, MeanRemoval], tuple[Mean, ...]]:
    """Check a preset against the model's key biases; return messages to log, and what keys are held without.

    That is, by layer, the means of this process's heads; and of all of the model's layers in order the kind of mean,
    which is the same in all processes.

    Parameters
    ----------
    config, options, impls
        As ``caching_layers``; what the engine says of packedkv.

    Raises
    ------
    BrokenPresetError
    UnsupportedError
        The layers cannot hold keys without the mean that is asked for, or processes have constants of two files.
    FormatError
        The constants are another model's.
    """
    own = {extract_layer_index(name): impl for name, impl in impls.items() if impl.kv_sharing_target_layer_name is None}
    order = caching_layers(config, impls)
    model = config.model_config
    whole = model.get_total_num_kv_heads() == model.get_num_kv_heads(config.parallel_config)
    text_config = model.hf_config.get_text_config(decoder=True)
    scheme, params = packed_everywhere(config, options.scheme), options.params
    if params is not None:
        _check_one_file(params)
        check_same_model(config, params)
    with _plain_torch():
        found = find_biases(type(model.hf_config).__name__, text_config, order, own)
        biases = None if isinstance(found, str) else found
        rotaries = Rotaries(own, text_config.hidden_size, model.dtype, model.max_model_len, model.uses_mrope)
        if biases:
            mean = rotaries.removable(biases.layers)
            biases.removable = lambda layer: "none" if group_tokens(layer) > 1 else mean  # unfinished groups keep it
        agreed = _same_on_all_processes(decided(scheme, order, biases, params))
        starts = partial(_starts, config, order=order, impls=own, biases=biases, rotaries=rotaries)
        told = check_biases(options, found, params if whole else None, starts)
        if biases and params is None:
            logger.info("packedkv: %s", biases.summary(scheme, agreed))
        given = None if params is None else {i: _own_params(config, params, i, impl) for i, impl in own.items()}
        kinds = dict(zip(order, agreed, strict=True))
        return told, means_of(scheme, kinds, own, biases, given, rotaries, _asked(scheme, order), starts), tuple(agreed)


def _asked(scheme: KVScheme, order: list[int]) -> frozenset[int]:
    """The layers whose mean the spec names."""
    return frozenset(i for at, i in enumerate(order) if scheme.for_layer(at, len(order)).mean in ("pre", "post"))


def _starts(
    config: VllmConfig,
    spec: str,
    *,
    order: list[int],
    impls: Mapping[int, Any],
    biases: KeyBiases | None,
    rotaries: Rotaries,
) -> bool:
    """Whether the engine would start with another spec in place of its preset, and the spec holds on these weights."""
    given = (config.additional_config or {}).get(KEY, {})
    try:
        options = read_options({KEY: {"preset": spec, **{name: 0 for name in ("window", "sink") if name in given}}})
        assert options is not None
        check_engine(config, options)
        scheme = packed_everywhere(config, options.scheme)
        kinds = dict(zip(order, decided(scheme, order, biases, None), strict=True))
        page = config.cache_config.block_size if config.cache_config.user_specified_block_size else None
        for index, impl in impls.items():
            layer = replace(scheme.for_layer(order.index(index), len(order)), mean=kinds[index])
            if refusal(layer, impl.head_size, page):
                return False
            device = next(impl.around.modules[0].parameters()).device
            if device.type != "cpu":
                tokens = page or preferred_page(layer)
                key, value = (layer.codec(role).for_dtype(config.model_config.dtype) for role in ROLES)
                choose(replace(layer, key=key, value=value), impl.head_size, device, tokens, static=True)
        means_of(scheme, kinds, impls, biases, None, rotaries, _asked(scheme, order))
        worst = biases.worst(scheme) if biases else None
    except KVError:
        return False
    return worst is None or not worst.broken


def _same_on_all_processes(means: list[Mean]) -> list[Mean]:
    """Make all tensor-parallel processes decide alike: a layer has a mean if it has one in any of them.

    A pipeline's stage knows the biases of its own layers only.
    """
    return [KINDS[number] for number in _largest_on_any_process([KINDS.index(mean) for mean in means])]


def _largest_on_any_process(numbers: list[int]) -> list[int]:
    """Element-wise maximum over all processes."""
    found = torch.tensor(numbers)
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return found.tolist()


def _check_one_file(params: FittedParams) -> None:
    """Raise if processes read different files of constants: on several hosts each has its own."""
    own = int(params.sha256[:15], 16)
    largest, other = _largest_on_any_process([own, -own])
    if largest != -other:
        raise UnsupportedError(
            f"packedkv: {params.file} is not the same file on all hosts of this server; copy one of them to the "
            f'same place on all, and give {{"params": FILE}}.'
        )


def _own_params(config: VllmConfig, params: FittedParams, index: int, impl: Any) -> dict[Role, Params]:
    """Constants of a layer's heads that this process holds."""
    first, total = _first_head(config, impl.num_kv_heads), config.model_config.get_total_num_kv_heads()
    return {role: _own_heads(own, first, impl.num_kv_heads, total) for role, own in params.get(index, {}).items()}


def _first_head(config: VllmConfig, heads: int) -> int:
    """The model's number of the first of the ``heads`` KV heads that this process holds."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    # with fewer heads than processes, several processes hold the same head
    return rank // max(1, size // config.model_config.get_total_num_kv_heads()) * heads


def skipping(config: VllmConfig, options: Options, impls: Mapping[str, Any]) -> Options:
    """Return the options with layers of ``--kv-cache-dtype-skip-layers`` in 16 bit, as a recipe has them.

    Parameters
    ----------
    config, options, impls
        As ``caching_layers``.

    Raises
    ------
    UnsupportedError
        A name is of no layer, or none is left to pack.
    """
    if not (names := config.cache_config.kv_cache_dtype_skip_layers):
        return options
    order, option = caching_layers(config, impls), "--kv-cache-dtype-skip-layers"
    sliding = {extract_layer_index(name) for name, impl in impls.items() if impl.rules.window and not impl.draft}
    if config.parallel_config.pipeline_parallel_size > 1:  # other stages' too
        sliding = {own.index for own in plan_for(config.model_config.hf_config, "decoded").kv_layers if own.window}
    skipped: set[int] = set()
    for name in names:
        found = {i for i in order if str(i) == name or (name == "sliding_window" and i in sliding)}
        if not found:
            raise UnsupportedError(
                f"packedkv: {option} {name} is no layer of this model that caches keys and values; give numbers from "
                f"{order[0]} to {order[-1]}, or sliding_window where layers have one."
            )
        skipped |= found
    if skipped >= set(order):
        raise UnsupportedError(f"packedkv: {option} leaves no layer to pack; serve the model without packedkv.")
    own, dense = packed_everywhere(config, options.scheme), replace(get("dense"), mean="none")
    layers = [dense if i in skipped else own.for_layer(at, len(order)) for at, i in enumerate(order)]
    return replace(options, scheme=mix_of(layers, f"{own} without layers {', '.join(map(str, sorted(skipped)))}"))


def packed_everywhere(config: VllmConfig, scheme: KVScheme) -> KVScheme:
    """Return the scheme, without dense outer layers for a hybrid model.

    Few of its layers cache keys and values: a dense one would take several times the bytes, and vLLM gives all its
    attention layers pages of one size.
    """
    if config.model_config.is_hybrid and not scheme.layers:
        return replace(scheme, dense_key_layers=0, dense_value_layers=0)
    return scheme


def bind(
    config: VllmConfig,
    options: Options,
    heads: int,
    head_dim: int,
    name: str,
    layer: Any,
    dtype: torch.dtype,
    layers: list[int],
    means: Mapping[int, MeanRemoval],
) -> EngineLayer:
    """Return the layer, with its scheme (by layer number) and constants (by head number).

    Parameters
    ----------
    config, options
        Of the engine, and what it says of packedkv.
    heads, head_dim : int
        KV heads of this process.
    name : str
        The layer's.
    layer
        vLLM's ``Attention``.
    dtype : torch.dtype
        Of the model's keys and values.
    layers : list of int
        ``caching_layers``; empty for a draft model's layer.
    means : mapping
        Of ``check_weights``.

    Raises
    ------
    UnsupportedError
        The layer cannot be served; the text says why.
    """
    parallel = config.parallel_config
    hf_config = config.model_config.hf_config
    index = extract_layer_index(name)
    drafts = not layers
    fitted, mean = (None, None) if drafts else (options.params, means.get(index))
    if drafts:
        scheme = options.draft.for_layer(0, 1)
    else:
        scheme = packed_everywhere(config, options.scheme).for_layer(layers.index(index), len(layers))
    dense = all(isinstance(scheme.codec(role), Dense) for role in ROLES)
    scheme = replace(scheme, mean="none" if mean is None else mean.kind, sink=0 if dense else scheme.sink)
    if why := refusal(scheme, head_dim, fitted=fitted is not None):
        raise UnsupportedError(f"packedkv, layer {index}: {why}")
    if getattr(layer, "head_size_v", head_dim) != head_dim:
        raise UnsupportedError(f"packedkv, layer {index}: keys and values have different head sizes; not served.")
    total, first_head = config.model_config.get_total_num_kv_heads(), _first_head(config, heads)
    params = None
    if fitted is not None:
        check_params(fitted, hf_config, fitted.scheme, seed=options.seed)
        held = {} if dense else fitted.get(index, {})
        params = {role: _own_heads(p, first_head, heads, total) for role, p in held.items()}
    device = layer._k_scale.device  # these scales of vLLM's own caches are on the layer's device
    grouped = group_tokens(scheme) > 1
    transfer = config.kv_transfer_config
    if grouped and transfer is not None and transfer.kv_connector not in WHOLE_BLOCKS:
        raise UnsupportedError(
            f"packedkv, layer {index}: {scheme} encodes {group_tokens(scheme)} tokens together, so pages can be handed "
            f"over in whole blocks only, and {transfer.kv_connector} is not known to do so; use one of "
            f"{', '.join(WHOLE_BLOCKS)}."
        )
    # pipeline stages alternate between batches: each batch needs its own slots
    slots = config.scheduler_config.max_num_seqs * parallel.pipeline_parallel_size
    with _plain_torch():
        halves = 1 if config.speculative_config is None else 2
        made = (partial(GroupedLayer, slots=slots, halves=halves) if grouped else EngineLayer)(
            scheme,
            layer=index,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            first_head=first_head,
            seed=options.seed,
            params=params,
            mean=mean,
        )
        if device.type == "cpu":  # constants of the kernels are made here as well
            made.find_kernels(preferred_page(scheme))
    return made


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Draw constants in float32 on the CPU: while vLLM loads a model, the default dtype is the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _own_heads(params: Params, first: int, heads: int, total: int) -> Params:
    """Constants of some heads: sliced along the head axis, the second of three or more."""
    cut = slice(first, first + heads)
    return {name: x[:, cut] if x.dim() > 2 and x.shape[1] == total else x for name, x in params.items()}
