"""Real weights in the real engine: a text is as likely through SmolLM2-135M's served cache as through the library's.

Tokens are not compared: a model's sums depend in their last bits on how a prompt is cut, a code that tips moves a
number by a whole step, and the layers behind make more codes tip, in the library as in the engine.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import packedkv
from packedkv.integrations.transformers.argument import passing
from tests.serve.engines import engine

pytestmark = pytest.mark.nightly

SPECS: dict[str, dict[str, Any]] = {"saw-int4": {}, "hqmq-s24_r3": {}, "turboquant-3": {}, "octopus-2": {"window": 0}}
LENGTH = 400


def loss(logits: torch.Tensor, ids: list[int]) -> float:
    """Nats per token, of all but the first."""
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), torch.tensor(ids[1:])))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model, its folder, and pieces of a real text with what they lose uncompressed."""
    pytest.importorskip("gguf")
    from packedkv.models.loading import load, load_text

    loaded = load("smollm2-135m", progress=False)
    # the weights were unpacked while they were read, and a model that calls itself quantized cannot be saved
    loaded.model.hf_quantizer = None
    loaded.model.config.__dict__.pop("quantization_config", None)
    folder: Path = tmp_path_factory.mktemp("smollm2")
    loaded.model.save_pretrained(folder)
    ids = loaded.tokenizer(load_text().text)["input_ids"]
    pieces = [ids[at : at + LENGTH] for at in (0, 2000, 4000)]
    with torch.no_grad():
        plain = [loss(loaded.model(torch.tensor([piece])).logits, piece) for piece in pieces]
    return loaded.model, folder, pieces, sum(plain) / len(plain)


@pytest.mark.parametrize("preset", SPECS)
def test_a_text_is_as_likely_as_through_the_librarys_cache(preset: str, real: Any) -> None:
    from vllm import SamplingParams

    model, folder, pieces, plain = real
    spec = ":".join([preset, *(f"{k}={v}" for k, v in SPECS[preset].items())])
    want = []
    for piece in pieces:
        cache = packedkv.cache_for(model, spec, prefill="decoded", probe=False)
        with torch.no_grad():
            want.append(loss(model(torch.tensor([piece]), **passing(model, cache)).logits, piece))
    options = {"max_num_batched_tokens": 128, "kv_cache_memory_bytes": 1 << 27}
    with engine(folder, {"preset": preset, **SPECS[preset]}, **options) as llm:
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found = []
        for answer in llm.generate([{"prompt_token_ids": p} for p in pieces], asked, use_tqdm=False):
            each = [next(iter(x.values())).logprob for x in answer.prompt_logprobs[1:]]
            found.append(-sum(each) / len(each))
    served, wanted = sum(found) / len(found), sum(want) / len(want)
    print(f"{preset}: served {served:.4f}, the library {wanted:.4f}, uncompressed {plain:.4f} nats a token")
    assert wanted - plain > 0.04  # else nothing is shown
    assert served == pytest.approx(wanted, abs=0.03)
