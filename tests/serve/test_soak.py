"""The soak of ``benchmarks/soak_serve.py``, short; and its verdict, which must see each thing that can go wrong."""

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.engines import ENVIRONMENT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


SIZES = ("--seconds", "20", "--prompts", "12", "--prompt", "160", "--answer", "16", "--chunk", "32", "--gap", "0.2")


def soak(model: Path, out: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what was said, and the report of a run."""
    command = [sys.executable, str(BENCHMARKS / "soak_serve.py"), "--model", str(model), "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"} | ENVIRONMENT
    done = subprocess.run([*command, *SIZES, *options], env=environment, capture_output=True, text=True)
    (report,) = out.glob("soak-*-cpu.json")
    return done.returncode, done.stdout[-3000:] + done.stderr[-3000:], json.loads(report.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize(("preset", "options"), [("saw-int4", ()), ("octopus-3", ("--window", "0"))])
def test_a_short_soak(preset: str, options: tuple[str, ...], llama: Any, tmp_path: Path) -> None:
    status, said, found = soak(llama.folder, tmp_path, "--preset", preset, *options)
    assert status == 0, said
    assert found["failures"] == []
    assert found["checked"]["equal"] >= found["ended"]["whole"] + found["ended"]["decode"]
    assert found["checked"]["equal"] == found["checked"]["answers"]
    assert found["checked"]["prompts_alone"] == found["checked"]["prompts"]
    assert found["checked"]["differing"] == []
    assert min(found["ended"][kind] for kind in ("whole", "queued", "prefill", "decode")) > 0
    assert found["preemptions"] > 0
    assert found["prefix_hit_tokens"] > 0
    assert any(c["changed"] for c in found["control"])
    assert not any(found["pool_used_when_idle"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("pages", "answers are not those of their prompts alone"),
        ("block", "blocks were held while nothing ran"),
        ("memory", "resident memory grew by"),
    ],
)
def test_a_planted_fault_is_found(fault: str, sentence: str, llama: Any, tmp_path: Path) -> None:
    """With few prompts and second turns, as on a GPU."""
    status, said, found = soak(llama.folder, tmp_path, "--plant", fault, "--turns", "6")
    assert status == 1, said
    assert any(sentence in failure for failure in found["failures"]), found["failures"]
    assert found["checked"]["prompts_alone"] == found["checked"]["prompts"]
    assert found["distinct_second_turns"] <= 6


@pytest.mark.nightly
def test_checks_that_are_cut_short_say_so(llama: Any, tmp_path: Path) -> None:
    status, said, found = soak(llama.folder, tmp_path, "--check-seconds", "1e-6")
    assert status == 1, said
    assert found["checked"]["prompts_alone"] == 1 < found["checked"]["prompts"]
    (failure,) = found["failures"]
    assert f"{found['checked']['prompts_alone']} of {found['checked']['prompts']} prompts were run alone" in failure


def good() -> dict[str, Any]:
    """What a run found, with nothing wrong."""
    requests = [SimpleNamespace(length=40, ended="whole")]
    control = [{"changed": True, "hit_tokens": 32, "most_behind": 2.0}]
    ended = {"whole": 1, "queued": 1, "prefill": 1, "decode": 1, "error": 0}
    return {
        "soak": SimpleNamespace(errors=[], idle=[0.0], requests=requests),
        "args": SimpleNamespace(
            tie=1e-3, leak=32.0, chunk=16, engine={"speculative_config": {}, "kv_transfer_config": {}}
        ),
        "loaded": {
            "ended": ended,
            "preemptions": 1,
            "prefix_hit_tokens": 16,
            "drafted_tokens": 9,
            "accepted_tokens": 4,
            "loaded_tokens": 64,
        },
        "checked": SimpleNamespace(
            differing=[{"requests": 2, "most_behind": 1e-4}],
            equal=5,
            answers=7,
            prompts=3,
            prompts_alone=3,
            seconds=9.0,
        ),
        "control": control,
        "grown": (1.0, 0.1, 600.0),
    }


BAD: dict[str, tuple[Any, str]] = {
    "wrong page": (lambda g: g["checked"].differing.append({"requests": 0, "most_behind": 0.1}), "1 answers are not"),
    "cut short": (
        lambda g: g["checked"].__dict__.update(prompts_alone=2, equal=4),
        "2 of 3 prompts were run alone in 9 s, 6 of 7 answers checked",
    ),
    "no answers": (lambda g: g["checked"].__dict__.update(prompts=0, prompts_alone=0), "0 of 0 prompts"),
    "held block": (lambda g: g["soak"].idle.append(0.025), "blocks were held while nothing ran: 2.50%"),
    "leak": (lambda g: g.update(grown=(40.0, 4.0, 600.0)), "resident memory grew by 40.0 MB in 600 s"),
    "no samples": (lambda g: g.update(grown=None), "too few samples"),
    "error": (lambda g: g["soak"].errors.append("EngineDeadError: gone"), "EngineDeadError: gone"),
    "no preemption": (lambda g: g["loaded"].update(preemptions=0), "no preemptions"),
    "no hit": (lambda g: g["loaded"].update(prefix_hit_tokens=0), "no prefix hits"),
    "no cut prompt": (lambda g: g["loaded"]["ended"].update(prefill=0), "no cancellations within a prompt"),
    "no chunks": (lambda g: g["soak"].requests.clear(), "no prompts in chunks"),
    "all drafts right": (lambda g: g["loaded"].update(accepted_tokens=9), "no rejected drafts"),
    "all drafts wrong": (lambda g: g["loaded"].update(accepted_tokens=0), "no accepted drafts"),
    "no offload": (lambda g: g["loaded"].update(loaded_tokens=0), "no tokens loaded by the connector"),
    "blind": (lambda g: g["control"][0].update(changed=False), "answers from others' pages look right"),
    "control without hits": (lambda g: g["control"][0].update(hit_tokens=0), "answers from others' pages look right"),
    "blunt": (lambda g: g["args"].__dict__.update(tie=2.5), "answers from others' pages look right"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_failed_check_of_a_soak_run_is_reported(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak_report import failures_of

    found = good()
    assert failures_of(**found) == []
    change, sentence = BAD[case]
    change(found)
    (failure,) = failures_of(**found)
    assert sentence in failure


def test_growth_is_the_slope_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 2 MB a minute after a warm-up that is steeper."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak_report import growth

    series = [(float(t), 100.0, 10.0 * t if t < 30 else 300 + (t - 30) / 30) for t in range(0, 151, 10)]
    assert growth(series, 30) == pytest.approx((4.0, 2.0, 120.0))
    assert growth(series, 140) is None


# -- the reading of answers that differ --------------------------------------------------------------------------------

BLOCK = 4


class Engine:
    """Of each text read it tells the gap of each token, a number of the text up to it; cached blocks have none."""

    def __init__(self, prompt: bytes, places: bool) -> None:
        self.cached, self.places, self.texts = {prompt}, places, []

    def gap(self, text: list[int]) -> float:
        return float(sum((i + 1) * t for i, t in enumerate(text)) % 97)

    async def generate(self, text: bytes, **options: Any) -> Any:
        from soak_load import pack, unpack

        ids, count = unpack(text), 0
        if not options["skip_reading_prefix_cache"]:
            blocks = range(BLOCK, len(ids), BLOCK)
            count = max((n for n in blocks if any(c.startswith(pack(ids[:n])) for c in self.cached)), default=0)
        self.texts.append(count)
        self.cached.add(text)
        at = [
            {ids[i]: SimpleNamespace(logprob=-self.gap(ids[: i + 1])), -1: SimpleNamespace(logprob=0.0)}
            for i in range(count + 1, len(ids))
        ]
        before = [None] + [{0: SimpleNamespace(logprob=5.0)}] * (count if self.places else 0)
        return SimpleNamespace(prompt_logprobs=before + at, num_cached_tokens=count)


@pytest.mark.parametrize("places", [True, False])
@pytest.mark.parametrize("start", [7, 8, 9])
def test_answers_are_read_from_where_they_differ(places: bool, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what they share is in the cache already, whether cached tokens have places in the output or not."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak_check import Checks, Found, paths
    from soak_load import pack, unpack

    rng = random.Random(start)
    prompt, alone = [rng.randrange(50) for _ in range(start)], [rng.randrange(50) for _ in range(24)]
    firsts = {}
    for first in (0, 0, 1, 4, 8, 8, 23):
        stem = [*alone[:first], 50, *(rng.randrange(50) for _ in range(23 - first))]
        for length in (first + 1, rng.randint(first + 1, 24), 24):
            firsts[pack(stem[:length])] = first
            other = [*stem[: max(first + 1, length - 3)], 51, 52]
            firsts[pack(other)] = first
    checks = Checks()
    engine = Engine(pack(prompt + alone), places)
    checks.generate, checks.found, checks.blocks = engine.generate, Found(), 12  # type: ignore[attr-defined]
    checks.args = SimpleNamespace(block=BLOCK, seqs=4)  # type: ignore[attr-defined]

    async def empty() -> bool:
        engine.cached.clear()
        return True

    checks.empty = empty
    found = asyncio.run(checks.read(pack(prompt), firsts))
    assert found == {
        tokens: [engine.gap(prompt + unpack(tokens)[: i + 1]) for i in range(first, len(tokens) // 4)]
        for tokens, first in firsts.items()
    }
    assert checks.found.read == len(paths(firsts)) < len(firsts)  # type: ignore[attr-defined]
    assert sum(count > 0 for count in engine.texts) > len(engine.texts) / 2


def test_packed_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak_load import Request, pack, unpack

    ids = [0, 1, 127, 128, 150_000, 2**31 - 1]
    assert unpack(pack(ids)) == ids
    assert len(pack(ids)) == 4 * len(ids)
    assert pack(ids[:3]) + pack(ids[3:]) == pack(ids)
    request = Request(pack(ids), 4, "whole", 0)
    assert request.length == len(ids)
    assert not hasattr(request, "__dict__")
