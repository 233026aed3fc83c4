"""benchmarks/serve_check.py finds a byte that is not the codec's, and is not misled by a block that was given away."""

import importlib
from pathlib import Path

import pytest

from tests.serve.engines import engine, prompts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("model", ["llama", "biased"])
def test_a_layer_is_compared_with_the_library(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys with their mean, and without it."""
    from vllm import SamplingParams

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    check = importlib.import_module("serve_check")
    # the first request ends within its block, which the second then takes for its third
    asked = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in (2, 20)]
    folder = request.getfixturevalue(model).folder
    with engine(folder, {"preset": "saw-int4"}, block_size=16) as llm:
        with check.Recorder(llm.llm_engine) as recorder:
            llm.generate([{"prompt_token_ids": p} for p in prompts(5, 21)], asked, use_tqdm=False)
        found = check.compare(recorder)
        assert (found["requests"], found["blocks_given_away"], found["bytes_equal"]) == (2, 1, 1.0)
        assert found["bytes"] == 40 * recorder.layer.kv_cache[0].numel() // 16  # the second's tokens that have pages
        assert max(found["prompt_error"], found["step_error"]) < 1e-5
        assert (recorder.layer.impl.packed.mean is None) == (model == "llama")
        recorder.layer.kv_cache.add_(1)
        assert check.compare(recorder)["bytes_equal"] < 0.01
