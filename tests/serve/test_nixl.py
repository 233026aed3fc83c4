"""Prompts handed from one server to another by NIXL, over its CPU path; servers whose pages mean other numbers refuse.

NIXL is not a part of vLLM: ``pip install nixl`` into the environment of these tests (70 MB).
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.engines import ENVIRONMENT, engine, generate, metric, prompts

pytestmark = pytest.mark.nightly
pytest.importorskip("nixl", reason="needs NIXL: pip install nixl")

IDS = prompts(200, 150, 100)
SIZES: dict[str, Any] = {"block_size": 32, "enable_prefix_caching": False}
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
COUNTED = "nixl_num_failed_transfers", "external_prefix_cache_hits"
GIVEN = {"preset": "turboquant-4"}
SCRIPT = """
import json, sys
from tests.serve.engines import engine
if __name__ == "__main__":
    from vllm import SamplingParams
    folder, given, ids, sizes, transfer = json.loads(sys.argv[1])
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    asked = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": keep})
    with engine(folder, given, kv_transfer_config=transfer, **sizes) as llm:
        found = llm.generate([{"prompt_token_ids": own} for own in ids], asked, use_tqdm=False)
        print("PAGES", json.dumps([one.kv_transfer_params for one in found]), flush=True)
        sys.stdin.read()
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def pages(llama: Any, tmp_path: Path) -> Iterator[list[Any]]:
    """Where a server in another process has the pages of the prompts."""
    log, script = tmp_path / "other.log", tmp_path / "other.py"
    script.write_text(SCRIPT)
    call = json.dumps([str(llama.folder), GIVEN, IDS, SIZES, TRANSFER])
    env = {**os.environ, **ENVIRONMENT, PORT: free_port(), "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(script), call], env=env, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline, lines = time.monotonic() + 600, []
        while not lines and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("PAGES ")]
        assert lines, log.read_text(errors="replace")[-3000:]
        yield json.loads(lines[0].removeprefix("PAGES "))
    finally:
        process.stdin.close()
        process.wait(60)


def loaded(llm: Any, pages: list[Any]) -> list[list[int]]:
    """Greedy tokens of the prompts, whose pages are asked of the other server."""
    from vllm import SamplingParams

    found = []
    for ids, own in zip(IDS, pages, strict=True):
        asked = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": own}
        )
        found.append(llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)[0])
    return [list(request.outputs[0].token_ids) for request in found]


def test_prompts_come_from_the_other_server(pages: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their tokens; none where a seed, a preset or the size of blocks differs, and they are computed again."""
    monkeypatch.setenv(PORT, free_port())
    transfer = {**TRANSFER, "kv_load_failure_policy": "recompute"}
    for given, block in ({}, 32), ({"seed": 1}, 32), ({"preset": "int-4"}, 32), ({}, 64):
        sizes = {**SIZES, "block_size": block}
        with engine(llama.folder, {**GIVEN, **given}, kv_transfer_config=transfer, **sizes) as llm:
            want = [generate(llm, [ids])[0] for ids in IDS]
            before = [metric(llm, name) for name in COUNTED]
            assert loaded(llm, pages) == want
            failed, hits = (metric(llm, name) - old for name, old in zip(COUNTED, before, strict=True))
            if given or block != SIZES["block_size"]:
                assert failed == len(IDS), (given, block)
            else:
                assert (failed, hits) == (0, sum(len(ids) for ids in IDS))
