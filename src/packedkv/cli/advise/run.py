"""Find a spec for a model, a context and a memory: candidates, sensitivity, search, and measurement of the finalists.

Where the context is longer than the windows of text, everything is measured with sinks and windows off: a hundred dense
tokens are negligible in a long context but much of a short window. The advised spec is measured once more with them.
"""

import hashlib
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from packedkv.cli.advise.candidates import DENSE
from packedkv.cli.advise.expected import dtype_of
from packedkv.cli.advise.steps import MIXTURE, Finalist, Request, Search
from packedkv.cli.measure import generation
from packedkv.cli.measure.caches import generating_cache
from packedkv.cli.measure.outliers import key_outliers
from packedkv.cli.measure.rows import plain
from packedkv.cli.measure.sensitivity import sensitivity
from packedkv.cli.stamp import versions
from packedkv.codec import ROLES
from packedkv.errors import KVError, PackedKVWarning
from packedkv.integrations.transformers.attention_hooks import implementation
from packedkv.models import windows as text_windows
from packedkv.models.loading import LoadedModel
from packedkv.progress import Progress
from packedkv.registry import get, write_recipe
from packedkv.scheme import KVScheme

NEW_TOKENS = 16
PROMPT_TOKENS = 256


def advise(
    model: LoadedModel,
    text: str,
    request: Request,
    *,
    output: str | Path | None = None,
    text_name: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find the best spec for a model's cache.

    The text has at least ``request.windows + 1`` windows. The folder ``output`` gets sensitivity rows, from which a
    later run continues, and a mixture's ``recipe.json``. Returns plain JSON values: ``advised`` (a finalist's row),
    ``met`` (whether it meets the request), ``layers`` (of a mixture), ``keys`` (K_max / K_median),
    ``left_out`` (presets that break on the model's key biases, and how), ...
    """
    begun, shown = time.monotonic(), progress or Progress(False)
    search = Search(model, request, shown)
    search.check_room()
    ids = text_windows.tokenize(model.tokenizer, text, (request.windows + 1) * request.window_tokens)
    first, *others = text_windows.split_windows(ids, request.windows + 1, request.window_tokens)
    if not others:
        raise KVError(
            f"the text has {ids.numel()} tokens; one window of {request.window_tokens} is searched on and at least one "
            f"measured: pass a longer text, or --window-tokens {max(ids.numel() // 2, 2)}."
        )
    candidates = search.candidates(first)
    digest = hashlib.sha256(text.encode()).hexdigest()
    rows = sensitivity(
        model,
        [first],
        search.chosen,
        seed=request.seed,
        path=None if output is None else Path(output) / "sensitivity.jsonl",
        text=digest,
        progress=shown,
    )
    groups = search.groups(rows)
    finalists, base = search.finalists(groups, others)
    best, met = search.decide(finalists)
    search.measure_served(best, others)
    if best.options and output is not None:
        about = {"model": model.name, "context": request.context, "batch": request.batch, "text": text_name}
        about |= {"windows": len(others), "window_tokens": request.window_tokens}
        _write_mixture(Path(output) / "recipe.json", best, about | search.row(best))
    row_of = search.row
    result: dict[str, Any] = {
        "model": model.name,
        "context": request.context,
        "batch": request.batch,
        "memory": request.memory,
        "max_kl": request.max_kl,
        "dense_bytes": search.bytes_of(get(DENSE)),
        "advised": row_of(best),
        "met": met,
        "finalists": [row_of(f) for f in sorted(finalists, key=lambda f: f.kl)],
        "not_tried": search.not_tried,
        "left_out": search.left_out,
        "layers": search.layer_rows(best),
        "uncompressed_perplexity": base.perplexity,
        "windows": len(others),
        "window_tokens": request.window_tokens,
        "tokens": base.tokens,
        "text": text_name,
        "text_sha256": digest,
        "seed": request.seed,
        "dtype": str(dtype_of(model.model)).removeprefix("torch."),
        "device": str(model.model.device),
        "candidates": [vars(c) for role in ROLES for c in candidates[role]],
        "sensitivity": rows,
        "keys": key_outliers(model.model, first),
        "speed": speed(model.model, best.scheme, others[0], request.seed),
        "use": _use(best, model.name),
        "seconds": time.monotonic() - begun,
        "versions": versions(),
    }
    result["not_measured"] = _not_measured(result, search.unserved(best))
    return result


def speed(model: Any, scheme: KVScheme, window: Tensor, seed: int) -> dict[str, Any]:
    """Greedy tokens per second of one sequence after the start of ``window [n]``, with a scheme and uncompressed."""
    prompt = window[: max(1, min(PROMPT_TOKENS, window.numel() - NEW_TOKENS))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackedKVWarning)
        cache, attention = generating_cache(model, scheme, seed=seed)
        with implementation(model, attention):
            made = generation.greedy(model, prompt, NEW_TOKENS, cache)
    base = generation.uncompressed(model, prompt, NEW_TOKENS)
    return {
        "tokens_per_s": made.tokens_per_s,
        "uncompressed_tokens_per_s": base.tokens_per_s,
        "prompt_tokens": prompt.numel(),
        "new_tokens": NEW_TOKENS,
        "device": str(model.device),
    }


def _write_mixture(path: Path, best: Finalist, about: Mapping[str, Any]) -> None:
    """Write a mixture's recipe, with what was measured of it; the file is its spec from now on."""
    best.spec = str(path)
    measured = ("bytes", "kl", "kl_se", "kl_as_served", "predicted_kl")
    told = ("model", "context", "batch", "windows", "window_tokens", "text", *measured)
    record = {name: about[name] for name in told}
    choices = [option.choice for option in best.options]
    best.scheme = write_recipe(path, choices, plain(record) | {"versions": versions()})


def _use(best: Finalist, name: str) -> dict[str, str]:
    """Return how to use the advised spec; a mixture that was not saved has none."""
    if best.spec == MIXTURE:
        return {"python": "write_recipe('recipe.json', choices); cache_for(model, 'recipe.json')", "command": ""}
    return {
        "python": f"cache = packedkv.cache_for(model, {best.spec!r})",
        "command": f"packedkv compare {name} --specs {best.spec},dense",
    }


def _not_measured(result: Mapping[str, Any], unserved: Sequence[str]) -> list[str]:
    tokens, context = result["window_tokens"], result["context"]
    told = [
        f"speed at {context} tokens, in batches, and of fused attention; `packedkv bench decode --specs ... "
        f"--device cuda` times that on a GPU. "
        f"{'No GPU kernel decodes ' + ', '.join(unserved) if unserved else 'GPU kernels decode every layer of it'}",
        "tasks: retrieval, questions and choices; `packedkv eval --specs ... --tasks ...` measures those",
    ]
    if context > tokens:
        told.append(f"long contexts: KL is of windows of {tokens} tokens, not of {context}; --window-tokens raises it")
    if result["not_tried"]:
        told.append(
            f"uniform presets that fit but promised less: {', '.join(result['not_tried'])}; --uniform raises it"
        )
    return told
