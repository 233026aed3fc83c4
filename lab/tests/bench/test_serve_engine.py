"""Loads on an engine in this process: what replies say, and what becomes of an engine that fails or is too slow."""

from types import SimpleNamespace

import pytest

from kvcodec_lab.serve.engine import EngineTarget
from kvcodec_lab.serve.loads import Point, Prompts, Sessions, send_load
from lab.tests.bench.fake_time import fake_time


class Engine:
    """One token per request and step; finds prompts that begin as another one did."""

    def __init__(self, step_s=0.002, fails_at=None, most=10_000):
        self.step_s, self.fails_at, self.most = step_s, fails_at, most
        self.steps, self.running, self.seen, self.aborted = 0, {}, [], []
        self.clock = None

    def add_request(self, request_id, prompt, params):
        ids = prompt["prompt_token_ids"]
        if len(ids) > self.most:
            raise ValueError(f"{len(ids)} tokens, at most {self.most}")
        cached = max((n for n in map(len, self.seen) if ids[:n] in self.seen), default=0)
        self.running[request_id] = SimpleNamespace(ids=ids, said=[], left=params, cached=cached)

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, request_ids):
        self.aborted += request_ids
        for name in request_ids:
            self.running.pop(name, None)

    def step(self):
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("illegal memory access")
        self.clock.now += self.step_s
        outputs = []
        for name, r in list(self.running.items()):
            new = 7 + len(r.said)
            r.said.append(new)
            finished = len(r.said) == r.left
            if finished:
                self.seen.append(r.ids + r.said[:-1])
                del self.running[name]
            outputs.append(SimpleNamespace(
                request_id=name, outputs=[SimpleNamespace(token_ids=[new])], finished=finished,
                num_cached_tokens=r.cached,
            ))  # fmt: skip
        return outputs


def send(engine, load, **more):
    async def run():
        target = EngineTarget(engine, lambda new: new, **more)
        async with target.running():
            return await send_load(target, load, Prompts(0, 500), probe=0.01), target

    with fake_time() as runner:
        engine.clock = runner.get_loop().clock  # a step blocks: no other timer of the loop fires meanwhile
        return runner.run(run())


def test_a_point_has_its_clients_at_once_and_every_token_timed():
    engine = Engine()
    run, target = send(engine, Point(8, 5, 6, 3))
    assert not run.failed
    assert not run.gone
    assert engine.steps == 10  # two times three clients
    assert [len(r.gaps) for r in run.replies] == [4] * 6
    assert target.tokens == sum(r.output_tokens for r in run.replies) == 30
    for reply in run.replies:
        assert reply.ttft == pytest.approx(0.002)
        assert reply.gaps == pytest.approx([0.002] * 4)
        assert reply.latency == pytest.approx(reply.ended - reply.started) == pytest.approx(0.01)


def test_sessions_find_what_their_rounds_before_computed():
    run, _ = send(Engine(), Sessions(2, 3, 4, 8, 6, 5, together=True))
    later = [r for r in run.replies if r.round > 1]
    assert len(later) == 4
    assert all(r.cached_tokens == r.prefix_tokens > 0 for r in later)
    assert len(run.pages) == 4


def test_a_refused_request_is_a_failed_one_and_others_go_on():
    run, _ = send(Engine(most=9), Sessions(1, 2, 0, 8, 6, 2))
    assert [r.ok for r in run.replies] == [True, False]
    assert run.failed[0].error.kind == "refused"
    assert "16 tokens, at most 9" in run.failed[0].error.text
    assert not run.gone


def test_an_engine_that_breaks_ends_the_load_with_what_it_said():
    run, target = send(Engine(fails_at=4), Point(8, 5, 6, 2))
    assert run.gone
    assert {r.error.kind for r in run.failed} == {"connection"}
    assert "illegal memory access" in run.failed[0].error.text
    assert run.unsent >= 2
    assert target.tokens == 6


def test_time_that_is_over_ends_the_load_and_empties_the_engine():
    engine = Engine(step_s=0.02)
    run, target = send(engine, Point(8, 50, 4, 2), seconds=0.1)
    assert run.gone
    assert {r.error.kind for r in run.failed} == {"timeout"}
    assert len(engine.aborted) == 2
    assert not engine.running
    assert engine.steps == 6  # the first that ends behind 0.1 s
    assert target.tokens == 12
