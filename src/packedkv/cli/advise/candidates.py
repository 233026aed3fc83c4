"""Which specs are worth measuring: per role the best of each class of bits, by the error of attention's output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from packedkv.cli.advise.expected import layer_bytes, sizes_of
from packedkv.cli.measure import fidelity
from packedkv.cli.measure.perplexity import uncompressed
from packedkv.codec import ROLES, Dense, Role
from packedkv.description import kernels_for
from packedkv.errors import KVError, ShapeError, UnsupportedError
from packedkv.integrations.transformers.plan import ModelPlan
from packedkv.progress import Progress
from packedkv.registry import LayerChoice, get, presets, scheme_of
from packedkv.scheme import mix_of

CLASSES = (2.7, 3.5, 4.3, 6.0, 10.0)
"""Upper ends of the classes of bits per element: about 2, 3, 4, 5 and 8 bits."""
QUERIES = 64
DENSE = "dense"


@dataclass(frozen=True)
class Candidate:
    """A spec for one role: its bits an element at the asked context, windows included, and the mean over layers of the
    squared relative error of attention's output.
    """

    spec: str
    role: Role
    bits: float
    error: float


def default_specs(head_dim: int) -> list[str]:
    """Presets that GPU kernels decode, that need no params file, and that do not round queries."""
    specs = []
    for spec in presets():
        scheme = get(spec)
        if spec == DENSE or scheme.query_error or "queries" in scheme.key.needs | scheme.value.needs:
            continue
        try:
            scheme.page_layout(head_dim)
        except ShapeError:
            continue
        if kernels_for(scheme, head_dim)["decode"] != "none":
            specs.append(spec)
    return specs


def check_specs(specs: Sequence[str], plan: ModelPlan) -> None:
    """Validate, before any work, that specs can be parts of a mixture for this model."""
    _, head_dim = sizes_of(plan)
    for spec in specs:
        scheme = scheme_of(LayerChoice(spec, spec))
        scheme.page_layout(head_dim)
        if "queries" in scheme.key.needs | scheme.value.needs:
            raise UnsupportedError(f"{spec}: its constants need `packedkv fit`; advise takes codecs that need no file.")


def role_bits(spec: str, role: Role, plan: ModelPlan, context: int, dtype: Any) -> float:
    """Bits per element of one role at the context, sink, window and pages included."""
    heads, head_dim = sizes_of(plan)
    tokens = max(context, 1)
    both = scheme_of(LayerChoice(spec, DENSE)) if role == "key" else scheme_of(LayerChoice(DENSE, spec))
    elements = heads * head_dim * tokens
    return layer_bytes(both, tokens, heads, head_dim, dtype) * 8 / elements - 16


def assess(
    model: Any,
    window: Tensor,
    specs: Sequence[str],
    plan: ModelPlan,
    context: int,
    dtype: Any,
    seed: int,
    shown: Progress,
) -> dict[Role, list[Candidate]]:
    """Bits and errors of every spec in both roles, on one window."""
    with fidelity.record(model, QUERIES) as records:
        uncompressed(model, window)
    exact = [r.output(r.k, r.v) for r in records]
    layers = len(plan.kv_layers)
    candidates: dict[Role, list[Candidate]] = {role: [] for role in ROLES}
    for i, spec in enumerate(specs):
        for role in ROLES:
            choice = LayerChoice(spec, DENSE, 0, 0) if role == "key" else LayerChoice(DENSE, spec, 0, 0)
            scheme = scheme_of(choice)
            if isinstance(scheme.codec(role), Dense):
                continue
            shown.bar("candidates", 2 * i + (role == "value"), 2 * len(specs), f"{spec} {role}s")
            errors = fidelity.attention_error(records, exact, mix_of([scheme] * layers), seed=seed).by_layer
            error = sum(e * e for e in errors.values()) / len(errors)
            candidates[role].append(Candidate(spec, role, role_bits(spec, role, plan, context, dtype), error))
    return candidates


def choose(candidates: Mapping[Role, Sequence[Candidate]]) -> dict[Role, list[str]]:
    """Choose the best candidate per role and class of bits; a codec with several names counts once."""
    chosen: dict[Role, list[str]] = {}
    for role in ROLES:
        seen: set[Any] = set()
        unlike = []
        for c in candidates[role]:
            codec = get(c.spec).codec(role)
            if codec not in seen:
                seen.add(codec)
                unlike.append(c)
        front: list[Candidate] = []
        for low, high in zip((0.0, *CLASSES[:-1]), CLASSES, strict=True):
            inside = sorted((c for c in unlike if low < c.bits <= high), key=lambda c: (c.error, c.bits))
            front += inside[:1]
        # dominated: more bits than another, and no better
        front = [c for c in front if not any(o.bits <= c.bits and o.error < c.error for o in front)]
        chosen[role] = [c.spec for c in front]
        if not front:
            raise KVError(f"no candidate compresses {role}s; name specs that do with --specs.")
    return chosen
