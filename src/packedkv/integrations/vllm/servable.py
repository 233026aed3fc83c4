"""Schemes that an engine with shared pages can serve: rules, each with its error message.

Requests with the same prefix share pages, and an evicted page is computed again: its bytes must be a pure function of
its tokens' own keys and values.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from packedkv.codec import ROLES
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.scheme import KVScheme

PAGE_STEP = 16
"""Page sizes are multiples of it: planes then need no padding, and kernels support them."""
BLOCK = 64
"""Tokens of a page that kernels read fastest, if it is a multiple of ``page_step``."""


def group_tokens(scheme: KVScheme) -> int:
    """Tokens that a scheme or mixture encodes together; 1: each alone."""
    layers = scheme.layer_schemes
    return math.lcm(*(layer.codec(role).block_tokens for layer in layers for role in ROLES))


def page_step(scheme: KVScheme) -> int:
    """A page must be a multiple of this many tokens."""
    return math.lcm(PAGE_STEP, group_tokens(scheme))


def preferred_page(scheme: KVScheme) -> int:
    """Tokens of a page that kernels read fastest; with a sink, long enough that it takes a quarter bit a number."""
    step, sink = page_step(scheme), max(layer.sink for layer in scheme.layer_schemes)
    return -(-max(BLOCK, BLOCK * sink) // step) * step


class Rule(NamedTuple):
    """One reason not to serve a layer's scheme; ``reason`` and ``cure`` are a sentence, with ``{s}`` for the scheme."""

    broken: Callable[[KVScheme, bool], bool]  # (scheme, whether constants come from a file)
    reason: str
    cure: str


RULES = (
    Rule(
        lambda s, fitted: not fitted and any(s.codec(role).needs for role in ROLES),
        "it takes constants from each sequence's own tokens, and sequences share pages",
        'run packedkv fit MODEL "{s}" --text TEXT -o FILE and pass that file, {{"params": FILE}}, or let the server do '
        'so at its start, {{"params": "fit"}}',
    ),
    Rule(
        lambda s, fitted: s.mean in ("pre", "post") and group_tokens(s) > 1,
        "it encodes groups of tokens, and the unfinished ones beside the pages keep their mean",
        "use mean=none",
    ),
    Rule(
        lambda s, fitted: s.recent is not None,
        "it encodes tokens anew when they age (recent), and pages that requests share must not change",
        'give "window": 0 to serve it without',
    ),
    Rule(
        lambda s, fitted: bool(s.window or (s.sink and group_tokens(s) > 1)),
        "it keeps {dense} dense, which is not in the pages that requests share",
        "give {zeros} to serve it without",
    ),
)
"""In the order in which they are reported: rules without a remedy first."""


def check_scheme(scheme: KVScheme, *, fitted: bool = False) -> None:
    """Check all layers of a scheme or mixture by ``check_layer``."""
    for layer in dict.fromkeys(scheme.layer_schemes):
        check_layer(layer, fitted=fitted)


def check_layer(
    scheme: KVScheme,
    head_dim: int | None = None,
    page_tokens: int | None = None,
    *,
    fitted: bool = False,
    where: str = "packedkv",
) -> None:
    """Raise UnsupportedError, with the reason and a cure, if the scheme of a layer (``for_layer``) is not served.

    ``page_tokens``: the engine's block size. ``fitted``: constants come from a file. ``where``: start of the message.

    >>> from packedkv.registry import get
    >>> check_layer(get("saw-int4"), 128, 128)
    >>> check_layer(get("octopus-3"))
    Traceback (most recent call last):
    packedkv.errors.UnsupportedError: packedkv: octopus-3: it keeps the newest 32 tokens dense, which is not in the pages that requests share; give "window": 0 to serve it without.
    """  # noqa: E501
    grouped = group_tokens(scheme) > 1
    dense = {"sink": ("first", scheme.sink if grouped else 0), "window": ("newest", scheme.window)}
    words = {
        "dense": " and ".join(f"the {which} {count} tokens" for which, count in dense.values() if count),
        "s": str(scheme),
        "zeros": " and ".join(f'"{name}": 0' for name, (_, count) in dense.items() if count),
    }
    # rules that depend on the scheme alone, then its layout at this head_dim, then the page
    for rule in RULES:
        if rule.broken(scheme, fitted):
            raise UnsupportedError(f"{where}: {scheme}: {rule.reason.format(**words)}; {rule.cure.format(**words)}.")
    if head_dim is not None:
        for role in ROLES:
            try:
                scheme.codec(role).layout(head_dim)
            except (ShapeError, UnsupportedError) as error:
                raise UnsupportedError(f"{where}: {scheme}: {error}") from error
        step = page_step(scheme)
        if (size := scheme.page_layout(head_dim, step).page_bytes) % step:
            raise UnsupportedError(
                f"{where}: {scheme}: at head_dim={head_dim} {step} tokens take {size} bytes, and engines count whole "
                f"bytes for each token; use shorter groups or a preset that encodes each token alone."
            )
    if page_tokens is not None:
        check_page(scheme, page_tokens)


def check_page(scheme: KVScheme, page_tokens: int) -> None:
    """Check that a page, which is an engine's block, can have so many tokens."""
    step, unit = page_step(scheme), group_tokens(scheme)
    if page_tokens % step:
        why = f"{scheme} encodes {unit} tokens together and " if unit > 1 else ""
        raise UnsupportedError(
            f"packedkv: --block-size {page_tokens}; {why}pages are multiples of {step} tokens, give one of these."
        )
    if page_tokens < scheme.sink:
        raise UnsupportedError(
            f"packedkv: --block-size {page_tokens}; the first {scheme.sink} tokens lie in one page, give as many or "
            f"more."
        )
