"""The README says what the files say: its blocks are derived again, its snippet runs, its tree is the tree."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kernels.emulation import machine

__all__ = ["machine"]

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "scripts/update_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.mark.parametrize("name", list(script.BLOCKS))
def test_block_is_what_the_result_files_and_the_registry_say(name: str) -> None:
    derived = script.BLOCKS[name](ROOT)  # a missing result file is an error, not a skip
    assert script.block_in(README, name) == derived, "run scripts/update_readme.py"


def write_speed(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / script.SPEED).mkdir(parents=True, exist_ok=True)
    (folder / script.SPEED / "kernels.json").write_text(json.dumps(rows))


def speed_rows() -> list[dict[str, Any]]:
    return [
        {"spec": spec, "metric": metric, "shape": shape, "values": {"p20": 0, "p50": value + i, "p80": 99}, "gpu": "G"}
        for spec in ("saw-int4", "other")
        for metric, value in (("decode_us_cold", 30.0), ("speedup_vs_bf16_cold", 1.5))
        for i, shape in enumerate(script.SHAPES)
    ]


def test_speed_sentence_quotes_the_medians(tmp_path: Path) -> None:
    write_speed(tmp_path, speed_rows())
    sentence = script.speed_block(tmp_path)
    assert "On one G, " in sentence
    assert [m[1] for m in re.finditer(r"(\d+) µs", sentence)] == ["30", "31", "32", "33"]
    assert "1.5, 2.5, 3.5 and 4.5 times as fast" in sentence


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[1:], "0 rows have spec saw-int4, metric decode_us_cold, shape llm64k"),
        (lambda rows: [*rows, rows[0]], "2 rows have spec saw-int4, metric decode_us_cold, shape llm64k"),
        (lambda rows: [{**rows[0], "gpu": "other"}, *rows[1:]], "several GPUs: G, other"),
    ],
    ids=["missing", "twice", "two machines"],
)
def test_speed_sentence_refuses_rows_that_do_not_carry_it(tmp_path: Path, spoil: Any, message: str) -> None:
    write_speed(tmp_path, spoil(speed_rows()))
    with pytest.raises(script.MissingResultError, match=message):
        script.speed_block(tmp_path)


def test_speed_sentence_takes_the_latest_run(tmp_path: Path) -> None:
    later = [
        {**row, "run": "2026-12-01", "values": {"p20": 0, "p50": row["values"]["p50"] + 100, "p80": 99}}
        for row in speed_rows()
    ]
    unmeasured = [{**row, "run": "2027-01-01", "values": None, "status": "failed"} for row in speed_rows()]
    write_speed(tmp_path, [*speed_rows(), *later, *unmeasured])
    assert [m[1] for m in re.finditer(r"(\d+) µs", script.speed_block(tmp_path))] == ["130", "131", "132", "133"]


def kernel_rows() -> list[dict[str, Any]]:
    def row(spec: str, shape: str, gain: float | None) -> dict[str, Any]:
        values = (
            {"values": None, "status": "no kernel"} if gain is None else {"values": {"p20": 0, "p50": gain, "p80": 9}}
        )
        common = {"effective_bits": 4.25, "unit": "x", "gpu": "G", "run": "2026-12-01"}
        return {"spec": spec, "metric": "speedup_vs_bf16_cold", "shape": shape, **common, **values}

    gains = {"llm64k": 2.2, "b32_8k": 2.6, "llama8b_b1_512": 0.9, "llama8b_b1_1024": 1.1}
    return [
        *(row("saw-int4", shape, gain) for shape, gain in gains.items()),
        row("kivi-2", "b32_32k", 3.6),
        row("octopus-2", "b32_32k", None),
    ]


def test_table_of_kernels_has_speedups_what_falls_short_and_the_break_even(tmp_path: Path) -> None:
    assert script.kernels_block(tmp_path).startswith("Not measured yet")
    assert not script.write_figure(tmp_path)
    write_speed(tmp_path, [])
    (tmp_path / script.SPEED / "decode.json").write_text(json.dumps(kernel_rows()))
    lines = script.kernels_block(tmp_path).splitlines()
    assert lines[0] == "![Speed-up over 16-bit attention over effective bits](docs/img/speed.png)"
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert cells == [
        ["`kivi-2`", "4.25", "–", "–", "3.60x", "–", "–", "–", "–"],
        ["`saw-int4`", "4.25", "2.20x", "2.60x ✗", "–", "–", "1024", "–", "–"],
    ]
    assert "(G; cold L2" in lines[-1]
    (tmp_path / script.SPEED_FIGURE).parent.mkdir(parents=True)
    assert script.write_figure(tmp_path)
    assert (tmp_path / script.SPEED_FIGURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("block", ["results", "columns", "speed", "generate", "best", "engine"])
def test_missing_result_files_are_errors(tmp_path: Path, block: str) -> None:
    with pytest.raises(script.MissingResultError):
        script.BLOCKS[block](tmp_path)


def step_row(spec: str, way: str, cache: str, ms: float, **more: Any) -> dict[str, Any]:
    values = {"p20": ms / 2, "p50": ms, "p80": ms}
    return {"spec": spec, "metric": f"ms_per_token_{way}", "shape": script.GENERATE, "cache": cache, "values": values,
            "held_bytes": 5e9, **more}  # fmt: skip


def test_eager_generate_is_compared_with_the_faster_dynamic_cache(tmp_path: Path) -> None:
    path = tmp_path / script.SPEED / script.GENERATE_FILE
    path.parent.mkdir(parents=True)
    rows = [
        step_row("saw-int4", "compiled", "kvcodec fused", 9.0), step_row("dense", "compiled", "StaticCache", 19.0),
        step_row("saw-int4", "generate", "kvcodec fused", 38.0), step_row("int-4", "generate", "kvcodec fused", 1.0),
        step_row("dense", "generate", "DynamicCache", 76.0, form="as torch chooses"),
    ]  # fmt: skip
    path.write_text(json.dumps(rows))
    told = script.generate_block(tmp_path)
    assert "`saw-int4` 38.0 ms, DynamicCache 76.0 ms as torch chooses its attention" in told
    assert "a fifth of the steps took 38.0 ms or less, so do not read it as DynamicCache's own speed" in told
    path.write_text(json.dumps([*rows, step_row("dense", "generate", "DynamicCache", 34.0, form="cuDNN off")]))
    told = script.generate_block(tmp_path)
    assert "DynamicCache 34.0 ms with cuDNN's attention switched off (76.0 ms as torch chooses" in told
    assert "| 16 bit, DynamicCache, cuDNN off | – | 34.0 |" in told
    path.write_text(json.dumps(rows[1:]))
    with pytest.raises(script.MissingResultError, match="no row is qwen3_8b_b1_32k, ms_per_token_compiled, kvcodec"):
        script.generate_block(tmp_path)


def test_the_best_of_a_budget_has_the_least_kl_of_those_that_fit(tmp_path: Path) -> None:
    path = tmp_path / script.ALL_RESULTS
    path.parent.mkdir(parents=True)
    held = [("a", 2.25, 0.9), ("b", 2.3, 0.8), ("c", 2.31, 0.1), ("d", 4.3, 0.2), ("e", 5.0, 0.01), ("f", 9.0, 0.0)]
    common = {"model": "m", "windows": 3, "window_tokens": 8, "perplexity": 9.5, "uncompressed": {"perplexity": 9.0}}
    path.write_text(json.dumps([{"spec": s, "effective_bits": b, "kl": kl, **common} for s, b, kl in held]))
    lines = script.best_block(tmp_path).splitlines()[2:6]
    assert [re.findall(r"`(\w)`", line) for line in lines] == [["b", "a"], ["c", "b"], ["c", "d"], ["e", "c"]]


def test_results_table_shows_each_row(tmp_path: Path) -> None:
    path = tmp_path / script.RESULTS
    path.parent.mkdir(parents=True)
    rows = [{"spec": "a-4", "kl": 0.25, "perplexity": 12.345}, {"spec": "b", "kl": None, "perplexity": 11}]
    path.write_text(json.dumps({"rows": rows}))
    assert script.results_block(tmp_path).splitlines() == [
        "| spec | perplexity | KL |",
        "| --- | ---: | ---: |",
        "| `a-4` | 12.35 | 0.2500 |",
        "| `b` | 11.00 | – |",
    ]


def test_picture_is_there() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    assert all((ROOT / p).read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_both_commands_stand_at_the_top() -> None:
    top = "\n".join(README.splitlines()[:20])
    assert "make demo" in top
    assert "make test" in top


@pytest.mark.slow
def test_snippet_runs_and_is_short() -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    assert len(code.splitlines()) <= 10
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "The Hanseatic League was" in done.stdout
    assert "'effective_bits'" in done.stdout


TINY_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=64, max_position_embeddings=256)
model = LlamaForCausalLM(config).eval()
inputs = {"input_ids": torch.arange(10)[None], "max_new_tokens": 3, "do_sample": False}
"""


def test_gpu_snippet_runs_on_the_emulated_machine(machine: dict[str, Any]) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.S)[1]
    assert "max_len=33_000" in code
    code = code.replace("max_len=33_000", "max_len=256")
    found: dict[str, Any] = {}
    exec(TINY_MODEL + code, found)
    assert found["cache"].report()["paths"]["fused"] == 4, "two steps of two layers attend in the kernel"
    assert set(machine) >= {"kv_decode", "kv_encode"}


def test_file_tree_names_every_room_and_no_other() -> None:
    tree = re.search(r"```\nsrc/kvcodec/\n(.*?)```", README, re.S)[1]
    named = set(re.findall(r"^  (\S+)", tree, re.M))
    rooms = {p.name + "/" * p.is_dir() for p in (ROOT / "src/kvcodec").iterdir()}
    assert named == rooms - {"__init__.py", "__main__.py", "py.typed", "__pycache__/"}
    for path in re.findall(r"^(\S+/) ", tree, re.M):
        assert (ROOT / path).is_dir()
