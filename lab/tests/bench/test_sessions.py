"""``packedkv bench serve``: sessions against a server of known answers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from packedkv.cli.main import main
from packedkv.errors import KVError, SpecError
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.sessions import Server, Sessions, session_rows

LOAD = Sessions(sessions=3, rounds=3, shared=8, context=16, turn=4, answer=5)


class Fake(BaseHTTPRequestHandler):
    """Streams ``max_tokens`` tokens, finds all but two tokens of a later prompt, and refuses what it is told to."""

    def log_message(self, *_):
        pass

    def _reply(self, text, kind="application/json", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self._reply(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked["authorization"] = self.headers.get("Authorization")
        self.server.asked.append(asked)
        if self.server.refuse(asked):
            return self._reply('{"error": "too long"}', status=400)
        n, events = asked["max_tokens"], []
        events += [{"choices": [{"text": "x", "token_ids": [len(self.server.asked) % 7 + 1]}]} for _ in range(n)]
        cached = {"cached_tokens": max(0, len(asked["prompt"]) - 30)}
        events.append({"choices": [], "usage": {"completion_tokens": n, "prompt_tokens_details": cached}})
        return self._reply(
            "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n", "text/event-stream"
        )


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    server.asked, server.refuse = [], lambda asked: False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def rows_of(url, load=LOAD, **options):
    recorder = Recorder(None, {}, lambda _: None)
    session_rows(Server(url, **options), load, recorder, label="s")
    return {(r["metric"], r["shape"]): r for r in recorder.new}


def test_every_prompt_is_the_previous_one_its_answer_and_a_tools_output(served):
    rows = rows_of(served.url)
    prompts = sorted((asked["prompt"] for asked in served.asked), key=len)
    assert [len(p) for p in prompts] == [24] * 3 + [33] * 3 + [42] * 3
    assert len({tuple(p[:8]) for p in prompts}) == 1, "the prefix is shared"
    assert len({tuple(p[8:24]) for p in prompts}) == 3, "the context is not"
    for later in prompts[3:]:
        assert any(later[: len(p)] == p for p in prompts if len(p) == len(later) - 9)
    assert all(min(p[:24]) >= 100 for p in prompts)
    assert rows["requests_done", LOAD.name]["values"]["p50"] == 9
    assert rows["requests_done", LOAD.name]["errors"] == []
    for turn in (1, 2, 3):
        assert rows["ttft_ms", f"{LOAD.name}_r{turn}"]["n"] == 3
    # of round 2, 24 + 4 tokens ran before, and 3 are found; round 1 knows none
    assert rows["prefix_residency", f"{LOAD.name}_r2"]["values"]["p50"] == pytest.approx(3 / 28, abs=1e-4)
    assert ("prefix_residency", f"{LOAD.name}_r1") not in rows


def test_a_failure_ends_its_session_and_is_said(served):
    served.refuse = lambda asked: len(asked["prompt"]) == 33
    rows = rows_of(served.url)
    assert rows["requests_done", LOAD.name]["values"]["p50"] == 3
    (error,) = rows["requests_done", LOAD.name]["errors"]
    assert "returned HTTP 400" in error
    assert "too long" in error


def test_a_server_that_is_not_there_or_no_address():
    with pytest.raises(KVError, match="does not answer"):
        rows_of("http://127.0.0.1:9")
    with pytest.raises(SpecError, match="is not the address of a server"):
        rows_of("ftp://x")


def test_the_command_writes_rows_and_page(served, capsys, tmp_path):
    sizes = ["--sessions", "2", "--rounds", "2", "--shared", "8", "--context", "1k", "--turn", "4", "--answer", "5"]
    arguments = ["bench", "serve", served.url, "--label", "bf16", "--header", "Authorization: Bearer x", *sizes]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "ttft_ms" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"serve.jsonl", "serve.json", "bench.html"}
    assert {asked["authorization"] for asked in served.asked} == {"Bearer x"}
    served.refuse = lambda asked: True
    assert main(arguments) == 1
    with pytest.raises(SystemExit):
        main(["bench", "serve"])
    assert "required: URL" in capsys.readouterr().err


def test_a_header_without_a_value_is_refused(served, capsys):
    assert main(["bench", "serve", served.url, "--header", "Authorization=x"]) == 2
    assert "--header 'Authorization=x': expected 'NAME: VALUE'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--concurrency", "--start", "--load"])
def test_options_of_a_sweep_name_vllms_own_command(capsys, option):
    with pytest.raises(SystemExit) as error:
        main(["bench", "serve", "http://x", option, "1"])
    assert error.value.code == 2
    assert "vllm bench serve" in capsys.readouterr().err
