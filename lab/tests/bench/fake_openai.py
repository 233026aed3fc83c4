"""An OpenAI endpoint of known delays and bad manners: in a thread, or as a program that ``--start`` starts."""

import argparse
import asyncio
import json
import sys
import threading
import time
from contextlib import contextmanager

FIRST, GAP = 0.04, 0.01


class Fake:
    """Answers with a fixed delay; ``manners(number, asked)`` names what it does wrong with a request, by its number."""

    def __init__(self, first=FIRST, gap=GAP, manners=lambda number, asked: "", block=16, blocks=100, says_cached=True,
                 tail=0.0):  # fmt: skip
        self.first, self.gap, self.tail, self.manners = first, gap, tail, manners
        self.block, self.blocks, self.says_cached = block, blocks, says_cached
        self.seen, self.at, self.most, self.busy = [], [], 0, 0
        self.cached = {}  # blocks of prompts, oldest first
        self.hits = self.queries = self.evicted = 0
        self.sick = False
        self.with_ids = True

    # -- a prefix cache ----------------------------------------------------------------------------------------------

    def look_up(self, ids):
        """Tokens of whole blocks found; then all of them are in the cache."""
        keys = [tuple(ids[: i + self.block]) for i in range(0, len(ids) - self.block + 1, self.block)]
        found = 0
        for key in keys:
            if key not in self.cached:
                break
            found += self.block
        self.queries, self.hits = self.queries + len(ids), self.hits + found
        self.keep(keys)
        return found

    def keep(self, keys):
        for key in keys:
            self.cached.pop(key, None)
            self.cached[key] = True
            if len(self.cached) > self.blocks:
                self.cached.pop(next(iter(self.cached)))
                self.evicted += 1

    def metrics(self):
        return "\n".join([
            "# HELP vllm:prefix_cache_hits_total tokens", "# TYPE vllm:prefix_cache_hits_total counter",
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="a\\"b"}} {self.hits}.0',
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.queries}.0',
            f'vllm:num_preemptions_total{{engine="0"}} {float(self.evicted // 10)}',
            f"vllm:kv_block_lifetime_seconds_count {self.evicted}", "vllm:kv_block_lifetime_seconds_sum nan-ish",
            f'vllm:cache_config_info{{block_size="{self.block}",num_gpu_blocks="{self.blocks}"}} 1.0', "",
        ])  # fmt: skip

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def serve(self, reader, writer):
        try:
            line = (await reader.readline()).decode()
            length = 0
            while (header := (await reader.readline()).decode().strip().lower()) != "":
                if header.startswith("content-length:"):
                    length = int(header.split(":")[1])
            body = await reader.readexactly(length)
            await self.answer(line.split()[1], body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, path, body, writer):
        if path == "/health":
            plain(writer, 500 if self.sick else 200, b"")
        elif path == "/metrics":
            plain(writer, 200, self.metrics().encode())
        elif path == "/version":
            plain(writer, 200, b'{"version": "fake-1"}')
        elif path == "/v1/models":
            plain(writer, 200, json.dumps({"data": [{"id": "tiny", "max_model_len": 4096}]}).encode())
        else:
            self.busy += 1
            self.most = max(self.most, self.busy)
            try:
                await self.complete(json.loads(body), writer)
            finally:
                self.busy -= 1

    async def complete(self, asked, writer):
        number = len(self.seen)
        self.seen.append(asked)
        self.at.append(time.perf_counter())
        wrong = self.manners(number, asked)
        if wrong == "refused":
            return plain(writer, 400, b'{"error": {"message": "Token id 9 is out of vocabulary", "code": 400}}')
        if wrong == "hangs up":
            return None
        if wrong == "not http":
            return writer.write(b"220 mail.example.org ESMTP\r\n\r\n")
        chunked = number % 2 == 0  # both ways of saying where a body ends
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Connection: close\r\n\r\n")

        async def send(data, pieces=1):
            raw = data if isinstance(data, bytes) else f"data: {data}\n\n".encode()
            step = -(-len(raw) // pieces)
            for i in range(0, len(raw), step):
                part = raw[i : i + step]
                writer.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
                await writer.drain()
                if pieces > 1:
                    await asyncio.sleep(0.001)

        found = self.look_up(asked["prompt"])
        await asyncio.sleep(self.first)
        await send(b": ping\n\n")
        tokens = asked["max_tokens"] - (wrong == "short")
        ids = []
        for i in range(tokens):
            if i:
                await asyncio.sleep(self.gap)
            if wrong == "stalls" and i == 1:
                await asyncio.sleep(60)
            if wrong == "cut" and i == 2:
                return None
            if wrong == "not json" and i == 2:
                await send("{'text': 1}")
            if wrong == "not events" and i == 2:
                await send(b"<html>\n\n")
            if wrong == "not utf-8" and i == 2:
                await send(b"data: \xff\xfe\n\n")
            if wrong == "error" and i == 2:
                await send('{"error": {"message": "EngineCore encountered an issue.", "code": 500}}')
            ids.append(200 + i)
            choice = {"index": 0, "text": "née 漢字 🙂", "finish_reason": None}
            if asked.get("return_token_ids") and self.with_ids:
                choice["token_ids"] = [200 + i]
            await send(json.dumps({"choices": [choice]}, ensure_ascii=False), 7 if wrong == "slow bytes" else 1)
        self.keep([tuple((asked["prompt"] + ids[:-1])[: i + self.block])
                   for i in range(0, len(asked["prompt"]) + tokens - self.block, self.block)])  # fmt: skip
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}
        if self.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": found}
        if wrong != "no usage":
            await asyncio.sleep(self.tail)
            await send(json.dumps({"choices": [], "usage": usage}))
        await send("[DONE]")
        if chunked:
            writer.write(b"0\r\n\r\n")
        return None


def plain(writer, status, body):
    writer.write(f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


@contextmanager
def running(fake):
    """Serve in a thread; yields the address."""
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

    def work():
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(asyncio.start_server(fake.serve, "127.0.0.1", 0))
        port.append(server.sockets[0].getsockname()[1])
        ready.set()
        loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(300)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(300)
        assert not thread.is_alive()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--tokens", type=int, default=1600)
    p.add_argument("--refuse")
    p.add_argument("--die-after", type=int)
    p.add_argument("--child", action="store_true")
    args = p.parse_args()
    if args.refuse:
        sys.exit(f"INFO 11-22 10:00:00 [core.py:1] loading\nValueError: {args.refuse}\n"
                 "RuntimeError: Engine core initialization failed. See root cause above.")  # fmt: skip

    def manners(number, asked):
        if args.die_after is not None and number >= args.die_after:
            import os

            os._exit(1)
        return ""

    if args.child:
        import subprocess

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
    print(f"INFO GPU KV cache size: {args.tokens:,} tokens, Maximum concurrency 3x", flush=True)

    async def serve():
        server = await asyncio.start_server(Fake(0.005, 0.001, manners).serve, "127.0.0.1", args.port)
        async with server:
            await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
