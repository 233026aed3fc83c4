"""The packed cache inside ``generate``: every operation equals the same operation on decoded K and V."""

from itertools import cycle, product
from typing import Any

import pytest
import torch

import packedkv
from packedkv.codec import Dense
from packedkv.integrations.transformers.argument import passing
from tests.conftest import MODELS, tiny_model
from tests.fuzz import models
from tests.kernels.decode_cases import each_in_turn

SPECS = ("dense", "saw-int4", "int-4", "kivi-2:window=8", "kivi-sink-2:window=4,sink=4", "octopus-3:window=8")
PROMPT, NEW = 45, 24


def prompt(batch: int = 1, tokens: int = PROMPT, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def run(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(7)
    given = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, **options}
    return model.generate(ids, **passing(model, cache), return_dict_in_generate=True, **given)


def assert_same(ours: Any, theirs: Any, atol: float = 2e-3) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=atol, msg=lambda m, step=step: f"step {step}: {m}")


def cache_for(model: Any, spec: str, **options: Any) -> Any:
    return packedkv.cache_for(model, spec, probe=False, **options)


# -- named programs, run as the random ones of tests.fuzz --------------------------------------------------------------

# an operation, the cache it runs on, and two numbers: of tokens, and a seed
FILLED = ["forward", 0, 45, 0]  # 46 tokens
STEP = ["step", 0, 1, 0]
PROGRAMS: dict[str, list[list[Any]]] = {
    "turns": [FILLED, ["greedy", 0, 8, 3], ["forward", 0, 6, 1], ["sample", 0, 5, 3], STEP],
    "stored": [FILLED, STEP],
    "beams": [["beams", 0, 19, 3]],
    "beams of a second turn": [FILLED, ["beams", 0, 9, 3]],
    "look-up": [["lookup", 0, 19, 8]],
    "assistant": [["assisted", 0, 19, 8]],
    "chunks": [["chunked", 0, 19, 3], STEP],
    "a small crop": [FILLED, ["crop", 0, 10, 1], STEP, ["crop", 0, 1, 1], STEP],
    "a large crop": [FILLED, ["crop", 0, 40, 0], STEP, FILLED, STEP],
    "selection": [FILLED, ["select", 0, 2, 0], STEP, ["reorder", 0, 0, 1], STEP, ["repeat", 0, 1, 0], STEP],
    "roll-back": [FILLED, ["record", 0, 0, 0], ["forward", 0, 6, 0], ["crop", 0, 4, 1], STEP, ["forward", 0, 6, 2]],
    "copies": [FILLED, ["deepcopy", 0, 0, 1], STEP, ["pickle", 1, 0, 1], ["step", 1, 2, 0], ["step", 2, 0, 1], STEP],
    "saving": [FILLED, ["save", 0, 0, 1], STEP, ["forward", 1, 6, 0], ["step", 1, 1, 1]],
    "reset": [FILLED, ["reset", 0, 0, 0], ["forward", 0, 30, 0], STEP],
}
ALONE = ("look-up", "assistant")
"""Programs on one sequence."""
ATTENTIONS = ("decoded", "streamed", "fused")
SLIDING = ("gemma3", "mistral", "gpt-oss", "gemma2")
CASES = [
    f"{program} {spec} {SLIDING[i % 4] if program == 'roll-back' else models.MODELS[i % len(models.MODELS)]}"
    for i, (spec, program) in enumerate(product(SPECS, PROGRAMS))
]
FURTHER = [(f"turns saw-int4 {name}", "decoded") for name in ("llama4", "gemma3n", "gemma4", "lfm2")]
"""Layers that attend chunks, borrow K and V, differ in heads and head_dim, or are convolutions."""
MEANS = [
    (f"{program} saw-int4:mean=pre {name}", attention)
    for program, name, attention in zip(
        PROGRAMS, cycle(["qwen2", "mistral", "glm", "phi", "gpt-neox"]), cycle(ATTENTIONS)
    )
]
"""Keys without their mean before RoPE: windows, and partial and interleaved rotations."""


@pytest.mark.parametrize(("case", "attention"), [*each_in_turn(CASES, ATTENTIONS), *FURTHER, *MEANS])
def test_a_program_equals_the_oracle(case: str, attention: str) -> None:
    """Every layer, at every call: what it holds, returns and attends."""
    program, spec, name = case.rsplit(" ", 2)
    batch = 1 if program in ALONE else 2
    setting = {
        "model": name,
        "spec": spec,
        "attention": attention,
        "prefill": "decoded" if program == "stored" else "exact",
        "batch": batch,
        "seed": 0,
        "padding": [0, 7][:batch],
        "dtype": "float32",
        "page_tokens": None,
    }
    models.run(setting, PROGRAMS[program])


@pytest.mark.parametrize(
    ("name", "spec"),
    [*((name, "saw-int4") for name in MODELS), ("gemma3", "kivi-2:window=8"), ("gemma3", "octopus-3:window=8")],
)
def test_streamed_equals_decoded(tiny: Any, name: str, spec: str) -> None:
    model = tiny(name)
    decoded = run(model, cache_for(model, spec, attention="decoded"), prompt(2))
    cache = cache_for(model, spec, attention="streamed")
    # another order of summation moves a key by an ulp, and with luck its code by one
    assert_same(run(model, cache, prompt(2)), decoded, atol=2e-2)
    assert set(cache.report()["paths"]) == {"exact", "streamed"}


def padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(lengths)
    ids = prompt(len(lengths), width)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
        ids[row, : width - length] = 0
    return ids, mask


@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "gemma3"])
def test_assisted_equals_greedy_token_for_token(tiny: Any, name: str) -> None:
    model, ids = tiny(name), prompt(1, 16).repeat(1, 3)  # repeats, so that candidates are proposed and rejected
    ways: tuple[dict[str, Any], ...] = ({}, {"prompt_lookup_num_tokens": 5})
    greedy, looked_up = (run(model, cache_for(model, "saw-int4"), ids, **way).sequences for way in ways)
    assert torch.equal(looked_up, greedy)


def test_default_settings_change_little(tiny: Any) -> None:
    """The dense cache in float16 gives the tokens of transformers' own cache."""
    model = tiny("llama-gqa")
    torch.manual_seed(7)
    plain = model.generate(prompt(2), max_new_tokens=NEW, do_sample=False)
    cache = cache_for(model, "dense")
    assert torch.equal(run(model, cache, prompt(2)).sequences, plain)
    assert all(isinstance(state.codec, Dense) for c in cache.layer_caches for state in c.roles.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
@pytest.mark.parametrize(
    ("attention", "name", "spec", "dynamic"),
    [
        ("sdpa", "llama-gqa", "saw-int4", True),
        ("sdpa", "gemma3", "kivi-4", None),
        ("packedkv", "llama-gqa", "saw-int4", None),
    ],
)
def test_a_compiled_model_gives_the_same_logits(attention: str, name: str, spec: str, dynamic: bool | None) -> None:
    """``torch.compile`` breaks its graphs at the cache, on CPU kernels too, and changes nothing as the cache grows."""
    kinds = {"gemma3": ["sliding_attention", "full_attention"]}.get(name, ["full_attention"])
    model = tiny_model(name, num_hidden_layers=len(kinds), **({"layer_types": kinds} if len(kinds) > 1 else {}))
    model.set_attn_implementation(attention)
    steps: list[torch.Tensor] = []
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for forward in (model, torch.compile(model, backend="eager", dynamic=dynamic)):
            cache = cache_for(model, spec)
            model(prompt(), **passing(model, cache))
            found = [forward(prompt(1, 1, seed=i), **passing(model, cache)).logits for i in range(2)]
            steps.append(torch.cat(found))
    torch._dynamo.reset()
    torch.testing.assert_close(steps[1], steps[0], rtol=0, atol=1e-5)
