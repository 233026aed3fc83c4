"""``packedkv fit``: run the uncompressed model over a text and fit every constant of a scheme that depends on data."""

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packedkv.checks import check_tensor
from packedkv.codec import ROLES, Codec, Params, Role, Sample, Site, storage_dtype
from packedkv.errors import FitError, KVError, ModelError
from packedkv.files.params import FittedParams, sites_to_fit
from packedkv.fitting import samples
from packedkv.integrations.transformers.attention_hooks import watched
from packedkv.models.loading import LoadedModel
from packedkv.models.windows import WINDOW_TOKENS, check_window, split_windows, tokenize
from packedkv.progress import Progress
from packedkv.registry import get
from packedkv.scheme import KVScheme
from packedkv.store.site import MEAN, MeanRemoval

WINDOWS = 4
SKIPPED = 4
"""First tokens of a window that the keys' mean leaves out: their keys are unlike all others."""
MAX_TOKENS = 8192
"""Most tokens kept per layer: 100 MB with 8 KV heads, 32 query heads and 128 channels."""
PIECE = 256
"""Tokens whose distribution over the vocabulary is held in float32 at a time."""


@dataclass
class LayerSample:
    """What was recorded of one layer, a tensor ``[1, H, n, D]`` per window; ``dtype`` is the model's.

    Roles without constants to fit have no keys or values, and only codecs that ask for them have gradients (bfloat16).
    ``places`` are the positions of the tokens in their window, int64 ``[n]``.
    """

    dtype: torch.dtype
    queries: list[Tensor] = field(default_factory=list)
    key: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)
    key_gradient: list[Tensor] = field(default_factory=list)
    value_gradient: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _WatchedSite(Site):
    """A site that records for which heads a codec drew random numbers."""

    drawn: list[int] = field(default_factory=list)

    def generator(self, head: int, stream: int = 0) -> torch.Generator:
        """As ``Site.generator``, and record the head."""
        self.drawn.append(head)
        return super().generator(head, stream)


def check_fit(spec: str | KVScheme, text: str | None, window_tokens: int | None = None) -> None:
    """Validate, before a model is loaded, that the scheme has constants to fit and that a text can be long enough."""
    scheme = get(spec)
    if not scheme.is_fitted:
        raise FitError(
            f"{scheme} has no constants to fit: it takes nothing from data; use it without a params file, or fit the "
            f"mean of the keys with mean=pre."
        )
    least = window_tokens or WINDOW_TOKENS
    if text is not None and (size := len(text.encode())) < least:  # a token is at least a byte
        raise ModelError(
            f"the text has {size} bytes and a window takes {least} tokens; pass a longer text, or "
            f"--window-tokens {max(size // 8, 2)}."
        )


def fit_model(
    model: LoadedModel,
    spec: str | KVScheme,
    text: str | None = None,  # real text, not the one that quality is measured on; None: the model's own samples
    *,
    windows: int = WINDOWS,  # at most
    window_tokens: int | None = None,  # default: 2,048, of the model's own samples 1,024
    max_tokens: int = MAX_TOKENS,  # kept per layer
    seed: int = 0,  # as for ``cache_for``; of the model's own samples too
    text_name: str = "",  # in the file
    progress: Progress | None = None,
) -> FittedParams:
    """Fit a scheme's constants to a model.

    Returns constants on the CPU: ``save(path)`` writes them, ``cache_for(model, spec, params=...)`` takes them. If the
    model cannot be run backwards, codecs are fitted without gradients, and the file says so beside the text's name.

    Raises
    ------
    FitError
        Nothing to fit, or a sample that constants cannot be fitted to.
    ModelError
        A text too short, or a window that the model cannot hold.
    SpecError, ShapeError, UnsupportedError
        An unknown spec, or one that does not fit the model.

    >>> from packedkv.models.loading import load, load_text
    >>> text = load_text("mine.txt")  # doctest: +SKIP
    >>> fitted = fit_model(load("smollm2-135m"), "innerq-base", text.text)  # doctest: +SKIP
    >>> fitted.save("innerq.safetensors")  # doctest: +SKIP
    """
    from packedkv.integrations.transformers.build import layer_schemes, resolve_means  # needs transformers
    from packedkv.integrations.transformers.plan import identify, plan_for
    from packedkv.integrations.transformers.rope import rotary_of

    scheme, shown = get(spec), progress or Progress(False)
    check_fit(scheme, text, window_tokens)
    plan = plan_for(model.model, "decoded")
    layers = [layer.index for layer in plan.kv_layers]
    schemes = resolve_means(model.model, plan, scheme, layer_schemes(plan, scheme))
    scheme = scheme.with_means([layer_scheme.mean for layer_scheme in schemes])
    means: dict[int, MeanRemoval] = {}
    for layer, layer_scheme in zip(plan.kv_layers, schemes, strict=True):
        if layer_scheme.mean in ("pre", "post"):
            means[layer.index] = MeanRemoval(
                layer_scheme.mean, rotary_of(model.model, layer.index) if layer_scheme.mean == "pre" else None
            )
    sites = sites_to_fit(scheme, layers)
    if not sites:
        raise FitError(f"{scheme}: all {len(layers)} KV layers of {model.name} are dense; there is nothing to fit.")
    size = window_tokens or (samples.WINDOW_TOKENS if text is None else WINDOW_TOKENS)
    check_window(model.model.config, size)
    if text is None:
        parts = samples.sample_windows(model.model, windows, size, seed=seed, progress=shown)
        read, text_name = torch.stack(parts).numpy().tobytes(), f"the model's own samples (seed {seed})"
    else:
        parts = split_windows(tokenize(model.tokenizer, text, windows * size), windows, size)
        read = text.encode()
    layer_samples, why = None, ""
    try:
        layer_samples = capture(model.model, parts, sites, max_tokens=max_tokens, seed=seed, progress=shown)
    except NoGradientsError as error:
        why = str(error)  # and what the run held is let go
    if layer_samples is None:
        shown.say(f"fitting without gradients: {why}")
        text_name = f"{text_name or 'a text'}, without gradients"
        layer_samples = capture(model.model, parts, sites, max_tokens=max_tokens, backward=False, progress=shown)
    tokens = min(sum(map(len, sample.places)) for sample in layer_samples.values())
    fitted, seeded = _fit_sites(sites, layer_samples, means, seed, model.model.device, shown)
    return FittedParams(
        scheme=scheme,
        model=identify(model.model, model.name),
        layers=fitted,
        seed=seed,
        seeded=seeded,
        tokens=tokens,
        windows=len(parts),
        window_tokens=size,
        text_name=text_name,
        text_sha256=hashlib.sha256(read).hexdigest(),
    )


def capture(
    model: Any,
    windows: Sequence[Tensor],
    sites: Sequence[tuple[int, Role, Codec]],
    *,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    backward: bool = True,
    progress: Progress | None = None,
) -> dict[int, LayerSample]:
    """Record what calibration needs, layer by layer, on the CPU, of ``sites``: layer, role and codec, to whose
    ``held_dtype`` tokens are rounded.

    At most ``max_tokens`` a layer are kept, evenly spaced in each window. ``seed`` is of the labels; without
    ``backward`` no codec gets gradients.

    Raises FitError for NaN, Inf or out-of-range keys or values, with the position, or a layer that was not seen;
    NoGradientsError if the model cannot be run backwards, or not within the memory; UnsupportedError if its attention
    cannot be recorded.
    """
    shown = progress or Progress(False)
    codecs: dict[int, dict[Role, Codec]] = {}
    for layer, role, codec in sites:
        codecs.setdefault(layer, {})[role] = codec
    share = max(max_tokens // len(windows), 1)
    samples: dict[int, LayerSample] = {}
    passed: set[int] = set()  # layers of the current window
    alive: list[tuple[int, Role, Tensor]] = []  # its keys and values, by which gradients are taken
    backward = backward and any("gradients" in codec.needs for _, _, codec in sites)

    def seen(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if layer not in codecs or layer in passed:
            return
        passed.add(layer)
        sample = samples.setdefault(layer, LayerSample(key.dtype))
        done = sum(len(s.queries) for s in samples.values())
        note = f"window {len(sample.queries) + 1} of {len(windows)}, layer {layer}"
        shown.bar("reading the text", done, len(windows) * len(codecs), note)
        sample.queries.append(_excerpt(query, share, storage_dtype(query.dtype)))
        sample.places.append(_places(query.shape[2], share))
        for role, x in zip(ROLES, (key, value), strict=True):
            if role in codecs[layer]:
                try:
                    check_tensor(f"{role}s of layer {layer}", x.detach())
                except ValueError as error:
                    raise FitError(str(error)) from error
                getattr(sample, role).append(_excerpt(x, share, codecs[layer][role].held_dtype(x.dtype)))
                if backward and "gradients" in codecs[layer][role].needs:
                    alive.append((layer, role, x))

    # the logits of a window are larger than all that is recorded
    keeps = not backward and "logits_to_keep" in inspect.signature(model.forward).parameters
    fewest = {"logits_to_keep": 1} if keeps else {}

    def run(window: Tensor) -> Any:
        return model(input_ids=window.to(model.device)[None], use_cache=False, **fewest)

    def run_backward(number: int, window: Tensor) -> None:
        try:
            grads = gradients(run(window), [x for _, _, x in alive], seed + number)
        except KVError:
            raise
        except (RuntimeError, NotImplementedError) as error:  # of autograd, or of memory
            raise NoGradientsError(f"{type(model).__name__} could not be run backwards ({error}).") from error
        for (layer, role, _), x in zip(alive, grads, strict=True):
            getattr(samples[layer], f"{role}_gradient").append(_excerpt(x, share, torch.bfloat16))

    with watched(model, seen), from_embeddings(model) if backward else torch.no_grad():
        for number, window in enumerate(windows):
            passed.clear()
            alive.clear()
            if backward:
                run_backward(number, window)
            else:
                run(window)
    if missing := sorted(set(codecs) - set(samples)):
        raise FitError(
            f"{type(model).__name__}: the attention of layer {missing[0]} was not seen; it cannot be fitted."
        )
    return samples


class NoGradientsError(FitError):
    """A model cannot be run backwards, not within the memory, or not in its dtype."""


@contextmanager
def from_embeddings(model: Any) -> Iterator[None]:
    """Record what follows from the embeddings of the tokens, whatever weights are frozen or quantized."""

    def leaf(module: Any, inputs: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    hook = model.get_input_embeddings().register_forward_hook(leaf)
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()


@torch.no_grad()
def gradients(out: Any, of: Sequence[Tensor], seed: int) -> tuple[Tensor, ...]:
    """Gradients by ``of`` of the summed cross-entropy of labels that are drawn from the model's own distribution.

    Their second moments are the Fisher information: no text has to be right for it.

    ``out`` is the output for one sequence within ``from_embeddings``; its logits ``[1, n, V]`` are used. The results
    have the shapes and dtypes of ``of``.
    """
    logits = getattr(out, "logits", None)
    if logits is None:
        raise NoGradientsError("the model returns no logits, so it has no loss.")
    generator = torch.Generator(logits.device).manual_seed(seed)
    slope = torch.empty_like(logits)  # of the loss by the logits: the distribution, less 1 at the label
    for piece, out in zip(logits[0].split(PIECE), slope[0].split(PIECE), strict=True):
        chances = piece.float().softmax(-1)
        label = torch.multinomial(chances, 1, generator=generator)
        out.copy_(chances.scatter_add_(1, label, -torch.ones_like(label, dtype=chances.dtype)))
    grads = torch.autograd.grad(logits, of, slope)
    if not all(bool(x.isfinite().all()) for x in grads):
        raise NoGradientsError(f"gradients in {str(logits.dtype).removeprefix('torch.')} are not finite; try bfloat16.")
    return grads


def _excerpt(x: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """At most ``tokens`` tokens of ``x [B, H, N, D]``, evenly spaced, copied to the CPU."""
    if x.shape[2] > tokens:
        x = x[:, :, _places(x.shape[2], tokens).to(x.device)]
    return x.detach().to("cpu", dtype, copy=True)


def _places(n: int, tokens: int) -> Tensor:
    return torch.linspace(0, n - 1, min(n, tokens), dtype=torch.float64).round().long()


def _mean_of(parts: Sequence[Tensor], places: Sequence[Tensor], mean: MeanRemoval) -> Tensor:
    """Mean of the keys ``[1, H, n, D]`` of several windows, float32 ``[1, H, D]``."""
    masks = [at >= SKIPPED for at in places]
    if not any(bool(mask.any()) for mask in masks):
        raise FitError(f"windows of at most {SKIPPED} tokens have no mean; pass a larger --window-tokens.")
    keys = torch.cat([x[:, :, mask] for x, mask in zip(parts, masks, strict=True)], 2)
    return mean.of(keys, torch.cat([at[mask] for at, mask in zip(places, masks, strict=True)])[None])


def _fit_sites(
    sites: Sequence[tuple[int, Role, Codec]],
    samples: dict[int, LayerSample],
    means: Mapping[int, MeanRemoval],
    seed: int,
    device: torch.device,
    progress: Progress,
) -> tuple[dict[int, dict[Role, Params]], bool]:
    """Calibrate site by site (emptying ``samples``), then settle; also whether any codec used the seed."""
    fitted: dict[Role, dict[int, Params]] = {role: {} for role in ROLES}
    removed: dict[int, Tensor] = {}
    codecs: dict[Role, Codec] = {}
    drawn: list[int] = []
    last = {layer: at for at, (layer, _, _) in enumerate(sites)}
    for done, (layer, role, codec) in enumerate(sites):
        progress.bar("fitting", done, len(sites), f"layer {layer}, {role}s")
        sample = samples[layer]
        x, queries = (torch.cat(parts, 2).to(device) for parts in (getattr(sample, role), sample.queries))
        if role == "key" and layer in means:
            removed[layer] = _mean_of(sample.key, sample.places, means[layer])
            x = x.float() - means[layer].at(removed[layer].to(device), torch.cat(sample.places)[None].to(device))
        if codec.needs:
            codecs[role] = codec.for_dtype(sample.dtype)
            site = _WatchedSite(layer, role, x.shape[1], x.shape[3], seed, device, drawn=drawn)
            slopes = getattr(sample, f"{role}_gradient")
            gradient = torch.cat(slopes, 2).to(device) if slopes else None
            fitted[role][layer] = codecs[role].fit(site, Sample(x, queries, gradient))
        if last[layer] == done:
            del samples[layer]
    layers: dict[int, dict[Role, Params]] = {layer: {} for layer, _, _ in sites}
    for role, codec in codecs.items():
        for layer, params in zip(fitted[role], codec.settle(list(fitted[role].values())), strict=True):
            layers[layer][role] = {name: value.detach().cpu() for name, value in params.items()}
    for layer, mean in removed.items():
        layers[layer]["key"] = {**layers[layer].get("key", {}), MEAN: mean}
    return layers, bool(drawn)


def about(fitted: FittedParams) -> dict[str, Any]:
    """What was fitted and on what, as plain JSON values.

    ``seed`` is None where no codec drew from it, ``layers`` a list, and ``constants`` has an object per role and
    constant over all its layers, whose ``layers`` is how many.
    """
    constants: dict[tuple[Role, str, str], list[Tensor]] = {}
    at = fitted.model.layers
    for layer, roles in fitted.items():
        scheme = fitted.scheme.for_layer(at.index(layer), len(at))
        for role, params in roles.items():
            codec = type(scheme.codec(role)).__name__
            for name, x in params.items():
                constants.setdefault((role, codec, name), []).append(x)
    rows = [
        {
            "role": role,
            "codec": codec,
            "constant": name,
            "dtype": str(xs[0].dtype).removeprefix("torch."),
            "shapes": [list(shape) for shape in dict.fromkeys(x.shape for x in xs)],
            "layers": len(xs),
            "bytes": sum(x.nbytes for x in xs),
            "min": min((x.double().min().item() for x in xs if x.numel()), default=None),
            "max": max((x.double().max().item() for x in xs if x.numel()), default=None),
        }
        for (role, codec, name), xs in constants.items()
    ]
    return {
        "spec": fitted.spec,
        "model": fitted.model.name,
        "text": fitted.text_name,
        "text_sha256": fitted.text_sha256,
        "tokens": fitted.tokens,
        "windows": fitted.windows,
        "window_tokens": fitted.window_tokens,
        "seed": fitted.seed if fitted.seeded else None,
        "sha256": fitted.sha256,
        "layers": list(fitted),
        "bytes": sum(x.nbytes for xs in constants.values() for x in xs),
        "constants": rows,
    }


def about_text(facts: Mapping[str, Any], windows: int) -> str:
    """``about`` (with ``file`` and ``seconds``) as readable text; ``windows`` is the number requested."""
    lines = [
        f"{facts['spec']} fitted to {facts['model']}: {len(facts['layers'])} layers, {facts['tokens']} tokens each"
    ]
    fewer = f" ({windows} asked for: the text is too short)" if facts["windows"] < windows else ""
    lines.append(f"text: {facts['text']}, {facts['windows']} x {facts['window_tokens']} tokens{fewer}")
    for c in facts["constants"]:
        shapes = " or ".join("x".join(map(str, shape)) for shape in c["shapes"])
        span = "" if c["min"] is None else f", {c['min']:.4g} .. {c['max']:.4g}"
        lines.append(f"  {c['role']}s: {c['constant']} {c['dtype']} [{shapes}] in {c['layers']} layers{span}")
    lines.append(f"written: {facts['file']}, {facts['bytes']} bytes of constants, {facts['seconds']:.1f} s")
    return "\n".join(lines)
