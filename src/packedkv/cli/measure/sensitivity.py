"""Sensitivity: KL of compressing one layer's keys, or its values, and nothing else, without sink and window.

The outputs of the layers before the compressed one are kept and handed out again (half of the work), where a trial
gives the same logits. Rows are written as they are measured, and a run goes on where the last one ended.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packedkv.cli.measure.perplexity import Reference, compressed_logits, summarize, uncompressed
from packedkv.cli.measure.rows import Row, append_line, resumed_lines
from packedkv.codec import ROLES, Role
from packedkv.errors import FormatError
from packedkv.integrations.transformers.plan import identify, plan_for
from packedkv.models.loading import LoadedModel
from packedkv.progress import Progress
from packedkv.registry import LayerChoice, scheme_of
from packedkv.scheme import KVScheme, mix_of

FORMAT, VERSION = "packedkv-sensitivity", 1
DENSE = "dense"


class Prefix:
    """Outputs of a decoder's layers on one window, to begin again at any of them."""

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        lists = [getattr(decoder, name, None) for name in ("layers", "h", "blocks")]
        self.layers: list[nn.Module] = next((list(m) for m in lists if isinstance(m, nn.ModuleList)), [])
        self.outputs: dict[int, Any] = {}
        self.works = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep every layer's output of the block's run."""
        self.outputs.clear()
        hooks = [layer.register_forward_hook(partial(self._keep, i)) for i, layer in enumerate(self.layers)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keep(self, i: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self.outputs[i] = output

    @contextmanager
    def starting_at(self, layer: int) -> Iterator[None]:
        """Within the block, layers before ``layer`` return their recorded outputs."""
        stubs = self.layers[:layer] if self.works else []
        forwards = [module.__dict__.get("forward") for module in stubs]
        try:
            for i, module in enumerate(stubs):
                module.__dict__["forward"] = self._given(i)
            yield
        finally:
            for module, forward in zip(stubs, forwards, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward

    def _given(self, i: int) -> Callable[..., Any]:
        return lambda *_, **__: self.outputs[i]

    def reference(self, model: Any, window: Tensor) -> Reference:
        """Run the uncompressed model on a window and keep its layers' outputs; the first time, try them."""
        with self.recording():
            reference = uncompressed(model, window)
        if not self.works and len(self.outputs) == len(self.layers) > 1:
            self.works = True
            with self.starting_at(len(self.layers) - 1):
                again = uncompressed(model, window)
            self.works = bool(torch.allclose(again.log_p, reference.log_p, atol=1e-4))
        return reference


def sensitivity(
    model: LoadedModel,
    windows: Sequence[Tensor],
    specs: Mapping[Role, Sequence[str]],
    *,
    seed: int = 0,
    path: str | Path | None = None,
    text: str = "",
    progress: Progress | None = None,
) -> list[Row]:
    """Measure KL with only one role of one layer compressed, for every layer, role and spec.

    ``windows`` are token ids ``[n]``. Rows that the ``.jsonl`` file ``path`` holds are not measured again;
    ``FormatError`` if it is of another model, text (by ``text``, e.g. a sha256), seed or window.
    """
    shown = progress or Progress(False)
    layers = [layer.index for layer in plan_for(model.model, "decoded").kv_layers]
    jobs = [(layer, role, spec) for role in ROLES for spec in specs.get(role, ()) for layer in layers]
    for role in ROLES:
        for spec in specs.get(role, ()):
            only(0, len(layers), role, spec)
    file = None if path is None else Path(path)
    rows = {} if file is None else _measured(file, _header(model, windows, seed, text))
    if todo := [job for job in jobs if job not in rows]:
        for job, row in _measure(model.model, windows, layers, todo, seed, shown):
            rows[job] = row
            if file is not None:
                append_line(file, row)
    return [rows[job] for job in jobs]


def only(at: int, layers: int, role: Role, spec: str) -> KVScheme:
    """Scheme that compresses one role of the ``at``-th KV layer, without sink and window, and holds the rest dense."""
    choice = LayerChoice(spec, DENSE, 0, 0) if role == "key" else LayerChoice(DENSE, spec, 0, 0)
    dense = scheme_of(LayerChoice(DENSE, DENSE))
    return mix_of([scheme_of(choice) if i == at else dense for i in range(layers)], f"{role}s of one layer: {spec}")


Job = tuple[int, Role, str]


def _measure(
    model: Any, windows: Sequence[Tensor], layers: list[int], todo: list[Job], seed: int, shown: Progress
) -> Iterator[tuple[Job, Row]]:
    """Measure jobs; with several windows each job runs over all of them, and its row comes with the last."""
    scores: dict[Job, list[Any]] = {job: [] for job in todo}
    total, done = len(todo) * len(windows), 0
    for window in windows:
        prefix = Prefix(model)
        reference = prefix.reference(model, window)
        for job in todo:
            layer, role, spec = job
            shown.bar("sensitivity", done, total, f"layer {layer} {role}s {spec}")
            scheme = only(layers.index(layer), len(layers), role, spec)
            with prefix.starting_at(layer):
                # without the probe: it would warn of every spec
                logits, _ = compressed_logits(model, scheme, window, seed=seed, probe="off")
            scores[job].append(reference.score(logits))
            done += 1
            if len(scores[job]) == len(windows):
                summary = vars(summarize(scores[job]))
                measured = ("kl", "kl_se", "nll_rise", "top1_agreement", "tokens", "windows")
                row = {"layer": layer, "role": role, "spec": spec} | {name: summary[name] for name in measured}
                yield job, row


def _header(model: LoadedModel, windows: Sequence[Tensor], seed: int, text: str) -> dict[str, Any]:
    weights = identify(model.model).weights
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model.name,
        "weights": [f"{magnitude:.5g}" for _, magnitude, _ in weights.values()],
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "window_tokens": windows[0].numel(),
        "windows": len(windows),
        "text": text,
        "seed": seed,
    }


def _measured(path: Path, header: dict[str, Any]) -> dict[Job, Row]:
    """Rows of a file that was begun with the same header; a file that is not there is begun."""
    if not path.is_file() or not path.stat().st_size:
        append_line(path, header)
        return {}
    try:
        first, *lines = resumed_lines(path)
        rows = {(row["layer"], row["role"], row["spec"]): row for row in lines}
    except (FormatError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} holds no sensitivity rows ({error}); name another file or remove it.") from error
    if differs := [k for k in header if first.get(k) != header[k]]:
        told = ", ".join(f"{k} {first.get(k)!r} (now {header[k]!r})" for k in differs if k != "weights")
        raise FormatError(
            f"{path} was measured on something else: {told or 'other weights'}; name another folder or remove it."
        )
    return rows
