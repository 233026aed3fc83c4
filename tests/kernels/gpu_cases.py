"""Random cases of the CUDA kernels on a GPU, against the reference there: bytes of encode, error of decode and prefill.

    python -m tests.kernels.gpu_cases --cases 10000 --out cases.json

Encoded bytes have to be those of the codec. Attention's error, against float64 over what the codec decodes, may be
twice that of PyTorch's bf16 attention over the same decoded keys and values. Of 10,000 cases bf16's roundings cancel in
a few: there bf16's error is taken over several roundings of the same problem (``expected``), and the row says so.

A case again: ``--presets kivi-4 --dims 256 --seed 2400 --cases 1`` with the preset, head_dim and seed of its row (the
page is that of a first combination, 64, or the least multiple of it that the codecs take).
"""

import argparse
import itertools
import json
import math
import multiprocessing
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import packedkv
from packedkv.atomic import whole_file
from packedkv.attention import Seen
from packedkv.codec import ROLES, Params, Payload, Role, Sample, Site
from packedkv.codecs.ghost import Ghost
from packedkv.description import kernels_for
from packedkv.errors import ShapeError
from packedkv.kernels import spec as specs
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cuda import build, encode, launch, prefill
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.mean import BLOCK, MOST_POSITIONS, KeyMean, key_mean, most_pairs, pairs_of
from packedkv.kernels.tokens import NewTokens, Rules, StepTokens
from packedkv.layout import PageLayout
from packedkv.ops.rope import Rotary
from packedkv.store.pages import PageStore
from tests.kernels.decode_cases import fit_klt

DIMS = (64, 96, 128, 192, 256, 512, 80)
VARIANTS = (
    "hqmq-s96_r4:outliers=3", *(f"ghost-4:bits={bits}" for bits in (2.5, 3.5, 4.5, 5)), "ghost-3:transform=klt",
    "ghost-4:transform=klt",
)  # fmt: skip
"""What is read beside the presets by readers of its own."""
ASKS = 4
"""Cases of a layer: what is encoded is the better part of a case's time."""
CHUNK = 48
"""Cases of a job at most, of whole layers: first jobs of all combinations, which compile programs, then second ones."""
PAGES = (64, 128, 32)
FEW = 16
LENGTHS = (1, 40, 64, 200, 700, 700, 3000)
PREFILLS = 0.2
"""How many of the cases are of prefill, too."""
LONG, LONGEST = (20_000, 50_000, 131_072), 1 << 20
"""Tokens of one layer in thirty, and of one case for each preset."""
STEP = 16384
"""Tokens that the reference encodes and decodes at a time; whole blocks of every codec."""
SLACK = 2e-4
"""Where bf16 attention happens to be nearly exact (one token), fp16 queries and scores still round."""


class Combination(NamedTuple):
    """What programs are compiled for, the better part of the time; ``of_programs`` has what else decides on them."""

    preset: str
    dim: int
    page: int


def combinations(presets: list[str] | None = None, dims: tuple[int, ...] = DIMS) -> list[Combination]:
    """Return what the kernels read, one page size each, in turn."""
    found = []
    for preset in presets or (*packedkv.presets(), *VARIANTS):
        scheme = packedkv.get(preset)
        for dim in dims:
            page = math.lcm(PAGES[len(found) % len(PAGES)], scheme.key.block_tokens, scheme.value.block_tokens)
            try:
                there = kernels_for(scheme, dim)["decode"] == "cuda"
            except ShapeError:  # ghost: not of so many bits
                continue
            if there:
                found.append(Combination(preset, dim, page))
    return found


def rows(rng: random.Random, gen: torch.Generator, shape: tuple[int, ...], role: str) -> tuple[Tensor, str]:
    """Draw numbers, and say by which law."""
    x = torch.randn(shape, generator=gen, device=gen.device)
    law = rng.choice(("plain", "plain", "loud", "shifted", "spread", "small"))
    if law == "loud":
        x[..., :: rng.choice((7, 16, 31))] *= rng.choice((5.0, 20.0))
    elif law == "shifted":
        x += rng.choice((-3.0, 2.0))
    elif law == "spread":
        x *= 2.0 ** torch.randint(-4, 5, (*shape[:3], 1), generator=gen, device=gen.device)
    elif law == "small":
        x *= 0.02
    if shape[2] and rng.random() < 0.3:
        x[:, :, rng.randrange(shape[2])] = 0.0
    return (x if role == "value" or law != "plain" else x * rng.choice((0.5, 1.0, 2.0))), law


class Mean(NamedTuple):
    """The mean before RoPE that keys are held without: ``[1 or B, H, D]``; position of slot 0 of each sequence."""

    mean: Tensor
    rotary: Rotary
    placed: Tensor
    held: KeyMean

    def at(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``count`` slots from ``first`` on."""
        slots = torch.arange(first, first + count, device=self.placed.device)
        return self.rotary.angles(self.placed[:, None] + slots)

    def turned(self, first: int, count: int) -> Tensor:
        """What is subtracted from their keys: float32 ``[B, H, count, D]``."""
        return self.rotary.turned(self.mean[:, :, None], *self.at(first, count))


def mean_of(
    pairs: int, dim: int, rng: random.Random, gen: torch.Generator, batch: int, heads: int, tokens: int
) -> Mean:
    """Draw a mean in ``pairs`` pairs, all or fewer: before RoPE of all channels or half of them, or after RoPE."""
    device = gen.device
    turning = rng.choice((dim, dim, dim // 2, 0))
    theta = rng.choice((1e4, 1e6)) ** (-torch.arange(0, turning, 2, device=device).float() / max(turning, 1))
    rotary = Rotary(theta, rng.choice((1.0, 1.0, 1.3)) if turning else 1.0, bool(turning) and rng.random() < 0.3)
    size = (rng.choice((1, batch)), heads, dim)
    mean = torch.randn(size, generator=gen, device=device) * rng.choice((0.1, 0.5, 1.0, 3.0, 20.0))
    if pairs < dim // 2:
        channels = torch.tensor(pairs_of(dim, turning, rotary.interleaved))
        for head in range(heads):
            gone = torch.tensor(rng.sample(range(dim // 2), dim // 2 - rng.randint(1, pairs)))
            mean[:, head, channels[gone].flatten().to(device)] = 0.0
    most = rng.choice((0, 100, 100_000, MOST_POSITIONS - tokens))
    placed = torch.tensor([rng.randint(0, most) for _ in range(batch)], dtype=torch.int32, device=device)
    held = key_mean(mean, rotary.radians, scaling=rotary.scaling, interleaved=rotary.interleaved)
    assert held.pairs == pairs, f"{held.pairs} pairs have a mean, not {pairs}"
    return Mean(mean, rotary, placed, held)


class Layer(NamedTuple):
    """One layer's pages, as a cache would hold them, and what they decode to."""

    store: PageStore
    spec: str
    key: Constants
    value: Constants
    keys: Tensor
    values: Tensor
    note: str
    laws: list[str]
    mean: Mean | None

    @property
    def term(self) -> dict[str, Any]:
        """Arguments of a reader for the mean."""
        return {} if self.mean is None else {"mean": self.mean.held, "origin": self.mean.placed}

    @property
    def packed(self) -> prefill.Packed:
        """All of it, to unpack."""
        return prefill.Packed(self.store.pages, self.store.table, self.spec, self.key, self.value, **self.term)

    def attend(
        self, q: Tensor, lens: list[int], starts: list[int], rules: Rules | None = None,
        dense: Sequence[Tensor | None] = (None, None), config: launch.Config | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Decode attention of ``q [B, HQ, 1, D]`` over the slots from ``starts`` to ``lens``, and log-sum-exp."""
        begin, end = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in (starts, lens))
        placed = self.term.get("origin")
        tokens = StepTokens(self.store.pages, self.store.table, end, begin if any(starts) else None, placed, *dense)
        return attention.decode_attention(
            q, tokens, rules or Rules(q.shape[3] ** -0.5), spec=self.spec, key=self.key, value=self.value,
            mean=self.term.get("mean"), config=config,
        )  # fmt: skip


def fill(
    c: Combination, rng: random.Random, gen: torch.Generator, batch: int, heads: int, tokens: int,
    mean: Mean | None = None, kernels: bool = True, dtype: torch.dtype | None = None,
) -> Layer:  # fmt: skip
    """Encode random keys and values, also with the kernels if there are some; raise if a byte is not the codec's."""
    scheme, device = packedkv.get(c.preset), gen.device
    pairs = mean.held.pairs if mean is not None else 0
    pair = specs.decode_spec(scheme.key, scheme.value, c.dim, c.page, pairs)
    target = specs.encode_spec(scheme.key, scheme.value, c.dim, c.page, mean=pairs > 0)
    layout = PageLayout(scheme.key.layout(c.dim), scheme.value.layout(c.dim), c.page)
    columns = -(-tokens // c.page)
    store = PageStore(layout, batch, heads, device)
    spare = 3
    store.pages = torch.randint(
        0, 256, (batch * columns + spare, heads, layout.page_bytes), generator=gen, device=device, dtype=torch.uint8
    )
    order = torch.randperm(batch * columns + spare, generator=gen, device=device)[: batch * columns]
    store.table = order.to(torch.int32).view(batch, columns).contiguous()
    dtype = dtype or rng.choice((torch.bfloat16, torch.float16, torch.float32))
    first = torch.zeros(batch, dtype=torch.int32, device=device)
    parts = range(0, tokens, STEP)
    params: dict[str, Params] = {}
    payloads: dict[str, list[Payload]] = {}
    laws: list[str] = []
    new: dict[Role, Tensor] = {}
    held = {role: Constants(None, None, 1) for role in ROLES}
    for role in ROLES:
        codec, side = scheme.codec(role), target.encoder(role)
        site = Site(rng.randrange(8), role, heads, c.dim, rng.randrange(1000), device)
        x, law = rows(rng, gen, (batch, heads, tokens, c.dim), role)
        less = mean if role == "key" else None
        x = (x if less is None else x + less.turned(0, tokens)).clamp(-60000, 60000).to(dtype)
        laws.append(law)
        x = x.to(codec.held_dtype(dtype)) if dtype == torch.float32 else x
        y = x.float() if less is None else x.float() - less.turned(0, tokens)
        fitted = fit_klt(codec, site, y) if isinstance(codec, Ghost) and "queries" in codec.needs else None
        fitted = fitted or codec.fit(site, Sample(y))
        params[role] = own = {name: value.to(device) for name, value in fitted.items()}
        payloads[role] = [codec.encode(codec.to_code(y[:, :, at : at + STEP], own), own) for at in parts]
        if side is not None:
            new[role], held[role] = x, constants_for(side, own, heads, c.dim)
    bad, before = torch.zeros(1, dtype=torch.int32, device=device), store.pages.clone()
    if kernels and new:
        less = None
        if mean is not None and target.mean:
            less = encode.RotatedMean(mean.mean, *mean.at(0, tokens), mean.rotary.interleaved)
        encode.encode_to_pages(
            NewTokens(new, first, bad, less), store.pages, store.table, spec=specs.text_of(target), key=held["key"],
            value=held["value"],
        )  # fmt: skip
    written, store.pages = store.pages, before

    def write(role: str) -> None:
        for i, payload in enumerate(payloads[role]):
            store.write(role, i * STEP, payload)

    for role in new:
        write(role)
    if kernels and (int(bad) or not torch.equal(written, store.pages)):
        wrong = int((written != store.pages).sum())
        raise AssertionError(f"encode: {wrong} bytes differ, bad={int(bad)}, {dtype}")
    decoded, tensors = {}, {}
    for role in ROLES:
        if role not in new:
            write(role)
        codec, own = scheme.codec(role), params[role]
        tensors[role] = constants_for(specs.reader(codec, c.dim, role), own, heads, c.dim)
        back = (codec.decode(store.read(role, at, min(at + STEP, tokens)), own) for at in parts)
        decoded[role] = torch.cat([codec.from_code(part, own) for part in back], 2)
        if role == "key" and mean is not None:
            decoded[role] = decoded[role] + mean.turned(0, tokens)
    note = ",".join(role for role in ROLES if role not in new)
    return Layer(
        store, specs.text_of(pair), tensors["key"], tensors["value"], decoded["key"], decoded["value"], note,
        laws, mean,
    )  # fmt: skip


def truth(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, sinks: Tensor | None, hidden: Tensor | None = None,
    rounds: bool = False,
):  # fmt: skip
    """Attention in float64 of one sequence: ``q [HQ, n, D]`` over ``k, v [H, t, D]``; ``rounds``: weights in bf16."""
    (hq, n, dim), heads = q.shape, k.shape[0]
    k, v = k.double(), v.double()
    s = (q.double().reshape(heads, hq // heads * n, dim) @ k.mT).view(hq, n, k.shape[1]) * scale
    s = cap * torch.tanh(s / cap) if cap else s
    s = s if hidden is None else s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], -1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], 1)
    if not s.shape[-1]:
        return torch.zeros_like(q, dtype=torch.float64)
    p = s.softmax(-1)
    p = p.bfloat16().double() if rounds else p
    return (p.view(heads, hq // heads * n, p.shape[-1]) @ v).view(hq, n, dim)


def rounded(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, sinks: Tensor | None, hidden: Tensor | None = None
):
    """The same as PyTorch's attention computes it from bf16 tensors (its own kernel unless a cap or sinks forbid)."""
    group = q.shape[0] // k.shape[0]
    q, k, v = (x.bfloat16() for x in (q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)))
    if not cap and sinks is None and k.shape[1]:
        seen = None if hidden is None else ~hidden
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=scale)[0]
    s = (q.float() @ k.float().mT) * scale
    s = cap * torch.tanh(s / cap) if cap else s
    s = s if hidden is None else s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.float()[:, None, None].expand(-1, s.shape[1], 1)], -1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], 1)
    return (s.softmax(-1).bfloat16().float() @ v.float()).bfloat16()


DRAWS = 16


def expected(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, sinks: Tensor | None, want: Tensor, gen: torch.Generator
) -> float:
    """Error of bf16 attention, root mean square over ``DRAWS`` roundings of the same numbers.

    Keys and values are multiplied by a random number in [1, 2) for each channel, rounded, and divided by it; so are
    queries, unless they are bf16 and bf16 attention takes them as they are.
    """

    def once(x: Tensor) -> Tensor:
        factor = 1 + torch.rand(x.shape[-1], generator=gen, device=x.device)
        return (x.float() * factor).bfloat16().double() / factor

    errors = []
    for _ in range(DRAWS):
        got = truth(q if q.dtype == torch.bfloat16 else once(q), once(k), once(v), scale, cap, sinks, rounds=True)
        errors.append(distance(got, want))
    return math.sqrt(sum(e * e for e in errors) / DRAWS)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-30))


class Programs(NamedTuple):
    """What a combination draws once, because programs are compiled for it.

    Heads that share a KV head, all up to 4 or all more; soft cap of all scores, 0: none; warps of a team, and teams;
    pairs of channels with a mean.
    """

    groups: list[int]
    cap: float
    warps: int
    teams: int
    pairs: int


def of_programs(c: Combination) -> Programs:
    rng = random.Random(repr(c))
    groups = [rng.choice((1, 2, 3)), 4] if rng.random() < 0.5 else rng.sample((7, 8, 9, 12, 16), 3)
    cap, warps, teams = 30.0 if rng.random() < 0.25 else 0.0, rng.choice((1, 2)), rng.choice((2, 3))
    pairs = rng.choice((0, BLOCK, most_pairs(c.dim))) if packedkv.get(c.preset).key.block_tokens == 1 else 0
    return Programs(groups, cap, warps, teams, pairs)


class Asked(NamedTuple):
    """A layer of several cases: its encoded tokens, of how many sequences, and whether these are long."""

    layer: Layer
    batch: int
    tokens: int
    long: bool


@lru_cache(maxsize=1)  # until its cases are done
def layer_of(c: Combination, number: int, device: str, longest: bool) -> Asked:
    """Draw a layer; ``longest``: of ``LONGEST`` tokens."""
    rng, gen = random.Random(f"layer {number}"), torch.Generator(device).manual_seed(number)
    batch, heads, length = rng.choice((1, 1, 2, 3, 5)), rng.choice((1, 2, 4)), rng.choice(LENGTHS)
    long = longest or rng.random() < 0.03
    if longest:
        batch, heads, length = 1, 1, LONGEST
    elif long:
        batch, heads, length = min(batch, 2), min(heads, 2), rng.choice(LONG)
    block = math.lcm(*(x.block_tokens for x in (packedkv.get(c.preset).key, packedkv.get(c.preset).value)))
    tokens = -(-length // block) * block
    pairs = of_programs(c).pairs
    mean = mean_of(pairs, c.dim, rng, gen, batch, heads, tokens) if pairs else None
    return Asked(fill(c, rng, gen, batch, heads, tokens, mean), batch, tokens, long)


def decode_case(c: Combination, seed: int, device: str, longest: bool = False) -> dict[str, Any]:
    """One random case of encode, decode attention and, sometimes, prefill; its errors. ``ASKS`` cases share a layer."""
    layer, batch, tokens, few_splits = layer_of(c, seed // ASKS, device, longest)
    rng, gen = random.Random(seed), torch.Generator(device).manual_seed(seed)
    heads, programs = layer.store.heads, of_programs(c)
    group = programs.groups[0] if longest else rng.choice(programs.groups)
    some = (tokens, rng.randint(tokens // 2, tokens)) if few_splits else (0, 1, 15, tokens, tokens)
    lens = [rng.choice((*some, rng.randint(0, tokens))) % (tokens + 1) for _ in range(batch)]
    begins = [rng.choice((0, 0, rng.randint(0, n))) for n in lens]
    hq, cap, sinks = heads * group, programs.cap, None
    dtype, loud = rng.choice((torch.bfloat16, torch.float16, torch.float32)), rng.choice((0.1, 0.5, 1.0, 4.0))
    # as a model's projection leaves it
    q = torch.randn(batch, 1, hq, c.dim, generator=gen, device=device).to(dtype).transpose(1, 2) * loud
    if rng.random() < 0.3:
        sinks = torch.randn(hq, generator=gen, device=device)
    dense: list[Tensor | None] = [None, None]
    if rng.random() < 0.4:
        dense = [
            torch.randn(batch, heads, rng.choice((1, 33, 130)), c.dim, generator=gen, device=device).bfloat16()
        ] * 2
    scale = c.dim**-0.5 * rng.choice((1.0, 1.0, 0.3))
    if few_splits and random.Random(f"equal {seed}").random() < 0.3:
        scale *= 1e-3  # nearly equal weights, whose products with scales may all be rounded to one side
    config = None
    if rng.random() < (0.8 if few_splits else 0.4):
        pair = specs.spec_of(layer.spec, specs.DecodeSpec)
        machine, apart = launch.machine(q.device), dense[0] is not None and not pair.joins
        config = launch.config_for(pair, batch * heads * pair.tiles(group), tokens, machine, apart)
        config = config._replace(splits=rng.choice((1, 1, 2, 5) if few_splits else (1, 2, 5, 70)))
        teams = config._replace(tile=min(32, config.tile), warps=programs.warps, resident=1, teams=programs.teams)
        shared = all(x.team_warps or x.by_head for x in (pair.key, pair.value))
        if not apart and rng.random() > 0.7 and shared and launch.shared_bytes(pair, teams) <= machine.shared_block:
            config = teams
    o, lse = layer.attend(q, lens, begins, Rules(scale, Seen(softcap=cap), sinks), dense, config)
    worst = {"error": 0.0, "bf16": 0.0, "ratio": 0.0}
    for b in range(batch):
        live = slice(begins[b], lens[b])
        k, v = layer.keys[b, :, live], layer.values[b, :, live]
        if dense[0] is not None and dense[1] is not None:
            k, v = torch.cat([k, dense[0][b].float()], 1), torch.cat([v, dense[1][b].float()], 1)
        want = truth(q[b], k, v, scale, cap, sinks)
        error, base = float(o[b].abs().max()), 0.0
        if float(want.norm()):
            error, base = distance(o[b], want), distance(rounded(q[b], k, v, scale, cap, sinks), want)
        ratio, drawn = error / (2 * base + SLACK), {}
        if math.isfinite(error) and ratio > 1:
            drawn = {"bf16_once": base}
            base = max(base, expected(q[b], k, v, scale, cap, sinks, want, gen))
            ratio = error / (2 * base + SLACK)
        if not ratio <= worst["ratio"]:  # a NaN as well
            worst = {"error": error, "bf16": base, "ratio": ratio, **drawn}
        if not math.isfinite(error) or not bool(torch.isfinite(lse[b]).all() | (lse[b] == -math.inf).all()):
            worst = {"error": math.inf, "bf16": base, "ratio": math.inf}
    asked = {
        "heads": heads, "group": group, "lens": lens, "starts": begins, "softcap": cap, "sinks": sinks is not None,
        "dense": 0 if dense[0] is None else dense[0].shape[2], "scale": scale, "q": f"{dtype} times {loud}",
        "laws": layer.laws, "config": config, "pairs": programs.pairs,
    }  # fmt: skip
    result = {**c._asdict(), "seed": seed, "tokens": tokens, "decode": worst, "case": asked}
    if layer.note:
        result["reference_encode"] = layer.note
    if rng.random() < PREFILLS and tokens >= 2:
        result["prefill"] = _prefill(layer, q, rng, gen, tokens, scale)
    return result


def _prefill(layer: Layer, like: Tensor, rng: random.Random, gen: torch.Generator, tokens: int, scale: float):
    n, (batch, hq, _, dim) = rng.choice((2, 16, 77)), like.shape
    q = torch.randn(batch, hq, n, dim, generator=gen, device=like.device).to(like.dtype)
    first = rng.choice((0, rng.randint(0, tokens - 1)))
    last = rng.randint(first + 1, tokens)
    got = prefill.attend_pages(q, layer.packed, first, last, scale)
    worst = {"error": 0.0, "bf16": 0.0, "ratio": 0.0}
    for b in range(batch):
        k, v = layer.keys[b, :, first:last], layer.values[b, :, first:last]
        want = truth(q[b], k, v, scale, 0.0, None)
        error, base = distance(got.out[b], want), distance(rounded(q[b], k, v, scale, 0.0, None), want)
        if not error / (2 * base + SLACK) <= worst["ratio"]:
            worst = {"error": error, "bf16": base, "ratio": error / (2 * base + SLACK)}
    return worst


Job = tuple[Combination, int, int, str, bool]
"""A combination, its first seed, how many cases, the device, and whether the first is of most tokens."""


def run_combination(job: Job) -> Iterator[dict[str, Any]]:
    """Run cases ``[first, first + count)`` of one combination; a case that raises is a failure with its text."""
    c, first, count, device, longest = job
    for seed in range(first, first + count):
        try:
            yield decode_case(c, seed, device, longest=seed == first and longest)
        except Exception as error:  # every failure is counted and shown
            yield {**c._asdict(), "seed": seed, "failed": f"{type(error).__name__}: {error}"[:300]}
            if "CUDA" in str(error) or "cuda" in str(error):
                raise  # the context is lost, and with it the process


def _work(run: Callable[[Any], Iterator[Any]], pipe: connection.Connection) -> None:
    """Send the rows of each job, then None, until there is no job: what a process of its own does."""
    while (job := pipe.recv()) is not None:
        for row in run(job):
            pipe.send(row)
        pipe.send(None)


def gathered(
    jobs: Iterable[Any], run: Callable[[Any], Iterator[Any]], processes: int, left: Callable[[], float]
) -> Iterator[Any]:
    """Yield the rows of jobs as they come from several processes, until no seconds are left: then those are ended.

    Where a process dies, its job's other cases are lost, and another process goes on with the next job.
    """
    context, waiting = multiprocessing.get_context("spawn"), deque(jobs)
    running: dict[Any, Any] = {}

    def begin() -> None:
        if waiting:
            own, other = context.Pipe()
            running[own] = context.Process(target=_work, args=(run, other), daemon=True)
            running[own].start()
            other.close()
            own.send(waiting.popleft())

    for _ in range(processes):
        begin()
    try:
        while running and (seconds := left()) > 0:
            for pipe in connection.wait(list(running), timeout=min(seconds, 1.0)):
                try:
                    row = pipe.recv()
                except EOFError:
                    process = running.pop(pipe)
                    process.join()
                    if process.exitcode:
                        print(f"a process ended with {process.exitcode}: its job's other cases are lost", flush=True)
                    begin()
                    continue
                if row is None:
                    pipe.send(waiting.popleft() if waiting else None)
                else:
                    yield row
    finally:
        for process in running.values():
            process.kill()
            process.join()


def bad(row: dict[str, Any]) -> bool:
    return "failed" in row or any(not row[k]["ratio"] <= 1 for k in ("decode", "prefill") if k in row)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--presets", default="")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=8, help="processes; 0: this one, as a sanitizer wants it")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which all ends, whatever compiles")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    started = time.time()
    wanted = combinations(args.presets.split(",") if args.presets else None, tuple(map(int, args.dims.split(","))))
    # hqmq's encoder tables take seconds of a processor for each case, so it gets fewer of them
    slow = sum(c.preset.startswith("hqmq") for c in wanted)
    least = -(-args.cases // len(wanted))
    few = min(FEW, least)
    each = least if slow == len(wanted) else -(-(args.cases - slow * few) // (len(wanted) - slow))
    each = -(-each // ASKS) * ASKS
    counts = [few if c.preset.startswith("hqmq") and slow < len(wanted) else each for c in wanted]
    jobs = [
        (c, args.seed + i * each + at, min(CHUNK, n - at), "cuda", c.dim == 128 and not at and ":" not in c.preset)
        for at in range(0, max(counts), CHUNK)
        for i, (c, n) in enumerate(zip(wanted, counts, strict=True))
        if at < n
    ]
    if reason := build.refusal(torch.device("cuda", 0)):
        print(f"no case can run: {reason}", file=sys.stderr)
        return 2

    def left() -> float:
        return args.deadline - (time.time() - started)

    if args.jobs:
        rows = gathered(jobs, run_combination, args.jobs, left)
    else:
        rows = itertools.takewhile(lambda _: left() > 0, (row for job in jobs for row in run_combination(job)))
    results: list[dict[str, Any]] = []
    written, total = 0.0, sum(counts)
    try:
        for row in rows:
            results.append(row)
            if bad(row):
                print(f"{time.time() - started:6.1f}s wrong: {json.dumps(row)[:1000]}", flush=True)
            if time.time() - written > 5:
                written = time.time()
                print(f"{written - started:6.1f}s {len(results)} of {total} cases", flush=True)
                report(args.out, results, total)
    finally:
        report(args.out, results, total)
    for c in wanted:
        mine = [row for row in results if (row["preset"], row["dim"]) == (c.preset, c.dim)]
        top = max((row["decode"]["ratio"] for row in mine if "decode" in row), default=math.nan)
        note = next((f" reference encodes {x}" for row in mine if (x := row.get("reference_encode"))), "")
        print(f"{c} cases={len(mine)} wrong={sum(map(bad, mine))} worst ratio {top:.2f}{note}")
    failures = sum(map(bad, results))
    print(f"{len(results)} of {total} cases, {failures} wrong, {time.time() - started:.0f} s")
    return 1 if failures or (len(results) < total and left() > 0) else 0


def report(path: Path | None, results: list[dict[str, Any]], wanted: int) -> None:
    """Write what has come so far, whole or not at all."""
    if path is None:
        return
    text = {
        "cases": len(results),
        "wanted": wanted,
        "wrong": [row for row in results if bad(row)][:100],
        "bf16_over_several_roundings": [row for row in results if "bf16_once" in row.get("decode", {})],
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    with whole_file(path) as part:
        part.write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    sys.exit(main())
