"""The soak of ``benchmarks/soak_serve.py``, short; and its verdict, which must see each thing that can go wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.engines import ENVIRONMENT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.nightly
@pytest.mark.parametrize(("preset", "options"), [("saw-int4", ()), ("octopus-3", ("--window", "0"))])
def test_a_short_soak(preset: str, options: tuple[str, ...], llama: Any, tmp_path: Path) -> None:
    sizes = ("--seconds", "20", "--prompts", "12", "--prompt", "160", "--answer", "16", "--chunk", "32", "--gap", "0.2")
    command = [sys.executable, str(BENCHMARKS / "soak_serve.py"), "--model", str(llama.folder), "--preset", preset]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"} | ENVIRONMENT
    done = subprocess.run(
        [*command, *options, *sizes, "--out", str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / f"soak-{preset}-cpu.json").read_text())
    assert found["failures"] == []
    assert found["checked"]["equal"] >= found["ended"]["whole"] + found["ended"]["decode"]
    assert found["checked"]["differing"] == []
    assert min(found["ended"][kind] for kind in ("whole", "queued", "prefill", "decode")) > 0
    assert found["preemptions"] > 0
    assert found["prefix_hit_tokens"] > 0
    assert any(c["changed"] for c in found["control"])
    assert not any(found["pool_used_when_idle"])


def good() -> dict[str, Any]:
    """What a run found, with nothing wrong."""
    requests = [SimpleNamespace(prompt=(1,) * 40, ended="whole")]
    control = [{"changed": True, "hit_tokens": 32, "most_behind": 2.0}]
    ended = {"whole": 1, "queued": 1, "prefill": 1, "decode": 1, "error": 0}
    return {
        "soak": SimpleNamespace(errors=[], idle=[0.0], requests=requests),
        "args": SimpleNamespace(tie=1e-3, leak=32.0, chunk=16),
        "loaded": {"ended": ended, "preemptions": 1, "prefix_hit_tokens": 16},
        "checked": {"differing": [{"most_behind": 1e-4}]},
        "control": control,
        "grown": (1.0, 0.1, 600.0),
    }


BAD: dict[str, tuple[Any, str]] = {
    "wrong page": (lambda g: g["checked"]["differing"].append({"most_behind": 0.1}), "1 answers are not those"),
    "held block": (lambda g: g["soak"].idle.append(0.025), "blocks were held while nothing ran: 2.50%"),
    "leak": (lambda g: g.update(grown=(40.0, 4.0, 600.0)), "resident memory grew by 40.0 MB in 600 s"),
    "no samples": (lambda g: g.update(grown=None), "too few samples"),
    "error": (lambda g: g["soak"].errors.append("EngineDeadError: gone"), "EngineDeadError: gone"),
    "no preemption": (lambda g: g["loaded"].update(preemptions=0), "no preemptions"),
    "no hit": (lambda g: g["loaded"].update(prefix_hit_tokens=0), "no prefix hits"),
    "no cut prompt": (lambda g: g["loaded"]["ended"].update(prefill=0), "no cancellations within a prompt"),
    "no chunks": (lambda g: g["soak"].requests.clear(), "no prompts in chunks"),
    "blind": (lambda g: g["control"][0].update(changed=False), "answers from others' pages look right"),
    "control without hits": (lambda g: g["control"][0].update(hit_tokens=0), "answers from others' pages look right"),
    "blunt": (lambda g: g["args"].__dict__.update(tie=2.5), "answers from others' pages look right"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_verdict_sees(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak_report import failures_of

    found = good()
    assert failures_of(**found) == []
    change, sentence = BAD[case]
    change(found)
    (failure,) = failures_of(**found)
    assert sentence in failure


def test_the_fitted_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 2 MB a minute after a warm-up that is steeper."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak_report import growth

    series = [(float(t), 100.0, 10.0 * t if t < 30 else 300 + (t - 30) / 30) for t in range(0, 151, 10)]
    assert growth(series, 30) == pytest.approx((4.0, 2.0, 120.0))
    assert growth(series, 140) is None
