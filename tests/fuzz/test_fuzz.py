"""Random programs: a sample with fixed seeds, many with fresh seeds each night; and caches in threads."""

from concurrent.futures import ThreadPoolExecutor
from datetime import date
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels.cpu.layer import CpuAttention
from packedkv.kernels.cpu.library import refusal
from packedkv.kernels.tokens import Rules
from packedkv.store.pages import PageStore
from packedkv.store.positions import Positions
from packedkv.store.site import RoleState
from tests.conftest import tiny_model
from tests.fuzz import fault_of, program_of, run_seeds

NIGHTLY = 20_000


PARTS = [
    *(range(i, i + 30) for i in range(0, 300, 30)),
    *(pytest.param(range(i, i + 500), marks=pytest.mark.nightly) for i in range(0, NIGHTLY, 500)),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_seeds(part: range, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample of fixed seeds; each night other ones."""
    if len(part) > 30:
        first = date.today().toordinal() * NIGHTLY + part.start
        part = range(first, first + len(part))
        with capsys.disabled():
            print(f"seeds {first} to {part[-1]}")
    _, faults = run_seeds(part)
    assert not faults, "\n".join(map(str, faults))


def _wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    own = CpuAttention.attend

    def attend(self: CpuAttention, q: Tensor, roles: Any, store: Any, rules: Rules, **options: Any) -> Any:
        return own(self, q, roles, store, rules._replace(scale=rules.scale * 1.001), **options)

    monkeypatch.setattr(CpuAttention, "attend", attend)


def _one_more_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = RoleState.remove
    monkeypatch.setattr(RoleState, "remove", lambda self, first, last: own(self, max(first - 1, 0), last))


def _order_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PageStore.select
    monkeypatch.setattr(PageStore, "select", lambda self, indices: own(self, indices.sort().values))


def _places_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Positions, "remove", lambda self, first, last: None)


@pytest.mark.parametrize("fault", [_wrong_scale, _one_more_removed, _order_lost, _places_lost])
def test_faults_are_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert any(fault_of(program_of(seed, "bare")) for seed in range(60))


# -- threads -----------------------------------------------------------------------------------------------------------

SPECS = ("ghost-4", "saw-int4:mean=pre", "kivi-4")


def _calls(thread: int, count: int) -> list[tuple[str, int]]:
    """Presets and seeds of the calls of a thread."""
    return [(SPECS[(thread + i) % len(SPECS)], 100 * thread + i) for i in range(count)]


def _generated(model: Any, spec: str, seed: int) -> list[Tensor]:
    """Tokens and logits of a prompt, one in six long enough for ghost's fit."""
    length = 530 if seed % 6 == 0 else 20 + seed % 17
    ids = torch.randint(2, 128, (1, length), generator=torch.Generator().manual_seed(seed))
    out = model.generate(
        ids, **passing(model, cache_for(model, spec, probe=False)), max_new_tokens=5, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return [out.sequences, *out.logits]


@pytest.mark.parametrize("attention", ["sdpa", "packedkv"])
@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize(("threads", "count"), [(4, 4), pytest.param(8, 50, marks=pytest.mark.nightly)])
def test_threads_give_what_one_gives(threads: int, count: int, models: int, attention: str) -> None:
    if attention == "packedkv" and (reason := refusal(torch.device("cpu"))):
        pytest.skip(reason)
    names = ("llama-gqa", "qwen2")[:models]
    first, own = ([tiny_model(name) for name in names] for _ in range(2))
    for model in (*first, *own):
        model.set_attn_implementation(attention)
    start = Barrier(threads)

    def work(thread: int) -> list[list[Tensor]]:
        start.wait()
        return [_generated(own[thread % models], *call) for call in _calls(thread, count)]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, range(threads)))
    for thread, results in enumerate(found):
        for call, result in zip(_calls(thread, count), results, strict=True):
            want = _generated(first[thread % models], *call)
            for x, y in zip(result, want, strict=True):
                assert torch.equal(x, y), f"thread {thread}, {call}: off by {float((x - y).abs().max()):.3g}"
