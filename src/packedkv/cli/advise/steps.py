"""The steps of ``advise``: what fits, candidates, options of each layer, and the measuring of the finalists."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from packedkv.cli.advise.candidates import DENSE, Candidate, assess, check_specs, choose, default_specs
from packedkv.cli.advise.expected import cache_bytes, dtype_of, layer_bytes, size, sizes_of
from packedkv.cli.advise.search import Option, best_within, least_for
from packedkv.cli.measure import perplexity
from packedkv.cli.measure.rows import Row
from packedkv.codec import ROLES, Role
from packedkv.description import kernels_for
from packedkv.errors import BrokenPresetError, KVError, PackedKVWarning, SpecError
from packedkv.integrations.transformers.biases import biases_of
from packedkv.integrations.transformers.plan import LayerPlan, ModelPlan, plan_for
from packedkv.key_bias import KeyBiases, Probe
from packedkv.models import windows as text_windows
from packedkv.models.loading import LoadedModel
from packedkv.progress import Progress
from packedkv.registry import LayerChoice, get, scheme_of
from packedkv.scheme import KVScheme, mix_of

MIXTURE = "(mixture)"
TRIES = 4
"""Mixtures measured, at most, to come below ``max_kl``."""


@dataclass(frozen=True)
class Request:
    """The request to ``advise``: the least KL within ``memory`` bytes, or the fewest bytes within ``max_kl`` per token.

    ``context`` tokens of each of ``batch`` sequences. The finalists, the mixture and the ``uniform`` most promising
    presets of ``specs`` (default: ``candidates.default_specs``), are measured on ``windows`` windows; one more is
    searched on. ``probe``: whether presets that break on the model's key biases are left out, and refused where
    ``specs`` names one.
    """

    context: int
    memory: int | None = None
    max_kl: float | None = None
    batch: int = 1
    specs: tuple[str, ...] = ()
    windows: int = 2
    window_tokens: int = 512
    uniform: int = 6
    seed: int = 0
    probe: Probe = "refuse"

    def __post_init__(self) -> None:
        if self.memory is None and self.max_kl is None:
            raise SpecError("advise: say how much memory there is (--memory 8GiB), or which KL is accepted (--max-kl).")
        if min(self.context, self.batch, self.windows, self.uniform) < 1 or self.window_tokens < 2:
            raise SpecError("advise: context, batch, windows and uniform are at least 1, window tokens at least 2.")
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise SpecError(f"advise: max_kl={self.max_kl:g}: expected a number above 0.")


@dataclass
class Finalist:
    """A mixture or uniform preset, its bytes, and its measurements."""

    spec: str
    scheme: KVScheme
    nbytes: int
    predicted: float | None = None
    options: list[Option] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    served: list[Any] = field(default_factory=list)

    @property
    def kl(self) -> float:
        """Measured KL."""
        return _cost(perplexity.summarize(self.scores).kl)


class Search:
    """The steps of ``advise``, and what they share."""

    def __init__(self, model: LoadedModel, request: Request, shown: Progress) -> None:
        self.model, self.request, self.shown = model, request, shown
        self.plan: ModelPlan = plan_for(model.model, "decoded")
        self.layers = self.plan.kv_layers
        self.heads, self.head_dim = sizes_of(self.plan)
        self.dtype = dtype_of(model.model)
        self.specs = list(dict.fromkeys(request.specs)) or default_specs(self.head_dim)
        self.specs = [spec for spec in self.specs if spec != DENSE]
        if not self.specs:
            raise SpecError("advise: no candidate but dense; name presets with --specs.")
        check_specs(self.specs, self.plan)
        self.biases, self.left_out = self._broken()
        text_windows.check_window(model.model.config, request.window_tokens)
        self.chosen: dict[Role, list[str]] = {}
        self.promise: dict[str, float] = {}
        self.not_tried: list[str] = []

    def _broken(self) -> tuple[KeyBiases | None, dict[str, str]]:
        """Return the model's key biases, if relevant, and the specs that break on them as presets, with the reasons."""
        asked = self.request.probe
        if asked == "off" or not (biases := biases_of(self.model.model, self.plan)):
            return None, {}
        broken = biases.broken(self.specs)
        if asked == "warn":
            for why in broken.values():
                warnings.warn(why, PackedKVWarning, stacklevel=4)
            return None, {}
        if broken and (self.request.specs or len(broken) == len(self.specs)):
            raise BrokenPresetError(next(iter(broken.values())))
        return biases, broken

    def bytes_of(self, scheme: KVScheme, *, grown: bool = False) -> int:
        """Bytes at the asked context."""
        r = self.request
        return cache_bytes(scheme, self.plan, r.context, self.dtype, batch=r.batch, grown=grown)

    def check_room(self) -> None:
        """Validate, before any work, that some candidate fits into the memory and that dense does not."""
        memory, r = self.request.memory, self.request
        if memory is None:
            return
        what, dense = f"{self.plan.name}: {r.batch} x {r.context} tokens", self.bytes_of(get(DENSE))
        if dense <= memory and r.max_kl is None:
            raise KVError(
                f"{what} take {size(dense)} in 16 bit, which fits into {size(memory)}: nothing has to be compressed. "
                f"Pass --max-kl in place of --memory for the fewest bytes at that loss."
            )
        holding = [spec for spec in self.specs if spec not in self.left_out]
        key = min(holding, key=lambda spec: self.bytes_of(self._everywhere(spec, DENSE)))
        value = min(self.specs, key=lambda spec: self.bytes_of(self._everywhere(DENSE, spec)))
        least = self.bytes_of(self._everywhere(key, value))
        if least > memory:
            raise KVError(
                f"{what} do not go into {size(memory)}; the smallest candidates, {key} for keys and {value} for "
                f"values, take {size(least)} (16 bit: {size(dense)}). Ask for fewer tokens or more memory, or name "
                f"smaller specs."
            )

    def _everywhere(self, key: str, value: str) -> KVScheme:
        return mix_of([scheme_of(LayerChoice(key, value))] * len(self.layers))

    def candidates(self, window: Tensor) -> dict[Role, list[Candidate]]:
        """Assess all specs on a window; set which ones are measured, and the promise of uniform presets."""
        r = self.request
        candidates = assess(self.model.model, window, self.specs, self.plan, r.context, self.dtype, r.seed, self.shown)
        self.chosen = choose(candidates | {"key": [c for c in candidates["key"] if c.spec not in self.left_out]})
        n = len(self.layers)
        errors = {(c.spec, c.role): c.error for role in ROLES for c in candidates[role]}
        for spec in self.specs:
            layers = [get(spec).for_layer(i, n) for i in range(n)]
            shares = {role: sum(type(s.codec(role)).__name__ != "Dense" for s in layers) / n for role in ROLES}
            self.promise[spec] = sum(errors.get((spec, role), 0.0) * shares[role] for role in ROLES)
        return candidates

    def groups(self, rows: Sequence[Row]) -> list[list[Option]]:
        """Options of every layer: each pair of a key spec and a value spec, ``dense`` among them."""
        kl = {(row["layer"], row["role"], row["spec"]): _cost(row["kl"]) for row in rows}
        pairs = [(k, v) for k in (DENSE, *self.chosen["key"]) for v in (DENSE, *self.chosen["value"])]
        sizes: dict[tuple[str, str, int | None], int] = {}
        groups = []
        for layer in self.layers:
            group = []
            for key, value in pairs:
                choice = LayerChoice(key, value)
                lost = self.biases.at(layer.index, scheme_of(choice).key) if self.biases else None
                if lost is not None and lost.broken:  # here the preset may keep keys dense, and a mixture would not
                    continue
                known = key, value, layer.window
                if known not in sizes:
                    sizes[known] = self._layer_bytes(choice, layer)
                cost = kl.get((layer.index, "key", key), 0.0) + kl.get((layer.index, "value", value), 0.0)
                group.append(Option(choice, sizes[known], cost))
            groups.append(group)
        return groups

    def _layer_bytes(self, choice: LayerChoice, layer: LayerPlan) -> int:
        scheme, tokens = scheme_of(choice), self.request.context
        if layer.window is not None:
            scheme = scheme_of(LayerChoice(choice.key, choice.value, 0, scheme.window))
            tokens = min(tokens, layer.window - 1)
        return layer_bytes(scheme, tokens, self.heads, self.head_dim, self.dtype, batch=self.request.batch)

    def finalists(
        self, groups: list[list[Option]], windows: Sequence[Tensor]
    ) -> tuple[list[Finalist], perplexity.Quality]:
        """Measure the mixture, and the most promising uniform presets of at most its bytes."""
        r = self.request
        mixture = self._mixture(groups, r.max_kl)
        room = mixture.nbytes if r.memory is None else r.memory
        fitting = sorted(
            (spec for spec in self.specs if spec not in self.left_out and self.bytes_of(get(spec)) <= room),
            key=lambda spec: self.promise[spec],
        )
        self.not_tried = fitting[r.uniform :]
        uniform = [Finalist(spec, get(spec), self.bytes_of(get(spec))) for spec in fitting[: r.uniform]]
        finalists = [mixture, *uniform]
        base = self._measure(finalists, windows)
        for _ in range(TRIES - 1):  # the prediction may be too low: then search with a lower bound
            if r.memory is not None or r.max_kl is None or mixture.kl <= r.max_kl:
                break
            target = 0.9 * (mixture.predicted or 0.0) * r.max_kl / mixture.kl
            again = self._mixture(groups, target)
            if again.nbytes == mixture.nbytes:
                break
            mixture = again
            self._measure([mixture], windows)
            finalists.append(mixture)
        return finalists, base

    def _mixture(self, groups: list[list[Option]], max_kl: float | None) -> Finalist:
        memory = self.request.memory
        picked = least_for(groups, max_kl or 0.0) if memory is None else best_within(groups, memory)
        if picked is None:
            raise KVError(f"no mixture of {', '.join(self.specs)} goes into {size(memory or 0)}.")
        scheme = mix_of([scheme_of(option.choice) for option in picked])
        return Finalist(MIXTURE, scheme, self.bytes_of(scheme), sum(option.kl for option in picked), picked)

    def measure_served(self, best: Finalist, windows: Sequence[Tensor]) -> None:
        """Measure the advised spec as it is served, if it was measured otherwise."""
        if self._read(best.scheme) == best.scheme:
            best.served = best.scores
            return
        twin = Finalist(best.spec, best.scheme, best.nbytes)
        self._measure([twin], windows, as_served=True)
        best.served = twin.scores

    def _read(self, scheme: KVScheme) -> KVScheme:
        """Return the scheme that replaces this one on the windows of text."""
        return scheme.without_windows() if self.request.context > self.request.window_tokens else scheme

    def _measure(
        self, finalists: Sequence[Finalist], windows: Sequence[Tensor], *, as_served: bool = False
    ) -> perplexity.Quality:
        model, r = self.model.model, self.request
        base, total = [], len(finalists) * len(windows)
        for i, window in enumerate(windows):
            reference = perplexity.uncompressed(model, window)
            base.append(reference.score_itself())
            for j, finalist in enumerate(finalists):
                self.shown.bar("measuring", i * len(finalists) + j, total, finalist.spec)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PackedKVWarning)  # what breaks here shows in its KL
                    scheme = finalist.scheme if as_served else self._read(finalist.scheme)
                    logits, _ = perplexity.compressed_logits(model, scheme, window, seed=r.seed)
                finalist.scores.append(reference.score(logits))
        return perplexity.summarize(base)

    def decide(self, finalists: Sequence[Finalist]) -> tuple[Finalist, bool]:
        """Return the finalist to advise, and whether it meets the request."""
        r = self.request
        if all(math.isinf(f.kl) for f in finalists):
            raise KVError(
                f"advise: with every candidate the logits of {self.plan.name} are no numbers; its keys or values "
                f"exceed the dtype: use --dtype bfloat16 or float32, or other --specs."
            )
        choices = [f for f in finalists if r.max_kl is None or f.kl <= r.max_kl]
        if r.memory is None and choices:
            return min(choices, key=lambda f: (f.nbytes, f.kl)), True
        best = min(finalists, key=lambda f: (f.kl, f.nbytes))
        return best, best in choices

    # -- rows --------------------------------------------------------------------------------------------------------

    def row(self, finalist: Finalist) -> Row:
        """Plain values of a finalist."""
        summary = perplexity.summarize(finalist.scores)
        elements = 2 * self.request.batch * self.request.context * self.heads * self.head_dim * len(self.layers)
        return {
            "spec": finalist.spec,
            "bytes": finalist.nbytes,
            "grown_bytes": self.bytes_of(finalist.scheme, grown=True),
            "bits": finalist.nbytes * 8 / elements,
            "ratio_to_16bit": elements * 2 / finalist.nbytes,
            "kl": summary.kl,
            "kl_se": summary.kl_se,
            "perplexity": summary.perplexity,
            "top1_agreement": summary.top1_agreement,
            "predicted_kl": finalist.predicted,
            "kl_as_served": perplexity.summarize(finalist.served).kl if finalist.served else None,
        }

    def layer_rows(self, finalist: Finalist) -> list[Row]:
        """Lines of a mixture; none for a preset."""
        return [
            {
                "layer": layer.index,
                "key": option.choice.key,
                "value": option.choice.value,
                "bytes": option.nbytes,
                "predicted_kl": option.kl,
            }
            for layer, option in zip(self.layers, finalist.options, strict=False)
        ]

    def unserved(self, finalist: Finalist) -> list[str]:
        """Pairs of codecs that no GPU kernel decodes."""
        layers = [finalist.scheme.for_layer(i, len(self.layers)) for i in range(len(self.layers))]
        unlike = {(s.key, s.value): s for s in layers}
        return [str(s) for s in unlike.values() if kernels_for(s, self.head_dim)["decode"] == "none"]


def _cost(kl: float | None) -> float:
    """KL to search and order by: infinite where logits were NaN (null in a file of rows)."""
    return math.inf if kl is None or math.isnan(kl) else max(kl, 0.0)
