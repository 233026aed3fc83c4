"""benchmarks/age_tiers.py: tokens fed in calls, scored at several lengths of one pass."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.cli.tiny import tiny_loaded

from kvcodec.cli.measure.perplexity import compressed_logits, uncompressed

FILE = Path(__file__).parents[3] / "benchmarks/age_tiers.py"


def test_rows_are_those_of_the_first_tokens_at_each_length() -> None:
    spec = importlib.util.spec_from_file_location("age_tiers", FILE)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model, windows = tiny_loaded(), [torch.randint(256, (64,)) for _ in range(2)]
    references = [uncompressed(model.model, window) for window in windows]
    tiers = "int-2:window=16,recent=int-8"
    found = {name: script.scores(model, name, windows, references, [32, 64], 16) for name in ("int-2", tiers, "dense")}
    for rows in found.values():
        assert [row["tokens"] for row in rows] == [32, 64]
    assert found["dense"][1]["kl"] < 1e-3 < found[tiers][1]["kl"] < found["int-2"][1]["kl"]
    assert found["int-2"][1]["effective_bits"] < found[tiers][1]["effective_bits"] < found[tiers][0]["effective_bits"]
    whole = [
        reference.compare(compressed_logits(model.model, "int-2", window, probe="off")[0]).kl
        for window, reference in zip(windows, references, strict=True)
    ]  # a codec that holds nothing dense gives the same in one call
    assert found["int-2"][1]["kl"] == pytest.approx(float(torch.cat(whole).mean()), rel=1e-3)
