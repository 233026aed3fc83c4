"""``kvcodec bench serve``: rows, resuming, servers that it starts, pages, exit statuses."""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcodec.cli.main import main
from kvcodec.cli.page.figures import curve_styles
from kvcodec.errors import KVError, SpecError
from kvcodec_lab.report.pages.serve import drawing, page_html
from kvcodec_lab.serve import bench as serve
from kvcodec_lab.serve import command
from kvcodec_lab.serve import server as serve_server
from kvcodec_lab.serve.client import Reply
from kvcodec_lab.serve.http import endpoint_of
from kvcodec_lab.serve.loads import Run, Sessions
from kvcodec_lab.serve.server import RefusedToStartError, Start, about, last_words, start_of, started
from kvcodec_lab.serve.tables import BASELINES, Chart, Curve, charts, tables
from lab.tests.bench import fake_openai
from lab.tests.bench.fake_openai import Fake, running
from lab.tests.bench.fake_time import run_with

SWEEP = ["--load", "sweep", "--concurrency", "1,2", "--input-len", "32", "--output-len", "4", "--requests", "4"]
SESSIONS = ["--load", "sessions", "--sessions", "2", "--rounds", "3", "--shared", "16", "--context", "32",
            "--turn", "16", "--answer", "4"]  # fmt: skip
QUICK = ["--warmups", "0", "--gpu", "G", "--commit", "abc"]


def bench(*arguments):
    return main(["bench", "serve", *map(str, arguments), *QUICK])


def read(folder):
    return [json.loads(line) for line in (folder / "serve.jsonl").read_text().splitlines()]


def by(rows, metric):
    return {row["shape"]: row for row in rows if row["metric"] == metric}


def test_rows_of_a_running_server(tmp_path, capsys):
    with running(Fake(0.01, 0.002)) as url:
        assert bench(url, *SWEEP, "--label", "fp8", "--out", tmp_path, "--seed", 7, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == read(tmp_path) == json.loads((tmp_path / "serve.json").read_text())
    keys = {"spec", "effective_bits", "metric", "unit", "values", "shape", "gpu", "versions", "commit", "seed", "run"}
    assert all(keys <= set(row) for row in rows)
    assert {(r["spec"], r["gpu"], r["commit"], r["seed"]) for r in rows} == {("fp8", "G", "abc", 7)}
    done = by(rows, "requests_done")
    assert list(done) == ["c1_i32_o4", "c2_i32_o4"]
    row = done["c2_i32_o4"]
    assert (row["values"]["p50"], row["failed"], row["unsent"], row["errors"]) == (4, 0, 0, {})
    assert row["sizes"] == {"input_len": 32, "output_len": 4, "requests": 4, "concurrency": 2}
    assert row["server"] == {"model": "tiny", "version": "fake-1", "kv_cache_tokens": 1600, "block_tokens": 16}
    assert set(by(rows, "ttft_ms")["c1_i32_o4"]["values"]) == {"p20", "p50", "p80", "p99", "mean"}
    assert all(by(rows, "output_tokens_per_s")[s]["values"]["p50"] > 0 for s in done)
    assert by(rows, "kv_cache_tokens")["start"]["values"]["p50"] == 1600
    page = (tmp_path / "serve.html").read_text()
    assert "Sweep: 32 tokens in, 4 out" in page
    assert "fp8" in (tmp_path / "serve-throughput-clients-i32-o4.svg").read_text()


def test_two_clients_get_twice_the_tokens_per_second(tmp_path, monkeypatch):
    monkeypatch.setattr(asyncio, "run", functools.partial(run_with, Fake(0.01, 0.002).serve))
    assert bench("http://127.0.0.1:80", *SWEEP, "--out", tmp_path) == 0
    rates = by(read(tmp_path), "output_tokens_per_s")
    alone = 4 / (0.01 + 3 * 0.002)
    assert [row["values"]["p50"] for row in rates.values()] == pytest.approx([alone, 2 * alone])


def test_what_is_finished_is_not_sent_again(tmp_path, capsys):
    fake = Fake(0.001, 0.0)
    with running(fake) as url:
        assert bench(url, *SWEEP, *SWEEP[:2], "--concurrency", "1", "--out", tmp_path) == 0
        assert len(fake.seen) == 4
        assert bench(url, *SWEEP, "--out", tmp_path) == 0
        assert len(fake.seen) == 8
        capsys.readouterr()
        assert bench(url, *SWEEP, "--out", tmp_path) == 0
        assert "server: finished before" in capsys.readouterr().err
        assert len(fake.seen) == 8
        assert bench(url, *SWEEP, "--out", tmp_path, "--label", "other") == 0
        assert len(fake.seen) == 16
    salts = {asked["cache_salt"] for asked in fake.seen}
    assert all(salt.startswith("kvcodec 20") for salt in salts)


def test_sessions_have_rows_per_round(tmp_path):
    with running(Fake(0.001, 0.0, blocks=10_000)) as url:
        assert bench(url, *SESSIONS, "--out", tmp_path) == 0
    rows = read(tmp_path)
    name = "s2x3_p16_c32_t16_a4"
    assert set(by(rows, "ttft_ms")) == {name, *(f"{name}_r{i}" for i in ("1", "2", "3", "2-3"))}
    assert by(rows, "prefix_residency")[f"{name}_r3"]["values"]["p50"] == 1.0
    assert by(rows, "lost_tokens")[name]["values"]["p50"] == 0
    assert by(rows, "requests_done")[name]["values"]["p50"] == 6
    page = (tmp_path / "serve.html").read_text()
    assert "2 sessions of 3 rounds, round by round" in page
    assert {p.name.split(f"-{name}")[0] for p in tmp_path.glob("*.svg")} == {
        "serve-round-ttft", "serve-round-ttft-p99", "serve-round-tpot", "serve-round-residency",
    }  # fmt: skip


def test_a_server_that_does_not_say_what_it_found(tmp_path):
    with running(Fake(0.0, 0.0, says_cached=False)) as url:
        assert bench(url, *SESSIONS, "--out", tmp_path) == 0
    (row,) = by(read(tmp_path), "prefix_residency").values()
    assert "vLLM: --enable-prompt-tokens-details" in row["status"]


def test_failures_are_said_and_change_the_status(tmp_path, capsys):
    with running(Fake(0.0, 0.0, lambda number, asked: "refused" * (number in (1, 2)))) as url:
        assert bench(url, *SWEEP, "--out", tmp_path) == 1
    told = capsys.readouterr()
    assert "2 of 4 requests failed; the first: refused: HTTP 400 Token id 9 is out of vocabulary" in told.err
    row = by(read(tmp_path), "requests_done")["c1_i32_o4"]
    assert (row["failed"], row["values"]["p50"], row["errors"]["refused"]["count"]) == (2, 2, 2)
    assert "2/4" in told.out
    assert "Token id 9 is out of vocabulary" in (tmp_path / "serve.html").read_text()
    with running(Fake(0.0, 0.0, lambda *_: "refused")) as url:
        assert bench(url, *SWEEP, "--out", tmp_path, "--label", "deaf") == 1
    rows = [r for r in read(tmp_path) if r["spec"] == "deaf" and r["shape"] != "start"]
    assert {r["metric"] for r in rows} == {"requests_done"}
    assert all(r["status"].startswith("failed: none of 4 requests was answered: refused: HTTP 400") for r in rows)


def test_requests_that_do_not_fit_are_not_sent(tmp_path):
    fake = Fake(0.0, 0.0)
    with running(fake) as url:
        assert bench(url, *SWEEP, "--input-len", "32,4093", "--concurrency", "1", "--out", tmp_path) == 1
    assert len(fake.seen) == 4
    row = by(read(tmp_path), "requests_done")["c1_i4093_o4"]
    assert row["status"] == "not sent: a request has 4097 tokens, the server takes 4096"


def test_rates_instead_of_clients(tmp_path):
    with running(Fake(0.0, 0.0)) as url:
        assert bench(url, *SWEEP, "--rate", "50,200", "--out", tmp_path) == 0
    assert list(by(read(tmp_path), "requests_done")) == ["r50_i32_o4", "r200_i32_o4"]
    assert (tmp_path / "serve-throughput-requests-i32-o4.svg").is_file()


def test_nothing_begins_when_time_is_out(tmp_path, capsys):
    fake = Fake(0.0, 0.0)
    with running(fake) as url:
        assert bench(url, *SWEEP, "--deadline", "-1") == 0
    assert not fake.seen
    assert "out of time; 2 loads are left" in capsys.readouterr().err


def test_mistakes_are_one_line(capsys, tmp_path):
    for arguments, said in (
        ([], "name a running server's URL, or servers to start"),
        (["ftp://x"], "is not the address of a server"),
        (["127.0.0.1:9"], "/v1/models does not answer"),
        (["--start", "bf16"], "write LABEL=COMMAND"),
        (["--start", "a/b=vllm serve"], "write LABEL=COMMAND"),
        (["--start", "a='"], "mind its quotes"),
        (["--start", "a=X=1"], "has no command behind its variables"),
        (["--start", "a=x", "--start", "a=y"], "has a label twice (a, a)"),
        (["localhost:1", "--header", "x"], "write 'NAME: VALUE'"),
        (["localhost:1", "--warmups", "-1"], "are 0 or more"),
    ):
        assert main(["bench", "serve", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "cache", "http://localhost"]) == 2
    assert "bench cache takes no address" in capsys.readouterr().err
    for option in (
        ["--rate", "0"],
        ["--rate", "x"],
        ["--load", "sweep,storm"],
        ["--timeout", "-1"],
        ["--timeout", "x"],
    ):
        with pytest.raises(SystemExit):
            main(["bench", "serve", "localhost:1", *option])


def test_a_model_that_is_not_served(capsys):
    with running(Fake()) as url:
        assert bench(url, "--model", "large") == 2
    assert "serves tiny, not large; pass one of them with --model" in capsys.readouterr().err


def test_what_a_server_says_of_itself(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 777}')
    cards = {"data": [{"id": "a", "root": str(tmp_path), "max_model_len": 99}, {"id": "b"}]}

    class Other(Fake):
        async def answer(self, path, body, writer):
            fake_openai.plain(writer, 200, json.dumps(cards).encode() if path == "/v1/models" else b"<html>")

    with running(Other()) as url:
        found = asyncio.run(about(endpoint_of(url)))
        assert (found.model, found.max_tokens, found.vocabulary, found.version) == ("a", 99, 777, None)
        assert asyncio.run(about(endpoint_of(url), "b")).vocabulary is None
        for wrong in ({"data": [{"name": "x"}]}, [1], {"data": []}):
            cards = wrong
            with pytest.raises(KVError):
                asyncio.run(about(endpoint_of(url)))


# -- servers that it starts --------------------------------------------------------------------------------------------

FAKE = f"{sys.executable} {Path(fake_openai.__file__)}"


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def shown(log):
    return log.read_text() if log.is_file() else ""


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_servers_one_after_the_other_and_one_that_refuses(tmp_path, port, capsys):
    arguments = []
    for label, options in (("bf16", "--tokens 1000"), ("ours", "--tokens 3760 --child"),
                           ("odd", "--refuse 'no such dtype'")):  # fmt: skip
        arguments += ["--start", f"{label}=SOME_VARIABLE=1 {FAKE} --port {port} {options}"]
    assert bench(*arguments, *SWEEP, "--out", tmp_path) == 1
    rows = read(tmp_path)
    sizes = {r["spec"]: r["values"]["p50"] for r in rows if r["metric"] == "kv_cache_tokens"}
    assert sizes == {"bf16": 1000, "ours": 3760}
    starts = {r["spec"]: r for r in rows if r["metric"] == "start_s"}
    assert starts["odd"]["status"] == "refused to start: ValueError: no such dtype"
    assert starts["bf16"]["values"]["p50"] > 0
    assert "--tokens 1000" in starts["bf16"]["command"]
    assert {r["spec"] for r in rows if r["metric"] == "requests_done"} == {"bf16", "ours"}
    child = int(re.search(r"child (\d+)", (tmp_path / "serve-ours.log").read_text())[1])
    assert not lives(child)  # its workers end with it
    text = capsys.readouterr().out
    assert "3.76x" in text
    assert "no such dtype" in text
    page = (tmp_path / "serve.html").read_text()
    assert "refused to start: ValueError: no such dtype" in page
    # again: what is finished is not started, what refused is
    assert bench(*arguments, *SWEEP, "--out", tmp_path) == 1
    told = capsys.readouterr().err
    assert "bf16: finished before" in told
    assert [r["spec"] for r in read(tmp_path)[len(rows) :]] == ["odd"]


def test_a_server_that_dies_is_a_row_and_the_next_one_runs(tmp_path, port):
    arguments = ["--start", f"frail={FAKE} --port {port} --die-after 5", "--start", f"well={FAKE} --port={port}"]
    assert bench(*arguments, *SWEEP, "--out", tmp_path) == 1
    done = [(r["spec"], r["shape"], r.get("status", "")) for r in read(tmp_path) if r["metric"] == "requests_done"]
    assert [d[:2] for d in done] == [
        ("frail", "c1_i32_o4"), ("frail", "c2_i32_o4"), ("well", "c1_i32_o4"), ("well", "c2_i32_o4"),
    ]  # fmt: skip
    assert re.match("the server was gone after [01] of 4 requests: connection", done[1][2])  # two are in flight
    assert not done[3][2]


def test_a_server_that_never_comes_up_is_ended(tmp_path, monkeypatch):
    script = "import time; print('loading weights', flush=True); time.sleep(600)"
    start = Start("slow", f'{sys.executable} -c "{script}"')
    log = tmp_path / "log"
    # time passes once it has said something, however long it takes to say it
    monkeypatch.setattr(serve_server, "time", SimpleNamespace(monotonic=lambda: 2.0 * ("weights" in shown(log))))

    async def begin():
        async with started(start, endpoint_of("127.0.0.1:9"), log, timeout=1.5):
            pytest.fail("up")

    with pytest.raises(RefusedToStartError, match=r"not up after 1\.5 s; its last words: loading weights"):
        asyncio.run(begin())


def test_one_that_ignores_the_request_to_end_is_killed(tmp_path, port):
    script = "import signal,sys; signal.signal(15, signal.SIG_IGN); sys.path.insert(0, sys.argv.pop(1)); " \
             "import fake_openai; fake_openai.main()"  # fmt: skip
    folder = Path(fake_openai.__file__).parent
    start = Start("deaf", f'{sys.executable} -c "{script}" {folder} --port {port} --child')
    log = tmp_path / "log"

    async def use():
        async with started(start, endpoint_of(f"127.0.0.1:{port}"), log, grace=0.5):
            pass

    asyncio.run(use())
    assert not lives(int(re.search(r"child (\d+)", log.read_text())[1]))
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port))


def test_a_port_in_use_and_a_command_that_is_none(tmp_path):
    async def use(start, url):
        async with started(start, endpoint_of(url), tmp_path / "log"):
            pytest.fail("up")

    with running(Fake()) as url, pytest.raises(RefusedToStartError, match="something answers at http"):
        asyncio.run(use(Start("a", "true"), url))
    with pytest.raises(RefusedToStartError, match="no-such-program: No such file"):
        asyncio.run(use(Start("a", "no-such-program --port 1"), "127.0.0.1:9"))
    with pytest.raises(RefusedToStartError, match="ended with status 3"):
        asyncio.run(use(Start("a", f"{sys.executable} -c 'raise SystemExit(3)'"), "127.0.0.1:9"))


@contextlib.contextmanager
def killed_at_the_end(process):
    try:
        yield
    finally:
        process.kill()


def test_an_interrupt_stops_the_server_and_keeps_the_rows(tmp_path, port):
    command = [sys.executable, "-m", "kvcodec", "bench", "serve", "--start", f"a={FAKE} --port {port} --child", *SWEEP,
               "--requests", "100000", "--out", str(tmp_path), *QUICK]  # fmt: skip
    # a shell's background jobs, and so what they start, ignore interrupts
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    with process, killed_at_the_end(process):
        reader = threading.Thread(target=process.stderr.read)
        log = tmp_path / "serve-a.log"
        end = time.monotonic() + 600
        while time.monotonic() < end and not (log.is_file() and "child" in log.read_text()
                                              and (tmp_path / "serve.jsonl").is_file()):  # fmt: skip
            time.sleep(0.1)
        reader.start()
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
        reader.join(300)
    assert not lives(int(re.search(r"child (\d+)", log.read_text())[1]))
    assert {r["metric"] for r in read(tmp_path)} >= {"start_s"}


def test_commands_are_shown_without_secrets():
    shown = Start("a", "HF_TOKEN=abc X=1 vllm serve M --api-key abc --api-key=abc --port 8001").shown()
    assert "abc" not in shown
    assert shown == "HF_TOKEN=*** X=1 vllm serve M --api-key *** --api-key=*** --port 8001"


def test_where_a_server_listens():
    default = endpoint_of("localhost:8000")
    assert start_of("a=vllm serve M --port 81").endpoint(default).port == 81
    assert start_of("a=vllm serve M --port=82").endpoint(default).port == 82
    assert start_of("a=vllm serve M --port").endpoint(default).port == 8000
    assert start_of("b=A=1 B='x y' vllm serve").words() == ({"A": "1", "B": "x y"}, ["vllm", "serve"])


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("loading\nINFO 11-22 02:00:00 [core.py:12] ready to go\n", "ready to go"),
        ("(EngineCore_0 pid=7) ERROR 11-22 02:00:00 [core.py:12] ValueError: no valid attention backend\n"
         "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
         "ValueError: no valid attention backend"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
         "  Value error, kvcodec: window=128 cannot be served [type=value_error, input_value=...]\n"
         "    For further information visit https://errors.pydantic.dev\n",
         "kvcodec: window=128 cannot be served"),
        ("usage: vllm\napi_server.py: error: argument --kv-cache-dtype: invalid choice: 'x'\n",
         "error: argument --kv-cache-dtype: invalid choice: 'x'"),
        ("torch.OutOfMemoryError: CUDA out of memory\n", "torch.OutOfMemoryError: CUDA out of memory"),
    ],
)  # fmt: skip
def test_last_words(log, words):
    assert last_words(log) == words


# -- the machine, tables and drawings ----------------------------------------------------------------------------------


def test_the_machine_is_the_servers(monkeypatch):
    here = [serve.Server("a", endpoint_of("localhost:1"), None)]
    there = [serve.Server("a", endpoint_of("gpu:1"), None)]
    assert serve._machine("B300", there) == {"gpu": "B300"}
    assert serve._machine(None, there) == {"gpu": "unknown (a server elsewhere)"}
    monkeypatch.setattr(serve.shutil, "which", lambda name: None)
    assert serve._machine(None, here) == {}
    monkeypatch.setattr(serve.shutil, "which", lambda name: "nvidia-smi")
    for said, found in (("H200\nH200\n", {"gpu": "2 x H200"}), ("H200\n", {"gpu": "H200"}), ("", {})):
        done = subprocess.CompletedProcess([], 0, said, "")
        monkeypatch.setattr(serve.subprocess, "run", lambda *_, done=done, **__: done)
        assert serve._machine(None, here) == found


def row(label, metric, shape, p50, **more):
    values = None if p50 is None else {"p20": p50, "p50": p50, "p80": p50, "p99": 2 * p50, "mean": p50}
    return {"spec": label, "metric": metric, "unit": "", "values": values, "shape": shape, "run": "1", **more}


SIZES = {"load": "sweep", "sizes": {"input_len": 8192, "output_len": 1024, "requests": 8, "concurrency": 4}}
ROWS = [
    row("saw-int4", "output_tokens_per_s", "c4_i8192_o1024", 300.0, **SIZES),
    row("saw-int4", "requests_done", "c4_i8192_o1024", 8, errors={}, unsent=0, **SIZES),
    row("bf16", "output_tokens_per_s", "c4_i8192_o1024", 200.0, **SIZES),
    row("bf16", "ttft_ms", "c4_i8192_o1024", 1234.5, **SIZES),
    row(
        "bf16",
        "requests_done",
        "c4_i8192_o1024",
        7,
        errors={"cut": {"count": 1, "first": "<i>gone"}},
        unsent=0,
        **SIZES,
    ),
    row("<b>", "requests_done", "c4_i8192_o1024", None, status="failed: x", **SIZES),
]


def test_ratios_are_to_bf16_wherever_it_stands():
    servers, sweep = tables(ROWS)
    assert [line[0] for line in servers.lines] == ["saw-int4", "bf16", "<b>"]
    cells = {line[0]: dict(zip(sweep.headings, line, strict=True)) for line in sweep.lines}
    assert (cells["saw-int4"]["of bf16"], cells["bf16"]["of bf16"], cells["<b>"]["of bf16"]) == ("1.50x", "1.00x", "–")
    assert (cells["bf16"]["TTFT p50 ms"], cells["bf16"]["answered"]) == ("1,234", "7/8")
    assert dict(zip([line[0] for line in sweep.lines], sweep.whys, strict=True)) == {
        "saw-int4": "", "bf16": "1 cut: <i>gone", "<b>": "failed: x",
    }  # fmt: skip
    assert str(sweep).endswith("\n! bf16: 1 cut: <i>gone\n! <b>: failed: x")


def test_the_page_escapes_what_it_shows():
    page = page_html(ROWS)
    assert "<b>" not in page
    assert "<i>gone" not in page
    assert "&lt;i&gt;gone" in page
    assert page.count("<svg") == len(charts(ROWS)) == 2


def test_a_drawing_has_its_points_in_their_places():
    curves = [Curve("bf16", [(1, 10.0), (4, 40.0)]), Curve("fp8", [(1, 20.0), (4, 39.0)]), Curve("x", [(2, 5.0)])]
    svg = drawing(Chart("n", "t", "clients", "y", True, curves))
    xs = {float(x) for x in re.findall(r'text x="([\d.]+)" y="307" text-anchor="middle">[124]<', svg)}
    assert len(xs) == 3
    low, mid, high = sorted(xs)
    assert mid - low == pytest.approx(high - mid, abs=0.2)  # doubling
    ends = re.findall(r'<line x1="([\d.]+)" y1="([\d.]+)" x2="[\d.]+" y2="([\d.]+)"', svg)
    assert [float(x) for x, _, _ in ends] == [high, high, mid]
    heights, labels = [float(y) for _, y, _ in ends], [float(y) for _, _, y in ends]
    assert heights == sorted(heights)  # the most on top
    assert all(b - a >= 13.9 for a, b in itertools.pairwise(labels))  # names do not overlap
    assert "nan" not in drawing(Chart("n", "t", "round", "y", False, [Curve("a", [(1, 0.0)])]))


@pytest.mark.parametrize("count", [3, 16, 40])
def test_every_name_is_on_the_drawing(count):
    """Curves that end beside each other near zero push each other's names up, not off."""
    svg = drawing(
        Chart(
            "n",
            "t",
            "sequences",
            "y",
            True,
            [Curve(f"n{i}", [(1, 1.0), (8, 90.0 if not i else 2.0)]) for i in range(count)],
        )
    )
    height = float(re.search(r'viewBox="0 0 \d+ (\d+)"', svg)[1])
    found = sorted(float(y) for y in re.findall(r'y="([\d.]+)" fill="[^"]+">n\d+<', svg))
    assert len(found) == count
    assert found[0] > 0
    assert found[-1] < height - 20
    assert all(b - a >= 13.9 for a, b in itertools.pairwise(found))


def test_labels_keep_their_methods_colour_and_do_not_look_alike():
    labels = ["bf16", "fp8", "saw-int4", "hqmq-s24_r3", "hqmq-s96_r4", "turboquant_4bit_nc", "int4_per_token_head"]
    found = curve_styles(labels, BASELINES)
    assert len({(style.color, style.dashes) for style in found.values()}) == len(labels)
    assert found["hqmq-s24_r3"].color == found["hqmq-s96_r4"].color
    assert curve_styles(["fp8"], BASELINES)["fp8"].color == found["fp8"].color


def test_page_of_a_folder_with_served_rows(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, rows in ((here, ROWS[:2]), (there, ROWS[2:])):
        folder.mkdir()
        (folder / "serve.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main(["bench", "page", "--out", str(here), "--add", str(there)]) == 0
    assert json.loads((here / "serve.json").read_text()) == ROWS
    assert {p.suffix for p in here.iterdir()} == {".jsonl", ".json", ".html", ".svg"}
    assert not (here / "bench.html").exists()


def test_an_end_that_nobody_collected_is_an_end(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    end = time.monotonic() + 600
    while lives(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not serve_server._lives(process.pid)
    process.wait()
    assert not serve_server._lives(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_labels_that_are_refused():
    for text in ("=x", "a b=x", "a="):
        with pytest.raises(SpecError, match="write LABEL=COMMAND"):
            start_of(text)


DOCS = (Path(__file__).parents[3] / "docs/bench-serve.md").read_text()


def test_the_docs_name_every_option_and_no_other():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = {o for a in parser._actions for o in a.option_strings if o.startswith("--")} - {"--help"}
    theirs = {"--enable-prompt-tokens-details", "--kv-cache-metrics", "--kv-cache-metrics-sample", "--kv-cache-dtype",
              "--port", "--out", "--add"}  # fmt: skip
    assert set(re.findall(r"--[a-z][a-z-]*", DOCS)) - theirs == options


def test_the_docs_name_every_metric():
    load, replies = (
        Sessions(1, 2, 0, 64, 16, 4),
        [Reply(2, 64, 0, 1, 0.5, 1, [0.5], 2, 64, [], None, i, 64) for i in (1, 2)],
    )
    counters = "\n".join(f"{name}_total 1" for name in (
        "vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "vllm:num_preemptions",
        "vllm:kv_block_lifetime_seconds_count"))  # fmt: skip
    made = {figure.metric for _, figure in serve.figures_of(load, Run(replies, 1.0, pages=["", counters]), 16)}
    assert len(made) == 13
    assert made | {"kv_cache_tokens", serve.DONE} <= set(re.findall(r"`(\w+)`", DOCS))
