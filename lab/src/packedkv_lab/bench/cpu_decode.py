"""Decode attention of the CPU kernels beside PyTorch's without compression: ``packedkv bench decode --device cpu``.

Rows as of ``bench cache``; ``path`` is the instruction set of the kernels, or ``torch``:

============================  ====  ==================================================================================
metric                        unit  what
============================  ====  ==================================================================================
``attend_us``                 us    attention of one new query per sequence over all tokens
``speedup_vs_sdpa``           x     time of float32 SDPA over it, round by round
``speedup_vs_two_matmuls``    x     time of the faster arrangement of two float32 matrix products over it, likewise
``read_share``                x     bytes that it must read / its time / what a sum over memory reads per second
============================  ====  ==================================================================================

Rows without compression have the specs ``sdpa`` (float32 and bfloat16, in ``dtype``), ``two-matmuls`` and
``two-matmuls-kt`` (keys held transposed). Rows of other libraries (``cpu_rivals.py``) have the library's name as
``path``; what is not installed is left out, and said. All jobs take turns, on PyTorch's threads; ``threads`` says how
many. A run of tokens is encoded once and its bytes repeated: times do not depend on the data.
Keys that are encoded without their mean (``mean=pre`` or ``post``, ``ghost``) have one in every pair of channels.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packedkv.cache.host import LayerCache, attend
from packedkv.errors import KVError, UnsupportedError
from packedkv.kernels.cpu import library
from packedkv.registry import get
from packedkv.store.site import LayerSite
from packedkv_lab.bench.attention_rivals import missing
from packedkv_lab.bench.cache import AGREEMENT
from packedkv_lab.bench.cpu_rivals import cpu_rivals
from packedkv_lab.bench.key_means import decided, mean_of
from packedkv_lab.bench.record import Row, spread
from packedkv_lab.bench.turns import in_turn, positive, ratios, stamped

PRESETS = (
    "saw-int4", "int-4", "turboquant-4", "ultraquant", "octopus-4", "octopus-3", "octopus-2", "hqmq-s24_r3",
    "hqmq-s96_r4", "kivi-4", "kivi-2", "innerq-base", "fp8", "int-8", "saw-int4:mean=pre", "ghost-4", "ghost-3",
)  # fmt: skip
ENCODED = 2048
"""Tokens that are encoded."""
READ_BYTES = 256 << 20
BASES = ("sdpa", "sdpa bfloat16", "two-matmuls", "two-matmuls-kt")


def decode_rows(
    specs: Sequence[str],
    *,
    batch: int,
    kv_heads: int,
    query_heads: int,
    head_dim: int,
    tokens: int,
    repeats: int = 9,
    seed: int = 0,
    libraries: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """Time presets and rivals at one shape.

    Parameters
    ----------
    specs : sequence of str
    batch, kv_heads, query_heads, head_dim, tokens : int
    repeats : int
        Rounds after a warm-up.
    seed : int
    libraries : bool
        Whether other libraries take part.
    progress : callable, optional

    Returns
    -------
    iterator of dict
        Rows as in the module's text, after all rounds.

    Raises
    ------
    UnsupportedError
        The kernels are missing, or do not read a spec.
    KVError
        Their attention is not the reference's, or a library's is not SDPA's.
    """
    positive("bench", {"batch": batch, "kv_heads": kv_heads, "tokens": tokens, "repeats": repeats})
    if reason := library.refusal(torch.device("cpu")):
        raise UnsupportedError(f"bench decode: {reason}.")
    say = progress or (lambda _: None)
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, n: int) -> Tensor:
        return torch.randn(batch, heads, n, head_dim, generator=generator)

    q, k, v = draw(query_heads, 1), draw(kv_heads, tokens), draw(kv_heads, tokens)
    jobs = _torch_jobs(q, k, v)
    bits = {"sdpa": 32.0, "sdpa bfloat16": 16.0, "two-matmuls": 32.0, "two-matmuls-kt": 32.0}
    for spec in specs:
        say(f"{spec}: encoding")
        cache = _filled(spec, k, v, tokens)
        _check(spec, k[:, :, :ENCODED], v[:, :, :ENCODED], q)
        bits[spec] = sum(cache.nbytes().values()) * 8 / cache.elements()
        jobs[spec] = lambda cache=cache: cache.attend(q)  # type: ignore[misc]
    paths = dict.fromkeys(jobs, library.variant()) | dict.fromkeys(BASES, "torch")
    own: dict[str, dict[str, str]] = {}
    for rival in cpu_rivals() if libraries else ():
        if rival.missing:
            say(f"{rival.spec}: {rival.package} is not installed, left out")
            continue
        say(f"{rival.spec}: preparing")
        try:
            jobs[rival.spec], bits[rival.spec] = rival.checked(q, k, v)
        except KVError:
            raise
        except Exception as error:  # e.g. no compiler for torch.compile; the others are timed
            say(f"{rival.spec}: {missing(error)}, left out")
            continue
        paths[rival.spec], own[rival.spec] = rival.package, rival.version()
    device = torch.device("cpu")
    memory = torch.zeros(READ_BYTES // 4)
    say(f"timing {len(jobs)} ways of attention over {tokens} tokens, {repeats} times")
    times = dict(zip((*jobs, "memory"), in_turn([*jobs.values(), memory.sum], device, repeats), strict=True))
    elements = 2 * batch * kv_heads * tokens * head_dim
    best = [min(pair) for pair in zip(times["two-matmuls"], times["two-matmuls-kt"], strict=True)]
    name = f"b{batch}_hq{query_heads}_h{kv_heads}_d{head_dim}_t{tokens}"
    common = stamped(name, device, repeats, seed) | {"threads": torch.get_num_threads()}
    for job in jobs:
        spec, _, dtype = job.partition(" ")
        head = {"spec": spec, "effective_bits": bits[job], "dtype": dtype or "float32", "path": paths[job]}
        about = common | {"versions": common["versions"] | own.get(job, {})}
        read = [
            elements * bits[job] / 8 / t / (READ_BYTES / m) for t, m in zip(times[job], times["memory"], strict=True)
        ]
        for metric, unit, values in (
            ("attend_us", "us", [1e6 * t for t in times[job]]),
            ("speedup_vs_sdpa", "x", ratios(times["sdpa"], times[job])),
            ("speedup_vs_two_matmuls", "x", ratios(best, times[job])),
            ("read_share", "x", read),
        ):
            yield {**head, "metric": metric, "unit": unit, "values": spread(values), **about}


def _torch_jobs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Attention without compression, by the name of its rows."""
    q16, k16, v16 = (x.bfloat16() for x in (q, k, v))
    transposed = k.mT.contiguous()
    rows = q.view(*k.shape[:2], -1, k.shape[3])
    scale = k.shape[3] ** -0.5
    return {
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa bfloat16": lambda: scaled_dot_product_attention(q16, k16, v16, enable_gqa=True),
        "two-matmuls": lambda: (rows @ k.mT * scale).softmax(-1) @ v,
        "two-matmuls-kt": lambda: (rows @ transposed * scale).softmax(-1) @ v,
    }


@torch.no_grad()
def _filled(spec: str, k: Tensor, v: Tensor, tokens: int) -> LayerCache:
    """A cache of ``tokens`` tokens, of which those behind the first ones repeat their bytes."""
    site, turned = _site(spec, k[:, :, :ENCODED])
    cache = LayerCache(site, capacity=tokens)
    cache.append(k[:, :, :ENCODED] + turned, v[:, :, :ENCODED])
    store = cache.store
    assert store is not None
    missing = (tokens - len(cache)) // ENCODED * ENCODED
    for role, state in cache.roles.items():
        x = (k if role == "key" else v)[:, :, :ENCODED]
        payload = state.encode(x.half())
        for _ in range(0, missing, ENCODED):
            first = state.next_slot
            store.ensure(first + ENCODED)
            store.write(role, first, payload)
            state.extend(ENCODED)
    cache.length += missing
    if cache.places_tokens:
        cache.positions.extend(missing)
    if rest := tokens - len(cache):
        cache.append(k[:, :, :rest], v[:, :, :rest])
    return cache


def _site(spec: str, k: Tensor) -> tuple[LayerSite, Tensor]:
    """A layer of a scheme, and what is added to its first keys ``k``: their mean, where they have one."""
    scheme = decided(get(spec).for_layer(8, 24))
    _, heads, tokens, dim = k.shape
    if (mean := mean_of(scheme, heads, dim, k.device)) is None:
        return LayerSite(scheme), torch.zeros(1)
    return LayerSite(scheme, mean=mean), mean.at(mean.given, torch.arange(tokens)[None])


@torch.no_grad()
def _check(spec: str, k: Tensor, v: Tensor, q: Tensor) -> None:
    """Verify attention before it is timed."""
    site, turned = _site(spec, k)
    cache = LayerCache(site)
    cache.append(k + turned, v)
    if reason := cache.unfused():
        raise UnsupportedError(f"bench decode: {reason}; packedkv bench cache times {spec} without a kernel.")
    difference = float((cache.attend(q) - attend(q, cache)).abs().max())
    if not difference <= AGREEMENT["float32"]:
        raise KVError(f"bench decode: attention of {spec} differs from the reference's by {difference:.2g}.")
