"""LoRA: requests of an adapter and of the model itself; neither reads the other's pages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.serve.engines import NEW, engine, metric, prompts

IDS = prompts(70, 40)


def adapter_of(model: Any, folder: Path) -> Path:
    """Write an adapter of rank 4 for keys and values, large enough to change every token."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if name.endswith((".k_proj", ".v_proj")):
            out, inner = module.weight.shape
            for side, shape in (("A", (4, inner)), ("B", (out, 4))):
                weights[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.nightly
def test_an_adapter_and_the_model_have_pages_of_their_own(llama: Any, tmp_path: Path) -> None:
    """The same prompts by turns; vLLM 0.32's operators on a CPU mix up adapters within a batch, so one at a time."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("own", 1, str(adapter_of(llama.model, tmp_path / "adapter")))
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def ask(llm: Any, which: Any) -> list[list[int]]:
        outs = [llm.generate([{"prompt_token_ids": p}], greedy, lora_request=which, use_tqdm=False)[0] for p in IDS]
        return [list(out.outputs[0].token_ids) for out in outs]

    given, block = {"preset": "saw-int4"}, {"block_size": 32}
    with engine(llama.folder, given, **block) as llm:
        plain = ask(llm, None)
    with engine(llama.folder, given, **block, enable_lora=True, max_lora_rank=8) as llm:
        turns = [(ask(llm, None), ask(llm, adapter)) for _ in range(2)]
        assert metric(llm, "prefix_cache_hits") == 2 * (64 + 32)  # in the second turn, of both
    assert turns[0] == turns[1]
    assert turns[0][0] == plain
    assert turns[0][1] != plain
