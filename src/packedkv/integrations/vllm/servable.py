"""What an engine with shared pages can serve: rules, each with its error message.

Requests with the same prefix share pages: they are found by the hash of their tokens, evicted, and computed again. So
the bytes of a page must be a pure function of its tokens' own keys and values. Dense tokens beside the pages and
statistics of a sequence break this: a request that finds its prompt in the prefix cache would read other numbers than
the one that computed it. Groups of tokens do not: requests share whole blocks, which are whole groups. Nor do dense
first tokens of codecs that encode each token alone: pages have room for them (``store.kept_rows``).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from packedkv.codec import ROLES
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.registry import get
from packedkv.scheme import KVScheme

PAGE_STEP = 16
"""Page sizes are multiples of it: planes then need no padding, and kernels support them."""


BLOCK = 64
"""Tokens of a page that kernels read fastest, if it is a multiple of ``page_step``."""


def group_tokens(scheme: KVScheme) -> int:
    """Tokens that a scheme or mixture encodes together; 1: each alone."""
    layers = scheme.layer_schemes
    return math.lcm(*(own.codec(role).block_tokens for own in layers for role in ROLES))


def page_step(scheme: KVScheme) -> int:
    """A page must be a multiple of this many tokens."""
    return math.lcm(PAGE_STEP, group_tokens(scheme))


def preferred_page(scheme: KVScheme) -> int:
    """Tokens of a page that kernels read fastest; with a sink so many that its room takes a quarter bit a number."""
    step, sink = page_step(scheme), max(own.sink for own in scheme.layer_schemes)
    return -(-max(BLOCK, BLOCK * sink) // step) * step


def page_refusal(scheme: KVScheme, page_tokens: int) -> str:
    """Return why a page, which is an engine's block, cannot have so many tokens, or ``""`` if it can."""
    step, unit = page_step(scheme), group_tokens(scheme)
    if page_tokens % step == 0:
        if page_tokens >= scheme.sink:
            return ""
        return f"--block-size {page_tokens}; the first {scheme.sink} tokens lie in one page, give as many or more."
    why = f"{scheme} encodes {unit} tokens together and " if unit > 1 else ""
    return f"--block-size {page_tokens}; {why}pages are multiples of {step} tokens, give one of these."


class Rule(NamedTuple):
    """One reason not to serve a layer's scheme.

    Parameters
    ----------
    name : str
    broken : callable
        (scheme, fitted) -> whether the scheme breaks it; ``fitted``: constants come from a file.
    reason, cure : str
        Two halves of the sentence, with ``{s}`` for the scheme.
    """

    name: str
    broken: Callable[[KVScheme, bool], bool]
    reason: str
    cure: str


def _roles(scheme: KVScheme, attribute: str) -> bool:
    return any(getattr(scheme.codec(role), attribute) for role in ROLES)


RULES = (
    Rule(
        "statistics",
        lambda s, fitted: not fitted and _roles(s, "needs"),
        "it takes constants from each sequence's own tokens, and sequences share pages",
        'run packedkv fit MODEL "{s}" --text TEXT -o FILE and pass that file, {{"params": FILE}}, or let the server do '
        'so at its start, {{"params": "fit"}}',
    ),
    Rule(
        "mean of groups",
        lambda s, fitted: s.mean in ("pre", "post") and group_tokens(s) > 1,
        "it encodes groups of tokens, and the unfinished ones beside the pages keep their mean",
        "use mean=none",
    ),
    Rule(
        "age tiers",
        lambda s, fitted: s.recent is not None,
        "it encodes tokens anew when they age (recent), and pages that requests share must not change",
        'give "window": 0 to serve it without',
    ),
    Rule(
        "dense tokens",
        lambda s, fitted: bool(s.window or (s.sink and group_tokens(s) > 1)),
        "it keeps {dense} dense, which is not in the pages that requests share",
        "give {zeros} to serve it without",
    ),
)
"""In the order in which they are reported: what has no remedy first."""


def refusal(
    scheme: KVScheme, head_dim: int | None = None, page_tokens: int | None = None, *, fitted: bool = False
) -> str:
    """Return why the scheme of a layer cannot be served, in one sentence that says what to do, or ``""`` if it can.

    Parameters
    ----------
    scheme : KVScheme
        Of one layer (``for_layer``); a mixture is asked layer by layer.
    head_dim : int, optional
    page_tokens : int, optional
        Tokens of a page, the engine's block size.
    fitted : bool
        Whether the constants come from a file.

    Examples
    --------
    >>> refusal(get("saw-int4"), 128, 128)
    ''
    >>> refusal(get("octopus-3"))
    'octopus-3: it keeps the newest 32 tokens dense, which is not in the pages that requests share; give "window": 0 to serve it without.'
    """  # noqa: E501
    grouped = group_tokens(scheme) > 1
    dense = {"sink": ("first", scheme.sink if grouped else 0), "window": ("newest", scheme.window)}
    words = {
        "dense": " and ".join(f"the {which} {count} tokens" for which, count in dense.values() if count),
        "s": str(scheme),
        "zeros": " and ".join(f'"{name}": 0' for name, (_, count) in dense.items() if count),
    }
    for rule in RULES:
        if rule.broken(scheme, fitted):
            return f"{scheme}: {rule.reason.format(**words)}; {rule.cure.format(**words)}."
    if head_dim is not None:
        for role in ROLES:
            try:
                scheme.codec(role).layout(head_dim)
            except (ShapeError, UnsupportedError) as error:
                return f"{scheme}: {error}"
        step = page_step(scheme)
        if (size := scheme.page_layout(head_dim, step).page_bytes) % step:
            return (
                f"{scheme}: at head_dim={head_dim} {step} tokens take {size} bytes, and engines count whole bytes for "
                f"each token; use shorter groups or a preset that encodes each token alone."
            )
    why = "" if page_tokens is None else page_refusal(scheme, page_tokens)
    return why and f"{scheme}: {why}"


def verdicts(presets: list[str], num_layers: int = 36) -> dict[str, str]:
    """Return ``refusal`` of every preset: that of the first layer which has one."""
    found = {}
    for name in presets:
        layers = {get(name).for_layer(i, num_layers): None for i in range(num_layers)}
        found[name] = next(filter(None, map(refusal, layers)), "")
    return found
