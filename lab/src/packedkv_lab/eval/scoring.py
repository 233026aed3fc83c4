"""Output of a model under a scheme, through the compressed cache: greedy answers, and scores of teacher-forced windows.

With ``prefill="exact"`` no score comes from the call that fills an empty cache. Nothing is padded, because
token-grouped codecs would mix padding into groups. ``Reader(model, None)`` is the uncompressed model.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packedkv.cli.measure.caches import CacheMaker, Prefill
from packedkv.cli.measure.generation import uncompressed_cache
from packedkv.cli.measure.perplexity import EXACT_CALL_TOKENS, Reference, TokenScores
from packedkv.cli.measure.quantized_cache import QuantizedCacheMaker, QuantizedCacheSpec, quantized_cache_of
from packedkv.cli.page.rows import UNCOMPRESSED
from packedkv.errors import ModelError
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.argument import passing
from packedkv.models.windows import positions_of
from packedkv.scheme import KVScheme


@dataclass(frozen=True)
class Content:
    """Content of one sequence's cache when it was read: bytes, and the elements of K and V that they encode."""

    nbytes: int
    elements: int


class Reader:
    """One scheme on one model; a ``spec`` of None is the uncompressed model, with 16 bits an element."""

    def __init__(
        self,
        model: Any,
        spec: str | KVScheme | QuantizedCacheSpec | None,
        *,
        prefill: Prefill = "decoded",
        seed: int = 0,
        params: LayerParams | None = None,
    ) -> None:
        self.model, self.prefill = model, prefill
        self.maker: CacheMaker | QuantizedCacheMaker | None = None
        if (quantized := quantized_cache_of(spec)) is not None:
            self.maker = QuantizedCacheMaker(model, quantized, prefill=prefill)
        elif spec is not None:
            self.maker = CacheMaker(model, spec, prefill=prefill, seed=seed, params=params, remember=True)  # type: ignore[arg-type]
        self.name = UNCOMPRESSED if self.maker is None else str(self.maker.scheme)
        self.notes: list[str] = []
        self.positions = positions_of(model.config)
        self._new_cache: Callable[[], Any] | None = None
        self._few_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Set the attention that the scheme needs for the block; collect warnings in ``notes``, each once."""
        dense = nullcontext(lambda: uncompressed_cache(self.model))
        with (
            torch.no_grad(),
            warnings.catch_warnings(record=True) as caught,
            dense if self.maker is None else self.maker.attending() as self._new_cache,
        ):
            warnings.simplefilter("always")
            try:
                yield
            finally:
                self._new_cache = None
                said = (str(w.message) for w in caught)
                self.notes = list(dict.fromkeys([*self.notes, *said]))

    def answers(
        self, prompts: Tensor, new_tokens: int, finished: Callable[[list[int]], bool]
    ) -> tuple[list[list[int]], Content]:
        """Continue ``prompts [B, n]`` greedily by at most ``new_tokens``, until every one is ``finished``.

        The bytes are those held when the prompt was read: what the answer is found in.
        """
        cache = self._cache()
        ids = prompts
        if self.prefill == "exact":
            self._feed(cache, ids[:, :-1])
            ids = ids[:, -1:]
        made: list[list[int]] = [[] for _ in range(prompts.shape[0])]
        content: Content | None = None
        for step in range(new_tokens):
            ids = self._logits(cache, ids, 1)[:, -1].argmax(-1, keepdim=True)
            content = content or self._content(cache)
            for tokens, new in zip(made, ids[:, 0].tolist(), strict=True):
                tokens.append(new)
            if step + 1 == new_tokens or all(finished(tokens) for tokens in made):
                break
        return made, content or self._content(cache)

    def window(self, ids: Tensor, reference: Reference) -> tuple[TokenScores, Content]:
        """Score each token of a window ``[n]`` against the uncompressed model's ``reference`` of it.

        With ``exact`` the tokens of the first call (256, or half of a short window) are not scored: they attend fresh
        K and V. The uncompressed model is scored on the same tokens.
        """
        n = ids.numel()
        first = 1 if self.prefill == "decoded" else min(EXACT_CALL_TOKENS, n // 2) + 1
        if self.maker is None:
            return reference.itself(first), Content(*self._dense_size(n))
        cache = self._cache()
        step = n if self.prefill == "decoded" else first - 1
        calls = [self._logits(cache, ids[None, a : a + step], None)[0] for a in range(0, n, step)]
        logits = torch.cat(calls)[first - 1 : -1]
        return reference.compare(logits, first), self._content(cache)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _cache(self) -> Any:
        assert self._new_cache is not None, "outside of reading()"
        return self._new_cache()

    def _feed(self, cache: Any, ids: Tensor) -> None:
        """Fill the cache in calls of 256 tokens; nothing of it is scored."""
        if not ids.shape[1]:
            raise ModelError(
                'prefill="exact" fills the cache before it scores, and nothing stands before what is scored; use '
                'prefill="decoded", or a text with a context.'
            )
        for a in range(0, ids.shape[1], EXACT_CALL_TOKENS):
            self._logits(cache, ids[:, a : a + EXACT_CALL_TOKENS], 1)

    def _logits(self, cache: Any, ids: Tensor, last: int | None) -> Tensor:
        """Logits ``[B, last, V]`` of the newest tokens; None: of all."""
        keep = {"logits_to_keep": last} if last is not None and self._few_logits else {}
        logits: Tensor = self.model(input_ids=ids, **passing(self.model, cache), use_cache=True, **keep).logits
        return logits if last is None else logits[:, -last:]

    def _content(self, cache: Any) -> Content:
        if self.maker is None:
            elements = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers if _holds_kv(layer))
            batch = max((layer.keys.shape[0] for layer in cache.layers if _holds_kv(layer)), default=1)
            return Content(2 * elements // batch, elements // batch)
        if isinstance(self.maker, QuantizedCacheMaker):
            return Content(*self.maker.held(cache))
        layers = cache.layer_caches
        batch = max((layer.batch for layer in layers), default=1)
        nbytes = sum(sum(layer.nbytes().values()) for layer in layers)
        return Content(nbytes // batch, sum(layer.elements() for layer in layers) // batch)

    def _dense_size(self, tokens: int) -> tuple[int, int]:
        """Bytes in 16 bit, and elements, that the model's layers hold after ``tokens`` tokens."""
        from packedkv.integrations.transformers.plan import plan_for

        plan = plan_for(self.model, "decoded")
        elements = 2 * sum(
            min(tokens, (layer.window or tokens + 1) - 1) * (layer.heads or 0) * (layer.head_dim or 0)
            for layer in plan.kv_layers
        )
        return 2 * elements, elements


def _holds_kv(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.ndim == 4


# -- tokens ------------------------------------------------------------------------------------------------------------


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Cut ``text`` before the first of ``stops``; white space that it begins with is no stop.

    >>> cut_at(" 1234. And", ("\\n", "."))
    ' 1234'
    """
    lead = len(text) - len(text.lstrip())
    ends = [at for stop in stops if (at := text.find(stop, lead)) >= 0]
    return text[: min(ends)] if ends else text
