"""Programs of the documentation that need a GPU, on the emulated one: generating in the kernels, and a reader."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from packedkv import cache_for  # registers the attention function "packedkv"
from packedkv.integrations.transformers.argument import passing
from tests.conftest import tiny_model

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # from transformers 5.24 on
def test_the_fused_program_of_the_guide_generates_in_the_kernels(machine: dict[str, Any]) -> None:
    (code,) = (program for program in programs("use.md") if "max_len=33_000" in program)
    code = code.replace("max_len=33_000", "max_len=256")  # the emulator runs every block of a table of that length
    inputs = {"input_ids": torch.arange(10)[None], "max_new_tokens": 3, "do_sample": False}
    names: dict[str, Any] = {"model": tiny_model("llama-gqa"), "inputs": inputs}
    exec(code, names)
    assert names["cache"].report()["paths"]["fused"] == 4, "two steps of two layers attend in the kernel"


def test_the_codec_of_the_guide_is_read_by_its_own_reader(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its Python files are as the page has them; nothing stays registered behind the test."""
    codec, reader = programs("add-a-codec.md")
    (tmp_path / "read_spin.cuh").write_text(programs("add-a-codec.md", "cpp")[0])
    spin = ModuleType("spin")
    monkeypatch.setitem(sys.modules, "spin", spin)
    monkeypatch.setattr("packedkv.registry.register", lambda *_, **__: lambda recipe: recipe)
    exec(codec, vars(spin))
    exec(reader, {"__file__": str(tmp_path / "spin_cuda.py")})
    model, scheme = tiny_model("llama-gqa"), vars(spin)["spin"](4, window=5)
    model.set_attn_implementation("packedkv")
    logits = {}
    for attention in ("fused", "streamed"):
        cache = cache_for(model, scheme, attention=attention, probe=False)
        with torch.no_grad():
            for tokens in (torch.arange(40)[None], torch.tensor([[7]]), torch.tensor([[9]])):
                logits[attention] = model(tokens, **passing(model, cache)).logits[:, -1]
        assert cache.report()["paths"] == {"exact": 2, attention: 4}
    # keys off by a sixteenth of a code change logits by 0.006 of their spread, a correct reader by 0.0007
    assert (logits["fused"] - logits["streamed"]).abs().max() < 0.0015 * logits["streamed"].std()
