"""Programs of the documentation that need a GPU, on the emulated one: generating in the kernels, and a reader."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvcodec

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_the_fused_program_of_the_guide_generates_in_the_kernels(machine: dict[str, Any]) -> None:
    code = programs("use.md")[1]
    assert "max_len=33_000" in code
    code = code.replace("max_len=33_000", "max_len=256")  # the emulator runs every block of a table of that length
    inputs = {"input_ids": torch.arange(10)[None], "max_new_tokens": 3, "do_sample": False}
    names: dict[str, Any] = {"model": tiny(), "inputs": inputs}
    exec(code, names)
    assert names["cache"].report()["paths"]["fused"] == 4, "two steps of two layers attend in the kernel"


def test_the_codec_of_the_guide_is_read_by_its_own_reader(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its files as the page has them; nothing stays registered behind the test."""
    codec, reader = programs("add-a-codec.md")
    (tmp_path / "read_spin.cuh").write_text(programs("add-a-codec.md", "cpp")[0])
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))  # the emulator's compiler knows the library's folders only
    spin = ModuleType("spin")
    monkeypatch.setitem(sys.modules, "spin", spin)
    monkeypatch.setattr("kvcodec.registry.register", lambda *_, **__: lambda recipe: recipe)
    exec(codec, vars(spin))
    exec(reader, {"__file__": str(tmp_path / "spin_cuda.py")})
    model, scheme = tiny(), vars(spin)["spin"](4, window=5)
    model.set_attn_implementation("kvcodec")
    logits = {}
    for attention in ("fused", "streamed"):
        cache = kvcodec.cache_for(model, scheme, attention=attention, probe=False)
        with torch.no_grad():
            for tokens in (torch.arange(40)[None], torch.tensor([[7]]), torch.tensor([[9]])):
                logits[attention] = model(tokens, past_key_values=cache).logits[:, -1]
        assert cache.report()["paths"] == {"exact": 2, attention: 4}
    spread = logits["streamed"].std()
    assert (logits["fused"] - logits["streamed"]).abs().max() < 0.02 * spread
