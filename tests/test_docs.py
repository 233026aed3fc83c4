"""Docs follow the registry: every method has its page, a codec in one file too; links and paths exist."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import ModuleType
from xml.etree import ElementTree

import pytest

import kvcodec

ROOT = Path(__file__).parents[1]
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts/make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", kvcodec.names())
def test_a_method_has_a_page_with_its_docstring_options_and_presets(make_docs: ModuleType, name: str) -> None:
    page = make_docs.method_page(name)
    presets = kvcodec.registry.method_of(name).presets
    described = kvcodec.describe(next(iter(presets)))
    assert page.startswith(f"# {name}\n")
    assert described["source"] in page
    for option in described["options"]:
        assert f"| `{option['name']}` |" in page
        assert option["doc"], f"option {option['name']} of {name} has no text in the recipe's docstring"
    for preset in presets:
        assert re.search(rf"^\| `{preset}` \| \d", page, re.M)
    wanted = {"What it is for", "When not to use it", "The method", "Bits", "Bytes", "Options"}
    if name != "dense":
        wanted |= {"Deviations from the paper", "Pitfalls"}
    assert wanted <= set(re.findall(r"^## (.+)$", page, re.M))
    worked = re.search(r"= (\d+) bytes; \1 x 8 / .* = \*\*([\d.]+) bits\*\*", page)
    assert float(worked[2]) == pytest.approx(kvcodec.get(next(iter(presets))).key_bits(128))
    assert (ROOT / re.search(r"Code: `(.*?)`", page)[1]).is_file()


@pytest.mark.parametrize("name", kvcodec.names())
def test_the_bytes_of_a_method_are_drawn(make_docs: ModuleType, name: str) -> None:
    """Every field of both blocks and every plane of the page has its box, with its bytes."""
    preset = next(iter(kvcodec.registry.method_of(name).presets))
    scheme, page = kvcodec.get(preset), kvcodec.get(preset).page_layout(128)
    svg = ElementTree.fromstring(make_docs.drawing(preset))
    told = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}title")][1:]
    fields = [f for codec in (scheme.key, scheme.value) for f in codec.layout(128).fields]
    assert len(told) == len(fields) + len(page.planes)
    assert [int(re.search(r": (\d+) bytes", t)[1]) for t in told[: len(fields)]] == [f.nbytes for f in fields]


def test_the_committed_pages_are_what_the_script_writes(make_docs: ModuleType, tmp_path: Path) -> None:
    assert make_docs.stale(ROOT / "docs") == [], "run `make docs` and commit them"
    made = make_docs.write_pages(tmp_path)
    assert make_docs.stale(tmp_path) == []
    made[0].write_text("changed")
    made[-1].unlink()
    (tmp_path / "codecs/gone.md").write_text("a method that is gone")
    assert make_docs.stale(tmp_path) == [made[0], made[-1], tmp_path / "codecs/gone.md"]


def test_the_methods_are_one_sentence_each_and_the_presets_one_row_each(make_docs: ModuleType) -> None:
    page = make_docs.index_page()
    assert sorted(re.findall(r"^\| .*\| `(\S+)` \|", page, re.M)) == sorted(kvcodec.presets())
    assert re.findall(r"^\| \[(\S+)\]", page, re.M) == kvcodec.names()


def test_the_way_of_a_token_is_drawn_for_small_screens_and_the_dark(make_docs: ModuleType) -> None:
    svg = make_docs.architecture_drawing.drawing()
    root = ElementTree.fromstring(svg)
    width = float(root.attrib["viewBox"].split()[2])
    assert width <= 400, "text of 11 pixels is 11 pixels on a page 400 wide"
    assert min(map(int, re.findall(r"font-size: (\d+)px", svg))) >= 11
    light, dark = (set(re.findall(r"(--\w+): ", block)) for block in svg.split("prefers-color-scheme: dark"))
    assert light == dark == set(re.findall(r"var\((--\w+)\)", svg)), "a colour that one of the two lacks"


def test_the_index_and_the_navigation_have_the_same_order() -> None:
    """Every page stands in both, but those of methods, which the table of methods links."""
    index = (ROOT / "docs/index.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", index)
    assert re.findall(r": ([\w/-]+\.md)$", navigation, re.M) == ["index.md", *listed]
    headings = re.findall(r"^## (.+)$", index, re.M)
    assert headings == ["Use", "Choose", "Serve", "Inside", "Methods", "Evidence"]
    assert re.findall(r"^  - (\w+):", navigation, re.M) == ["Home", *headings]
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert pages - {f"codecs/{name}.md" for name in kvcodec.names()} == {"index.md", *listed}


def test_what_the_docs_say_of_codec_speed_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/cpu/codec_speed.json").read_text())
    assert {r["spec"] for r in rows if "job" not in r} == set(kvcodec.presets()), "a preset was not timed"

    def slowest(metric: str) -> float:
        return max(r["values"]["p50"] for r in rows if r["metric"] == metric)

    assert slowest("encode_vs_int4") <= 95
    assert slowest("decode_vs_int4") <= 30
    every = {r["spec"]: r["values"]["p50"] for r in rows if r["metric"] == "exhaustive_vs_encode"}
    assert all(18 <= every[f"hqmq-s{s}_r{r}"] <= 36 for s in (96, 192) for r in (3, 4, 6))
    rivals = [r["values"]["p50"] for r in rows if r["metric"] == "encode_vs_preset"]
    assert len(rivals) == 4
    assert 0.95 <= min(rivals) <= max(rivals) <= 1.45


def test_what_the_docs_say_of_the_soak_is_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks/results/cpu/soak-saw-int4-cpu.json").read_text())
    text = " ".join((ROOT / "docs/serve-results.md").read_text().split())
    assert found["failures"] == []
    assert found["checked"]["differing"] == []
    assert not any(found["pool_used_when_idle"])
    ended, grown = found["ended"], found["resident_growth"]
    held = sum(found["resident_mb"]["rows"][-1][1:])
    for told in (
        f"{found['requests']:,} requests, {ended['queued'] + ended['prefill'] + ended['decode']} of them cancelled",
        f"{found['preemptions']} preemptions, {found['prefix_hit_tokens']:,} prompt tokens from the prefix cache",
        f"Each of the {found['checked']['equal']:,} answers",
        f"in each of {len(found['pool_used_when_idle'])} idle moments",
        f"({held / 1000:.1f} GB) grew by {grown['mb']:.1f} MB in the last {grown['seconds'] / 60:.0f} minutes",
        f"commit {found['commit'][:7]}",
    ):
        assert told in text, told


def test_what_the_docs_say_of_serving_on_a_cpu_is_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks/results/cpu/serve-smollm2.json").read_text())
    text = " ".join((ROOT / "docs/serve-results.md").read_text().split())
    rows = {row["way"]: row for row in found["rows"]}
    assert rows["kernels"]["by"].startswith("cpu avx512")
    step = {way: 1e3 * median(row["step_seconds"]) for way, row in rows.items()}
    larger = json.loads((ROOT / "benchmarks/results/cpu/serve-llama-1b.json").read_text())
    other = {row["way"]: 1e3 * median(row["step_seconds"]) for row in larger["rows"]}
    assert step["kernels"] < step["16 bit"]
    assert other["kernels"] < other["16 bit"]
    for told in (
        f"Four requests of {found['options']['tokens']:,} tokens",
        f"take {step['kernels']:.0f} ms a decode step with `{found['options']['preset']}`",
        f"{step['16 bit']:.0f} ms with vLLM's own 16-bit cache",
        f"(Llama-3.2-1B's shape: {other['kernels']:.0f} and {other['16 bit']:.0f} ms)",
        f"holds {rows['kernels']['tokens'] / rows['16 bit']['tokens']:.2f} times the tokens",
    ):
        assert told in text, told


def test_what_the_docs_say_of_first_tokens_and_drafts_is_what_was_measured() -> None:
    text = (ROOT / "docs/serve-results.md").read_text()
    for host in ("h200", "h100"):
        rows = json.loads((ROOT / f"benchmarks/results/nvidia-{host}/serve_prompts.json").read_text())
        found = {(row["spec"], row["metric"], row["shape"]): row["values"]["p50"] for row in rows}
        table = text.split(f"| {host.upper()}, {rows[-1]['commit'][:7]} |")[1]
        for spec in {row["spec"] for row in rows} - ({"kivi-2"} if host == "h200" else set()):  # before it was mended
            first = (f"{found[spec, 'first_ms', f'n1_i{tokens}']:.1f}" for tokens in (512, 1024, 4096))
            rate = found.get((spec, "drafted_tokens_per_s", "n32_i8192"))
            line = f" `{spec}` | {' | '.join(first)} | {'–' if rate is None else f'{rate:,.0f}'} |"
            assert line in table, line


def test_what_the_docs_say_of_ghosts_retrieval_is_what_was_measured() -> None:
    text, found = " ".join((ROOT / "docs/ghost.md").read_text().split()), {}
    for run in ("smollm2-135m", "smollm2-135m-auto"):
        rows = json.loads((ROOT / f"benchmarks/results/eval/{run}/results.json").read_text())["rows"]
        for row in rows:
            if row["metric"] == "recall" and row["group"] is None:
                found[row["task"], row["spec"]] = round(row["value"] * row["items"])
                assert row["items"] == 30

    def of(task: str, *specs: str) -> list[int]:
        return [found[task, spec] for spec in specs]

    assert of("needle", "ghost-3", "ghost-4", "(uncompressed)") == [30, 30, 30]
    needles = of("needle", "saw-int4", "turboquant-4", "turboquant-3", "ghost-2")
    assert "`saw-int4` {}, `turboquant-4` {}, `turboquant-3` {}, `ghost-2` {}.".format(*needles) in text
    whole, four, kivi, three, saw = of("kv_retrieval", "(uncompressed)", "ghost-4", "kivi-4", "ghost-3", "saw-int4")
    assert three == saw
    assert f"finds {whole}, `ghost-4` {four}, `kivi-4` {kivi} at 5.59 bits, `ghost-3` and `saw-int4` {three}:" in text


def test_what_the_docs_say_of_two_gpus_is_what_was_measured() -> None:
    text = " ".join((ROOT / "docs/serve-results.md").read_text().split())
    rows = json.loads((ROOT / "benchmarks/results/nvidia-h100/serve_features.json").read_text())
    found = {(row["spec"], row["shape"]): row for row in rows}
    pages = [page for (_, shape), row in found.items() if shape.split("_")[1] not in ("page", "head")
             for page in row.get("pages", ())]  # fmt: skip
    assert len(pages) == 4 * (2 + 2) + 6  # processes of four presets, and those of drafts
    assert all(page["bytes_equal"] == 1 for page in pages)
    assert f"within {100 * max(page['error'] for page in pages):.2f} % of the reference" in text

    def times(spec: str, run: str) -> float:
        return found[spec, f"two_{run}"]["apart"]["prompt"] / found[spec, "two_order"]["apart"]["prompt"]

    packed, wrong = ([times(spec, run) for spec in ("saw-int4", "kivi-2", "recipe")] for run in ("tp2", "page"))
    for told in (
        f"does {times('dense', 'tp2'):.1f} times what that order does with 16-bit pages",
        f"{times('none', 'tp2'):.1f} times with vLLM's own cache, and {min(packed):.1f} to {max(packed):.1f} times",
        f"wrong in every layer does {min(wrong):.0f} to {max(wrong):.0f} times as much",
    ):
        assert told in text, told


def test_what_the_docs_say_a_lone_prompt_takes_is_what_was_measured() -> None:
    text = " ".join((ROOT / "docs/serve-results.md").read_text().split())
    rows = json.loads((ROOT / "benchmarks/results/nvidia-h100/serve_lone.json").read_text())
    found = {(row["spec"], row["shape"]): row for row in rows if row["metric"] == "busy_ms"}
    one, two, three = (found[spec, "n1_i512"] for spec in ("saw-int4", "kivi-2", "innerq-base"))
    took, busy = (
        [f"{x:.1f}" for x in xs]
        for xs in zip(*((r["first_ms"]["p50"], r["values"]["p50"]) for r in (one, two, three)), strict=True)
    )
    for told in (
        "took {} ms with `saw-int4`, {} with `kivi-2` and {} with `innerq-base`".format(*took),
        "busy for {}, {} and {} ms, in".format(*busy),
        "in {:.0f}, {:.0f} and {:.0f} launches".format(*(r["launches"] for r in (one, two, three))),
    ):
        assert told in text, told
    shares = [row["values"]["p50"] / row["first_ms"]["p50"] for (_, shape), row in found.items() if shape == "n1_i4096"]
    assert all(0.88 < share < 0.92 for share in shares)


def test_the_api_page_has_every_public_name(make_docs: ModuleType) -> None:
    assert re.findall(r"^## (\w+)$", make_docs.api_page(), re.M) == kvcodec.__all__


def test_a_codec_in_one_file_has_its_page(tmp_path: Path) -> None:
    guide = (ROOT / "docs/add-a-codec.md").read_text()
    codec = next(c for c in re.findall(r"```python\n(.*?)```", guide, re.S) if "@register" in c)
    file = tmp_path / "mine.py"
    file.write_text(codec)
    name = re.search(r'@register\(\s*"([\w-]+)"', codec)[1]
    command = [sys.executable, ROOT / "scripts/make_docs.py", "--out", tmp_path / "docs", "--codec-file", file]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    written = {p.stem for p in (tmp_path / "docs/codecs").iterdir()}
    assert written == {*kvcodec.names(), name, "index"}
    assert codec.split('"""')[1].splitlines()[0] in (tmp_path / f"docs/codecs/{name}.md").read_text()


@pytest.mark.parametrize("text", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(text: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text.read_text())
    missing = [t for t in targets if not (text.parent / t).exists()]
    assert not missing


def test_every_target_of_the_makefile_is_explained() -> None:
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert {t for t in targets if f"`make {t}`" not in contributing} == {"help", "clean"}


def test_the_version_stands_in_one_place() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[({re.escape(kvcodec.__version__)}|Unreleased)\]", changelog, re.M)
    assert "### Bits changed" in changelog
