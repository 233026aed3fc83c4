"""The OpenAI server over HTTP: a process for one that serves and one that is refused, started together."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import packedkv
from packedkv.kernels.cpu import library
from tests.serve.engines import Server, prompts, spec_of
from tests.serve.engines import library as tokens_of

PRESET, GIVEN = "octopus-3", {"window": 0}
"""With an option of its own; how the engine serves other presets, test_engine.py asks in this process."""
F32 = torch.float32
MEMORY, BLOCK, LAYERS, HEADS = 4_000_000, 32, 6, 2


def config(preset: str) -> str:
    return json.dumps({"packedkv": {"preset": preset, **(GIVEN if preset == PRESET else {})}})


@pytest.fixture(scope="module")
def servers(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    logs = tmp_path_factory.mktemp("logs")
    sizes = ("--kv-cache-memory-bytes", str(MEMORY), "--block-size", str(BLOCK), "--max-num-batched-tokens", "32")
    started = {
        preset: Server(llama.folder, logs / preset, *sizes, "--additional-config", config(preset))
        for preset in (PRESET, "kivi-2")
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
    assert f"layers are served by the kernels 'cpu {library.variant()}'" in server.text()
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
    want = [f"t{i}" for i in tokens_of(llama.model, spec, ids)]
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
