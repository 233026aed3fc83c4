"""The report: every row shown, everything escaped, self-contained, honest about what is missing."""

import re
from pathlib import Path

import pytest
from lab.tests.report.test_page import Page

import packedkv
from packedkv.cli.page.compare import HTML_NAME, SVG_NAME, write_report
from packedkv.cli.page.figures import points_of
from packedkv.cli.page.tables import COLUMNS, columns_of


def row(spec: str, bits: float, kl: float, **more: object) -> dict[str, object]:
    return {
        "spec": spec, "perplexity": 20 * (1 + kl), "kl": kl, "top1_agreement": 0.912, "key_bits": bits,
        "value_bits": bits, "effective_bits": bits, "cache_bytes": 1_234_567, "ratio_to_16bit": 16 / bits,
        "attention_error": 0.0123, "tokens_per_s": 17.25, "long_tokens_per_s": 6.5, "windows": 3,
        "continuation": f"the same words, then {spec}",
        "prefill": "decoded", "kl_se": kl / 10, "nll_rise_se": 0.01,
    } | more  # fmt: skip


ROWS = [row("dense", 16, 0.0), row("int-4", 4.5, 0.09), row("saw-int4", 4.4, 0.03), row("octopus-2", 3.1, 0.2)]
META = {"title": "t", "model": "m", "recommendation": "Take saw-int4.", "prompt": "Once", "versions": {"torch": "2.13"}}


def test_writes_a_picture_and_a_self_contained_page_with_every_row_and_the_recommendation(tmp_path: Path) -> None:
    picture, page = write_report(ROWS, tmp_path / "new" / "folder", META)
    assert (picture.name, page.name) == (SVG_NAME, HTML_NAME)
    assert picture.read_text().startswith("<svg xmlns=")
    text = page.read_text()
    for tag, attrs in Page(text).tags:  # every tag is closed, and nothing is taken from elsewhere
        assert tag not in ("script", "link", "img")
        for name in ("src", "href"):
            assert (attrs.get(name) or "data:").startswith("data:")
    for r in ROWS:
        assert f"{r['spec']}</p>" in text.replace("</span>", "")
        assert re.search(rf"</svg>{r['spec']}</th>", text)
    assert "Take saw-int4." in text
    assert '<span class="same">the same words, then </span>int-4' in text  # grey up to the first difference
    assert "torch 2.13" in text
    assert "prefers-color-scheme: dark" in text


def test_model_output_and_meta_are_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    rows = [row("dense", 16, 0.0, continuation=evil), row(f"int-4{evil}", 4.5, 0.1, continuation=evil + "y")]
    page = write_report(rows, tmp_path, dict.fromkeys(("title", "model", "prompt", "recommendation", "note"), evil))[1]
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "gone", ["perplexity", "effective_bits", "long_tokens_per_s", "kl_se", "windows", "continuation"]
)
def test_a_missing_value_is_a_dash_and_an_empty_column_is_left_out(tmp_path: Path, gone: str) -> None:
    one = [ROWS[0], {**ROWS[1], gone: None}, *ROWS[2:]]
    text = write_report(one, tmp_path, {})[1].read_text()
    assert ("<td>–</td>" in text) == (gone in [c.key for c in COLUMNS])
    none = [{k: v for k, v in r.items() if k != gone} for r in ROWS]
    assert "–" not in write_report(none, tmp_path, {})[-1].read_text()
    assert gone not in [c.key for c in columns_of(none)]
    points_of(one)
    points_of(none)


def test_interrupted_rows_are_shown_as_such(tmp_path: Path) -> None:
    rows = [*ROWS[:-1], {**ROWS[-1], "partial": True}]
    text = write_report(rows, tmp_path, META)[1].read_text()
    assert "interrupted" in text
    assert "octopus-2 (partial)" in text
    for rows in ([], ROWS[:1], ROWS):
        written = write_report(rows, tmp_path, META)
        assert all(path.stat().st_size > 500 for path in written)
        assert "interrupted" not in written[-1].read_text()


def test_points_are_kl_with_two_standard_errors_to_either_side() -> None:
    metric, points = points_of(ROWS)
    assert metric == "kl"
    assert [(p.spec, p.x, p.y, p.high - p.y) for p in points] == [
        ("int-4", 4.5, 0.09, pytest.approx(0.018)),
        ("saw-int4", 4.4, 0.03, pytest.approx(0.006)),
        ("octopus-2", 3.1, 0.2, pytest.approx(0.04)),
    ]


def test_without_kl_the_points_are_the_perplexity_gap_to_the_uncompressed_model() -> None:
    rows = [{k: v for k, v in r.items() if k != "kl"} for r in ROWS]
    metric, points = points_of(rows)
    assert metric == "perplexity"
    assert points[0].y == pytest.approx(20 * 1.09 - 20)
    assert points[0].high - points[0].y == pytest.approx(2 * 20 * 1.09 * 0.01)
    assert points_of(rows[1:])[1] == []  # nothing to measure the gap from
    told = [{**rows[1], "uncompressed": {"perplexity": 19.0}}]
    assert points_of(told)[1][0].y == pytest.approx(2.8)


def test_the_uncompressed_model_has_a_row_and_is_what_continuations_are_compared_with(tmp_path: Path) -> None:
    base = {"perplexity": 19.87, "continuation": "the same words, then nothing"}
    rows = [{**r, "uncompressed": base} for r in ROWS]
    text = write_report(rows, tmp_path, META)[1].read_text()
    assert text.count("(uncompressed)</th>") == 1
    assert "<td>19.87</td>" in text
    assert "what agrees with <b>(uncompressed)</b> is grey" in text


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(packedkv.KVError, match=r"file.* cannot be written .*choose another file"):
        write_report(ROWS, tmp_path / "file", META)
