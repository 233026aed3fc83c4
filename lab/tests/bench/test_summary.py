"""The page of a bench: break-even contexts, the points of the figure, medians of every part."""

import pytest

from packedkv.cli.page import figures, svg
from packedkv.errors import ShapeError, SpecError
from packedkv_lab.bench.shapes import GROUPS, SHAPES, SPINE, Shape, shapes_named, sweep
from packedkv_lab.report.bench import SpeedPoint, break_evens, page_html, speed_points


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


def test_a_name_that_is_no_shape_lists_some():
    with pytest.raises(SpecError, match="no shape 'llm'; use some of spine, octopus"):
        shapes_named("llm")
    with pytest.raises(SpecError, match="no shapes named"):
        shapes_named(" , ")
    with pytest.raises(ShapeError, match="3 query heads are no multiple of 2"):
        Shape("x", 1, 3, 2, 64, 8)
    with pytest.raises(ShapeError, match="every size must be at least 1"):
        Shape("x", 1, 2, 2, 64, 0)


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


# -- break-even --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ({128: 0.5, 512: 0.9, 1024: 1.2, 4096: 1.5}, "1024"),
        ({128: 1.1, 512: 1.2}, "<= 128"),
        ({128: 0.5, 512: 0.9}, "> 512"),
        ({128: 1.3, 512: 0.9, 1024: 1.2}, "1024"),  # faster at 128 alone does not count
        ({128: 1.3, 512: 1.2, 1024: 1.0}, "> 1024"),  # as fast is not faster
        ({128: 0.5, 512: None, 1024: 2.0}, "1024"),  # a length that was not timed is no length
    ],
)
def test_break_even_is_where_every_longer_length_is_faster(ratios, text):
    rows = speedups("a", {f"llama8b_b8_{t}": x for t, x in ratios.items()})
    rows += speedups("a", {"llama8b_b1_128": 9.0, "saw_b8_16k": 0.1, "b32_8k": 0.1}) + speedups("b", {"llm64k": 1.0})
    assert break_evens(rows) == {"a": {8: text, 1: "<= 128"}}


# -- the page ----------------------------------------------------------------------------------------------------------


def test_points_are_of_measured_rows():
    found = speed_points([*ROWS, row("int-4", "speedup_vs_bf16_cold", "llm64k", None, status="no kernel")])
    assert found == [SpeedPoint("saw-int4", "llm64k", 4.25, 2.3), SpeedPoint("saw-int4", "b32_32k", 4.25, 3.1)]


def test_the_page_has_a_table_for_each_metric_of_each_part():
    told = [row("dense", "ms_per_token_generate", "qwen3_8b_b8_32k", 40.0, cache="DynamicCache")]
    page = page_html({"decode": ROWS, "generate": told})
    assert page.count("<table>") == page.count("</table>") == 1 + 3 + 1
    assert "decode: decode_us_cold (us)" in page
    assert "dense, cudnn, a" in page
    assert "no kernel: &lt;none&gt;" in page
    assert "<none>" not in page
    assert page.count("<svg") == 2
    assert "DynamicCache" in page
    assert "http" not in page.replace("http-equiv", "")  # one file, nothing fetched


def test_drawing_keeps_names_inside():
    points = [SpeedPoint(f"p{i}", "llm64k", 4.0, 2.0) for i in range(40)]
    (plot,) = figures.speed(points)
    drawn = svg.draw(plot)
    height = int(drawn.split('viewBox="0 0 560 ')[1].split('"')[0])
    places = [float(part.split('y="')[1].split('"')[0]) for part in drawn.split('class="name"')[1:]]
    assert len(places) == 40
    assert all(0 < y < height for y in places)
    assert all(b - a >= 13.9 for a, b in zip(sorted(places), sorted(places)[1:], strict=False))
