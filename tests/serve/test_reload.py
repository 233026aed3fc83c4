"""New weights in a running engine: it generates what an engine does that starts with them, or nothing more."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from packedkv.errors import BrokenPresetError, UnsupportedError
from tests.serve.engines import Biased, engine, generate, layers, library, prompts

IDS = prompts(40, 2, 33)


def changed(biased: Biased, folder: Path, factor: float) -> Biased:
    """The model with other weights, and its key biases times ``factor``."""
    model = copy.deepcopy(biased.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.mul_(factor)
            weight = layer.self_attn.v_proj.weight
            weight.copy_(weight[torch.randperm(weight.shape[0], generator=generator)])
    for file in biased.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(folder)
    return Biased(folder, model, biased.tokenizer)


def load(llm: Any, folder: Path) -> None:
    """As a loop of reinforcement learning does."""
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()


def identity(llm: Any) -> str:
    """What the backend of the first layer is called, which connectors compare."""
    return str(next(iter(layers(llm).values())).attn_backend.get_name())


def test_means_are_those_of_the_new_weights(biased: Biased, tmp_path_factory: pytest.TempPathFactory) -> None:
    """From random weights, with which some engines start; from one mean to another, to no mean, and back."""
    preset = "saw-int4"
    larger, none = (changed(biased, tmp_path_factory.mktemp("changed"), factor) for factor in (-1.7, 0.0))
    want = {own.folder: [library(own.model, preset, ids) for ids in IDS] for own in (biased, larger, none)}
    assert want[biased.folder] != want[larger.folder]
    with engine(biased.folder, {"preset": preset}, load_format="dummy", block_size=16) as llm:
        generate(llm, IDS[:1])
        names = []
        for own in (biased, larger, none, biased):
            load(llm, own.folder)
            assert generate(llm, IDS) == want[own.folder]
            names.append(identity(llm))
        assert names[0] == names[1] == names[3] != names[2]  # pages with a mean, and without one
        assert re.fullmatch(r"[A-Z_]+-[0-9a-f]{12}-16", names[-1])


def test_weights_that_break_the_preset_stop_the_engine(biased: Biased) -> None:
    """What it would generate is noise."""
    with engine(biased.folder, {"preset": "saw-int4:mean=none"}, load_format="dummy", block_size=16) as llm:
        generate(llm, IDS[:1])
        with pytest.raises(BrokenPresetError, match=r"breaks on the key biases"):
            load(llm, biased.folder)
        with pytest.raises(UnsupportedError, match=r"weights were replaced, and they cannot be served: .*key biases"):
            generate(llm, IDS[:1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given", [{"preset": "kivi-2", "window": 0}, {"preset": "int-8:sink=4"}, {"preset": "ultraquant"}]
)
def test_layers_without_a_mean_stay(given: dict[str, Any], llama: Any, tmp_path: Path) -> None:
    """Groups of tokens that are not complete belong to requests, which go on."""
    second = copy.deepcopy(llama.model)
    with torch.no_grad():
        for p in second.parameters():
            p.mul_(1.1)
    second.save_pretrained(tmp_path)
    with engine(llama.folder, given, block_size=64) as llm:
        want = generate(llm, IDS)
        load(llm, tmp_path)
        assert generate(llm, IDS) != want
        load(llm, llama.folder)
        assert generate(llm, IDS) == want
