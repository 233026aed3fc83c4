"""Bind the attention layers of vLLM's model: decide their schemes and constants, and give each an ``EngineLayer``.

A layer is bound when its weights are loaded: only then are its name, and so its index, scheme and constants, known.
"""

from collections import Counter
from collections.abc import Iterator
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
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf

from packedkv.codec import ROLES, Dense, Params, Role
from packedkv.errors import KVError, UnsupportedError
from packedkv.files.params import FittedParams
from packedkv.integrations.transformers.plan import load_params, plan_for
from packedkv.integrations.vllm.engine_args import check_engine
from packedkv.integrations.vllm.fitting import check_same_model
from packedkv.integrations.vllm.flash import flash_for
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.identity import WHOLE_BLOCKS, digest_of
from packedkv.integrations.vllm.layer import EngineLayer
from packedkv.integrations.vllm.options import KEY, Options, read_options
from packedkv.integrations.vllm.servable import check_layer, check_page, group_tokens, page_step, preferred_page
from packedkv.integrations.vllm.weights import Rotaries, check_biases, decided, find_biases, means_of
from packedkv.kernels.choose import choose
from packedkv.key_bias import KeyBiases
from packedkv.registry import get
from packedkv.scheme import KVScheme, Mean, mix_of
from packedkv.store.pages import rows_bytes
from packedkv.store.site import MeanRemoval

logger = init_logger("vllm.packedkv")
KINDS: tuple[Mean, ...] = ("none", "post", "pre")


def impls_of(config: VllmConfig, kind: type) -> dict[str, Any]:
    """Return the attention implementations of this class and process, by their layers' names."""
    layers = config.compilation_config.static_forward_context
    impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {name: impl for name, impl in impls.items() if isinstance(impl, kind)}


class ServedModel:
    """State that the layers of a model share in a process: options, means of keys, and the backend classes.

    The implementation of a draft model's layer has its own ``config``. ``backend``: ``PackedBackend``.
    """

    def __init__(self, config: VllmConfig, options: Options, backend: type[Any]) -> None:
        self.config, self.options, self.backend = config, options, backend
        self.means: dict[int, MeanRemoval] = {}
        self.kinds: tuple[Mean, ...] = ()
        self.backends: dict[tuple[str, int, int, int], type[Any]] = {}
        self.backend_name = ""
        self.stopped = ""
        """Why the engine runs no further step."""

    def impls(self) -> dict[str, Any]:
        """Return the implementations of the model's layers, without a draft model's."""
        impls = impls_of(self.config, self.backend.get_impl_cls())
        return {name: impl for name, impl in impls.items() if not impl.draft}

    # -- layers --------------------------------------------------------------------------------------------------------

    def caching_layers(self, window: bool = False) -> list[int]:
        """Return the indices of the model's layers that cache keys and values, in order; ``window``: of sliding ones.

        vLLM has built these layers, whatever else a layer has (Falcon-H1's have a recurrent state too). A pipeline
        stage builds only its own layers, so there transformers' config names the others.
        """
        if self.config.parallel_config.pipeline_parallel_size > 1:
            plan = plan_for(self.config.model_config.hf_config, "decoded")
            return [layer.index for layer in plan.kv_layers if layer.window or not window]
        impls = {name: impl for name, impl in self.impls().items() if impl.kv_sharing_target_layer_name is None}
        windows = {name: impl.rules.seen.window for name, impl in impls.items()}
        return sorted({extract_layer_index(name) for name, tokens in windows.items() if tokens or not window})

    def skipping(self, options: Options) -> Options:
        """Return the options with the layers of ``--kv-cache-dtype-skip-layers`` in 16 bit, as in a recipe."""
        if not (names := self.config.cache_config.kv_cache_dtype_skip_layers):
            return options
        order, option = self.caching_layers(), "--kv-cache-dtype-skip-layers"
        by_name = {str(i): {i} for i in order} | {"sliding_window": set(self.caching_layers(window=True))}
        skipped: set[int] = set()
        for name in names:
            if not by_name.get(name):
                raise UnsupportedError(
                    f"packedkv: {option} {name} is no layer of this model that caches keys and values; give numbers "
                    f"from {order[0]} to {order[-1]}, or sliding_window where layers have one."
                )
            skipped |= by_name[name]
        if skipped >= set(order):
            raise UnsupportedError(f"packedkv: {option} leaves no layer to pack; serve the model without packedkv.")
        scheme, dense = self.packed_everywhere(options.scheme), replace(get("dense"), mean="none")
        layers = [dense if i in skipped else scheme.for_layer(at, len(order)) for at, i in enumerate(order)]
        without = ", ".join(map(str, sorted(skipped)))
        logger.info("packedkv: --kv-cache-dtype-skip-layers keeps layers in 16 bit: %s", ", ".join(names))
        return replace(options, scheme=mix_of(layers, f"{scheme} without layers {without}"))

    def packed_everywhere(self, scheme: KVScheme) -> KVScheme:
        """Return the scheme, without dense outer layers for a hybrid model.

        Few of a hybrid model's layers cache keys and values. A dense one would take several times the bytes, and vLLM
        gives all attention layers of the model pages of one size.
        """
        if self.config.model_config.is_hybrid and not scheme.layers:
            return replace(scheme, dense_key_layers=0, dense_value_layers=0)
        return scheme

    # -- weights -------------------------------------------------------------------------------------------------------

    def check_weights(self, again: bool) -> None:
        """Check the preset against the model's key biases, and decide which keys are encoded without their mean.

        ``again``: new weights have replaced others in a running engine.
        """
        options = self.options if again else self.skipping(self.options)
        means, kinds = self._means(options)
        for (kind, source), count in Counter((mean.kind, mean.source) for mean in means.values()).items():
            side = "before" if kind == "pre" else "after"
            logger.info(
                "packedkv: %d layers hold keys without their mean %s RoPE, which the %s give", count, side, source
            )
        if again:
            logger.info("packedkv: the weights were replaced; means of keys are those of the new weights")
            if kinds != self.kinds:
                logger.warning(
                    "packedkv: other layers than before hold keys without their mean; reset the prefix cache"
                )
            if options.params is not None:
                logger.warning("packedkv: the constants of %s were fitted to other weights", options.params.file)
        self.options, self.means, self.kinds = options, means, kinds

    def _means(self, options: Options) -> tuple[dict[int, MeanRemoval], tuple[Mean, ...]]:
        """Return the means of this process's heads by layer, and ``mean`` of all of the model's layers in order.

        The second is the same in all processes.
        """
        impls, model, order = self.impls(), self.config.model_config, self.caching_layers()
        layers = {extract_layer_index(n): impl for n, impl in impls.items() if not impl.kv_sharing_target_layer_name}
        text_config = model.hf_config.get_text_config(decoder=True)
        scheme, params, given = self.packed_everywhere(options.scheme), options.params, None
        if params is not None:
            _check_one_file(params)
            check_same_model(self.config, params)
            given = {index: self._params_shard(params, index, impl.num_kv_heads) for index, impl in layers.items()}
        whole = model.get_total_num_kv_heads() == model.get_num_kv_heads(self.config.parallel_config)
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
                # unfinished groups keep their mean
                biases.removable = lambda layer: "none" if group_tokens(layer) > 1 else mean
            # tensor-parallel processes must agree, and a pipeline's stage knows the biases of its own layers only
            here = [KINDS.index(mean) for mean in decided(scheme, order, biases, params)]
            kinds = {index: KINDS[number] for index, number in zip(order, _largest_on_any_process(here), strict=True)}
            starts = partial(self._starts, biases=biases, rotaries=rotaries)
            if biases is not None:
                check_biases(options, biases, params if whole else None, starts)
            if biases and params is None:
                logger.info("packedkv: %s", biases.summary(scheme, [*kinds.values()]))
            return means_of(scheme, kinds, biases, given, rotaries, starts), tuple(kinds.values())

    def _starts(self, spec: str, *, biases: KeyBiases | None, rotaries: Rotaries) -> bool:
        """Whether the engine would start with another spec in place of its preset, and it holds on these weights."""
        config, order = self.config, self.caching_layers()
        given = (config.additional_config or {}).get(KEY, {})
        with suppress(KVError):
            options = read_options({KEY: {"preset": spec, **{name: 0 for name in ("window", "sink") if name in given}}})
            assert options is not None
            check_engine(config, options)
            scheme = self.packed_everywhere(options.scheme)
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

    def _params_shard(self, params: FittedParams, index: int, heads: int) -> dict[Role, Params]:
        """Constants of this process's heads of a layer: slices along the head axis, the second of three or more."""
        total, first = self.config.model_config.get_total_num_kv_heads(), _first_head(self.config, heads)
        shard = slice(first, first + heads)
        return {
            role: {name: x[:, shard] if x.dim() > 2 and x.shape[1] == total else x for name, x in given.items()}
            for role, given in params.get(index, {}).items()
        }

    # -- binding -------------------------------------------------------------------------------------------------------

    def bind(self, impl: Any, dtype: torch.dtype) -> None:
        """Bind a layer, or bind it to new weights: set ``packed``, ``digest`` and the backend of its vLLM layer.

        ``dtype``: of keys and values. After an error with new weights the engine runs no further step.
        """
        again = any(one.shared is not None for one in impls_of(self.config, type(impl)).values())
        try:
            self._bind(impl, dtype, again)
        except Exception as error:
            if again:
                self.stopped = f"packedkv: the weights were replaced, and they cannot be served: {error}"
            raise

    def _bind(self, impl: Any, dtype: torch.dtype, again: bool) -> None:
        layers = self.config.compilation_config.static_forward_context
        name = next(n for n, layer in layers.items() if getattr(layer, "impl", None) is impl)
        layer, target = layers[name], impl.kv_sharing_target_layer_name
        if next(iter(self.impls().values())) is impl:  # the first layer decides for all
            self.check_weights(again)
        if target is not None:
            if isinstance(layers[target].impl.packed, GroupedLayer):
                raise UnsupportedError(
                    f"packedkv: {name} reads another layer's cache, but not the tokens of its unfinished groups; serve "
                    "the model with a preset that encodes each token alone, such as saw-int4."
                )
            impl.packed = None  # ``step.bound_layer`` returns the earlier layer, whose pages this one reads
            return
        if not layer.attn_backend.__module__.startswith("packedkv."):
            # a class derived by vLLM, which passes other block tables
            raise UnsupportedError(
                f"packedkv: {name} is attention of a kind of its own ({layer.attn_backend.__name__}), which is not "
                "served from packed pages; serve the model without packedkv in --additional-config."
            )
        digest = digest_of(self.options, impl.head_size, dtype, () if impl.draft else self.kinds)
        if again and digest != impl.digest:
            self._check_running()
        index = extract_layer_index(name)
        mean = None if impl.draft else self.means.get(index)
        if impl.packed is None or not impl.packed.renew(mean):
            if again:
                self._check_running()
            impl.packed = self._layer(impl, index, mean, dtype, layer)
        impl.digest, self.backend_name = digest, self.backend_name or layer.attn_backend.get_name()
        layer.attn_backend = self._backend(impl.packed, digest)

    def _check_running(self) -> None:
        """Raise if other servers or captured graphs depend on what the bytes of the pages mean."""
        who = ""
        if self.config.kv_transfer_config is not None:
            who = "a KV connector has announced"
        elif self.config.compilation_config.cudagraph_mode.has_full_cudagraphs() and not current_platform.is_cpu():
            who = "CUDA graphs have captured"
        if who:
            raise UnsupportedError(
                f"packedkv: with the new weights {self.options.scheme} removes other means from keys than {who}; start "
                "the server anew with these weights."
            )

    def _layer(self, impl: Any, index: int, mean: MeanRemoval | None, dtype: torch.dtype, layer: Any) -> EngineLayer:
        config, options, heads, head_dim = impl.config, self.options, impl.num_kv_heads, impl.head_size
        where = f"packedkv, layer {index}"
        scheme, fitted = options.draft.for_layer(0, 1), None
        if not impl.draft:
            order, fitted = self.caching_layers(), options.params
            scheme = self.packed_everywhere(options.scheme).for_layer(order.index(index), len(order))
        dense = all(isinstance(scheme.codec(role), Dense) for role in ROLES)
        scheme = replace(scheme, mean="none" if mean is None else mean.kind, sink=0 if dense else scheme.sink)
        check_layer(scheme, head_dim, fitted=fitted is not None, where=where)
        if getattr(layer, "head_size_v", head_dim) != head_dim:
            raise UnsupportedError(f"{where}: keys and values have different head sizes; not served.")
        params = None
        if fitted is not None:
            load_params(fitted, config.model_config.hf_config, fitted.scheme, seed=options.seed)
            params = {} if dense else self._params_shard(fitted, index, heads)
        device = layer._k_scale.device  # these scales of vLLM's own caches are on the layer's device
        make: Any = EngineLayer
        if (unit := group_tokens(scheme)) > 1:
            transfer = config.kv_transfer_config
            if transfer is not None and transfer.kv_connector not in WHOLE_BLOCKS:
                raise UnsupportedError(
                    f"{where}: {scheme} encodes {unit} tokens together, so pages can be handed over in whole blocks "
                    f"only, and {transfer.kv_connector} is not known to do so; use one of {', '.join(WHOLE_BLOCKS)}."
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
        if config.cache_config.user_specified_block_size:
            check_page(scheme, config.cache_config.block_size)
        if device.type != "cpu":
            made.flash = flash_for(head_dim, impl.rules.seen.softcap > 0)
            made.find_kernels(preferred_page(scheme))  # raises before memory is allocated
        return made

    def _backend(self, packed: EngineLayer, digest: str) -> type[Any]:
        """Return the backend of layers whose tokens take as many bytes as this one's."""
        step, unit = page_step(packed.scheme), group_tokens(packed.scheme)
        token_bytes, sink_bytes = packed.layout(step).page_bytes // step, rows_bytes(packed.sink, packed.head_dim)
        if (key := (digest, token_bytes, sink_bytes, unit)) not in self.backends:
            # engines may differ in block size, which cache_config knows before vLLM asks for the name
            name, cache_config = f"{self.backend_name}-{digest}", self.config.cache_config
            members = {
                "token_bytes": token_bytes,
                "sink_bytes": sink_bytes,
                "forward_includes_kv_cache_update": unit > 1,
                "get_name": staticmethod(lambda: f"{name}-{cache_config.block_size}"),
                "get_supported_kernel_block_sizes": staticmethod(lambda kv_cache_spec=None: [MultipleOf(step)]),
                "__doc__": self.backend.__doc__,
                "__module__": self.backend.__module__,
            }
            # vLLM distinguishes backends by class name
            label = f"PackedBackend{token_bytes}x{unit}" + f"and{sink_bytes}" * (sink_bytes > 0)
            self.backends[key] = type(label, (self.backend,), members)
        return self.backends[key]


def _largest_on_any_process(numbers: list[int]) -> list[int]:
    largest = torch.tensor(numbers)
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return largest.tolist()


def _check_one_file(params: FittedParams) -> None:
    """Raise if processes read different files of constants: on several hosts each has its own."""
    number = int(params.sha256[:15], 16)
    largest, other = _largest_on_any_process([number, -number])
    if largest != -other:
        raise UnsupportedError(
            f"packedkv: {params.file} is not the same file on all hosts of this server; copy one of them to the "
            f'same place on all, and give {{"params": FILE}}.'
        )


def _first_head(config: VllmConfig, heads: int) -> int:
    """The model's number of the first of this process's ``heads`` KV heads."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    # with fewer heads than processes, several processes have the same head
    return rank // max(1, size // config.model_config.get_total_num_kv_heads()) * heads


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
