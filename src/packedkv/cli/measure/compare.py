"""``compare``: measure several schemes on one model and one text, one row each.

First the first window for every spec, then generation, then the further windows, so that an interrupt loses little.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from packedkv.cli.measure import fidelity, generation, perplexity
from packedkv.cli.measure.caches import Prefill, generating_cache, packed_cache
from packedkv.cli.measure.fidelity import Fidelity
from packedkv.cli.measure.generation import Generation
from packedkv.cli.measure.perplexity import Quality, WindowScore
from packedkv.cli.measure.quantized_cache import check_unlike
from packedkv.cli.measure.rows import Row
from packedkv.cli.stamp import versions
from packedkv.errors import BrokenPresetError, PackedKVWarning, UnsupportedError
from packedkv.files.params import FittedParams, match_params
from packedkv.integrations.transformers.attention_hooks import implementation
from packedkv.key_bias import Probe
from packedkv.models import windows as text_windows
from packedkv.models.loading import LoadedModel
from packedkv.models.windows import WINDOW_TOKENS
from packedkv.progress import Progress
from packedkv.registry import get
from packedkv.scheme import KVScheme

QUALITY = ("perplexity", "perplexity_se", "kl", "kl_se", "top1_agreement", "nll_rise", "nll_rise_se")
LONG_STEPS = 8
"""Tokens generated behind a long context."""


@dataclass
class _Run:
    """Results of one spec so far (None: the uncompressed model)."""

    scheme: KVScheme | None
    params: FittedParams | None = None
    fitted: str | None = None
    scores: list[WindowScore] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    errors: Fidelity | None = None
    made: Generation | None = None
    made_report: dict[str, Any] = field(default_factory=dict)
    long: Generation | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Settings:
    """Settings of a comparison, written to every row.

    No window but the first is started that would end after ``budget`` seconds. ``new_tokens=0``: no generation. Speed
    is also taken behind ``long_tokens``. ``queries``: newest queries whose attention error is taken. ``probe``: whether
    a spec that breaks on the model's key biases is left out, or measured with a note.
    """

    windows: int = 3
    window_tokens: int = WINDOW_TOKENS
    prefill: Prefill = "decoded"
    seed: int = 0
    budget: float | None = None
    prompt_tokens: int = generation.PROMPT_TOKENS
    new_tokens: int = generation.NEW_TOKENS
    long_tokens: int = 0
    queries: int = fidelity.QUERIES
    text_name: str = ""
    text_sha256: str = ""
    probe: Probe = "refuse"


def compare(
    model: LoadedModel,
    specs: Sequence[str | KVScheme],
    text: str,
    settings: Settings | None = None,
    *,
    params: Sequence[str | Path | FittedParams] = (),
    progress: Progress | None = None,
) -> list[Row]:
    """Measure schemes on a model and a text of at least one window; each spec becomes a row, in this order.

    ``params`` are files of ``packedkv fit``. Codecs that need a sample and have none are fitted on each prefill;
    ``fitted`` is ``file``, ``prefill``, or None.

    Rows are plain JSON values; ``tables.COLUMNS`` explains the main ones. ``status``: ``complete``, ``budget``,
    ``short-text`` or ``interrupted``: on Ctrl-C the rows hold the windows that every spec has finished. ``left_out``
    has the specs that ``Settings.probe`` left out, and why.

    ``KVError`` before any work for a spec, params or text that do not fit, or if every spec breaks on the model's key
    biases; ``KeyboardInterrupt`` if nothing is finished.
    """
    s = settings or Settings()
    schemes = [get(spec) for spec in specs]
    check_unlike(schemes, "compare")
    text_windows.check_window(model.model.config, s.window_tokens)
    runs = [_Run(scheme, given) for scheme, given in zip(schemes, match_params(params, schemes), strict=True)]
    broken: dict[str, BrokenPresetError] = {}
    for run, scheme in zip(runs, schemes, strict=True):
        options: dict[str, Any] = {"prefill": s.prefill, "seed": s.seed, "params": run.params, "probe": s.probe}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PackedKVWarning)  # a note of the first window
            try:
                with packed_cache(model.model, scheme, **options) as cache:
                    pass  # raises now for an unsupported scheme
            except BrokenPresetError as error:
                broken[str(scheme)] = error
                continue
        if run.params or any(layer.site.fit_tokens for layer in cache.layer_caches):
            run.fitted = "file" if run.params else "prefill"
            run.notes.append(_source_of_constants(run.params))
            waits = max(layer.site.fit_tokens + layer.scheme.sink for layer in cache.layer_caches)
            if not run.params and waits > s.window_tokens:
                run.notes.append(
                    f"held in 16 bit throughout: its constants are fitted on the first {waits} tokens, and a window "
                    f"has {s.window_tokens}; take a larger --window-tokens, or --params."
                )
    runs = [run for run in runs if str(run.scheme) not in broken]
    if not runs:
        raise next(iter(broken.values()))
    ids = text_windows.tokenize(model.tokenizer, text, max(s.windows * s.window_tokens, s.prompt_tokens, s.long_tokens))
    windows = text_windows.split_windows(ids, s.windows, s.window_tokens)
    most = getattr(model.model.config, "max_position_embeddings", s.long_tokens + LONG_STEPS)
    fits = 0 < s.long_tokens <= min(ids.numel(), most - LONG_STEPS)
    behind = ids[: s.long_tokens] if fits else None
    comparison = _Comparison(model, runs, windows, ids[: s.prompt_tokens], s, progress or Progress(False), behind)
    status = comparison.run()
    left_out = {"left_out": {spec: str(error) for spec, error in broken.items()}} if broken else {}
    return [row | left_out for row in comparison.rows(status)]


def about(rows: Sequence[Row]) -> str:
    """The notes under a table: the amount of text, missing results, warnings."""
    row = rows[0]
    text = (
        f"{row['windows']} window{'s' * (row['windows'] > 1)} of {row['window_tokens']} tokens of {row['text']}, "
        f"prefill={row['prefill']}, {row['dtype']} on {row['device']}; standard error of the perplexity "
        f"{row['perplexity_se']:.2f} (over tokens; the windows are the same for all rows)."
    )
    text += {
        "complete": "",
        "budget": " Fewer windows than asked for: the time budget was spent (--budget).",
        "short-text": " Fewer windows than asked for: the text is too short.",
        "interrupted": " INTERRUPTED: these are the windows finished so far.",
    }[row["status"]]
    left_out = [f"left out: {why}" for why in row.get("left_out", {}).values()]
    # a note of the probe names the spec itself
    notes = [(r["spec"], note.removeprefix(r["spec"] + " ")) for r in rows for note in r["notes"]]
    return "\n".join([text, *left_out, *_paths(rows), *(f"{spec}: {note}" for spec, note in notes)])


def _paths(rows: Sequence[Row]) -> list[str]:
    """What attended while generating: specs by path, and why not the kernels."""
    by: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if path := row.get("generation_attention"):
            by.setdefault((path, row["generation_unfused"]), []).append(row["spec"])
    words = {"fused": "kernels over packed pages", "decoded": "PyTorch over decoded K and V",
             "streamed": "PyTorch, decoding chunk by chunk"}  # fmt: skip
    return [
        f"generated by {words[path]}: {', '.join(specs)}{f' ({why})' if why else ''}."
        for (path, why), specs in by.items()
    ]


class _Comparison:
    def __init__(
        self,
        model: LoadedModel,
        runs: list[_Run],
        windows: list[Tensor],
        prompt: Tensor,
        settings: Settings,
        progress: Progress,
        behind: Tensor | None,
    ) -> None:
        self.model, self.windows, self.prompt, self.behind = model, windows, prompt, behind
        self.settings, self.progress = settings, progress
        self.base = _Run(None)
        self.runs = runs
        self.start = time.monotonic()
        self.jobs_done, self.latest_window = 0, 0.0
        generating = 1 if settings.new_tokens else 0
        self.jobs = (len(runs) + 1) * (len(windows) + generating)

    def run(self) -> str:
        """Measure; return the rows' status."""
        s = self.settings
        try:
            self._window(self.windows[0], first=True)
            if s.new_tokens:
                for run in (self.base, *self.runs):
                    self._generate(run)
                if self.behind is not None:
                    self._generate_behind(self.behind)
            for window in self.windows[1:]:
                spent = time.monotonic() - self.start
                if s.budget is not None and spent + self.latest_window > s.budget:
                    self.progress.say(f"{spent:.0f} s of {s.budget:.0f} s are spent: no further window.")
                    return "budget"
                self._window(window, first=False)
        except KeyboardInterrupt:
            if not any(run.scores for run in self.runs):
                raise
            self.progress.say("interrupted: the rows hold what was finished.")
            return "interrupted"
        return "complete" if len(self.windows) == s.windows else "short-text"

    def _window(self, window: Tensor, *, first: bool) -> None:
        begun = time.monotonic()
        s, model = self.settings, self.model.model
        number = len(self.base.scores) + 1
        records: list[fidelity.LayerRecord] = []
        self._show_progress("uncompressed", number)
        if first and s.queries:
            with fidelity.record(model, s.queries) as records:
                reference = perplexity.uncompressed(model, window)
        else:
            reference = perplexity.uncompressed(model, window)
        exact = [r.output(r.k, r.v) for r in records]
        self.base.scores.append(reference.score_itself())
        self._done(self.base, begun)
        for run in self.runs:
            at = time.monotonic()
            assert run.scheme is not None
            self._show_progress(str(run.scheme), number)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                options: dict[str, Any] = {"prefill": s.prefill, "seed": s.seed, "params": run.params}
                probe: Probe = "off" if s.probe == "off" else "warn"
                logits, cache = perplexity.compressed_logits(model, run.scheme, window, probe=probe, **options)
            score = reference.score(logits)
            if first:
                run.notes += dict.fromkeys(str(w.message) for w in caught)
                run.report = cache.report()
                if records and run.report["mean"] == "none":  # bare tensors have no mean to add
                    run.errors = fidelity.attention_error(records, exact, run.scheme, seed=s.seed, params=run.params)
            run.scores.append(score)
            del logits, cache
            self._done(run, at)
        self.latest_window = time.monotonic() - begun

    def _generate(self, run: _Run) -> None:
        at = time.monotonic()
        s, model = self.settings, self.model.model
        self.progress.bar("measuring", self.jobs_done, self.jobs, f"{run.scheme or 'uncompressed'}: generating")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown once, for the first window
            if run.scheme is None:
                run.made = generation.uncompressed(model, self.prompt, s.new_tokens)
            else:
                cache, attention = generating_cache(model, run.scheme, seed=s.seed, params=run.params)
                with implementation(model, attention):
                    run.made = generation.greedy(model, self.prompt, s.new_tokens, cache)
                run.made_report = cache.report()
        self._done(run, at)

    def _generate_behind(self, ids: Tensor) -> None:
        s, model = self.settings, self.model.model
        self.progress.bar("measuring", self.jobs_done, self.jobs, f"reading {ids.numel():,} tokens")
        try:
            context = generation.long_context(model, ids[:-1], s.window_tokens)
        except UnsupportedError as error:
            self.progress.say(f"no long context: {error}.")
            return
        caches: dict[str, tuple[Any, str]] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown once, for the first window
            for run in (self.base, *self.runs):
                name = str(run.scheme or "uncompressed")
                self.progress.bar("measuring", self.jobs_done, self.jobs, f"{name}: storing {ids.numel():,} tokens")
                if run.scheme is None:
                    caches[name] = generation.uncompressed_cache(model), model.config._attn_implementation
                else:
                    caches[name] = generating_cache(model, run.scheme, seed=s.seed, params=run.params)
                generation.fill(caches[name][0], context)
            del context
            made = generation.in_turns(model, int(ids[-1]), caches, LONG_STEPS)
        for run, continuation in zip((self.base, *self.runs), made.values(), strict=True):
            run.long = continuation

    def _show_progress(self, name: str, number: int) -> None:
        note = f"{name}: window {number} of {len(self.windows)}"
        self.progress.bar("measuring", self.jobs_done, self.jobs, note)

    def _done(self, run: _Run, at: float) -> None:
        run.seconds += time.monotonic() - at
        self.jobs_done += 1

    # -- rows --------------------------------------------------------------------------------------------------------

    def rows(self, status: str) -> list[Row]:
        """Rows of the specs that finished at least one window; all over the same windows."""
        done = [run for run in self.runs if run.scores]
        common = min(len(run.scores) for run in done)
        base = perplexity.summarize(self.base.scores[:common])
        return [self._row(run, perplexity.summarize(run.scores[:common]), base, status) for run in done]

    def _row(self, run: _Run, quality: Quality, base: Quality, status: str) -> Row:
        assert run.scheme is not None
        s, report = self.settings, run.report
        row: Row = {
            "spec": str(run.scheme),
            "model": self.model.name,
            **{name: getattr(quality, name) for name in QUALITY},
            **{name: report[name] for name in ("key_bits", "value_bits", "effective_bits", "ratio_to_16bit")},
            "cache_bytes": report["total_bytes"],
            "cache_tokens": s.window_tokens,
            "bytes_by_part": report["bytes"],
            "workspace_bytes": report["workspace_bytes"],
        }
        if run.errors:
            row["attention_error"] = run.errors.mean
            row["attention_error_worst"] = run.errors.worst
            row["attention_error_worst_layer"] = run.errors.worst_layer
        row |= self._generated(run)
        row["uncompressed"] = {"perplexity": base.perplexity, "perplexity_se": base.perplexity_se}
        row["uncompressed"] |= self._generated(self.base)
        row |= {
            "status": status,
            "partial": status == "interrupted",
            "windows": quality.windows,
            "window_tokens": s.window_tokens,
            "tokens": quality.tokens,
            "prefill": s.prefill,
            "attention": report["attention"],
            "fitted": run.fitted,
            "params": about_params(run.params),
            "seed": s.seed,
            "text": s.text_name,
            "text_sha256": s.text_sha256,
            "origin": self.model.origin,
            "dtype": str(self.model.model.dtype).removeprefix("torch."),
            "device": str(self.model.model.device),
            "notes": run.notes,
            "seconds": run.seconds,
            "versions": versions(),
        }
        return row

    def _generated(self, run: _Run) -> Row:
        made = run.made
        if made is None:
            return {}
        row: Row = {
            "tokens_per_s": made.tokens_per_s,
            "continuation": self.model.tokenizer.decode(
                made.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            "prompt_tokens": self.prompt.numel(),
            "new_tokens": len(made.tokens),
        }
        if run.long is not None and self.behind is not None:
            row |= {"long_tokens_per_s": run.long.tokens_per_s, "long_tokens": self.behind.numel()}
        if run.scheme is not None and self.base.made is not None:
            row["generation_attention"] = run.made_report["attention"]
            row["generation_unfused"] = run.made_report["unfused"]
            row["same_tokens"] = made.agreement(self.base.made)
            row["generation_cache_bytes"] = run.made_report["total_bytes"]
        return row


def _source_of_constants(params: FittedParams | None) -> str:
    if params is None:
        return "constants fitted on each prefill (packedkv fit and --params: on a text of your own)."
    file, text = params.file or "given params", params.text_name or "a text"
    return f"constants of {file}, fitted on {params.tokens} tokens of {text}."


def about_params(params: FittedParams | None) -> Row | None:
    """The file of the constants, and what it was fitted on."""
    if params is None:
        return None
    return {"file": params.file, "sha256": params.sha256, "tokens": params.tokens, "text": params.text_name}
