"""lm-evaluation-harness on a packed cache: the registered model ``packedkv`` (docs/lm-eval.md).

It is lm-eval's own ``hf`` model, except that each forward pass fills an empty ``KVCache`` and reads it. Only sequences
of equal length share a batch: padding would be encoded with the tokens beside it.
"""

import difflib
import inspect
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from packedkv import __version__
from packedkv.cli.measure.caches import CacheMaker, Prefill, attention_of, packed_cache
from packedkv.cli.measure.perplexity import EXACT_CALL_TOKENS
from packedkv.codec import Dense
from packedkv.description import describe
from packedkv.errors import FormatError, KVError, ModelError, SpecError, UnsupportedError
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.plan import load_params
from packedkv.models import loading as models
from packedkv.models.named import NAMED
from packedkv.registry import get, load_file
from packedkv.scheme import KVScheme

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(
        f"lm-evaluation-harness cannot be imported ({error}); install it with: pip install 'packedkv[eval]'."
    ) from error

log = logging.getLogger(__name__)

ARGS = ("pretrained", "spec", "prefill", "seed", "params", "codec_file", "tokenizer", "device", "dtype", "batch_size")
FOR_A_LOADED_MODEL = (
    *("truncation", "logits_cache", "max_length", "softmax_dtype", "mixed_precision_dtype", "max_batch_size"),
    *("add_bos_token", "prefix_token_id", "think_end_token", "enable_thinking", "chat_template_args"),
)
"""Options of lm-eval's ``hf`` model that still apply once the model is loaded."""
FINGERPRINT = "packedkv"
"""Key in the file of ``--use_cache`` for the model, spec and prefill of its answers."""
MOSTLY = 0.5


@dataclass
class Totals:
    """Totals over all caches of a run, each counted once its sequences are done: bytes, elements of K and V, tokens
    times layers times roles, how many of these were encoded, and attention calls by what they read.
    """

    nbytes: int = 0
    elements: int = 0
    tokens: int = 0
    encoded: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, cache: Any) -> None:
        """Count a filled ``KVCache``."""
        report = cache.report()
        self.nbytes += report["total_bytes"]
        for path, count in report["paths"].items():
            self.calls[path] = self.calls.get(path, 0) + count
        for layer in cache.layer_caches:
            self.elements += layer.elements()
            for state in layer.roles.values():
                self.tokens += layer.batch * len(layer)
                self.encoded += layer.batch * state.encoded * (not isinstance(state.codec, Dense))


@register_model("packedkv")
class PackedKVLM(HFLM):  # type: ignore[misc]
    """A causal language model with a packed KV cache; docs/lm-eval.md lists the parameters.

    ``pretrained`` may also be loaded: a ``LoadedModel``, or a ``PreTrainedModel`` with ``tokenizer``.
    """

    def __init__(
        self,
        pretrained: Any,
        spec: str | KVScheme | None = None,
        prefill: Prefill = "decoded",
        seed: int = 0,
        params: str | Path | LayerParams | None = None,
        codec_file: str | Path | None = None,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: str | torch.dtype = "auto",
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        if codec_file is not None:
            load_file(codec_file)
        if spec is None:
            raise SpecError("model packedkv: no spec; pass e.g. spec=saw-int4, or spec=dense for no compression.")
        self.scheme = get(spec)
        _check_options(self.scheme, prefill, batch_size, options)
        self.prefill, self.seed, self.totals = prefill, seed, Totals()
        self.origin: dict[str, Any] = {}
        if isinstance(pretrained, str):
            device = _device(device)
            if pretrained.lower() in NAMED or pretrained.endswith(".gguf"):
                pretrained = _load(pretrained, device, dtype, options)
        if isinstance(pretrained, models.LoadedModel):
            self.origin = {"model": pretrained.name, "origin": pretrained.origin, "sha256": pretrained.sha256}
            tokenizer = tokenizer or pretrained.tokenizer
            pretrained = pretrained.model
        else:
            self.origin = {"model": pretrained if isinstance(pretrained, str) else pretrained.name_or_path}
        chosen = {"device": device, "dtype": dtype} if isinstance(pretrained, str) else {}
        super().__init__(pretrained, tokenizer=tokenizer, batch_size=batch_size, **chosen, **options)
        if self.backend != "causal":
            raise UnsupportedError(
                f"model packedkv: {self.config.model_type} is an encoder-decoder model; tasks score the tokens of one "
                "sequence, so use a decoder-only model. `cache_for` takes encoder-decoder models in `generate`."
            )
        if isinstance(params, str | Path):
            params = load_params(params, self.model, self.scheme, seed=seed)
        # a plain mapping: FittedParams would be compared with the model's weights again for every cache
        self.params = dict(params) if params else None
        self._makers = {
            way: CacheMaker(self.model, self.scheme, prefill=way, seed=seed, params=self.params, remember=True)
            for way in get_args(Prefill)
        }
        with packed_cache(self.model, self.scheme, seed=seed, params=self.params):
            pass  # raises for unsupported options before the first request

    @contextmanager
    def _cache(self, context: int) -> Iterator[Any]:
        """Yield an empty cache for a block, then count it; ``context`` as for ``_read``."""
        with self._makers[self.prefill if context else "decoded"].attending() as new_cache:
            cache = new_cache()
            yield cache
        self.totals.add(cache)

    def _autocast(self) -> Any:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    # -- log-likelihoods -------------------------------------------------------------------------------------------

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits ``[B, n, V]`` of sequences of equal length, ``inps [B, n]``, read through an empty cache."""
        if attn_mask is not None or labels is not None:
            raise UnsupportedError("model packedkv: sequences are not padded and have no labels; use causal models.")
        return self._read(inps, 0)

    def _read(self, ids: Tensor, context: int) -> Tensor:
        """As ``_model_call``; with ``prefill="exact"`` the first ``context`` tokens are fed before the rest is read."""
        parts = []
        with self._cache(context) as cache, torch.no_grad(), self._autocast():
            for a, b in itertools.pairwise(_edges(self.prefill, ids.shape[1], context)):
                parts.append(self.model(input_ids=ids[:, a:b], **passing(self.model, cache), use_cache=True).logits)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is what greedy decoding gives. Requests that are too
        long lose their first tokens, as in lm-eval's ``hf`` model.
        """
        jobs: dict[_Job, list[int]] = {}  # continuations that differ in their last token share a call
        for i, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ModelError(
                    f"model packedkv: a context of {len(context)} and a continuation of {len(continuation)} tokens; "
                    f"expected at least 1 and 1 ... {self.max_length}, which is the model's max_length."
                )
            tokens = (context + continuation)[-(self.max_length + 1) : -1]
            if len(tokens) < len(context) + len(continuation) - 1:
                log.warning("a request of %d tokens is cut on the left to max_length", len(context) + len(continuation))
            fed = len(tokens) - len(continuation) if self.prefill == "exact" else 0
            jobs.setdefault((fed, tuple(tokens)), []).append(i)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="loglikelihood") as bar:
            for batch in _equal(jobs, override_bs or self.batch_size):
                ids = torch.tensor([tokens for _, tokens in batch], device=self.device)
                for job, logits in zip(batch, self._read(ids, batch[0][0]), strict=True):
                    for i in jobs[job]:
                        texts, _, continuation = requests[i]
                        answers[i] = _score(logits, continuation, self.softmax_dtype)
                        if texts is not None:  # rolling windows are cached by their document
                            self.cache_hook.add_partial("loglikelihood", texts, answers[i])
                    bar.update(len(jobs[job]))
        return answers

    # -- generation ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until a stop string, as lm-eval's ``hf`` model does, in batches of equal length."""
        if self.batch_size == 1:
            return super().generate_until(requests, disable_tqdm=disable_tqdm)
        lengths: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            lengths.setdefault(self.tok_batch_encode([request.args[0]])[0].shape[1], []).append(i)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="generate_until") as bar:
            for length in sorted(lengths, reverse=True):
                texts = super().generate_until([requests[i] for i in lengths[length]], disable_tqdm=True)
                for i, text in zip(lengths[length], texts, strict=True):
                    answers[i] = text
                bar.update(len(texts))
        return answers

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Continue ``context [B, n]``, which is not padded; as in ``hf``, with an empty packed cache."""
        mask = options.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise UnsupportedError("model packedkv: prompts of unequal length in one batch; pass batch_size=1.")
        fed = context.shape[1] - 1 if self.prefill == "exact" else 0
        with self._cache(fed) as cache:
            given = passing(self.model, cache)
            with torch.no_grad(), self._autocast():
                for part in context[:, :fed].split(EXACT_CALL_TOKENS, 1):
                    if part.numel():
                        self.model(input_ids=part, **given, use_cache=True)
            return super()._model_generate(context, max_length, stop, **given, **options)

    # -- results ----------------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """Describe the model, and under ``packedkv`` the caches read; lm-eval puts it into ``config``."""
        totals = self.totals
        share = totals.encoded / totals.tokens if totals.tokens else None
        if share is not None and share < MOSTLY and not isinstance(self.scheme.key, Dense):
            log.warning(
                "%s: %.0f %% of the tokens of these requests were ever encoded (sink %d, window %d): scores are mostly "
                "those of 16-bit tokens. Take tasks with longer contexts, or a smaller window.",
                self.scheme, 100 * share, self.scheme.sink, self.scheme.window,
            )  # fmt: skip
        return super().get_model_info() | {
            "packedkv": self.origin
            | {
                "version": __version__,
                "spec": str(self.scheme),
                "prefill": self.prefill,
                "attention": attention_of(self.scheme),
                "seed": self.seed,
                "fitted_params": self.params is not None,
                "attention_calls": totals.calls,
                "cache_bytes": totals.nbytes,
                "elements": totals.elements,
                "effective_bits": totals.nbytes * 8 / totals.elements if totals.elements else None,
                "encoded_share": share,
            }
        }

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's cache of answers, unless it holds those of another model, spec or prefill."""
        answers = cache_hook.dbdict
        if answers is not None:
            mine = json.dumps([self.origin, repr(self.scheme), self.prefill, self.seed, self.params is not None])
            if len(answers) and answers.get(FINGERPRINT) != mine:
                raise FormatError(
                    f"the answers in the file of --use_cache were made by {answers.get(FINGERPRINT, 'another model')}, "
                    f"these would be by {mine}; name another file for every model, spec and prefill."
                )
            answers[FINGERPRINT] = mine
        super().set_cache_hook(cache_hook)


def main() -> None:
    """Run lm-eval's own command line, to which importing this module has added the model ``packedkv``."""
    try:
        cli_evaluate()
    except KVError as error:
        sys.exit(f"packedkv-lm-eval: error: {error}")


_Job = tuple[int, tuple[int, ...]]
"""Number of tokens that are fed before the others are read, and all tokens."""


def _edges(prefill: Prefill, total: int, context: int) -> list[int]:
    """Where the calls of a sequence begin and end."""
    if prefill == "decoded":
        return [0, total]
    if context:
        return [*range(0, context, EXACT_CALL_TOKENS), context, total]
    return [*range(0, total, EXACT_CALL_TOKENS), total]


def _equal(jobs: Iterable[_Job], most: int) -> Iterator[list[_Job]]:
    """Batches of jobs of equal length and equally long fed parts, the longest first."""

    def kind(job: _Job) -> tuple[int, int]:
        return -len(job[1]), job[0]

    for _, group in itertools.groupby(sorted(jobs, key=kind), kind):
        alike = list(group)
        yield from (alike[a : a + most] for a in range(0, len(alike), most))


def _score(logits: Tensor, continuation: list[int], dtype: torch.dtype | None) -> tuple[float, bool]:
    """Log-probability of the last tokens of a sequence, ``logits [n, V]``, and whether each is the most likely one."""
    log_p = torch.log_softmax(logits[-len(continuation) :], -1, dtype=dtype)
    targets = torch.tensor(continuation, device=logits.device)
    greedy = bool((log_p.argmax(-1) == targets).all())
    return float(log_p.gather(1, targets[:, None])[:, 0].sum()), greedy


def _check_options(scheme: KVScheme, prefill: str, batch_size: int | str, options: dict[str, Any]) -> None:
    """Validate options: reject those that would be ignored or silently passed on."""
    if prefill not in get_args(Prefill):
        raise SpecError(f"prefill={prefill!r}: expected one of {', '.join(get_args(Prefill))}.")
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise UnsupportedError(f"model packedkv: batch_size={batch_size!r}; pass a whole number >= 1.")
    for name in sorted(set(options) - {*inspect.signature(HFLM.__init__).parameters}):
        if name in {option["name"] for option in describe(str(scheme))["options"]}:
            raise SpecError(
                f"model_args: {name} is an option of the spec {scheme}, cut off at the comma. On the command line "
                f"quote the spec: 'spec=\"{scheme},{name}={options[name]}\"'; in Python pass model_args as a dict."
            )
        if close := difflib.get_close_matches(name, ARGS, 1, 0.75):  # anything else may be meant for transformers
            raise SpecError(f"model_args: {name} is no option of model packedkv. Did you mean {close[0]!r}?")


def _device(device: str | None) -> str:
    """As lm-eval: the requested GPU (by default the first) if there is one, else the CPU."""
    wanted = device or "cuda"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        log.info("no CUDA device: running on the CPU")
        return "cpu"
    return wanted


def _load(name: str, device: str, dtype: Any, options: dict[str, Any]) -> models.LoadedModel:
    if foreign := sorted(set(options) - set(FOR_A_LOADED_MODEL)):
        raise ModelError(
            f"{name} is loaded by packedkv, which takes no {', '.join(foreign)}; those options are for models that "
            f"lm-eval loads: a hub id or a folder."
        )
    wanted = "float32" if dtype == "auto" else str(dtype).removeprefix("torch.")
    if wanted not in get_args(models.ModelDtype):
        raise ModelError(f"dtype={dtype!r}: expected auto or one of {', '.join(get_args(models.ModelDtype))}.")
    return models.load(name, progress=False, device=device, dtype=wanted)  # type: ignore[arg-type]
