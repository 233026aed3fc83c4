"""For measurements, let a model's attention read a packed cache for the length of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from packedkv.codec import Params, Role
from packedkv.errors import UnsupportedError
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.argument import unwrapped
from packedkv.integrations.transformers.attention_hooks import implementation
from packedkv.key_bias import Probe
from packedkv.registry import get
from packedkv.scheme import KVScheme

Prefill = Literal["decoded", "exact"]


def attention_of(scheme: KVScheme) -> Literal["decoded", "streamed"]:
    """How a run reads a scheme's cache: ``streamed`` where queries are rounded inside attention, else ``decoded``."""
    return "streamed" if scheme.query_error else "decoded"


@contextmanager
def packed_cache(
    model: Any,
    spec: str | KVScheme,
    *,
    prefill: Prefill = "decoded",
    seed: int = 0,
    params: LayerParams | None = None,
    probe: Probe = "warn",
) -> Iterator[Any]:
    """Yield an empty ``KVCache``, with the model set to the attention that the scheme needs for the block."""
    with CacheMaker(model, spec, prefill=prefill, seed=seed, params=params, probe=probe).attending() as new_cache:
        yield new_cache()


def generating_cache(
    model: Any, spec: str | KVScheme, *, seed: int = 0, params: LayerParams | None = None
) -> tuple[Any, str]:
    """Make an empty ``KVCache`` to generate with; also returns the ``implementation`` of attention that reads it.

    On a CPU that is the kernels' where they serve the scheme, as ``cache_for`` does for a model that attends with
    ``packedkv``. The report's ``attention`` says which path it is, ``unfused`` why it is not the kernels'.
    """
    from packedkv.integrations.transformers.cache import cache_for  # registers the attention function
    from packedkv.integrations.transformers.plan import ATTENTION_NAME

    model, scheme = unwrapped(model), get(spec)
    given: dict[str, Any] = {"seed": seed, "params": params, "probe": "off"}
    with implementation(model, ATTENTION_NAME):
        try:
            cache = cache_for(model, scheme, **given)
            if cache.options["attention"] == "fused":
                return cache, ATTENTION_NAME
            unfused = cache.unfused
        except UnsupportedError as error:  # queries are rounded, and no kernels: streamed. Anything else comes again
            unfused = str(error)
    way = attention_of(scheme)
    name = model.config._attn_implementation if way == "decoded" else ATTENTION_NAME
    with implementation(model, name):
        cache = cache_for(model, scheme, attention=way, **given)
    cache.unfused = unfused
    return cache, name


class CacheMaker:
    """Makes empty caches of one scheme for one model, one after another; arguments are those of ``cache_for``.

    Constants that need no sample are drawn for the first cache only, and the probe watches only that one. ``remember``:
    each token is decoded once; for scores only, never for speed.
    """

    def __init__(
        self,
        model: Any,
        spec: str | KVScheme,
        *,
        prefill: Prefill = "decoded",
        seed: int = 0,
        params: LayerParams | None = None,
        remember: bool = False,
        probe: Probe = "warn",
    ) -> None:
        self.model, self.scheme, self.prefill, self.seed = unwrapped(model), get(spec), prefill, seed
        self.params, self.remember, self.probe = params, remember, probe
        self._first: Any = None
        self._drawn = False

    @contextmanager
    def attending(self) -> Iterator[Callable[[], Any]]:
        """Yield the function that makes a cache, with the model set to the attention that the scheme needs."""
        from packedkv.integrations.transformers.cache import cache_for  # registers the attention function
        from packedkv.integrations.transformers.plan import ATTENTION_NAME

        way = attention_of(self.scheme)
        name = self.model.config._attn_implementation if way == "decoded" else ATTENTION_NAME

        def new_cache() -> Any:
            self._keep_constants()
            cache = cache_for(
                self.model,
                self.scheme,
                prefill=self.prefill,
                attention=way,
                seed=self.seed,
                params=self.params,
                probe=self.probe if self._first is None and not self._drawn else "off",
            )
            for layer in cache.layer_caches:
                layer.remember = self.remember
            if not self._drawn:
                self._first = cache
            return cache

        with implementation(self.model, name):
            yield new_cache

    def _keep_constants(self) -> None:
        """Keep the constants of the first cache, once it holds tokens."""
        if self._first is None or not all(layer.filled for layer in self._first.packed_layers):
            return
        given = self.params or {}
        constants: dict[int, dict[Role, Params]] = {}
        for layer in self._first.packed_layers:
            constants[layer.index] = dict(given.get(layer.index, {}))
            for role, state in layer.cache.roles.items():
                if state.params is not None and "tensor" not in state.codec.needs:
                    constants[layer.index][role] = {**constants[layer.index].get(role, {}), **state.params}
        self.scheme = self._first.scheme  # with mean=auto decided: constants without a mean would decide it anew
        self.params, self._first, self._drawn = constants, None, True
