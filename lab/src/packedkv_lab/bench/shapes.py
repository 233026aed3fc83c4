"""Shapes and presets that the GPU benches time, by the names that result rows carry.

``audio``, ``video`` and ``llm64k`` are OCTOPUS, Table 7; ``llama8b_b1_*`` InnerQ, Table 4, and HQMQ, Table 5;
``saw_b*_16k`` SAW-INT4, Table 7 (Qwen3-32B over two GPUs). ``llm64k_apart`` is ``llm64k`` by a program per query head:
its 7 query heads per KV head as 7 sequences that share pages.
"""

from dataclasses import dataclass

from packedkv.errors import ShapeError, SpecError

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Shape:
    """One step: ``queries`` new tokens per sequence (one, to decode) over ``tokens`` held ones. ``shared``: all
    sequences read the same keys and values, which are held once.

    >>> SHAPES["llm64k"].group, SHAPES["llm64k"].bf16_bytes
    (7, 134217728)
    """

    name: str
    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    shared: bool = False
    queries: int = 1

    def __post_init__(self) -> None:
        if min(self.batch, self.query_heads, self.kv_heads, self.head_dim, self.tokens, self.queries) < 1:
            raise ShapeError(f"shape {self.name}: every size must be at least 1.")
        if self.query_heads % self.kv_heads:
            raise ShapeError(f"shape {self.name}: {self.query_heads} query heads are no multiple of {self.kv_heads}.")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def kv_batch(self) -> int:
        """Sequences whose keys and values are held."""
        return 1 if self.shared else self.batch

    @property
    def elements(self) -> int:
        """Elements of K and V together."""
        return 2 * self.kv_batch * self.kv_heads * self.tokens * self.head_dim

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the uncompressed cache."""
        return 2 * self.elements

    def sizes(self) -> dict[str, int]:
        """Return the sizes as result rows carry them."""
        numbers = {"batch": self.batch, "query_heads": self.query_heads, "kv_heads": self.kv_heads,
                   "head_dim": self.head_dim, "tokens": self.tokens, "page_tokens": PAGE_TOKENS}  # fmt: skip
        return numbers | ({"sequences_held": 1} if self.shared else {})


SPINE = (
    Shape("llm64k", 1, 28, 4, 128, 65536),
    Shape("b32_8k", 32, 32, 8, 128, 8192),
    Shape("b32_32k", 32, 32, 8, 128, 32768),
    Shape("video", 1, 16, 16, 64, 32760),
)
OCTOPUS = (Shape("audio", 1, 16, 16, 64, 455),)
INNERQ_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
HQMQ_TOKENS = (4096, 16384, 32768)
SWEEP_BATCHES = (1, 8, 32)
SWEEP_TOKENS = (128, 256, *INNERQ_TOKENS, 65536, 131072)
SWEEP_TOKENS_HELD = 1 << 20
"""The sweep stops where sequences x tokens pass this (32 sequences of 32k)."""


def sweep(batch: int) -> tuple[Shape, ...]:
    """Shapes of one batch size, by length, from which the break-even context is read.

    >>> [s.name for s in sweep(32)][-1]
    'llama8b_b32_32768'
    """
    return tuple(
        Shape(f"llama8b_b{batch}_{tokens}", batch, 32, 8, 128, tokens)
        for tokens in SWEEP_TOKENS
        if batch * tokens <= SWEEP_TOKENS_HELD
    )


SWEEP = tuple(shape for batch in SWEEP_BATCHES for shape in sweep(batch))
SAW = tuple(Shape(f"saw_b{batch}_16k", batch, 32, 4, 128, 16384) for batch in (1, 4, 8, 16, 32))
PER_HEAD = (Shape("llm64k_apart", 7, 4, 4, 128, 65536, shared=True),)
CORNERS = (
    Shape("b128_1k", 128, 32, 8, 128, 1024),
    Shape("b64_2k", 64, 32, 8, 128, 2048),
    *(shape for shape in sweep(1) if shape.tokens == 4096),
    Shape("one_kv_head_b2_8k", 2, 16, 1, 128, 8192),
    Shape("d64_b4_32k", 4, 14, 2, 64, 32768),
    Shape("d96_b4_8k", 4, 32, 32, 96, 8192),
    Shape("d256_b16_16k", 16, 16, 8, 256, 16384),
    Shape("d512_b8_32k", 8, 32, 4, 512, 32768),
)
SHAPES = {shape.name: shape for shape in (*SPINE, *OCTOPUS, *SAW, *PER_HEAD, *CORNERS, *SWEEP)}

GROUPS = {
    "spine": SPINE,
    "octopus": (SPINE[3], *OCTOPUS, SPINE[0]),
    "innerq": tuple(s for s in sweep(1) if s.tokens in INNERQ_TOKENS),
    "hqmq": tuple(s for s in sweep(1) if s.tokens in HQMQ_TOKENS),
    "saw": SAW,
    "per-head": PER_HEAD,
    "corners": CORNERS,
    "sweep": SWEEP,
} | {f"sweep{batch}": sweep(batch) for batch in SWEEP_BATCHES}

PRESETS = (
    "saw-int4", "saw-int4:rotate=kv", "int-4", "int-8", "fp8", "kivi-2", "innerq-base", "innerq-small", "innerq-hybrid",
    "ultraquant", "ultra-tq", "turboquant-4", "turboquant-3", "turboquant-2", "octopus-4", "octopus-3", "octopus-2",
    "octopus-qjl-3", "hqmq-s24_r3", "hqmq-s96_r4", "hqmq-s96_r4:outliers=3", "hqmq-s192_r6",
)  # fmt: skip
"""What is timed when no presets are named."""

KMEANS = "saw-int4:kmeans=16"
"""SAW-INT4's study has it too; it is timed where a kernel reads it."""


def shapes_named(names: str) -> list[Shape]:
    """Shapes of a comma-separated list of names and groups, each once, in order.

    >>> [s.name for s in shapes_named("spine,llm64k,audio")]
    ['llm64k', 'b32_8k', 'b32_32k', 'video', 'audio']
    """
    shapes: dict[str, Shape] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in GROUPS and name not in SHAPES:
            known = ", ".join([*GROUPS, *(s.name for s in (*SPINE, *OCTOPUS, *PER_HEAD, *CORNERS[:2]))])
            raise SpecError(f"bench: no shape {name!r}; use some of {known}, saw_b8_16k, llama8b_b1_4096, ...")
        shapes |= {shape.name: shape for shape in GROUPS.get(name) or (SHAPES[name],)}
    if not shapes:
        raise SpecError("bench: no shapes named; use e.g. spine.")
    return list(shapes.values())
