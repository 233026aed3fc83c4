"""What every test shares: seeds, NaN-filled memory, tiny random models, and the reason a gpu test is skipped."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import packedkv.integrations.transformers.cache  # noqa: F401  registers the attention named "packedkv"

# tiny tensors: more threads only wait for each other, and on a shared machine they wait long
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What the suite's modules and items hold stays: collections of garbage pass over it from here on."""
    gc.collect()
    gc.freeze()


def own_threads() -> int:
    """This process's share of the machine's cores, for a real model: the other workers have theirs."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max((os.cpu_count() or 1) // workers, 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # what takes long first: workers end together, and one loads the real model
        items.sort(key=lambda item: "slow" not in item.keywords)
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if "serve" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs vLLM; `make test-serve` installs it"))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nan_filled_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory from ``torch.empty`` holds NaN (integers: the largest number), so that nobody reads it unwritten."""
    if "gpu" in request.keywords:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M in float32, loaded once per process: who changes it changes it back."""
    from packedkv.models.loading import load

    return load("smollm2-135m", progress=False)


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {"head_dim": 64}),
    "llama-mha": ("Llama", {"head_dim": 64, "num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"head_dim": 64, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "mistral": ("Mistral", {"head_dim": 64, "sliding_window": 12}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 256,
            "num_hidden_layers": 3,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 256,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 64,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
        },
    ),
    "phi3": ("Phi3", {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 64,
            "sliding_window": 12,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 64,
            "attention_chunk_size": 12,
            "layer_types": ["chunked_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "moe_layers": [],
            "attn_temperature_tuning": False,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [64] * 4,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "gemma4": (  # KV heads and head_dim of full layers differ from those of sliding ones
        "Gemma4",
        {
            "head_dim": 64,
            "global_head_dim": 128,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {"head_dim": 64, "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "hidden_size": 256,
            "attention_multiplier": 0.125,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 64,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
}
MODELS = ("llama-gqa", "llama-mha", "llama-mqa", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt-oss")


def tiny_config(name: str, **changed: Any) -> Any:
    import transformers

    family, options = _NAMES[name]
    suffix = "TextConfig" if family in ("Gemma3", "Gemma3n", "Gemma4", "Llama4") else "Config"
    return getattr(transformers, family + suffix)(**{**SMALL, **options, **changed})


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unchanged(model: Any, before: dict[str, torch.Tensor]) -> bool:
    """Whether the parameters are those of ``weights`` before."""
    return all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def tiny_model(name: str, **changed: Any) -> Any:
    """A random model of 2-4 small layers; weights large enough that tokens differ, Qwen2's K bias large."""
    import transformers

    config = tiny_config(name, **changed)
    family = _NAMES[name][0]
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in key and "lm_head" not in key:
                weight.mul_(4)
            if key.endswith("k_proj.bias"):
                weight.normal_()
                weight[3::64] += 40.0  # one channel of a head carries a large constant, as in Qwen2.5
            if key.endswith("sinks"):
                weight.normal_()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def tiny() -> Any:
    """Factory of tiny models, each made once per session."""
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            made[name] = tiny_model(name)
        made[name].set_attn_implementation("eager" if name == "gpt-oss" else "sdpa")
        return made[name]

    return make
