"""What rows say: break-even, the points of the figure, the papers' studies, the page."""

import re
from itertools import pairwise

import pytest

import kvcodec
from kvcodec.cli.page import figures, pictures, svg
from kvcodec.cli.page.html import table as html_table
from kvcodec.errors import ShapeError, SpecError
from kvcodec_lab.bench.shapes import GROUPS, KMEANS, PRESETS, SHAPES, SPINE, Shape, shapes_named, sweep
from kvcodec_lab.bench.studies import OCTOPUS_PAPER, studies
from kvcodec_lab.bench.summary import BreakEven, Point, Table, break_even, lines, speed_points, steps_of_a_model
from kvcodec_lab.report.pages.bench import page_html


def row(spec, metric, shape, p50, **more):
    values = None if p50 is None else {"p20": p50 * 0.9, "p50": p50, "p80": p50 * 1.1}
    known = {"unit": "us", "effective_bits": 4.25, "gpu": "G", "commit": "c", "seed": 0, "versions": {"torch": "2"}}
    return {"spec": spec, "metric": metric, "shape": shape, "values": values, "run": "2026-01-01", **known, **more}


def speedups(spec, by_shape):
    return [row(spec, "speedup_vs_bf16_cold", shape, x, unit="x") for shape, x in by_shape.items()]


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_shapes_of_the_spine_and_of_the_papers():
    assert [(s.name, s.batch, s.query_heads, s.kv_heads, s.head_dim, s.tokens) for s in SPINE] == [
        ("llm64k", 1, 28, 4, 128, 65536),
        ("b32_8k", 32, 32, 8, 128, 8192),
        ("b32_32k", 32, 32, 8, 128, 32768),
        ("video", 1, 16, 16, 64, 32760),
    ]
    assert [s.tokens for s in GROUPS["innerq"]] == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert [s.name for s in GROUPS["octopus"]] == ["video", "audio", "llm64k"]
    assert [s.batch for s in GROUPS["saw"]] == [1, 4, 8, 16, 32]
    assert [s.tokens for s in GROUPS["hqmq"]] == [4096, 16384, 32768]
    one, apart = SHAPES["llm64k"], SHAPES["llm64k_apart"]
    assert (apart.group, apart.batch * apart.query_heads, apart.elements) == (1, one.query_heads, one.elements)
    assert max(s.batch * s.tokens for s in sweep(32)) == 32 * 32768
    assert all(name == shape.name for name, shape in SHAPES.items())


def test_every_preset_that_is_timed_by_default_is_one():
    for spec in (*PRESETS, KMEANS):
        kvcodec.get(spec)


def test_a_name_that_is_no_shape_lists_some():
    with pytest.raises(SpecError, match="no shape 'llm'; use some of spine, octopus"):
        shapes_named("llm")
    with pytest.raises(SpecError, match="no shapes named"):
        shapes_named(" , ")
    with pytest.raises(ShapeError, match="3 query heads are no multiple of 2"):
        Shape("x", 1, 3, 2, 64, 8)
    with pytest.raises(ShapeError, match="every size must be at least 1"):
        Shape("x", 1, 2, 2, 64, 0)


# -- break-even --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ({128: 0.5, 512: 0.9, 1024: 1.2, 4096: 1.5}, "1024"),
        ({128: 1.1, 512: 1.2}, "<= 128"),
        ({128: 0.5, 512: 0.9}, "> 512"),
        ({128: 1.3, 512: 0.9, 1024: 1.2}, "1024"),  # faster at 128 alone does not count
        ({128: 1.3, 512: 1.2, 1024: 1.0}, "> 1024"),  # as fast is not faster
    ],
)
def test_break_even_is_where_every_longer_length_is_faster(ratios, text):
    rows = speedups("a", {f"llama8b_b8_{t}": x for t, x in ratios.items()})
    rows += speedups("a", {"llama8b_b1_128": 9.0, "saw_b8_16k": 0.1, "b32_8k": 0.1}) + speedups("b", {"llm64k": 1.0})
    table = Table(rows)
    assert str(break_even(table, "a", 8)) == text
    assert break_even(table, "a", 1) == BreakEven(128, 128, 128)
    assert break_even(table, "a", 32) is None
    assert break_even(table, "b", 8) is None


def test_a_length_that_was_not_timed_is_no_length():
    rows = speedups("a", {"llama8b_b1_128": 0.5, "llama8b_b1_512": None, "llama8b_b1_1024": 2.0})
    assert break_even(Table(rows), "a", 1) == BreakEven(1024, 128, 1024)


# -- lines and points -------------------------------------------------------------------------------------------------

ROWS = [
    row("dense", "decode_us_cold", "llm64k", 50.0, effective_bits=16.0, backend="cudnn", form="a"),
    row("dense", "decode_us_cold", "llm64k", 45.0, effective_bits=16.0, backend="flash", form="a"),
    row("dense", "decode_us_cold", "llm64k", None, backend="flashinfer", form="p", status="not installed"),
    *speedups("saw-int4", {"llm64k": 2.3, "b32_32k": 3.1}),
    row("saw-int4", "decode_us_cold", "llm64k", 21.0),
    row("saw-int4", "roofline_share_cold", "llm64k", 0.4, unit="x"),
    *speedups("saw-int4", {f"llama8b_b1_{t}": t / 1024 for t in (512, 1024, 2048)}),
    row("kivi-2", "decode_us_cold", "llm64k", None, status="no kernel: <none>"),
]


def test_a_line_per_preset_measured_or_not():
    found = {line.spec: line for line in lines(ROWS)}
    assert set(found) == {"saw-int4", "kivi-2"}
    saw = found["saw-int4"]
    assert (saw.bits, saw.speedups["llm64k"], saw.speedups["b32_8k"]) == (4.25, 2.3, None)
    assert (saw.microseconds["llm64k"], saw.shares["llm64k"]) == (21.0, 0.4)
    assert str(saw.break_evens[1]) == "2048"
    assert found["kivi-2"].status == "no kernel: <none>"
    assert Table(ROWS).bf16("decode_us_cold", "llm64k") == 45.0


def test_points_are_of_measured_rows():
    assert speed_points(ROWS) == [Point("saw-int4", "llm64k", 4.25, 2.3), Point("saw-int4", "b32_32k", 4.25, 3.1)]


# -- studies -----------------------------------------------------------------------------------------------------------


def study(rows, title):
    return next(s for s in studies(rows) if s.title.startswith(title))


def test_no_rows_no_studies():
    assert studies([]) == []


def test_octopus_table_compares_ratios():
    rows = [*speedups("octopus-3", {"llm64k": 2.0}), row("octopus-3", "encode_us", "llm64k", 230.0)]
    found = study(rows, "Encode and decode")
    assert found.lines == [["llm64k, octopus-3", "0.50", "9.4", "0.230", "4.6", "20"]]
    assert len(OCTOPUS_PAPER) == 18


def test_saw_tables_show_rotation_k_means_and_what_is_unfused():
    rows = [row("saw-int4", "decode_us_cold", f"saw_b{b}_16k", 10.0 * b) for b in (1, 32)]
    rows += [row("saw-int4:rotate=kv", "decode_us_cold", "saw_b1_16k", 11.0)]
    rows += [row(KMEANS, "decode_us_cold", "saw_b1_16k", None, status="no kernel: k-means")]
    rows += [row("saw-int4", m, "llm64k", x) for m, x in (("encode_us", 80.0), ("encode_us_unfused", 200.0))]
    rows += [row("saw-int4:rotate=kv", "encode_us", "llm64k", 90.0)]
    rows += [row("saw-int4", m, "append_b8", x) for m, x in (("append_us", 4.0), ("append_us_unfused", 9.5))]
    found = {line[0]: line[1:] for line in study(rows, "Decode attention by batch").lines}
    assert found["ours: saw-int4"] == ["10.0", "–", "–", "–", "320.0"]
    assert found["ours: saw-int4:rotate=kv"][0] == "11.0"
    assert found[f"ours: {KMEANS}"][0] == "no kernel"
    assert found["paper: fused rotation of K"][-1] == "322.88"
    lines = study(rows, "Rotate, quantize and write:").lines
    assert lines[0] == ["llm64k", "–", "80.0", "90.0", "200.0", "2.50", "–", "–"]
    assert lines[-1][:6] == ["paper, 64k tokens", "135.87", "212.32", "", "2281.04", "10.74"]
    written = study(rows, "Rotate, quantize and write one token")
    assert written.headings == ["", "1 sequence", "4 sequences", "8 sequences", "16 sequences", "32 sequences"]
    assert written.lines[1] == ["ours: keys rotated, fused", "–", "–", "4.00", "–", "–"]
    assert written.lines[3][3] == "9.50"
    assert written.lines[-1] == ["paper: rotation of K apart", "9.92", "13.41", "17.22", "14.56", "14.88"]


def test_what_the_papers_print_is_no_study_alone():
    rows = [row(KMEANS, "decode_us_cold", "saw_b1_16k", None, status="no kernel: k-means")]
    assert studies(rows) == []


def test_innerq_hqmq_and_heads():
    rows = [row("innerq-base", "decode_us_cold", "llama8b_b1_512", 7.0)]
    rows += speedups("hqmq-s96_r4", {"llama8b_b1_4096": 0.5})
    rows += [row("hqmq-s96_r4", "decode_us_cold", "llama8b_b1_4096", 20.0)]
    rows += [row("hqmq-s96_r4", "prefill_apart_us", "prefill_b1_t4096_q1", 900.0)]
    rows += [row("innerq-base", "append_us", f"append_b{b}", float(b)) for b in (1, 8, 32, 256)]
    rows += [row("int-4", "decode_us_cold", s, x) for s, x in (("llm64k", 25.0), ("llm64k_apart", 100.0))]
    rows += speedups("int-4", {"llm64k": 2.0})
    rows += [row("int-4", "prefill_us", "prefill_b1_t2048_q16", 10.0)]
    rows += [row("int-4", "prefill_apart_us", "prefill_b1_t2048_q16", 30.0, least_apart_us=12.5)]
    rows += [row("dense", "prefill_us", "prefill_b1_t2048_q16", 8.0)]
    assert study(rows, "Both products").lines[4][:2] == ["ours: innerq-base", "7.0"]
    assert study(rows, "Quantization's overhead").lines == [["innerq-base", "1.0", "8.0", "32.0", "256.0", "18.3"]]
    assert study(rows, "Heads of a group").lines == [["int-4", "25.0", "100.0", "4.00"]]
    decoded = study(rows, "Fused decode over").lines
    assert decoded[1] == ["ours: hqmq-s96_r4", "20.0", "0.50", "45", "–", "–", "–", "–", "–", "–"]
    assert decoded[-1][:4] == ["paper: s192", "33", "0.39", "7"]
    prefilled = study(rows, "Prefill over").lines
    assert prefilled == [["prefill_b1_t2048_q16, int-4", "10.0", "30.0", "12.5", "1.25", "8.0"]]


def test_steps_of_a_model_by_cache_and_way():
    def step(spec, cache, way, batch, ms, **more):
        shape = f"qwen3_8b_b{batch}_32k"
        return row(spec, f"ms_per_token_{way}", shape, ms, unit="ms", cache=cache, peak_bytes=batch * 1e9, **more)

    rows = [
        step("int-4", "kvcodec fused", "graph", 1, 9.0), step("int-4", "kvcodec fused", "generate", 8, 40.0),
        step("kivi-2", "kvcodec fused", "generate", 8, 38.0), step("hqq-4", "QuantizedCache", "generate", 1, 200.0),
        step("dense", "DynamicCache", "generate", 8, 81.0, form="as torch chooses"),
        step("dense", "DynamicCache", "generate", 8, 47.0, form="cuDNN off"),
        step("dense", "StaticCache", "graph", 1, 33.0),
        step("fp8", "kvcodec fused", "graph", 1, None, status="no kernel"),
        step("int-4", "kvcodec fused", "graph", 1, 99.0, run="2025-01-01"),
        row("int-4", "ms_per_token_graph", "qwen3_8b_b1_0k", 1.0), row("int-4", "decode_us_cold", "llm64k", 1.0),
    ]  # fmt: skip
    found = steps_of_a_model(rows)
    assert found.headings == [
        "cache", "1 sequence, one step in a CUDA graph", "1 sequence, generate, eager",
        "8 sequences, generate, eager", "GB, 8 sequences",
    ]  # fmt: skip
    assert found.lines == [
        ["16 bit, StaticCache", "33.0", "–", "–", "–"],
        ["16 bit, DynamicCache, cuDNN off", "–", "–", "47.0", "8.0"],
        ["16 bit, DynamicCache, as torch chooses", "–", "–", "81.0", "8.0"],
        ["hqq-4, QuantizedCache", "–", "200.0", "–", "–"],
        ["kivi-2", "–", "–", "38.0", "8.0"],
        ["int-4", "9.0", "–", "40.0", "8.0"],
    ]
    assert steps_of_a_model([]).lines == []


# -- page and figure ---------------------------------------------------------------------------------------------------


def test_the_page_has_tables_of_all_kinds_of_rows():
    encoded = [row("int-4", "encode_us", "llm64k", 90.0), row("int-4", "encode_roofline_us", "llm64k", 40.0)]
    told = [row("dense", "ms_per_token_generate", "qwen3_8b_b8_32k", 40.0, cache="DynamicCache", peak_bytes=5e9)]
    page = page_html([*ROWS, *encoded, *told])
    assert page.count("<table>") == page.count("</table>") >= 4
    assert "<td>2.30x</td>" in page
    assert "<td>21.0 (40 %)</td>" in page
    assert page.count("not timed because") == 2  # of kivi-2 and of flashinfer; all were encoded
    assert "no kernel: &lt;none&gt;" in page
    assert "<none>" not in page
    assert page.count("<svg") == 2
    assert "<td>90.0</td><td>40.0</td><td>2.2</td>" in page
    assert "DynamicCache" in page
    assert "http" not in page.replace("http-equiv", "")  # one file, nothing fetched


def test_page_before_anything_was_measured():
    page = page_html([])
    assert page.count("Not measured yet.") == 4
    assert "<svg" not in page


@pytest.mark.parametrize("gains", [[2.0] * 20, [0.1] * 20, [5.0, 4.9, 1.0, 0.2]])
def test_drawing_keeps_names_apart_and_inside(gains):
    (plot,) = figures.speed([Point(f"p{i}", "llm64k", 4.0, gain) for i, gain in enumerate(gains)])
    drawn = svg.draw(plot)
    heights = [float(y) for y in re.findall(r'<text class="name" x="[\d.]+" y="([\d.]+)"', drawn)]
    assert len(heights) == len(gains)
    assert min(b - a for a, b in pairwise(heights)) > 12
    assert 0 < heights[0] <= heights[-1] < 370


def test_cells_are_escaped():
    assert "&lt;b&gt;" in html_table(["<b>"], [["<b>"]])


def test_figure_is_a_picture(tmp_path):
    pictures.write(figures.speed(speed_points(ROWS)), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
