"""An engine's layers of token groups on the CPU kernels against the codecs, and which layers are served by kernels."""

from pathlib import Path

import pytest
import torch

from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.engine import CpuEngine
from tests.integrations import test_groups as groups
from tests.integrations import test_serving as single
from tests.integrations.test_serving import BLOCK
from tests.kernels.test_grouped_layer import CASES, Batch
from tests.kernels.test_packed_layer import ALONE, READ, SERVED

pytestmark = pytest.mark.usefixtures("compiled")
GROUPS = [*(spec for spec in READ if spec not in ALONE), "innerq-hybrid:window=0,sink=0"]


def test_every_method_with_readers_is_served() -> None:
    assert len(READ) >= 40
    left = {s.partition(":")[0].partition("-")[0] for s in SERVED} - {s.partition("-")[0] for s in READ}
    assert left == {"additive", "e8", "kvarn", "polarquant"}


@pytest.mark.parametrize("rules", groups.RULES)
@pytest.mark.parametrize("spec", GROUPS)
def test_chunks_over_groups_are_the_references(spec: str, rules: str) -> None:
    """However the prompt is cut; bytes too."""
    layer = groups.made(spec)
    want_pages, pages = groups.pool(layer), groups.pool(layer)
    want = groups.fed(layer, want_pages, groups.CUTS["across"], groups.RULES[rules])
    for cut in ("across", "at once", "at edges"):
        pages.fill_(0xFF)
        found = groups.fed(layer, pages, groups.CUTS[cut], groups.RULES[rules], kernels=True)
        torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)
        assert torch.equal(pages, want_pages)


@pytest.mark.parametrize(("spec", "rules"), [*CASES, *((s, "plain") for s in GROUPS if s not in dict(CASES))])
def test_decode_steps_over_groups_are_the_references(spec: str, rules: str) -> None:
    first = [61, 31, 1] if groups.made(spec).unit == 32 else [125, 63, 1]
    batch = Batch(spec, groups.RULES[rules], first)
    assert isinstance(batch.layer.engine(groups.block_of(batch.layer)), CpuEngine)
    for step in range(6):
        batch.step([[0, 1, 2], [2, 0], [1]][step % 3], padding=step % 2)


def test_why_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = single.made("saw-int4")
    layer.find_kernels(BLOCK)
    assert layer.unserved == ""
    left = single.made("polarquant-3")
    left.find_kernels(BLOCK)
    assert left.unserved.startswith("polarquant-3: no CPU kernel reads PolarQuant")
    monkeypatch.setattr(library, "chosen", lambda: Path("missing.so"))
    layer = single.made("saw-int4")
    layer.find_kernels(BLOCK)
    assert "the CPU kernels are not compiled (missing.so is missing)" in layer.unserved
