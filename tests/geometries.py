"""Geometries of attention: head_dims, query heads per KV head, and channels that RoPE rotates.

``GEOMETRIES`` has every combination of head_dim, rotated channels and pairing, and every ratio of heads, of the causal
models in transformers whose head_dim the kernels support; ``test_geometries.py`` compares.
"""

from typing import NamedTuple

import torch

from packedkv.ops.rope import Rotary


class Geometry(NamedTuple):
    """Attention of one layer of ``model``, with ``group`` query heads per KV head.

    RoPE rotates the first ``rotated`` channels of a head (0: none): p and p + rotated / 2 together, or, interleaved,
    2 p and 2 p + 1.
    """

    model: str
    head_dim: int
    rotated: int
    group: int
    interleaved: bool = False

    @property
    def rotary(self) -> Rotary:
        """Its RoPE, with a base of 10,000."""
        return Rotary(1e4 ** (-torch.arange(0, self.rotated, 2) / max(self.rotated, 1)), 1.0, self.interleaved)


GEOMETRIES = (
    Geometry("tiny", 16, 16, 2),
    Geometry("Pythia 14M", 32, 8, 1),
    Geometry("Blenderbot small", 32, 0, 1),
    Geometry("32 channels", 32, 32, 4),
    Geometry("Pythia 160M", 64, 16, 1),
    Geometry("Phi-1", 64, 32, 1),
    Geometry("GPT-2", 64, 0, 1),
    Geometry("SmolLM2 135M", 64, 64, 3),
    Geometry("Qwen2.5 0.5B", 64, 64, 7),
    Geometry("gpt-oss", 64, 64, 8),
    Geometry("Falcon 7B", 64, 64, 71),
    Geometry("StableLM 3B", 80, 20, 1),
    Geometry("Phi-2", 80, 32, 1),
    Geometry("CTRL", 80, 0, 1),
    Geometry("H2O Danube", 80, 80, 4),
    Geometry("GPT-NeoX 20B", 96, 24, 1),
    Geometry("Phi-3 mini", 96, 96, 1),
    Geometry("112 channels", 112, 112, 7),
    Geometry("112 channels, half", 112, 56, 2, True),
    Geometry("Pythia 1.4B", 128, 32, 1),
    Geometry("Jamba", 128, 0, 4),
    Geometry("GLM-4 9B", 128, 64, 16, True),
    Geometry("Minitron 4B", 128, 64, 3),
    Geometry("Phi-4 mini", 128, 96, 3),
    Geometry("Command R", 128, 128, 8, True),
    Geometry("Llama 3.1 8B", 128, 128, 4),
    Geometry("Qwen2.5 14B", 128, 128, 5),
    Geometry("Qwen2.5 1.5B", 128, 128, 6),
    Geometry("Qwen2.5 7B", 128, 128, 7),
    Geometry("StarCoder2 3B", 128, 128, 12),
    Geometry("dots.llm1", 144, 144, 1),
    Geometry("StableLM 2 12B", 160, 40, 4),
    Geometry("Zamba2 2.7B", 160, 160, 1),
    Geometry("MiMo-V2-Flash", 192, 64, 16),
    Geometry("Nemotron-4 340B", 192, 96, 12),
    Geometry("192 channels", 192, 192, 5),
    Geometry("GPT-J", 256, 64, 1, True),
    Geometry("Qwen3-Next", 256, 64, 8),
    Geometry("RecurrentGemma", 256, 128, 10),
    Geometry("Gemma 2", 256, 256, 2),
    Geometry("Zamba 7B", 464, 0, 1),
    Geometry("Gemma 4", 512, 512, 8),
    Geometry("DeepSeek-V4", 512, 64, 64, True),
)
