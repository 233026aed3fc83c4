"""README and docs say what the result files say: their blocks are derived again, and the README's program runs."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import update_readme as script
from blocks import front, ghost, modules, quality, sources, speed
from kvcodec.cli.page import figures
from kvcodec.cli.page.rows import UNCOMPRESSED, Row
from kvcodec.models.named import SMOLLM2
from kvcodec.registry import presets

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(script.BLOCKS))
def test_block_is_what_the_result_files_and_the_registry_say(name: str) -> None:
    page, make = script.BLOCKS[name]
    derived = make(ROOT)  # a missing result file is an error, not a skip
    assert script.block_in((ROOT / page).read_text(encoding="utf-8"), name) == derived, "run scripts/update_readme.py"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def write_speed(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / sources.SPEED).mkdir(parents=True, exist_ok=True)
    (folder / sources.SPEED / "kernels.json").write_text(json.dumps(rows))


def speed_rows() -> list[dict[str, Any]]:
    return [
        {"spec": spec, "metric": metric, "shape": shape, "values": {"p20": 0, "p50": value + i, "p80": 99}, "gpu": "G"}
        for spec in ("saw-int4", "other")
        for metric, value in (("decode_us_cold", 30.0), ("speedup_vs_bf16_cold", 1.5))
        for i, shape in enumerate(sources.SHAPES)
    ]


def test_speed_sentence_quotes_the_medians(tmp_path: Path) -> None:
    write_speed(tmp_path, speed_rows())
    sentence = speed.speed_block(tmp_path)
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
    with pytest.raises(sources.MissingResultError, match=message):
        speed.speed_block(tmp_path)


def test_speed_sentence_takes_the_latest_run(tmp_path: Path) -> None:
    later = [
        {**row, "run": "2026-12-01", "values": {"p20": 0, "p50": row["values"]["p50"] + 100, "p80": 99}}
        for row in speed_rows()
    ]
    unmeasured = [{**row, "run": "2027-01-01", "values": None, "status": "failed"} for row in speed_rows()]
    write_speed(tmp_path, [*speed_rows(), *later, *unmeasured])
    assert [m[1] for m in re.finditer(r"(\d+) µs", speed.speed_block(tmp_path))] == ["130", "131", "132", "133"]


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


def test_table_of_kernels_has_speedups_and_the_break_even(tmp_path: Path) -> None:
    assert speed.kernels_block(tmp_path).startswith("Not measured yet")
    assert not speed.write_figures(tmp_path)
    write_speed(tmp_path, [])
    (tmp_path / sources.SPEED / "decode.json").write_text(json.dumps(kernel_rows()))
    lines = speed.kernels_block(tmp_path).splitlines()
    assert lines[0] == "![Speed-up over 16-bit attention over effective bits](img/speed.png)"
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert cells == [
        ["`kivi-2`", "4.25", "–", "–", "3.60x", "–", "–", "–", "–"],
        ["`saw-int4`", "4.25", "2.20x", "2.60x", "–", "–", "1024", "–", "–"],
    ]
    assert "(G; cold L2" in lines[-1]
    (tmp_path / speed.SPEED_FIGURE).parent.mkdir(parents=True)
    assert speed.write_figures(tmp_path)
    assert (tmp_path / speed.SPEED_FIGURE).read_bytes().startswith(b"\x89PNG")


UNMEASURED = ("kernels", "board", "ghost-steps", "ghost-fresh", "ghost-speed")
"""Blocks that say so where nothing was measured."""


@pytest.mark.parametrize("block", [name for name in script.BLOCKS if name not in UNMEASURED])
def test_missing_files_are_errors(tmp_path: Path, block: str) -> None:
    with pytest.raises(sources.MissingResultError):
        script.BLOCKS[block][1](tmp_path)


def write_rows(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))


def write_numbers(folder: Path) -> list[dict[str, Any]]:
    """Rows of everything that the three numbers quote; those of the server."""
    write_speed(folder, speed_rows())
    (folder / sources.SPEED / "kernels.json").rename(folder / sources.SPEED / "decode.json")
    base = {"perplexity": 20.0, "tokens_per_s": 16.0, "prompt_tokens": 256}
    common = {"model": "m", "uncompressed": base}
    write_rows(folder / sources.ALL_RESULTS, [{"spec": "saw-int4", "perplexity": 21.0, **common}])
    demo = [{"spec": s, "tokens_per_s": x, **common} for s, x in (("a", 4.0), ("b", 9.0))]
    write_rows(folder / sources.RESULTS, {"rows": demo})

    def served(spec: str, metric: str, shape: str, value: float, **sizes: int) -> dict[str, Any]:
        return {"spec": spec, "metric": metric, "shape": shape, "values": {"p50": value}, "sizes": sizes, "gpu": "G",
                "versions": {"vllm": "0.9"}, "run": "2026-12-01"}  # fmt: skip

    rows = []
    for spec, scale in (("saw-int4", 1), ("bf16", 2)):
        rows += [
            served(spec, "kv_cache_tokens", "start", 8000 / scale),
            served(spec, "step_ms", front.STEP, 7.5 * scale, sequences=32, tokens=8192),
            served(spec, "output_tokens_per_s", front.SESSIONS, 500 / scale, sessions=5, rounds=6),
            served(spec, "output_tokens_per_s", front.ONE_CLIENT, 90 + 10 * scale),
        ]
    return rows


def test_three_numbers_are_ratios_of_the_rows(tmp_path: Path) -> None:
    rows = write_numbers(tmp_path)
    write_rows(tmp_path / sources.SPEED / sources.SERVE_FILE, rows)
    told = " ".join(front.numbers_block(tmp_path).split())
    for words in (
        "on one G", "8,000 tokens fit instead of 4,000, 2.00 times as many (vLLM 0.9",
        "a perplexity of 21.00 instead of 20.00 (m", "1.5 to 4.5 times as fast",
        "a decode step of 32 sequences of 8,192 tokens takes 7.5 ms instead of 15.0",
        "5 sessions of 6 rounds get 2.0 times the output tokens per second",
        "one client with a short prompt (0.91 times",
        "where PyTorch decodes the cache, generation has this share of the speed without compression: 0.25 to 0.56 beh",
    ):  # fmt: skip
        assert words in told, words
    for left_out in rows:
        others = [row for row in rows if row is not left_out]
        write_rows(tmp_path / sources.SPEED / sources.SERVE_FILE, others)
        with pytest.raises(sources.MissingResultError, match=f"no row is saw-int4 and bf16, {left_out['metric']}"):
            front.numbers_block(tmp_path)


def test_the_cpu_sentence_says_which_path_ran_and_how_fast_behind_a_long_context(tmp_path: Path) -> None:
    base = {"tokens_per_s": 16.0, "prompt_tokens": 256, "long_tokens_per_s": 4.0, "long_tokens": 8000}
    speeds = {"tokens_per_s": 16.0, "long_tokens_per_s": 8.0}
    rows = [{"spec": "a", "model": "m", "generation_attention": "fused", "uncompressed": base, **speeds}]
    write_rows(tmp_path / sources.RESULTS, {"rows": rows})
    assert front.cpu_sentence(tmp_path) == (
        "On two CPU cores, where kernels read the packed pages, generation has this share of the speed without "
        "compression: 1.00 to 1.00 behind 256 tokens and 2.00 to 2.00 behind 8,000 tokens (m, 1 presets)."
    )


def test_five_rows_to_choose_from_are_the_best_that_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Chosen by the real model's KL, of its run with today's default or as vLLM serves; options are left out."""
    judged = {  # spec: bits, KL, perplexity on the real model, with the keys' biases and without
        "kivi-4": ((5.7, 0.008, 10.1), (5.7, 0.007, 10.1)), "kivi-tq-4": ((4.2, 0.012, 10.2),) * 2,
        "turboquant-4": ((4.1, 6.8, 5_000.0), (4.1, 0.02, 10.2)), "saw-int4": ((4.3, 6.9, 6_000.0), (4.3, 0.02, 10.3)),
        "ghost-4": ((4.06, 9.0, 900.0), (4.06, 0.006, 10.1)), "ghost-3": ((3.06, 9.0, 900.0), (3.06, 0.02, 10.4)),
        "kvarn-k4v4": ((4.0, 0.0, 10.0),) * 2,
        "fp8:mean=pre": ((3.0, 0.003, 10.0),) * 2, "dense": ((16.0, 0.0, 10.0),) * 2,
    }  # fmt: skip
    runs = {}
    for place, name in enumerate((sources.JUDGE[0], sources.TODAY)):
        found = {"(uncompressed)": (16.0, 0.0, 10.0), **{spec: both[place] for spec, both in judged.items()}}
        rows = [
            Row(spec, metric, metric, None, {"effective_bits": bits, "value": value, "items": 3.0}, "lower", "", "")
            for spec, (bits, kl, perplexity) in found.items()
            for metric, value in (("kl", kl), ("perplexity", perplexity))
        ]
        runs[name] = SimpleNamespace(rows=rows)
    monkeypatch.setattr(sources, "read_runs", lambda folder: runs)
    common = {"model": "m", "windows": 3, "perplexity": 9.5, "uncompressed": {"perplexity": 9.0}, "kl": 0.05}
    write_rows(tmp_path / sources.ALL_RESULTS, [{"spec": s, "effective_bits": 4.5, **common} for s in ("saw-int4",)])
    write_rows(tmp_path / sources.ADDED, [{"spec": "kivi-tq-4", "effective_bits": 4.25, **common}])
    write_speed(tmp_path, [])
    (tmp_path / sources.SPEED / "decode.json").write_text(
        json.dumps([{**row, "spec": "kivi-4", "shape": "b32_32k", "run": "2026-12-01"} for row in speed_rows()[4:5]])
    )
    lines = [line for line in front.choose_block(tmp_path).splitlines() if "`" in line]
    taken = ["ghost-4", "ghost-3", "saw-int4", "kivi-tq-4", "kivi-4"]
    assert [re.search(r"`(.*?)`", line)[1] for line in lines] == taken
    assert lines[0].endswith("| 4.06 | 0.0060 | 10.10 | – | – | – |")
    assert lines[2].endswith("| 4.30 | 0.0200 | 10.30 | 0.0500 | 9.50 | – |")
    assert lines[4].endswith("| 5.70 | 0.0080 | 10.10 | – | – | 1.5x |")
    monkeypatch.setattr(sources, "read_runs", lambda folder: {})
    with pytest.raises(sources.MissingResultError, match=r"no run qwen2.5-coder-1.5b"):
        front.choose_block(tmp_path)


@pytest.mark.parametrize("wish", front.WISHES, ids=lambda w: w.text)
def test_nothing_is_chosen_that_breaks_on_the_real_model(wish: Any) -> None:
    run, block = sources.read_runs(ROOT / sources.BOARD)[wish.run], front.choose_block(ROOT)
    spec = re.search(rf"\| {re.escape(wish.text)} \| `(.*?)`", block)[1]
    value, base = (run.row("perplexity", "perplexity", s)["value"] for s in (spec, "(uncompressed)"))
    assert value < 1.1 * base


def test_modules_of_a_package_are_listed_with_their_first_sentence(tmp_path: Path) -> None:
    for name, doc in (("a.py", "One: ``x`` | y.\n\nMore."), ("room/__init__.py", "A room\nof two lines.")):
        path = tmp_path / "src/kvcodec" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{doc}"""')
    (tmp_path / "src/kvcodec/data").mkdir()
    lines = modules.rooms_block(tmp_path, "kvcodec").splitlines()
    assert lines[2:] == ["| `a.py` | One: `x` \\| y |", "| `room/` | A room of two lines |"]


def step_row(spec: str, way: str, cache: str, ms: float, **more: Any) -> dict[str, Any]:
    values = {"p20": ms / 2, "p50": ms, "p80": ms}
    return {"spec": spec, "metric": f"ms_per_token_{way}", "shape": speed.GENERATE, "cache": cache, "values": values,
            "held_bytes": 5e9, "gpu": "A GPU", **more}  # fmt: skip


def test_eager_generate_is_compared_with_the_faster_dynamic_cache(tmp_path: Path) -> None:
    path = tmp_path / speed.GENERATE_FILE
    path.parent.mkdir(parents=True)
    rows = [
        step_row("saw-int4", "compiled", "kvcodec fused", 9.0), step_row("dense", "compiled", "StaticCache", 19.0),
        step_row("saw-int4", "generate", "kvcodec fused", 38.0), step_row("int-4", "generate", "kvcodec fused", 1.0),
        step_row("dense", "generate", "DynamicCache", 76.0, form="as torch chooses"),
    ]  # fmt: skip
    path.write_text(json.dumps(rows))
    told = speed.generate_block(tmp_path)
    assert "`saw-int4` 38.0 ms, DynamicCache 76.0 ms as torch chooses its attention" in told
    assert "a fifth of the steps took 38.0 ms or less, so do not read it as DynamicCache's own speed" in told
    path.write_text(json.dumps([*rows, step_row("dense", "generate", "DynamicCache", 34.0, form="cuDNN off")]))
    told = speed.generate_block(tmp_path)
    assert "DynamicCache 34.0 ms with cuDNN's attention switched off (76.0 ms as torch chooses" in told
    assert "| 16 bit, DynamicCache, cuDNN off | – | 34.0 |" in told
    path.write_text(json.dumps(rows[1:]))
    with pytest.raises(sources.MissingResultError, match="no row is qwen3_8b_b1_32k, ms_per_token_compiled, kvcodec"):
        speed.generate_block(tmp_path)


def test_the_best_of_a_budget_has_the_least_kl_of_those_that_fit(tmp_path: Path) -> None:
    path = tmp_path / sources.ALL_RESULTS
    path.parent.mkdir(parents=True)
    held = [("a", 2.25, 0.9), ("b", 2.3, 0.8), ("c", 2.31, 0.1), ("d", 4.3, 0.2), ("e", 5.0, 0.01), ("f", 9.0, 0.0)]
    common = {"model": "m", "windows": 3, "window_tokens": 8, "perplexity": 9.5, "uncompressed": {"perplexity": 9.0}}
    path.write_text(json.dumps([{"spec": s, "effective_bits": b, "kl": kl, **common} for s, b, kl in held]))
    lines = quality.best_block(tmp_path).splitlines()[2:6]
    assert [re.findall(r"`(\w)`", line) for line in lines] == [["b", "a"], ["c", "b"], ["c", "d"], ["e", "c"]]


def test_what_is_noise_on_the_real_model_is_best_at_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = {"(uncompressed)": (16.0, 0.0, 10.0), "turboquant-2": (2.1, 0.1, 5_000.0), "kivi-tq-3": (3.2, 0.5, 11.5),
            "kivi-4:mean=pre": (5.0, 0.01, 10.1), "int-8": (8.2, 0.0, 10.0)}  # fmt: skip
    rows = [
        Row(spec, metric, metric, None, {"effective_bits": bits, "value": value, "items": 3.0}, "lower", "", "")
        for spec, (bits, kl, perplexity) in held.items()
        for metric, value in (("kl", kl), ("perplexity", perplexity))
    ]
    run = SimpleNamespace(rows=rows, about={"model": {"name": "qwen2.5-coder-1.5b"}})
    monkeypatch.setattr(sources, "read_runs", lambda folder: {sources.TODAY: run})
    lines = quality.judged_block(tmp_path).splitlines()
    assert [re.findall(r"`(.*?)`", line) for line in lines[2:6]] == [
        [],
        ["kivi-tq-3"],
        ["kivi-tq-3"],
        ["kivi-4:mean=pre", "kivi-tq-3"],
    ]
    assert lines[-1].startswith("3 presets and 1 options of them on qwen2.5-coder-1.5b")
    assert "2 of the presets are more than 10 % above" in lines[-1]


def test_results_table_shows_each_row(tmp_path: Path) -> None:
    path = tmp_path / sources.RESULTS
    path.parent.mkdir(parents=True)
    rows = [{"spec": "a-4", "kl": 0.25, "perplexity": 12.345}, {"spec": "b", "kl": None, "perplexity": 11}]
    path.write_text(json.dumps({"rows": rows}))
    assert quality.results_block(tmp_path).splitlines() == [
        "| spec | perplexity | KL |",
        "| --- | ---: | ---: |",
        "| `a-4` | 12.35 | 0.2500 |",
        "| `b` | 11.00 | – |",
    ]


def test_the_picture_is_a_png_in_the_repository() -> None:
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_both_commands_stand_at_the_top() -> None:
    top = "\n".join(README.splitlines()[:20])
    assert "make demo" in top
    assert "make test" in top


def programs(page: str) -> list[str]:
    """Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.slow
def test_the_program_runs_and_is_short(smollm2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, but for the hub and 24 tokens: the model's name is a folder that ``save_pretrained`` wrote."""
    from transformers.initialization import no_init_weights

    (code,) = programs("README.md")
    assert len(code.splitlines()) <= 10
    hub_id = SMOLLM2.hub_id
    assert f'"{hub_id}"' in code
    lm = smollm2
    config = type(lm.model.config)(**{k: v for k, v in lm.model.config.to_dict().items() if k != "quantization_config"})
    with no_init_weights():
        model = type(lm.model)(config)  # the GGUF's numbers in a model that can be saved
    model.load_state_dict(lm.model.state_dict())
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    check_generates(code.replace(hub_id, str(tmp_path)), capsys)


@pytest.mark.slow
def test_the_first_program_of_the_guide_runs(
    smollm2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcodec.models.loading.load", lambda name: smollm2)  # loaded once for many tests
    check_generates(programs("docs/use.md")[0], capsys)


def check_generates(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported what takes long; four tokens: each takes all layers of the model."""
    assert "max_new_tokens=24" in code
    exec(compile(code.replace("max_new_tokens=24", "max_new_tokens=4"), "program", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "The Hanseatic League was" in said
    assert "'effective_bits'" in said


def test_what_the_readme_says_of_the_speed_of_ghost_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/nvidia-h100/decode.json").read_text())
    cold = {
        (row["spec"], row["shape"]): row["values"]["p50"]
        for row in rows
        if row["metric"] == "decode_us_cold" and row["values"]
    }
    assert all("mean" in row for row in rows if row["spec"] in ("ghost-3", "ghost-4") and row["values"])
    slower = {
        (n, at): cold[f"ghost-{n}", at] / cold["saw-int4", at] for n in (3, 4) for at in ("llm64k", "b32_8k", "b32_32k")
    }
    assert len(slower) == 6
    assert max(by for (_, at), by in slower.items() if at != "llm64k") < 1.04
    assert 1.2 < slower[3, "llm64k"] < slower[4, "llm64k"] < 1.27
    said = "at most 4 % slower than that of `saw-int4` for 32 sequences, 21 to 27 % for one of 64k tokens"
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_less_is_lost_than_by_all_at_about_these_bits_and_by_eight_bit_integers() -> None:
    values, _ = sources.judged(ROOT, sources.TODAY)
    own = values["ghost-4"]
    others = {spec: of for spec, of in values.items() if spec in presets() and "ghost" not in spec}
    assert {spec for spec, of in others.items() if of.kl <= own.kl and of.bits <= 5} == set()
    assert values["int-8"].kl > own.kl
    told = ghost.least_sentence(values)
    less = {spec for spec, of in others.items() if of.kl <= own.kl}
    assert all(f"`{spec}`" in told for spec in (*less, "int-8", min(others.keys() - less, key=lambda s: others[s].kl)))


def test_others_with_the_courtesies_of_ghost_stand_by_bits_and_scale(tmp_path: Path) -> None:
    assert ghost.alike_table(tmp_path) == ""
    specs = {"x-4:sink=4": 4, "x-2:sink=4,scale=search": 2, "x-3:sink=4": 3, "x-3:scale=search,sink=4": 3}
    rows = [
        {"spec": spec, "model": "m", "kl": (0.5 if "search" in spec else 1) / n, "effective_bits": n + 0.25}
        for spec, n in specs.items()
    ]
    write_rows(tmp_path / ghost.ALIKE, rows)
    lines = [line for line in ghost.alike_table(tmp_path).splitlines() if line.startswith("| `")]
    assert lines == [
        "| `x-2:sink=4` | 2.25 | – | 0.2500 |",
        "| `x-3:sink=4` | 3.25 | 0.3333 | 0.1667 |",
        "| `x-4:sink=4` | 4.25 | 0.2500 | – |",
    ]
    beside = ghost.alike_table(tmp_path, [("ghost-3", 3.03, 0.0667, 24.67, "")]).splitlines()
    assert beside[-1] == "| `ghost-3` | 3.03 | – | 0.0667 |"


def write_run(
    folder: Path, scores: dict[str, dict[str, float]], task: str = "kl", params: Any = None, **more: Any
) -> None:
    """A published run: KL of each window, or whether a number was found, of each spec."""
    metric, text = ("kl", "lower") if task == "kl" else ("recall", "higher")
    about = {"format": "kvcodec-eval", "version": 1, "model": {"name": folder.parents[1].name}, "seed": 0}
    about |= {"versions": {}, "settings": {"prefill": "decoded", **more}, "specs": list(scores), "bits": {}}
    about |= {"params": params or {}}
    own = {"items": 2, "window_tokens": 2048, "lengths": [4096]}
    about["tasks"] = {task: {**own, "metrics": {metric: {"better": text, "text": "", "of": "", "exp": False}}}}
    none = dict.fromkeys(next(iter(scores.values())), 0.0 if task == "kl" else 1.0)
    lines = [
        {"spec": spec, "task": task, "item": item, "group": {}, "scores": {metric: [x, 1.0]}, "prefill": "decoded"}
        | {"seconds": 1.0, "bytes": 3 * 64, "elements": 8 * 64}
        for spec, of in {UNCOMPRESSED: none, **scores}.items()
        for item, x in of.items()
    ]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "items.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(x) + "\n" for x in lines).encode()))


def test_presets_on_other_texts_are_compared_window_by_window(tmp_path: Path) -> None:
    assert "Not measured yet" in ghost.ghost_fresh_block(tmp_path)
    folder = tmp_path / ghost.FRESH / "tiny"
    code = {"ghost-3": {"a": 0.1, "b": 0.3}, "ghost-4": {"a": 0.02, "b": 0.02}, "int-4": {"a": 0.4, "b": 0.5}}
    write_run(folder / "code" / "plain", code)
    write_run(folder / "novel" / "plain", {spec: {"c": 0.2, "d": 0.2} for spec in code})
    loud = {spec: {item: 1.5 * x for item, x in of.items()} for spec, of in code.items()}
    write_run(folder / "code" / "stressed", loud, stress={"factor": 64.0, "pairs": 1})
    klt = "ghost-3:transform=klt"
    params = {klt: {"text": "emma.txt"}}
    write_run(folder / "code" / "fitted", {klt: {"a": 0.05, "b": 0.2}, "ghost-3": {"a": 0.1, "b": 0.1}}, params=params)
    write_run(folder / "novel" / "fitted", {klt: {"c": 0.1}, "ghost-3": {"c": 0.4}}, params=params)
    assert "gradients" not in ghost.ghost_fresh_block(tmp_path)
    for text, of in (("code", {"a": 0.06, "b": 0.2}), ("novel", {"c": 0.1})):
        write_run(folder / text / "fitted-without-gradients", {klt: of}, params=params)
    for kind, kl in (("fitted", 0.2), ("fitted-without-gradients", 0.2)):
        write_run(folder / "begin" / kind, {klt: {"e": kl}}, params=params)
    found = {"ghost-3": {"x": 1.0, "y": 1.0}, "ghost-4": {"x": 1.0, "y": 0.0}}
    write_run(folder / "needle-4k" / "plain", found, task="needle")
    told = ghost.ghost_fresh_block(tmp_path)
    row = next(line for line in told.splitlines() if line.startswith("| `int-4`")).strip("| ").split(" | ")
    assert row[:5] == ["`int-4`", "3.00", "0.4500", "0.2000", "0.3250"]
    value, low, high = map(float, re.findall(r"[-+][.\d]+", row[5]))
    assert (value, 0 <= low < value < high <= 0.3) == (0.125, True)
    assert next(line for line in told.splitlines() if line.startswith("| `ghost-3`")).count("–") == 1
    assert "4 windows of 2,048 tokens" in told
    assert "64:1) on the same windows the KL of `ghost-3` is 0.3000, 1.50 times as much; `ghost-4` 0.0300" in told
    fitted = told[told.index("| tiny, fitted |") :].splitlines()
    cells = fitted[2].strip("| ").split(" | ")
    assert cells[:4] == ["`ghost-3:transform=klt`", "0.1250", "0.1000", "0.1167"]
    assert (cells[4].split()[0], cells[5].split()[0]) == ("-0.0833", "-0.0033")
    cells = fitted[3].strip("| ").split(" | ")
    assert (cells[0], cells[3], cells[4].split()[0], cells[5]) == ("`ghost-3`", "0.2000", "+0.0000", "–")
    assert "another novel (`emma.txt`), on 3 of these windows" in told
    paired = told[told.index("KL with gradients") :].splitlines()[2].strip("| ").split(" | ")
    assert paired[:3] == ["`ghost-3:transform=klt`", "0.1375", "0.1400"]
    assert (paired[3].split()[0], paired[4:]) == ("-1.8", ["–"] * 3)
    assert "On all 4 windows that have both" in told
    assert "Of 2 numbers hidden in 4,096 tokens of a novel, one each, `ghost-3` finds 2 and `ghost-4` 1" in told
    assert "uncompressed model 2." in told


def test_steps_stand_beside_each_other_for_every_model(tmp_path: Path) -> None:
    assert "Not measured yet" in ghost.ghost_steps_block(tmp_path)
    (tmp_path / "benchmarks/results/gpu").mkdir(parents=True)
    same = {"effective_bits": 3.0, "windows": 3, "window_tokens": 2048, "text": "T"}
    for model, names in (("a", ("one", "two")), ("b", ("two",))):
        rows = [{"step": name, "model": model, "kl": 0.5 if name == "one" else 0.25, **same} for name in names]
        (tmp_path / f"benchmarks/results/gpu/ghost_steps_{model}.json").write_text(json.dumps(rows))
    told = ghost.ghost_steps_block(tmp_path)
    assert "| one | 3.00 | 0.5000 | – | – |" in told
    assert "| two | 3.00 | 0.2500 | 3.00 | 0.2500 |" in told
    assert "3 windows of 2,048 tokens of T" in told
    assert told.startswith("![KL after each step of ghost](img/ghost-steps.png)")


def test_errors_of_the_own_method_stand_beside_the_bound_and_the_best_of_others(tmp_path: Path) -> None:
    same = {"paper": "rate-distortion", "spread": 0.0}
    errors = {
        ("ghost-3", "ghost", 3.0): 0.02,
        ("a-3", "a", 3.4): 0.03,
        ("b-3", "b", 3.6): 0.01,
        ("c-3", "c", 3.2): None,
    }
    rows = [
        {"spec": spec, "method": method, "bits": bits, "source": source, "relative_mse": mse and by * mse, **same}
        for source, by in (("Gaussian keys", 1.0), ("heavy-tailed keys", 9.0), ("keys of m", 0.5), ("values of m", 2.0))
        for (spec, method, bits), mse in errors.items()
    ]
    write_rows(tmp_path / ghost.REPRODUCED, {"rate_distortion": rows})
    told = ghost.ghost_rate_block(tmp_path)
    cells = "0.0156 | 0.0200 | 0.0300 (`a-3`, 3.40) | 0.0100 | 0.0150 (`a-3`, 3.40) | 0.0400 | 0.0600 (`a-3`, 3.40) |"
    assert f"| `ghost-3` | {cells}" in told


def test_its_speed_stands_beside_the_term_alone(tmp_path: Path) -> None:
    assert "Not measured yet" in ghost.ghost_speed_block(tmp_path)
    rows = [
        {"spec": spec, "metric": metric, "shape": "b32_8k", "values": {"p50": us}, "gpu": "G", "effective_bits": 3.0}
        for spec, us in (("saw-int4", 50.0), ("saw-int4:mean=pre", 55.0), ("ghost-3", 60.0), ("int-4", 9.0))
        for metric, us in (("decode_us_cold", us), ("speedup_vs_bf16_cold", 150 / us))
    ]
    write_rows(tmp_path / sources.SPEED / "decode.json", rows)
    told = ghost.ghost_speed_block(tmp_path)
    assert "| `saw-int4:mean=pre` | – | 55 µs, 2.73x | – |" in told
    assert "| `ghost-3` | – | 60 µs, 2.50x without the term | – |" in told
    write_rows(tmp_path / sources.SPEED / "decode.json", [row | {"mean": "pre"} for row in rows])
    assert "| `ghost-3` | – | 60 µs, 2.50x | – |" in ghost.ghost_speed_block(tmp_path)
    assert "int-4` | – | 9" not in told


def test_the_figure_of_steps_joins_them_and_leaves_what_is_taken_away_hollow(tmp_path: Path) -> None:
    assert not ghost.write_figures(tmp_path)
    (tmp_path / "benchmarks/results/gpu").mkdir(parents=True)
    (tmp_path / "docs/img").mkdir(parents=True)
    same = {"model": "a", "spec": "ghost-3", "effective_bits": 3.0, "windows": 3, "window_tokens": 2048, "text": "T"}
    rows = [{"step": name, "kl": kl, **same} for name, kl in (("one, two", 0.5), ("last", 0.1), ("last, no mean", 0.3))]
    (tmp_path / "benchmarks/results/gpu/ghost_steps_a.json").write_text(json.dumps(rows))
    plot = figures.ablation(ghost.steps_of(tmp_path), "T")
    assert [(c.name, c.joined, list(c.points)) for c in plot.curves] == [
        ("a", True, [(0.0, 0.5), (1.0, 0.1)]), ("", False, [(2.0, 0.3)])]  # fmt: skip
    assert [plot.x.tick(x) for x in (0.0, 1.0, 2.0)] == ["one, two", "last", "no mean"]
    assert "hollow: `last`, but for this" in plot.note
    assert ghost.write_figures(tmp_path)
    assert (tmp_path / "docs/img/ghost-steps.png").read_bytes().startswith(b"\x89PNG")
