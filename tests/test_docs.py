"""Docs follow the registry and the tables: pages build, tables are fresh, programs and examples run, links exist."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import packedkv
import packedkv.models.loading
import pages
import tables
from packedkv.models.named import SMOLLM2

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUILT = {"api.md", "codecs/index.md", *(f"codecs/{name}.md" for name in packedkv.names())}
"""Pages that ``scripts/pages.py`` adds to the site."""


# -- tables ------------------------------------------------------------------------------------------------------------


def test_no_page_is_stale() -> None:
    assert [str(page.relative_to(ROOT)) for page in tables.stale()] == [], "run scripts/docs"


def test_tables_are_small_and_name_the_run_of_each_value() -> None:
    assert sum(path.stat().st_size for path in (DOCS / "tables").iterdir()) < 1_500_000
    runs = tables.read_runs()
    assert all(run["device"] and run["commit"] and run["date"] for run in runs.values())
    assert {row["run"] for rows in tables.read_all().values() for row in rows} == set(runs)


def test_a_table_has_a_line_for_spec_and_case_and_a_column_for_metric() -> None:
    def row(spec: str, case: str, metric: str, value: str, **more: str) -> tables.Row:
        given = {"what": "t", "model": "m", "spec": spec, "case": case, "metric": metric, "value": value}
        return dict.fromkeys(tables.COLUMNS, "") | given | more

    rows = [row("int-4", "32 x 8k", "step", "1234.5", unit="ms"), row("int-4", "32 x 8k", "ratio", "2.0", unit="x")]
    rows += [row("Two products", "one", "ratio", "81.2", unit="%", low="-1", high="90")]
    assert tables.table(rows).splitlines() == [
        "| preset | case | step (ms) | ratio |",
        "| --- | --- | ---: | ---: |",
        "| `int-4` | 32 x 8k | 1,234.5 | 2.0x |",
        "| Two products | one | – | 81.2 % [-1, 90] |",
    ]
    with pytest.raises(tables.TableError, match="two values of step for int-4, 32 x 8k"):
        tables.table([*rows, row("int-4", "32 x 8k", "step", "3", unit="ms")])
    text = "a\n<!-- table t -->\nold\n<!-- end -->\nb"
    assert tables.rendered(text, {"t": rows}) == text.replace("old", tables.table(rows))
    with pytest.raises(tables.TableError, match="no file of tables/ has the table 't'"):
        tables.rendered(text, {})


# -- what the code recommends is what was measured ---------------------------------------------------------------------


def values(what: str, metric: str, case: str = "", model: str = "") -> dict[str, str]:
    rows = tables.read_all()[what]
    rows = [row for row in rows if row["metric"] == metric and row["case"].startswith(case) and model in row["model"]]
    return {row["spec"]: row["value"] for row in rows}


def test_presets_named_instead_of_a_broken_one_hold_on_the_real_model() -> None:
    """Qwen2.5-Coder-1.5B, whose biases break half of the presets: within 10 % of the uncompressed perplexity."""
    from packedkv.integrations.vllm.weights import ALTERNATIVES as SERVED
    from packedkv.key_bias import ALTERNATIVES

    perplexity = values("tasks", "perplexity", "mean=none", "Qwen2.5")
    for spec in (*ALTERNATIVES, "saw-int4:mean=pre"):
        assert float(perplexity[spec]) < 1.1 * float(perplexity["(uncompressed)"]), spec
    # the served ones are these, without the window
    assert [spec.partition(":")[0] for spec in SERVED] == list(ALTERNATIVES)


def test_nothing_breaks_without_a_warning() -> None:
    """The check of the weights or the probe warns of what is 10 % off here and not on SmolLM2, which has no biases."""
    real, plain = (values("tasks", "perplexity", "mean=none", model) for model in ("Qwen2.5", "SmolLM2"))
    weights, probe = values("key-breaks", "weights"), values("key-breaks", "probe")
    assert len(weights) > 40
    for spec in weights.keys() & real.keys():
        off = float(real[spec]) > 1.1 * float(real["(uncompressed)"])
        coarse = spec in plain and float(plain[spec]) > 1.1 * float(plain["(uncompressed)"])
        assert not off or coarse or weights[spec].startswith("refuses") or probe[spec] == "warns", spec


# -- the pages that the site builds ------------------------------------------------------------------------------------


def test_every_method_has_a_page_with_its_options_presets_and_bytes() -> None:
    """Every field of both blocks and every plane of the page has its box in the drawing, with its bytes."""
    for name in packedkv.names():
        page, presets = pages.method_page(name), packedkv.registry.method_of(name).presets
        preset = next(iter(presets))
        described, scheme = packedkv.describe(preset), packedkv.get(preset)
        assert page.startswith(f"# {name}\n")
        assert described["source"] in page
        for option in described["options"]:
            assert f"| `{option['name']}` |" in page
            assert option["doc"], f"option {option['name']} of {name} has no text in the recipe's docstring"
        assert all(re.search(rf"^\| `{preset}` \| \d", page, re.M) for preset in presets), name
        svg = ElementTree.fromstring(pages.drawing(preset))
        told = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}title")][1:]
        fields = [f for codec in (scheme.key, scheme.value) for f in codec.layout(128).fields]
        assert len(told) == len(fields) + len(scheme.page_layout(128).planes), name
        assert [int(re.search(r": (\d+) bytes", t)[1]) for t in told[: len(fields)]] == [f.nbytes for f in fields]


def test_the_indexes_list_every_name_method_and_preset_and_the_recommended_first() -> None:
    assert re.findall(r"^## (\w+)$", pages.api_page(), re.M) == packedkv.__all__
    page = pages.index_page()
    assert re.findall(r"^### \[(\S+)\]", page, re.M) == packedkv.names()
    listed = re.findall(r"^\| `(\S+)` \|", page.partition("## By paper")[2], re.M)
    assert sorted(listed) == sorted(packedkv.presets())
    recommended = re.findall(r"^\| `(\S+)` \|", page.partition("## By paper")[0], re.M)
    assert recommended == list(dict.fromkeys(re.findall(r"^\| `(\S+)` \|", README, re.M)))


def test_a_codec_in_one_file_has_its_page(tmp_path: Path) -> None:
    guide = (DOCS / "add-a-codec.md").read_text()
    codec = next(c for c in re.findall(r"```python\n(.*?)```", guide, re.S) if "@register" in c)
    (file := tmp_path / "mine.py").write_text(codec)
    name = re.search(r'@register\(\s*"([\w-]+)"', codec)[1]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\nimport packedkv, pages\n"
        f"packedkv.load_file({str(file)!r}); print(pages.pages()['codecs/{name}.md'])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=600)
    assert codec.split('"""')[1].splitlines()[0] in done.stdout


# -- README and guides -------------------------------------------------------------------------------------------------


def programs(page: str) -> list[str]:
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
    monkeypatch.setattr("packedkv.models.loading.load", lambda name: smollm2)  # loaded once for many tests
    check_generates(programs("docs/use.md")[0], capsys)


def check_generates(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported what takes long; four tokens: each takes all layers of the model."""
    assert "max_new_tokens=24" in code
    exec(compile(code.replace("max_new_tokens=24", "max_new_tokens=4"), "program", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "The Hanseatic League was" in said
    assert "'effective_bits'" in said


# -- links and names ---------------------------------------------------------------------------------------------------


def test_the_index_and_the_navigation_have_the_same_order() -> None:
    """Every page stands in both, but those of methods, which the index of methods links."""
    index = (DOCS / "index.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", index)
    assert re.findall(r": ([\w/-]+\.md)$", navigation, re.M) == ["index.md", *listed]
    headings = re.findall(r"^## (.+)$", index, re.M)
    assert headings == ["Use", "Choose", "Serve", "Inside", "Methods", "Evidence"]
    assert re.findall(r"^  - (\w+):", navigation, re.M) == ["Home", *headings]
    written = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert written | {"api.md", "codecs/index.md"} == {"index.md", *listed}


def test_links_and_files_that_texts_name_exist() -> None:
    missing = []
    for text in TEXTS:
        content = text.read_text(encoding="utf-8")
        built = {os.path.normpath(DOCS / page) for page in BUILT} if text.is_relative_to(DOCS) else set()
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", content):
            if not (text.parent / link).exists() and os.path.normpath(text.parent / link) not in built:
                missing.append((text, link))
        files = re.findall(r"\b(?:benchmarks|scripts|examples|tests)/[\w/-]+\.py", content)
        missing += [(text, file) for file in files if not (ROOT / file).is_file()]
    for script in filter(Path.is_file, (ROOT / "scripts").iterdir()):  # ``{a,b}`` in the names of tests is expanded
        content = script.read_text(encoding="utf-8")
        named = r"((?:lab/)?tests/[\w/]+\.py)(?:::(\w*)(?:\{([\w,]+)\})?(\w*))?"
        for file, before, several, after in re.findall(named, content):
            tests = [f"def {before}{middle}{after}" for middle in several.split(",")] if before else []
            text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
            missing += [(script, file, test) for test in tests or [""] if not re.search(rf"{test}\b", text)]
    assert missing == []
    assert len(README.splitlines()) <= 150


def test_images_are_shown_targets_explained_and_the_version_is_in_the_changelog() -> None:
    shown = {os.path.normpath(t.parent / i) for t in TEXTS for i in re.findall(r"!\[.*?\]\((.*?)\)", t.read_text())}
    images = [p for p in DOCS.rglob("*") if p.suffix in (".png", ".svg", ".gif")]
    assert [str(p) for p in images if str(p) not in shown] == []
    assert all(p.stat().st_size < 200_000 for p in images)
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert {t for t in targets if f"`make {t}`" not in contributing} == {"help", "clean"}
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[({re.escape(packedkv.__version__)}|Unreleased)\]", changelog, re.M)
    assert "### Bits changed" in changelog


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run an example in this process, which has imported what takes long; return what it prints."""

    def printed(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_one_tensor_shows_every_preset_with_its_bits_and_a_bounded_cache(run: Any) -> None:
    text = run("01_one_tensor.py")
    bits = {m[1]: float(m[2]) for m in re.finditer(r"^(\S+) +\d+ +([\d.]+) +[\d.]+$", text, re.M)}
    assert list(bits) == packedkv.presets()
    assert bits["saw-int4"] == 4.25
    assert bits["dense"] == 16
    assert "saw-int4 cache: 256 tokens" in text


@pytest.mark.slow
def test_generate_shows_bytes_and_text_for_each_spec(run: Any, smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packedkv.models.loading, "load", lambda name: smollm2)  # loaded once for many tests
    generate = smollm2.model.generate
    fewer = {"max_new_tokens": 6}  # each takes all layers of the model
    monkeypatch.setattr(smollm2.model, "generate", lambda **given: generate(**given | fewer))
    text = run("02_generate.py", "dense", "saw-int4")
    bits = {m[1]: float(m[2]) for m in re.finditer(r"^(\S+): \d+ bytes, ([\d.]+) bits", text, re.M)}
    assert list(bits) == ["dense", "saw-int4"]
    assert bits["saw-int4"] < bits["dense"] / 2
    assert len(re.findall(r"^  \.\.\. \w+ .*\w", text, re.M)) == 2


def test_speech_is_transcribed_with_both_caches_packed(run: Any) -> None:
    text = run("05_speech.py")
    found = re.findall(r"^(\S+): (\d+) bytes of text, (\d+) bytes of s", text, re.M)
    sizes = {name: int(speech) for name, _, speech in found}
    assert list(sizes) == ["dense", "saw-int4", "kivi-4", "octopus-3"]
    # layers, keys and values, bytes, frames, channels; and free slots
    assert sizes["dense"] > 2 * 2 * 2 * 1500 * 128
    assert 3.5 < sizes["dense"] / sizes["saw-int4"] < 3.8
    assert len(re.findall(r"^  \[\d+(, \d+)+\]$", text, re.M)) == 4


def test_a_video_rolls_on_and_ends_as_pictures(run: Any, tmp_path: Path) -> None:
    text = run("06_video.py", str(tmp_path))
    rows = re.findall(r"^(\S+): frames \[0, 18, 19, 20, 21, 22\] of 23, (\d+) bytes, PSNR ([\d.]+) dB$", text, re.M)
    assert [row[0] for row in rows] == ["dense", "saw-int4", "octopus-3", "octopus-2"]
    assert [int(row[1]) for row in rows] == sorted((int(row[1]) for row in rows), reverse=True)
    assert float(rows[1][2]) > 20
    picture = (tmp_path / "saw-int4.pgm").read_bytes()
    assert picture.startswith(b"P5 384 16 255\n")
    assert len(set(picture[-384 * 16 :])) > 20


@torch.no_grad()
def test_bare_tensors_are_attended_as_in_one_masked_call() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "04_bare_tensors.py"))
    errors = example["main"]()
    assert set(errors) == {"stream a", "stream b"}
    assert all(0 < error < 0.2 for error in errors.values())
    layer, chunk, keep = example["ChunkCausalAttention"](), example["CHUNK"], example["KEEP"]
    x = torch.randn(2, 6 * chunk, 256)
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    streamed = torch.cat([layer(part, cache) for part in x.split(chunk, 1)], 1)
    assert len(cache) == keep
    q, k, v = layer.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    k, v = packedkv.fake_quant("saw-int4", k, v)
    at = torch.arange(6 * chunk)
    end = (at // chunk + 1) * chunk
    mask = (at[None, :] < end[:, None]) & (at[None, :] >= end[:, None] - keep)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = layer.out(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(streamed, expected, rtol=1e-4, atol=1e-5)
