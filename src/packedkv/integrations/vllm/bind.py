"""Make an ``EngineLayer`` for a layer of vLLM's model: its scheme and constants."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
from packedkv.integrations.transformers.identity import load_params
from packedkv.integrations.transformers.plan import plan_for
from packedkv.integrations.vllm.engine_args import check_engine
from packedkv.integrations.vllm.fitting import check_same_model, logger
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.identity import WHOLE_BLOCKS
from packedkv.integrations.vllm.layer import EngineLayer
from packedkv.integrations.vllm.options import KEY, Options, read_options
from packedkv.integrations.vllm.servable import check_layer, group_tokens, preferred_page
from packedkv.integrations.vllm.weights import Rotaries, check_biases, decided, find_biases, means_of
from packedkv.kernels.choose import choose
from packedkv.key_bias import KeyBiases
from packedkv.registry import get
from packedkv.scheme import KVScheme, Mean, mix_of
from packedkv.store.site import MeanRemoval

KINDS: tuple[Mean, ...] = ("none", "post", "pre")

# -- layers ------------------------------------------------------------------------------------------------------------


def caching_layers(config: VllmConfig, impls: Mapping[str, Any], window: bool = False) -> list[int]:
    """Return the indices of the model's layers that cache keys and values, in order; ``window``: of sliding ones.

    vLLM has built these layers, whatever else a layer has (Falcon-H1's have a recurrent state too). A pipeline stage
    builds only its own layers, so there transformers' config names the others. ``impls``: the implementations of this
    process, by their layers' names.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        plan = plan_for(config.model_config.hf_config, "decoded")
        return [layer.index for layer in plan.kv_layers if layer.window or not window]
    own = {name: impl for name, impl in impls.items() if impl.kv_sharing_target_layer_name is None and not impl.draft}
    return sorted({extract_layer_index(name) for name, impl in own.items() if impl.rules.seen.window or not window})


def skipping(config: VllmConfig, options: Options, impls: Mapping[str, Any]) -> Options:
    """Return the options with the layers of ``--kv-cache-dtype-skip-layers`` in 16 bit, as in a recipe.

    Raises
    ------
    UnsupportedError
        The model has no layer of this name, or none is left to pack.
    """
    if not (names := config.cache_config.kv_cache_dtype_skip_layers):
        return options
    order, option = caching_layers(config, impls), "--kv-cache-dtype-skip-layers"
    by_name = {str(i): {i} for i in order} | {"sliding_window": set(caching_layers(config, impls, window=True))}
    skipped: set[int] = set()
    for name in names:
        if not by_name.get(name):
            raise UnsupportedError(
                f"packedkv: {option} {name} is no layer of this model that caches keys and values; give numbers from "
                f"{order[0]} to {order[-1]}, or sliding_window where layers have one."
            )
        skipped |= by_name[name]
    if skipped >= set(order):
        raise UnsupportedError(f"packedkv: {option} leaves no layer to pack; serve the model without packedkv.")
    scheme, dense = packed_everywhere(config, options.scheme), replace(get("dense"), mean="none")
    layers = [dense if i in skipped else scheme.for_layer(at, len(order)) for at, i in enumerate(order)]
    return replace(options, scheme=mix_of(layers, f"{scheme} without layers {', '.join(map(str, sorted(skipped)))}"))


def packed_everywhere(config: VllmConfig, scheme: KVScheme) -> KVScheme:
    """Return the scheme, without dense outer layers for a hybrid model.

    Few of a hybrid model's layers cache keys and values. A dense one would take several times the bytes, and vLLM gives
    all attention layers of the model pages of one size.
    """
    if config.model_config.is_hybrid and not scheme.layers:
        return replace(scheme, dense_key_layers=0, dense_value_layers=0)
    return scheme


# -- weights -----------------------------------------------------------------------------------------------------------


def check_weights(
    config: VllmConfig, options: Options, impls: Mapping[str, Any]
) -> tuple[dict[int, MeanRemoval], tuple[Mean, ...]]:
    """Check a preset against the model's key biases, and decide which keys are encoded without their mean.

    Returns the means of this process's heads by layer, and ``mean`` of all of the model's layers in order, which is the
    same in all processes.

    Raises
    ------
    BrokenPresetError
    UnsupportedError
        The layers do not support the mean that the spec names, or processes have constants of two files.
    FormatError
        The constants are another model's.
    """
    storing = [name for name, impl in impls.items() if impl.kv_sharing_target_layer_name is None]
    layers = {extract_layer_index(name): impls[name] for name in storing}
    order, model = caching_layers(config, impls), config.model_config
    text_config = model.hf_config.get_text_config(decoder=True)
    scheme, params, given = packed_everywhere(config, options.scheme), options.params, None
    if params is not None:
        _check_one_file(params)
        check_same_model(config, params)
        given = {index: _own_params(config, params, index, impl.num_kv_heads) for index, impl in layers.items()}
    whole = model.get_total_num_kv_heads() == model.get_num_kv_heads(config.parallel_config)
    with plain_torch():
        rotaries = Rotaries(layers, text_config.hidden_size, model.dtype, model.max_model_len, model.uses_mrope)
        biases = None
        try:
            biases = find_biases(type(model.hf_config).__name__, text_config, order, layers)
        except UnsupportedError as error:
            if options.probe != "off":
                logger.warning("packedkv: key biases are not known (%s)", error)
        if biases:
            mean = rotaries.removable(biases.layers)
            biases.removable = lambda layer: "none" if group_tokens(layer) > 1 else mean  # unfinished groups keep it
        # tensor-parallel processes must agree, and a pipeline's stage knows the biases of its own layers only
        here = [KINDS.index(mean) for mean in decided(scheme, order, biases, params)]
        agreed = [KINDS[number] for number in _largest_on_any_process(here)]
        starts = partial(_starts, config, order=order, biases=biases, rotaries=rotaries)
        if biases is not None:
            check_biases(options, biases, params if whole else None, starts)
        if biases and params is None:
            logger.info("packedkv: %s", biases.summary(scheme, agreed))
        kinds = dict(zip(order, agreed, strict=True))
        return means_of(scheme, kinds, biases, given, rotaries, starts), tuple(agreed)


def _starts(config: VllmConfig, spec: str, *, order: list[int], biases: KeyBiases | None, rotaries: Rotaries) -> bool:
    """Whether the engine would start with another spec in place of its preset, and the spec holds on these weights."""
    given = (config.additional_config or {}).get(KEY, {})
    with suppress(KVError):
        options = read_options({KEY: {"preset": spec, **{name: 0 for name in ("window", "sink") if name in given}}})
        assert options is not None
        check_engine(config, options)
        scheme = packed_everywhere(config, options.scheme)
        kinds = dict(zip(order, decided(scheme, order, biases, None), strict=True))
        page = config.cache_config.block_size if config.cache_config.user_specified_block_size else None
        for index, impl in rotaries.impls.items():
            layer = replace(scheme.for_layer(order.index(index), len(order)), mean=kinds[index])
            check_layer(layer, impl.head_size, page)
            device = next(impl.modules[0].parameters()).device
            if device.type != "cpu":
                tokens = page or preferred_page(layer)
                key, value = (layer.codec(role).for_dtype(config.model_config.dtype) for role in ROLES)
                choose(replace(layer, key=key, value=value), impl.head_size, device, tokens, static=True)
        means_of(scheme, kinds, biases, None, rotaries)
        worst = biases.worst(scheme) if biases else None
        return worst is None or not worst.broken
    return False


def _largest_on_any_process(numbers: list[int]) -> list[int]:
    """Element-wise maximum over all processes."""
    found = torch.tensor(numbers)
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return found.tolist()


def _check_one_file(params: FittedParams) -> None:
    """Raise if processes read different files of constants: on several hosts each has its own."""
    number = int(params.sha256[:15], 16)
    largest, other = _largest_on_any_process([number, -number])
    if largest != -other:
        raise UnsupportedError(
            f"packedkv: {params.file} is not the same file on all hosts of this server; copy one of them to the "
            f'same place on all, and give {{"params": FILE}}.'
        )


def _own_params(config: VllmConfig, params: FittedParams, index: int, heads: int) -> dict[Role, Params]:
    """Constants of this process's heads of a layer: slices along the head axis, the second of three or more."""
    total, first = config.model_config.get_total_num_kv_heads(), _first_head(config, heads)
    return {
        role: {n: x[:, first : first + heads] if x.dim() > 2 and x.shape[1] == total else x for n, x in given.items()}
        for role, given in params.get(index, {}).items()
    }


def _first_head(config: VllmConfig, heads: int) -> int:
    """The model's number of the first of this process's ``heads`` KV heads."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    # with fewer heads than processes, several processes have the same head
    return rank // max(1, size // config.model_config.get_total_num_kv_heads()) * heads


# -- binding -----------------------------------------------------------------------------------------------------------


def bind(impl: Any, name: str, layer: Any, dtype: torch.dtype, order: list[int]) -> EngineLayer:
    """Make the layer, with its scheme (by layer index) and constants (by head number).

    ``impl`` is the ``PackedImpl`` of vLLM's ``Attention`` layer, ``dtype`` that of keys and values, and ``order`` the
    ``caching_layers``, empty for a draft model's layer.

    Raises
    ------
    UnsupportedError
        The layer cannot be served; the text says why.
    """
    config, options, heads, head_dim = impl.config, impl.options, impl.num_kv_heads, impl.head_size
    index = extract_layer_index(name)
    where = f"packedkv, layer {index}"
    scheme, fitted, mean = options.draft.for_layer(0, 1), None, None
    if order:
        scheme = packed_everywhere(config, options.scheme).for_layer(order.index(index), len(order))
        fitted, mean = options.params, impl.means.get(index)
    dense = all(isinstance(scheme.codec(role), Dense) for role in ROLES)
    scheme = replace(scheme, mean="none" if mean is None else mean.kind, sink=0 if dense else scheme.sink)
    check_layer(scheme, head_dim, fitted=fitted is not None, where=where)
    if getattr(layer, "head_size_v", head_dim) != head_dim:
        raise UnsupportedError(f"{where}: keys and values have different head sizes; not served.")
    params = None
    if fitted is not None:
        load_params(fitted, config.model_config.hf_config, fitted.scheme, seed=options.seed)
        params = {} if dense else _own_params(config, fitted, index, heads)
    device = layer._k_scale.device  # these scales of vLLM's own caches are on the layer's device
    make: Any = EngineLayer
    if (unit := group_tokens(scheme)) > 1:
        transfer = config.kv_transfer_config
        if transfer is not None and transfer.kv_connector not in WHOLE_BLOCKS:
            raise UnsupportedError(
                f"{where}: {scheme} encodes {unit} tokens together, so pages can be handed over in whole blocks only, "
                f"and {transfer.kv_connector} is not known to do so; use one of {', '.join(WHOLE_BLOCKS)}."
            )
        # pipeline stages alternate between batches: each batch needs its own slots
        slots = config.scheduler_config.max_num_seqs * config.parallel_config.pipeline_parallel_size
        make = partial(GroupedLayer, slots=slots, halves=1 if config.speculative_config is None else 2)
    with plain_torch():
        made: EngineLayer = make(
            scheme,
            layer=index,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            first_head=_first_head(config, heads),
            seed=options.seed,
            params=params,
            mean=mean,
        )
        if device.type == "cpu":  # this computes constants of the kernels as well
            made.find_kernels(preferred_page(scheme))
    return made


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute constants in float32 on the CPU: while vLLM loads a model, the default dtype is the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
