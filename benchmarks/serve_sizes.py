"""What ``serve_h200.py`` measures: variants, sizes of models and loads, jobs."""

from pathlib import Path
from typing import Any, NamedTuple

RIVALS = {"bf16": "auto", "fp8": "fp8", "int4_per_token_head": "int4_per_token_head",
          "turboquant_4bit_nc": "turboquant_4bit_nc", "ultraquant_4bit": "ultraquant_4bit"}  # fmt: skip
VARIANTS = (
    "bf16", "saw-int4", "fp8", "ultraquant", "innerq-base", "hqmq-s24_r3", "octopus-3", "ultra-tq",
    "int4_per_token_head", "ultraquant_4bit", "turboquant_4bit_nc", "int-4", "turboquant-4", "hqmq-s96_r4",
    "kvcodec:fp8", "kivi-2", "int-8",
)  # fmt: skip
SLOW = ("int4_per_token_head", "turboquant_4bit_nc", "ultraquant_4bit")
"""Of the sweep only points of at most ``FEW`` clients: beyond, one takes minutes."""
CLIENTS = (1, 16, 256)
FEW = 64
LOADED = ("bf16", "saw-int4", "fp8")
"""Of throughput, sessions and the sweep, which take minutes."""
PARTS = ("smoke", "first", "steps", "drafts", "throughput", "clients", "sessions", "offload", "sweep", "timeline")
LOADS = ("throughput", "clients", "sessions", "offload", "sweep")
SECONDS = {
    "smoke": 200, "first": 100, "steps": 150, "drafts": 160, "throughput": 330, "sessions": 330, "sweep": 300,
    "clients": 200, "offload": 150,
    "timeline": 120,
}  # fmt: skip
"""A process's turn may take so long."""
ON_A_CPU = {"spec_name": "HostTier", "spec_module_path": "tests.serve.host_tier"}
"""Of OffloadingConnector's options: vLLM's own copies need a GPU."""
DRAFTS = 3
"""Of a request in each step, where there are any."""
SAID = 1500
SEED = 20261122


class Scale(NamedTuple):
    """Sizes of everything; ``smoke`` is the small model's."""

    model: dict[str, int]
    smoke: dict[str, int]
    tokens: int = 8192
    lone: tuple[int, ...] = (512, 1024, 4096)
    sequences: tuple[int, ...] = (32, 8, 1)
    new: int = 100
    chunk: int = 8192
    point: tuple[int, int, int, int] = (16384, 1024, 128, 256)
    points: tuple[tuple[int, int, int, int], ...] = (
        (1024, 1024, 16, 16), (4096, 1024, 16, 16), (1024, 1024, 64, 64), (4096, 1024, 64, 64), (1024, 1024, 256, 256),
        (4096, 1024, 256, 256), (1024, 1024, 1, 1),
    )  # fmt: skip
    sessions: tuple[int, ...] = (32, 6, 1024, 8192, 2048, 128)
    sessions_bytes: int = 25_500_000_000
    offloaded: tuple[int, ...] = (12, 6, 1024, 8192, 1024, 32)
    offload_bytes: tuple[int, int] = (4_000_000_000, 8_000_000_000)
    smoke_bytes: int = 2_000_000_000
    smoke_tokens: tuple[int, ...] = (5, 64, 700, 3000)
    memory: float = 0.9

    def most(self, part: str) -> int:
        """Tokens of the longest request of a part."""
        if part in ("sessions", "offload"):
            _, rounds, shared, context, turn, answer = self.sessions if part == "sessions" else self.offloaded
            return shared + context + (rounds - 1) * (turn + answer) + answer
        points = {"throughput": (self.point,), "sweep": self.points, "clients": self.points}
        if part in points:
            return max(sum(point[:2]) for point in points[part])
        return max(self.smoke_tokens) if part == "smoke" else self.tokens


QWEN3_8B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}  # fmt: skip
SMALL = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
         "hidden_size": 2048, "intermediate_size": 4096, "vocab_size": 32000}  # fmt: skip
TINY = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
SCALES = {
    "full": Scale(QWEN3_8B, SMALL),
    "tiny": Scale(
        TINY, TINY, 96, (33, 64), (3, 1), 12, 256, (64, 8, 6, 4), ((64, 8, 3, 2), (32, 8, 1, 1)), (3, 3, 32, 64, 48, 8),
        3 << 19, (2, 3, 32, 64, 16, 4), (3 << 19, 1 << 22), 2 << 20, (5, 70),
    ),
}  # fmt: skip


class Job(NamedTuple):
    """One process: a part of a variant; ``eager``: without CUDA graphs (smoke)."""

    part: str
    variant: str
    eager: bool = False

    @property
    def name(self) -> str:
        words = [self.part, self.variant.replace(":", "-")] + ["eager"] * self.eager
        return "-".join(words)


def folder_of(out: Path, sizes: dict[str, int]) -> Path:
    """Where a model's config.json is."""
    return out / f"model-{sizes['num_hidden_layers']}-{sizes['hidden_size']}"


def plugin_in(folder: Path) -> Path:
    """Write the plugin's entry point, which vLLM finds without an installation if the folder is on the path."""
    import kvcodec

    about = folder / f"kvcodec-{kvcodec.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvcodec\nVersion: {kvcodec.__version__}\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nkvcodec = kvcodec.integrations.vllm:register\n")
    return folder


def rows_file(out: Path, part: str) -> Path:
    """Where a part's rows go; checks are kept apart from measurements."""
    return out / ("checks.jsonl" if part in ("smoke", "first", "drafts", "timeline") else "serve.jsonl")


def config_of(sizes: dict[str, int]) -> dict[str, Any]:
    """Qwen3's config.json."""
    return sizes | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False, "attention_bias": False,
        "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16",
    }  # fmt: skip


def loads_of(job: Job, scale: Scale) -> list[Any]:
    """The loads of a job, in the order in which they are sent."""
    from kvcodec_lab.serve.loads import Point, Sessions

    if job.part in ("sessions", "offload"):
        return [Sessions(*(scale.sessions if job.part == "sessions" else scale.offloaded), together=True)]
    if job.part == "throughput":
        return [Point(*scale.point)]
    points = [Point(*point) for point in scale.points]
    if job.part == "clients":
        few = [p for p in points if p.input_len == points[0].input_len and p.concurrency in CLIENTS]
        return few or points[:1]
    return [p for p in points if p.concurrency <= FEW or job.variant not in SLOW]


def goal(job: Job, scale: Scale) -> tuple[str, str, str]:
    """Metric, unit and shape of the row that says that a job is done."""
    if job.part == "smoke" or job.part == "timeline":
        return job.part, "x", job.name
    if job.part == "steps":
        return "step_ms", "ms", f"n{scale.sequences[-1]}_i{scale.tokens}"
    if job.part == "first":
        return "first_ms", "ms", f"n1_i{scale.lone[-1]}"
    if job.part == "drafts":
        return "drafted_tokens_per_s", "tokens/s", f"n{scale.sequences[0]}_i{scale.tokens}"
    return "requests_done", "requests", loads_of(job, scale)[-1].name


def kind_of(job: Job, scale: Scale) -> dict[str, Any]:
    """What tables ask of a row that failed."""
    if job.part == "steps":
        return {"load": "steps", "sizes": {"sequences": scale.sequences[-1], "tokens": scale.tokens}}
    if job.part in LOADS:
        kind = "sessions" if job.part in ("sessions", "offload") else "sweep"
        return {"load": kind, "sizes": loads_of(job, scale)[-1].sizes()}
    return {}
