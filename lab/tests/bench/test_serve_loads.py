"""Loads: how many clients, when, which prompts, what is counted when things go wrong; figures of made-up replies."""

import asyncio
import itertools

import aiohttp
import numpy as np
import pytest

from kvcodec_lab.serve.bench import figures_of
from kvcodec_lab.serve.client import Reply, Target
from kvcodec_lab.serve.http import Endpoint, RequestError
from kvcodec_lab.serve.loads import Point, Prompts, Run, Sessions, arrivals, send_load
from kvcodec_lab.serve.metrics import (
    Capacity,
    Page,
    capacity,
    counted,
    errors_of,
    latencies,
    quantiles,
    residency,
    throughput,
)
from lab.tests.bench.fake_openai import Fake
from lab.tests.bench.fake_time import run_with

PROMPTS = Prompts(0, 1000)


def send(fake, load, timeout=20.0, **options):
    """On a clock of its own: a run takes what its pauses add up to."""
    target = Target(Endpoint("127.0.0.1", 80), "tiny", timeout)
    return run_with(fake.serve, send_load(target, load, PROMPTS, probe=0.01, **options))


def test_as_many_clients_as_asked_for_each_with_its_own_prompts():
    fake, told = Fake(0.03, 0.001), []
    point = Point(32, 4, 11, concurrency=3)
    run = send(fake, point, warmups=2, tick=lambda *now: told.append(now))
    assert (len(run.replies), run.unsent, run.gone, fake.most) == (11, 0, False, 3)
    assert told == [(i + 1, 11, 0) for i in range(11)]
    prompts = [tuple(asked["prompt"]) for asked in fake.seen]
    assert len(set(prompts)) == 13  # warm-ups among them: nobody finds another's blocks
    assert {len(p) for p in prompts} == {32}
    assert all(100 <= i < 1000 for p in prompts for i in p)
    assert run.wall == pytest.approx(4 * (0.03 + 3 * 0.001))  # 11 requests of 3 clients: the longest client has 4
    assert len(run.pages) == 2


def test_prompts_are_the_same_for_the_same_seed_and_no_other():
    same = Prompts(0, 1000).ids("a", 1, 50)
    assert PROMPTS.ids("a", 1, 50) == same
    assert PROMPTS.ids("a", 1, 60)[:50] == same
    others = [Prompts(1, 1000).ids("a", 1, 50), PROMPTS.ids("b", 1, 50), PROMPTS.ids("a", 2, 50)]
    assert all(other != same for other in others)
    assert set(Prompts(0, 8).ids("a", 0, 99)) == {7}  # a toy's vocabulary


def test_an_open_loop_sends_at_its_times_whatever_the_server_does():
    point = Point(16, 2, 20, rate=50.0)
    times = list(arrivals(point, 0))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20 / 50.0)
    fake = Fake(0.5, 0.0)
    run = send(fake, point)
    assert fake.most == 20  # nobody waited for an answer
    assert fake.at == pytest.approx(times)
    assert run.wall == pytest.approx(0.5 + times[-1])


def test_gaps_of_an_open_loop_are_exponential():
    gaps = np.diff(list(arrivals(Point(1, 1, 4000, rate=2.0), 3)))
    assert gaps.mean() == pytest.approx(0.5, rel=0.02)
    assert gaps.std() == pytest.approx(0.5, rel=0.1)


def test_failed_requests_are_counted_by_kind_and_are_in_no_time():
    wrong = {1: "refused", 2: "cut", 5: "not json"}
    run = send(Fake(0.0, 0.0, lambda number, asked: wrong.get(number, "")), Point(16, 4, 8, concurrency=2))
    found = errors_of(run)
    assert (found["failed"], run.unsent, run.gone) == (3, 0, False)
    assert {k: e["count"] for k, e in found["errors"].items()} == {"refused": 1, "cut": 1, "malformed": 1}
    assert found["errors"]["refused"]["first"] == "HTTP 400 Token id 9 is out of vocabulary"
    assert {f.n for f in latencies(run.replies) if f.metric in ("ttft_ms", "e2e_ms", "tpot_ms")} == {5}


def test_a_server_that_is_gone_gets_nothing_more():
    fake = Fake(0.0, 0.0)
    fake.manners = lambda number, asked: setattr(fake, "sick", number >= 3) or ("hangs up" if number >= 3 else "")
    run = send(fake, Point(16, 4, 50, concurrency=2))
    assert (run.gone, len(run.replies), run.unsent) == (True, 5, 45)  # two were on their way
    fake = Fake(0.0, 0.0)
    fake.manners = lambda number, asked: setattr(fake, "sick", True) or "hangs up"
    run = send(fake, Point(16, 4, 9, rate=20.0))
    assert (run.gone, len(run.replies), run.unsent) == (True, 1, 8)


def test_a_server_that_hangs_up_on_one_lives():
    run = send(Fake(0.0, 0.0, lambda number, asked: "hangs up" * (number == 0)), Point(16, 4, 6, concurrency=2))
    assert (run.gone, len(run.failed), len(run.replies)) == (False, 1, 6)


def test_an_interrupt_as_a_connection_closes_is_not_lost(monkeypatch):
    fake = Fake(0.0, 0.0)

    async def interrupted():
        load = asyncio.create_task(
            send_load(Target(Endpoint("127.0.0.1", 80), "tiny", 20.0), Point(16, 2, 50, 1), PROMPTS)
        )

        async def close_interrupted(client):
            if fake.seen:
                load.cancel()
            await close(client)

        close = aiohttp.ClientSession.close
        monkeypatch.setattr(aiohttp.ClientSession, "close", close_interrupted)
        with pytest.raises(asyncio.CancelledError):
            await load

    run_with(fake.serve, interrupted())
    assert len(fake.seen) == 1  # no second one was sent


SESSIONS = Sessions(sessions=3, rounds=4, shared=32, context=64, turn=24, answer=8)


@pytest.mark.parametrize("together", [False, True])
def test_a_session_grows_by_its_answers_and_tools(together):
    fake = Fake(0.005, 0.0, blocks=10_000)
    load = Sessions(3, 4, 32, 64, 24, 8, together=together)
    run = send(fake, load, warmups=1)
    assert (len(run.replies), len(run.failed), len(run.pages)) == (12, 0, 5 if together else 2)
    rounds = fake.seen[1:]
    assert all(asked["return_token_ids"] for asked in rounds)
    by_session = {}
    for asked in rounds:
        by_session.setdefault(tuple(asked["prompt"][:96]), []).append(asked["prompt"])
    assert len(by_session) == 3
    assert len({prompt[:32] for prompt in by_session}) == 1  # shared
    for prompts in by_session.values():
        assert [len(p) for p in prompts] == [96, 128, 160, 192]
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + 8] == [200 + i for i in range(8)]  # what the server said
    assert load.most_tokens == 192 + 8
    assert sorted(r.round for r in run.replies) == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    if together:
        assert [r.round for r in run.replies] == sorted(r.round for r in run.replies)
    second = [r for r in run.replies if r.round == 2]
    assert {r.prefix_tokens for r in second} == {96 + 7}
    assert {r.cached_tokens for r in second} == {96}  # whole blocks of 16
    (share, lost) = residency(run.replies, 16)
    assert (share.values["p20"], share.n, lost.values["p50"]) == (1.0, 9, 0)


def test_what_was_evicted_is_lost_and_computed_again():
    run = send(Fake(0.001, 0.0, blocks=12), SESSIONS)
    share, lost = residency(run.replies, 16)
    assert share.values["mean"] < 0.5
    found = sum(r.cached_tokens for r in run.replies if r.round > 1)
    whole = sum(r.prefix_tokens // 16 * 16 for r in run.replies)
    assert lost.values["p50"] == whole - found > 0
    figures = {f.metric: f.values["p50"] for f in counted(*run.pages)}
    assert figures["evicted_blocks_sampled"] > 0
    assert figures["preemptions"] > 0
    assert 0 <= figures["prefix_hit_share"] < 0.5


def test_answers_that_the_server_does_not_give_are_made_up():
    fake = Fake(0.0, 0.0)
    fake.with_ids = False
    run = send(fake, SESSIONS)
    assert not run.failed
    assert {len(asked["prompt"]) for asked in fake.seen} == {96, 128, 160, 192}
    assert {r.prefix_tokens for r in run.replies if r.round == 2} == {96}  # made-up ones are in no cache


def test_a_session_ends_where_it_fails():
    run = send(Fake(0.0, 0.0, lambda number, asked: "refused" * (number == 3)), SESSIONS)
    assert (len(run.failed), run.gone) == (1, False)
    assert run.unsent == 4 - run.failed[0].round
    assert len(run.replies) + run.unsent == 12


def test_pauses_are_between_rounds():
    run = send(Fake(0.0, 0.0), Sessions(1, 3, 0, 32, 8, 2, pause=0.1))
    assert run.wall == pytest.approx(0.2)


# -- figures -----------------------------------------------------------------------------------------------------------


def reply(ttft, gaps, prompt=100, **more):
    return Reply(
        len(gaps) + 1, prompt, 0.0, ttft + sum(gaps), ttft, ttft + sum(gaps), list(gaps), len(gaps) + 1, **more
    )


REPLIES = [reply(0.1, [0.01] * 9), reply(0.2, [0.03] * 9), reply(0.3, [])]


def test_figures_are_those_of_vllms_benchmark():
    broken = Reply(10, 100, error=RequestError("cut", ""))
    sums = {f.metric: (f.values["p50"], f.n) for f in throughput([*REPLIES, broken], 2.0)}
    assert sums == {"requests_per_s": (1.5, 3), "output_tokens_per_s": (10.5, 3), "total_tokens_per_s": (160.5, 3)}
    found = {f.metric: f for f in latencies([*REPLIES, broken])}
    assert found["ttft_ms"].values == {"p20": 140, "p50": 200, "p80": 260, "p99": 298, "mean": 200}
    assert found["tpot_ms"].values["mean"] == 20  # of the two with more than one token
    assert found["tpot_ms"].n == 2
    assert (found["itl_ms"].n, found["itl_ms"].values["p50"]) == (18, 20)
    assert found["e2e_ms"].values["p99"] == pytest.approx(300 + 0.98 * 170)
    assert found["request_tokens_per_s"].values["mean"] == pytest.approx((10 / 0.09 + 10 / 0.27) / 2, rel=1e-5)
    assert throughput([broken], 1.0) == latencies([broken]) == []


def test_quantiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=101).tolist()
    found = quantiles(values, 1e3)
    assert found["p99"] == round(float(np.percentile(values, 99)) * 1e3, 4)
    assert quantiles([2.0]) == {"p20": 2, "p50": 2, "p80": 2, "p99": 2, "mean": 2}


def test_rounds_are_counted_one_by_one_and_warm_and_late_together():
    load = Sessions(2, 6, 0, 64, 16, 4)
    replies = [reply(0.1 * i, [0.01], round=i, prefix_tokens=64 * (i > 1), cached_tokens=32) for i in range(1, 7)] * 2
    found = list(figures_of(load, Run(replies, 1.0, pages=["", ""]), 16))
    medians = {shape.removeprefix(load.name): f.values["p50"] for shape, f in found if f.metric == "ttft_ms"}
    expected = {f"_r{i}": 100 * i for i in range(1, 7)}
    assert medians == pytest.approx({"": 350} | expected | {"_r2-3": 250, "_r4-6": 500})
    shares = {shape.removeprefix(load.name): f.values["p50"] for shape, f in found if f.metric == "prefix_residency"}
    assert set(shares) == {"", *(f"_r{i}" for i in range(2, 7)), "_r2-3", "_r4-6"}
    assert set(shares.values()) == {0.5}


def test_counters_per_round_where_rounds_wait_for_each_other():
    load = Sessions(1, 2, 0, 64, 16, 4, together=True)
    pages = [f"vllm:prefix_cache_hits_total {h}\nvllm:prefix_cache_queries_total {q}" for h, q in
             ((10, 100), (10, 200), (85, 300))]  # fmt: skip
    found = list(figures_of(load, Run([reply(0.1, [0.1], round=i) for i in (1, 2)], 1.0, pages=pages), 16))
    shares = {shape.removeprefix(load.name): f.values["p50"] for shape, f in found if f.metric == "prefix_hit_share"}
    assert shares == {"": 0.375, "_r1": 0.0, "_r2": 0.75}


def test_metrics_pages():
    page = Page('# HELP a b\na{x="1",y="q\\"}{"} 2\na{x="2"} 3.5\nb_total 1e3\nbroken\nc{} NaN-ish\n')
    assert (page.total("a"), page.total("b"), page.total("c")) == (5.5, 1000.0, None)
    assert page.labels("a")[0] == {"x": "1", "y": 'q\\"}{'}
    assert counted("", "") == []
    assert counted("vllm:num_preemptions_total 3", "vllm:num_preemptions_total 5")[0].values["p50"] == 2


BLOCKS = 'block_size="16",num_gpu_blocks="100"'


@pytest.mark.parametrize(
    ("log", "labels", "expected"),
    [
        ("x GPU KV cache size: 797,488 tokens, y\n", [], Capacity(797_488, None)),
        ("", [BLOCKS], Capacity(1600, 16)),
        ("", [f'{BLOCKS},kv_cache_size_tokens="900"'], Capacity(900, 16)),
        ("size: GPU KV cache size: 700 tokens", [BLOCKS], Capacity(700, 16)),
        ("GPU KV cache size: 70 tokens\n" * 3, ['engine="0"', 'engine="1"'], Capacity(140, None)),
        ("", ['block_size="None"'], Capacity(None, None)),
    ],
)
def test_capacity_from_log_or_metrics(log, labels, expected):
    page = "\n".join(f"vllm:cache_config_info{{{one}}} 1.0" for one in labels)
    assert capacity(log, page) == expected
