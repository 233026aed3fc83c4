"""The page in headless Chromium: it renders at a phone's width and a desk's, its script works, nothing is fetched."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvcodec.cli.page import compare
from kvcodec.cli.page.rows import read_folder, read_layers
from kvcodec.cli.page.words import bytes_text
from kvcodec_lab.report.pages import bench, serve
from kvcodec_lab.report.pages.eval import page_html
from lab.tests.bench.test_serve import ROWS as SERVED_ROWS
from lab.tests.bench.test_summary import speedups
from lab.tests.report import chromium, folders
from lab.tests.report.folders import BITS, SPECS, UNCOMPRESSED

PROGRAM = chromium.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason=f"no Chromium here; looked for {', '.join(chromium.NAMES)}"),
]
TABLE = "[...document.querySelectorAll('section#all table tbody.rows tr')]"
CENTRES = """[...document.querySelectorAll('#bytes svg[data-name=kl] .dot')].map(d => {
  const box = d.querySelector('.mark').getBoundingClientRect();
  return [d.dataset.spec, box.x + box.width / 2, box.y + box.height / 2];
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    assert PROGRAM is not None
    with chromium.Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folders.write(tmp_path_factory.mktemp("run"))
    bench = json.loads((folders.write_times(folder / "times") / "decode.json").read_text())
    layers = read_layers(folders.write_layers(folder))
    path = folder / "page.html"
    path.write_text(page_html(read_folder(folder), context=4096, bench=bench, layers=layers), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_renders_without_an_error_a_request_or_a_sideways_scroll(
    browser: chromium.Browser, page: Path, width: int, dark: bool, tmp_path: Path
) -> None:
    browser.open(page, width, dark=dark)
    assert browser.run("document.querySelectorAll('svg .dot').length") > 2 * len(SPECS)
    assert browser.run("[...document.querySelectorAll('section')].every(s => s.getBoundingClientRect().height > 60)")
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("document.querySelector('#bytes svg text').getBoundingClientRect().height") >= 10
    back = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") != dark
    clipped = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
      const frame = svg.getBoundingClientRect();
      return [...svg.querySelectorAll('text')].filter(t => {
        const box = t.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1;
      }).map(t => t.textContent);
    })"""
    assert browser.run(clipped) == []
    picture = tmp_path / "page.png"
    browser.picture(picture)
    assert picture.stat().st_size > 20_000
    assert browser.complaints() == []
    assert browser.asked() == [page.as_uri()]


@pytest.mark.parametrize("name", ["bench", "serve", "compare"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_other_pages_have_the_same_shell(browser: chromium.Browser, name: str, width: int, tmp_path: Path) -> None:
    shapes = ("llm64k", "b32_8k", "b32_32k", "video")
    timed = [speedups(spec, dict.fromkeys(shapes, 2.0 + i)) for i, spec in enumerate(("saw-int4", "kivi-2"))]
    compared = [{"spec": spec, "perplexity": 20.0, "kl": 0.1, "effective_bits": bits} for spec, bits in BITS.items()]
    text = {
        "bench": lambda: bench.page_html([row for rows in timed for row in rows]),
        "serve": lambda: serve.page_html(SERVED_ROWS),
        "compare": lambda: compare.page_html(compared, {}, b""),
    }[name]()
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    browser.open(page, width, dark=True)
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert browser.run("[...document.querySelectorAll('section')].every(s => s.getBoundingClientRect().height > 60)")
    assert browser.complaints() == []


def test_a_heading_sorts_by_keyboard_and_says_so(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, 1280)
    names = f"{TABLE}.map(row => row.dataset.spec)"
    head = "document.querySelector('section#all th:nth-child(4)')"
    assert browser.run(names) == list(SPECS)
    browser.run(f"{head}.querySelector('button').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.run(names) == sorted(SPECS, key=lambda s: BITS[s])
    assert browser.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    browser.press(" ", 32, " ")
    assert browser.run(names) == sorted(SPECS, key=lambda s: -BITS[s])
    assert browser.run(f"{head}.getAttribute('aria-sort')") == "descending"
    assert browser.run("document.querySelector('section#all tbody tr').dataset.spec") == UNCOMPRESSED  # stays on top
    browser.run("document.querySelector('section#all th button').click()")
    assert browser.run(names) == sorted(SPECS)
    assert browser.run("document.querySelectorAll('section#all [aria-sort]').length") == 1
    assert browser.complaints() == []


def test_another_context_moves_bytes_in_drawing_and_table(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, 1280)
    browser.run("document.getElementById('context').scrollIntoView()")
    before = browser.run(CENTRES)
    ask = "(n => { const b = document.getElementById('context'); b.value = n; b.dispatchEvent(new Event('input')) })"
    browser.run(f"{ask}(4096)")  # the script draws where the page was drawn
    for (spec, x, y), (again, x2, y2) in zip(before, browser.run(CENTRES), strict=True):
        assert (spec, x, y) == (again, pytest.approx(x2, abs=0.5), pytest.approx(y2, abs=0.5))
    browser.run(f"{ask}(65536)")
    data = json.loads(browser.run("document.getElementById('sizes').textContent"))
    at = data["contexts"].index(65536)
    head = browser.run("document.querySelector('section#all th[data-key=bytes]').cellIndex")
    cells = f"{TABLE}.map(row => [row.dataset.spec, row.cells[{head}].textContent, +row.cells[{head}].dataset.v])"
    for spec, text, value in browser.run(cells):
        assert value == pytest.approx(data["bytes"][spec][at])
        assert text == bytes_text(value)
    moved = {spec: x for spec, x, _ in browser.run(CENTRES)}
    order = sorted(moved, key=lambda spec: moved[spec])
    assert order == sorted(moved, key=lambda spec: data["bytes"][spec][at])
    left = {spec: moved[spec] - min(moved.values()) for spec in moved}
    sizes = {spec: data["bytes"][spec][at] - min(data["bytes"][s][at] for s in moved) for spec in moved}
    rates = [left[s] / sizes[s] for s in order[1:]]
    assert all(a == pytest.approx(b, rel=0.02) for a, b in pairwise(rates))
    assert browser.run("document.querySelector('.atcontext').textContent") == "65,536"
    assert browser.run("document.querySelector('.denseat').textContent") == bytes_text(data["bytes"][UNCOMPRESSED][at])
    browser.run(f"{ask}(1)")
    assert browser.run("document.getElementById('context').getAttribute('aria-invalid')") == "true"
    assert browser.run("document.querySelector('.atcontext').textContent") == "65,536"
    assert browser.complaints() == []


def test_the_dot_that_is_pointed_at_is_named(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, 390)
    browser.run("document.querySelector('#bytes').scrollIntoView()")
    spec, x, y = next(dot for dot in browser.run(CENTRES.replace("#bytes svg[data-name=kl]", "#bytes svg")))
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = browser.run("document.querySelector('#bytes .near').textContent")
    assert told == browser.run(f"document.querySelector('#bytes .dot[data-spec=\"{spec}\"] title').textContent")
    assert told.startswith(f"{spec}: KL ")
    assert browser.complaints() == []


def test_it_reads_without_its_script(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, 390, scripts=False)
    try:
        assert browser.complaints() == []
        snapshot = browser.send("Page.captureSnapshot")["data"]
        assert "kivi-2" in snapshot
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.run("getComputedStyle(document.getElementById('asked')).display") == "none"


def test_the_driver_sees_errors_and_requests(browser: chromium.Browser, tmp_path: Path) -> None:
    """What the tests above rely on: a page that fails is seen to fail."""
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><img src='http://127.0.0.1:9/x.png'><script>nothing.there()</script>")
    browser.open(bad, 390)
    assert "http://127.0.0.1:9/x.png" in browser.asked()
    assert any("nothing is not defined" in text for text in browser.complaints())
