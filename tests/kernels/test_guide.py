"""The program of docs/use.md that generates through the kernels, on the emulated GPU."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

GUIDE = Path(__file__).parents[2] / "docs/use.md"


def test_the_fused_program_of_the_guide_generates_in_the_kernels(machine: dict[str, Any]) -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)[1]
    assert "max_len=33_000" in code
    code = code.replace("max_len=33_000", "max_len=256")  # the emulator runs every block of a table of that length
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    inputs = {"input_ids": torch.arange(10)[None], "max_new_tokens": 3, "do_sample": False}
    names: dict[str, Any] = {"model": LlamaForCausalLM(config).eval(), "inputs": inputs}
    exec(code, names)
    assert names["cache"].report()["paths"]["fused"] == 4, "two steps of two layers attend in the kernel"
