"""Pages that leave the process: the same server reads them again, one whose bytes mean other numbers refuses them."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.identity import claim, digest_of, folders
from packedkv.integrations.vllm.options import read_options
from tests.serve.engines import ENVIRONMENT, engine, generate, layers, metric, prompts, watched

IDS = prompts(70, 40)


def transfer(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.mark.parametrize("given", [{"preset": "turboquant-4:sink=3"}, {"preset": "kivi-2", "window": 0}], ids=str)
def test_a_folder_of_pages(given: dict[str, Any], llama: Any, tmp_path: Path) -> None:
    """Stored by one engine and loaded by the next: as without. Other seeds, presets and block sizes do not start."""
    sizes: dict[str, Any] = {"block_size": 32, "enable_prefix_caching": False}
    found = []
    for _ in range(2):
        with watched(3) as steps, engine(llama.folder, given, **sizes, kv_transfer_config=transfer(tmp_path)) as llm:
            tokens, most = generate(llm, IDS[:1]), max(len(step.query) for step in steps)
            found.append((tokens, layers(llm)["model.layers.3.self_attn.attn"].attn_backend.get_name(), most >= 70))
    first, second = found
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == (True, False)  # the second computes only the tokens of the unfinished block
    if "window" in given:
        return
    for other, block in ({**given, "seed": 1}, 32), ({"preset": "int-4"}, 32), (given, 64):
        sizes["block_size"] = block
        with (
            pytest.raises(UnsupportedError, match=r"holds pages of .* mean other numbers; give the connector another"),
            engine(llama.folder, other, **sizes, kv_transfer_config=transfer(tmp_path)),
        ):
            pass


@pytest.mark.nightly
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "given",
    [{"preset": "saw-int4"}, {"preset": "octopus-3:sink=2", "window": 0}, {"preset": "kivi-2", "window": 0}],
    ids=str,
)
def test_a_pool_that_must_reload(given: dict[str, Any], drafts: int, llama: Any) -> None:
    """vLLM's OffloadingConnector: what a pool without room for two of the prompts evicts comes back, tokens equal."""
    asked = [[own, own[: len(own) // 2]] for own in prompts(120, 110, 100)]
    sizes: dict[str, Any] = {"block_size": 32, "max_model_len": 160, "enable_prefix_caching": True}
    if drafts:
        sizes["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    tier = {"cpu_bytes_to_use": 1 << 24, "spec_name": "HostTier", "spec_module_path": "tests.serve.host_tier"}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tier}

    def turns(llm: Any) -> list[list[list[int]]]:
        return [generate(llm, own) for _ in range(2) for own in asked]

    with engine(llama.folder, given, **sizes) as llm:
        want = turns(llm)
    with engine(llama.folder, given, **sizes, num_gpu_blocks_override=8, kv_transfer_config=connector) as llm:
        assert turns(llm) == want
        assert metric(llm, "external_prefix_cache_hits") >= 96 + 96 + 64  # whole blocks of the second turn


def test_a_digest_says_what_bytes_mean() -> None:
    def digest(**given: Any) -> str:
        options = read_options({"packedkv": given})
        return digest_of(options, 64, torch.float16)

    found = [
        digest(preset="saw-int4"),
        digest(preset="int-4"),
        digest(preset="saw-int4", seed=1),
        digest(preset="saw-int4:sink=4"),
        digest(preset="octopus-3", window=0),
        digest(preset="octopus-4", window=0),
    ]
    assert len(set(found)) == len(found)
    assert digest(preset="saw-int4", probe="off") == found[0]
    assert digest(preset="saw-int4", sink=0) == found[0]
    options = read_options({"packedkv": {"preset": "saw-int4"}})
    decided = [digest_of(options, 64, torch.float16, means) for means in (("none", "none"), ("none", "pre"))]
    assert len({found[0], *decided}) == 3


def test_folders_are_found_at_any_depth(tmp_path: Path) -> None:
    tiers = {"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "deep")}], "cpu": 1}
    given = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config=tiers)
    assert folders(None) == []
    assert folders(given) == [tmp_path / "deep"]
    claim(given, "a", "saw-int4")
    claim(given, "a", "saw-int4")
    with pytest.raises(UnsupportedError, match=r"holds pages of saw-int4 \(a\), this server's are of int-4"):
        claim(given, "b", "int-4")
    with pytest.raises(UnsupportedError, match=r"keeps pages in /tmp unless it is told; give .* a shared_storage_path"):
        claim(SimpleNamespace(kv_connector="ExampleConnector", kv_connector_extra_config={}), "a", "saw-int4")


# -- NIXL over its CPU path: pip install nixl (70 MB) ------------------------------------------------------------------

LONG = prompts(200, 150, 100)
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
    call = json.dumps([str(llama.folder), GIVEN, LONG, SIZES, TRANSFER])
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
    for ids, own in zip(LONG, pages, strict=True):
        asked = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": own}
        )
        found.append(llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)[0])
    return [list(request.outputs[0].token_ids) for request in found]


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL: pip install nixl")
def test_prompts_come_from_the_other_server(pages: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their tokens; none where a seed, a preset or the size of blocks differs, and they are computed again."""
    monkeypatch.setenv(PORT, free_port())
    transfer = {**TRANSFER, "kv_load_failure_policy": "recompute"}
    for given, block in ({}, 32), ({"seed": 1}, 32), ({"preset": "int-4"}, 32), ({}, 64):
        sizes = {**SIZES, "block_size": block}
        with engine(llama.folder, {**GIVEN, **given}, kv_transfer_config=transfer, **sizes) as llm:
            want = [generate(llm, [ids])[0] for ids in LONG]
            before = [metric(llm, name) for name in COUNTED]
            assert loaded(llm, pages) == want
            failed, hits = (metric(llm, name) - old for name, old in zip(COUNTED, before, strict=True))
            if given or block != SIZES["block_size"]:
                assert failed == len(LONG), (given, block)
            else:
                assert (failed, hits) == (0, sum(len(ids) for ids in LONG))
