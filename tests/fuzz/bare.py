"""Random programs on the cache of one layer: appends, attention, removals, copies and files, beside the oracle.

A program is a setting and a list of operations, plain values both. Numbers of an operation are read modulo what the
cache holds, so that a program stays valid when operations are left out of it.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import packedkv
from packedkv.attention import Seen
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import ROLES, Role, Sample, Site
from packedkv.errors import KVError, UnsupportedError
from packedkv.files.caches import load_layers, save_layers
from packedkv.kernels.choose import Kernels, refusal
from packedkv.kernels.cpu.spec import cpu_spec
from packedkv.ops.rope import Rotary
from packedkv.scheme import KVScheme, recent_of
from packedkv.store.site import LayerSite, MeanRemoval
from tests.conformance.conftest import SPECS
from tests.fuzz import oracle
from tests.fuzz.oracle import LayerTokens, Mismatch, causal
from tests.geometries import GEOMETRIES

Setting = dict[str, Any]
Operation = list[Any]
CPU = torch.device("cpu")
SMALL = [geometry for geometry in GEOMETRIES if 64 <= geometry.head_dim <= 128 and geometry.rotated]
SLOW = ("additive", "e8", "hqmq", "polarquant")
"""Codecs that encode slowly; their programs are shorter."""
CAPACITY = 1024
MOST_CACHES = 3
WRITES = ("append", "append", "append", "step", "step", "refused")
READS = ("attend", "attend", "attend", "decode")
CHANGES = ("crop", "crop", "evict", "evict", "select", "repeat", "reorder")
COPIES = ("deepcopy", "pickle", "save")
OPERATIONS = (*WRITES, *READS, *CHANGES, *COPIES, "undo", "bytes", "reset")


# -- making programs ---------------------------------------------------------------------------------------------------


def scheme_of(setting: Setting) -> KVScheme:
    scheme = packedkv.get(setting["spec"]).for_layer(3, 8)
    if not setting["values"]:
        return scheme
    value = packedkv.get(setting["values"]).for_layer(3, 8).value
    return replace(scheme, value=value, recent=recent_of(scheme.key, value, scheme.recent, scheme.recent))


def setting_of(random: Random) -> Setting:
    """A preset with options, a geometry and a kind of cache that serves it."""
    while True:
        spec, geometry = random.choice(SPECS), random.choice(SMALL)
        dim = geometry.head_dim
        values = random.choice(SPECS) if random.random() < 0.2 else ""  # of another method
        options = {}
        if random.random() < 0.5:
            options["sink"] = random.choice((0, 1, 3, 8))
        if random.random() < 0.5:
            options["window"] = random.choice((0, 1, 5, 17, 40))
        options["mean"] = random.choice(("none", "none", "post", "pre", "pre"))
        if options.get("window") and random.random() < 0.3:
            options["recent"] = random.choice(("int-8", "fp8", "saw-int4", "turboquant-4"))
        kind = random.choice(("host", "host", "fixed", "growing", "growing", "static"))
        text = f"{spec}:{','.join(f'{name}={value}' for name, value in options.items())}"
        try:
            scheme = scheme_of({"spec": text, "values": values})
            page = scheme.page_layout(dim)
        except KVError:
            continue
        if kind in ("growing", "static") and refusal(scheme, dim, CPU):
            kind = "host"
        if kind == "static" and None in cpu_spec(scheme.key, scheme.value, dim, page.page_tokens).encoders.values():
            kind = "growing"  # PyTorch encodes a role, which static caches refuse on a GPU
        batch = random.choice((1, 1, 2, 3))
        return {
            "spec": text,
            "values": values,
            "kind": kind,
            "dim": dim,
            "heads": random.choice((1, 1, 2, 3)),
            "ratio": min(geometry.group, 8),
            "batch": batch,
            "dtype": random.choice(("float32", "float32", "float16", "bfloat16")),
            "layer": random.randint(0, 3),
            "seed": random.randint(0, 3),
            "rotated": geometry.rotated,
            "interleaved": geometry.interleaved,
            "scaling": random.choice((1.0, 1.0, 1.2)),
            "given": random.random() < 0.5,  # constants, and the mean, are given rather than fitted
            "most": random.choice((None, 24, 70)),  # tokens that constants are fitted on
            "energy": random.random() < 0.3,
            "page_tokens": random.choice((None, None, 128)),
            "padding": [random.choice((0, 0, 3, 20)) for _ in range(batch)] if random.random() < 0.4 else [0] * batch,
            "told": random.choice(("always", "always", "first", "never")),  # the positions of which appends are passed
            "remember": kind in ("host", "fixed") and random.random() < 0.15,
        }


def program_of(seed: int) -> tuple[Setting, list[Operation]]:
    random = Random(seed)
    setting = setting_of(random)
    scheme, slow = scheme_of(setting), any(name in setting["spec"] + setting["values"] for name in SLOW)
    unit = max(scheme.key.block_tokens, scheme.value.block_tokens)
    edge = scheme.sink + scheme.window + unit  # where tokens begin to leave
    operations: list[Operation] = []
    for i in range(random.randint(4, 16)):
        name = "append" if i == 0 else random.choice(OPERATIONS)
        most = random.choice((3, 9, 40, 40 if slow else 90, edge + 3, edge + unit))
        if i == 0 and setting["most"] is None and not slow and random.random() < 0.3:
            most = 560
        numbers = [random.randrange(1 << 16) for _ in range(3)]
        if name == "append":
            numbers[0] = random.randint(most // 2, most) if random.random() < 0.95 else 0
        operations.append([name, random.randrange(4), *numbers])
    for name in ("attend", "decode"):
        operations += [[name, who, *[random.randrange(1 << 16) for _ in range(3)]] for who in range(2)]
    return setting, operations


# -- running them ------------------------------------------------------------------------------------------------------


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class HostStatic(FusedLayerCache):
    """A static cache on the CPU kernels, which do not drop what a step writes behind the capacity, as CUDA's do."""

    def _write(self, new: Mapping[Role, Tensor], first: Tensor, bad: Tensor) -> None:
        assert self.store is not None
        if int(first[0]) < self.store.capacity:
            super()._write(new, first, bad)


@dataclass
class Held:
    """A cache, its oracle, the position of the next token of each sequence, and the most tokens before an eviction."""

    cache: LayerCache
    tokens: LayerTokens
    place: Tensor
    kept: int = 0


class Machine(oracle.Machine):
    def __init__(self, setting: Setting, folder: str) -> None:
        self.setting, self.folder = setting, Path(folder)
        self.dtype, self.dim, self.heads = getattr(torch, setting["dtype"]), setting["dim"], setting["heads"]
        scheme = scheme_of(setting)
        frequencies = 1e4 ** -(torch.arange(0, setting["rotated"], 2) / setting["rotated"])
        self.rotary = Rotary(frequencies, setting["scaling"], setting["interleaved"])
        self.offset = 2 * _normal(1, 1, self.heads, self.dim)  # the mean of the keys that come
        given = self.offset if setting["given"] else None
        mean = None
        if scheme.mean == "pre":
            mean = MeanRemoval("pre", self.rotary, given, "weights")
        elif scheme.mean == "post":
            mean = MeanRemoval("post", None, given, "params")
        params = {}
        if setting["given"]:
            for role in ROLES:
                if "tensor" in (codec := scheme.codec(role)).needs:
                    site = Site(setting["layer"], role, self.heads, self.dim, setting["seed"])
                    params[role] = codec.fit(site, Sample(_normal(7, 1, self.heads, 128, self.dim)))
        energy = _normal(8, 1, self.heads, self.dim).square() if setting["energy"] else None
        self.site = LayerSite(
            scheme, setting["layer"], setting["seed"], params, mean=mean, most=setting["most"], energy=energy
        )
        self.fused = setting["kind"] in ("growing", "static")
        self.held = [Held(self._cache(), LayerTokens(self.site, self.fused), self._first_places(setting["batch"]))]

    def _cache(self) -> LayerCache:
        kind, pages = self.setting["kind"], self.setting["page_tokens"]
        if kind == "growing":
            return FusedLayerCache(self.site, page_tokens=pages)
        if kind == "static":  # on a CPU no model is given one; its schedule is the same
            return HostStatic(self.site, page_tokens=pages, capacity=CAPACITY, kernels=Kernels(pages, static=False))
        capacity = 200 if kind == "fixed" else 0
        return LayerCache(self.site, page_tokens=pages, capacity=capacity, remember=self.setting["remember"])

    def _first_places(self, batch: int) -> Tensor:
        own = self.setting["padding"]
        padding = [0 if self.setting["told"] == "never" else own[i % len(own)] for i in range(batch)]
        return -torch.tensor(padding)

    def check(self, of: Held) -> None:
        if len(of.cache) != len(of.tokens):
            raise Mismatch(f"{len(of.cache)} tokens, expected {len(of.tokens)}")

    # -- writing -----------------------------------------------------------------------------------------------------

    def _append(self, of: Held, n: int, seed: int, kind: int) -> None:
        tokens, batch = of.tokens, len(of.place)
        if of.cache.static:
            n = min(n, CAPACITY - 2 * 128 - len(tokens))
            if n < 0:
                return
        positions = of.place[:, None] + torch.arange(n)
        keys, values = self._rows(batch, n, seed, kind, positions)
        told = self._told(of, positions)
        if told is not None and kind % 3 and n and bool((told[:, -1] >= 0).all()):
            told = told.clamp_min(kind % 3 - 2)  # as models place padding
        if self._static_refuses(of, n):
            self._refuses(lambda: of.cache.append(keys, values, told), UnsupportedError, "too few tokens for a fit")
            return
        of.cache.append(keys, values, told)
        tokens.append(keys, values, positions)
        of.place = of.place + n
        if isinstance(of.cache, FusedLayerCache):
            of.cache.check()

    def _rows(self, batch: int, n: int, seed: int, kind: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        both = _normal(seed, 2, batch, self.heads, n, self.dim)
        shape = kind % 11
        if shape == 7:
            both[:, :, :, n // 2 :] = 0
        elif shape == 8:
            both[:] = both[..., :1]
        elif shape == 9:
            both[..., 3] *= 15
        elif shape == 10:
            both *= 2.0**-12
        both[0] += self.rotary.turn(self.offset[:, :, None], positions)
        return both[0].to(self.dtype), both[1].to(self.dtype)

    def _told(self, of: Held, positions: Tensor) -> Tensor | None:
        """The positions as the cache is told them."""
        told = self.setting["told"]
        if told == "never" or (told == "first" and len(of.tokens)):
            return None
        return positions[:1] if bool((of.place == of.place[0]).all()) else positions

    def _step(self, of: Held, n: int, seed: int, kind: int) -> None:
        """One to three single tokens."""
        for i in range(1 + n % 3):
            self._append(of, 1, seed + i, kind)

    def _static_refuses(self, of: Held, n: int) -> bool:
        tokens, wanted = of.tokens, self.site.fit_tokens
        if not of.cache.static or wanted <= 1 or not n:
            return False
        probe = tokens.copy()
        batch = len(of.place)
        zeros = torch.zeros(batch, self.heads, n, self.dim, dtype=self.dtype)
        if tokens.roles and not tokens.missing:
            return False
        sink = min(self.site.scheme.sink, n)
        padding = int((-of.place - sink).clamp_min(0).max())
        mean = self.site.mean
        known = not tokens.roles and all(probe._role(role, zeros).params is not None for role in ROLES)
        known = known and (mean is None or mean.given is not None)
        return not known and n < sink + wanted + padding

    def _refused(self, of: Held, n: int, seed: int, kind: int) -> None:
        """Tokens that no codec can hold: refused, and the cache is as it was."""
        batch, n = len(of.place), 1 + n % 40
        if of.cache.static:  # takes a zero row for a single one
            return
        positions = of.place[:, None] + torch.arange(n)
        keys, values = self._rows(batch, n, seed, 0, positions)
        bad = (float("nan"), float("inf"), 1e5 if self.dtype != torch.float16 else float("-inf"))[kind % 3]
        (keys, values)[seed % 2][kind % batch, 0, n - 1, seed % self.dim] = bad
        told = self._told(of, positions)
        before = len(of.cache)
        self._refuses(lambda: of.cache.append(keys, values, told), ValueError, f"a token of {bad}")
        if len(of.cache) != before:
            raise Mismatch(f"{len(of.cache)} tokens after a refusal, {before} before")
        if before:
            of.tokens.check_decoded(of.cache.decode(), of="after a refusal: ")

    def _refuses(self, call: Any, error: type[Exception], why: str) -> None:
        try:
            call()
        except error:
            return
        raise Mismatch(f"no {error.__name__}: {why}")

    # -- removing and rearranging --------------------------------------------------------------------------------------

    def _crop(self, of: Held, left: int, small: int, _: int) -> None:
        tokens, held = of.tokens, len(of.tokens)
        length = max(0, held - left % 12) if small % 2 else left % (held + 1)
        if self.fused and length <= of.kept and of.kept:
            return  # positions of what follows would go back behind evicted ones, which these caches refuse
        if self.setting["told"] != "always" and of.kept and length <= of.kept:
            return  # which position follows, of that before the gap or behind it, is for the caller to say
        if self.fused and isinstance(of.cache, FusedLayerCache) and tokens.refuses(length, held):
            self._refuses(lambda: of.cache.crop(length), UnsupportedError, f"crop({length}) cuts a block")
            tokens.check_decoded(of.cache.decode(), of="after a refusal: ")
            return
        of.cache.crop(length)
        if length < held:
            of.place = tokens.positions[:, length].expand(len(of.place)).clone()
        tokens.crop(length)

    def _evict(self, of: Held, n: int, keep: int, how: int) -> None:
        tokens, held = of.tokens, len(of.tokens)
        keep = (0, tokens.sink, keep % (held + 1))[how % 3]
        n %= held - keep + 1
        if how % 5 and n > 30:
            n %= 30
        if keep and keep + n == held and (self.fused or self.setting["told"] != "always"):
            return  # which position follows is for the caller to say
        if isinstance(of.cache, FusedLayerCache):
            static = of.cache.static and keep < keep + n < held
            if static or tokens.refuses(keep, keep + n):
                self._refuses(lambda: of.cache.evict(n, keep), UnsupportedError, f"evict({n}, {keep})")
                return
            if of.cache.static and n:
                return  # of all tokens behind the first: a crop, whose slots are used again
        of.cache.evict(n, keep)
        tokens.evict(n, keep)
        of.kept = max(of.kept, keep) if n else of.kept

    def _take(self, of: Held, index: Tensor) -> None:
        """Select sequences by their numbers or by a boolean mask."""
        if of.tokens.roles:
            of.cache.select(index)
            of.tokens.select(index.nonzero().flatten() if index.dtype == torch.bool else index)
            of.place = of.place[index]

    def _select(self, of: Held, n: int, seed: int, kind: int) -> None:
        batch = len(of.place)
        index = torch.randint(batch, (1 + n % 3,), generator=torch.Generator().manual_seed(seed))
        self._take(of, torch.zeros(batch, dtype=torch.bool).index_fill(0, index, True) if kind % 3 == 0 else index)

    def _reorder(self, of: Held, _: int, seed: int, __: int) -> None:
        self._take(of, torch.randperm(len(of.place), generator=torch.Generator().manual_seed(seed)))

    def _repeat(self, of: Held, n: int, _: int, __: int) -> None:
        times = 1 + n % 2
        if len(of.place) * times > 4 or not of.tokens.roles:
            return
        of.cache.repeat(times)
        index = torch.arange(len(of.place)).repeat_interleave(times)
        of.tokens.select(index)
        of.place = of.place[index]

    def _undo(self, of: Held, n: int, seed: int, kind: int) -> None:
        """Tokens that are taken back, as those of a pass that another layer refuses."""
        if not isinstance(of.cache, FusedLayerCache) or of.cache.static or not len(of.tokens) or of.tokens.missing:
            return
        tokens, place, state = of.tokens.copy(), of.place, of.cache.state()
        self._append(of, 2 + n % 40, seed, kind)
        of.cache.go_back(state)
        of.tokens, of.place = tokens, place
        tokens.check_decoded(of.cache.decode(), of="after going back: ")

    def _reset(self, of: Held, n: int, _: int, __: int) -> None:
        of.cache.reset()
        if not of.cache.static and (of.cache.nbytes() or list(of.cache.tensors())):
            raise Mismatch("bytes are held after a reset")
        of.tokens.reset()
        of.kept = 0
        of.place = self._first_places(1 + n % 3)

    # -- copies ------------------------------------------------------------------------------------------------------

    def go_on(self, of: Held, cache: LayerCache, both: int) -> None:
        if both % 3 and len(self.held) < MOST_CACHES:
            self.held.append(Held(cache, of.tokens.copy(), of.place, of.kept))
        else:
            of.cache = cache

    def _save(self, of: Held, _: int, __: int, both: int) -> None:
        """What is loaded is a cache of the host; how keys turn is the model's to say, and no file holds it."""
        if of.cache.static and not of.tokens.roles:
            return  # its pages stay after a reset, and in a file their batch would be for ever
        path = self.folder / "cache.safetensors"
        save_layers(path, [of.cache], {})
        (cache,), _meta = load_layers(path)
        cache.give_mean(self.site.mean)
        self.go_on(of, cache, both)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _bytes(self, of: Held, *_: int) -> None:
        parts = of.cache.nbytes()
        real = sum(x.untyped_storage().nbytes() for x in of.cache.tensors())
        if sum(parts.values()) != real:
            raise Mismatch(f"nbytes gives {sum(parts.values())} bytes, the tensors have {real}: {parts}")

    def _decode(self, of: Held, first: int, last: int, _: int) -> None:
        if not of.tokens.roles:
            return
        held = len(of.tokens)
        of.tokens.check_decoded(of.cache.decode())
        first %= held + 1
        last = first + last % (held - first + 1)
        of.tokens.check_decoded(of.cache.decode(first, last), first, last, of=f"[{first}, {last}) of ")

    def _attend(self, of: Held, n: int, seed: int, how: int) -> None:
        """By kernels where they serve the cache, and by the reference."""
        cache, tokens, held = of.cache, of.tokens, len(of.tokens)
        if not held:
            return
        random = Random(how)
        batch, n = len(of.place), min(1 if n % 2 else 1 + n % 9, held)
        if random.random() < 0.05:
            n = held
        heads = self.heads * self.setting["ratio"]
        q = _normal(seed, batch, heads, n, self.dim).to(self.dtype)
        scale = random.choice((None, None, 0.3))
        sinks = _normal(seed + 1, heads) if random.random() < 0.3 else None
        rules: dict[str, Any] = {"scale": scale, "sinks": sinks}
        visible, bias, mask, is_causal = causal(n, held), None, None, True
        softcap = 0.0
        if random.random() < 0.15:
            is_causal, visible = False, torch.ones(n, held, dtype=torch.bool)
        fused = isinstance(cache, FusedLayerCache)
        start: list[int] = []
        seen: Seen | None = None
        if fused and random.random() < 0.3:
            softcap = rules["softcap"] = 20.0
        if fused and random.random() < 0.4:
            start = [random.randrange(held - n + 1) for _ in range(batch)]
            visible = visible & (torch.arange(held) >= torch.tensor(start)[:, None, None, None])
        if fused and n > 1 and is_causal and random.random() < 0.3:
            window, chunk, place = random.choice(((1 + random.randrange(held), 0, 0), (0, 16, random.randrange(40))))
            seen = Seen(window=window, chunk=chunk, place=place, start=tuple(start), softcap=softcap)
            padding = torch.tensor(start or [0])[:, None, None, None]
            visible = causal(n, held, window, chunk, place) & (torch.arange(held) >= padding)
        elif not start and (n > 1 or not fused) and random.random() < 0.4:
            rows = (random.choice((1, batch)), 1, n, held)
            hidden = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.3
            visible = causal(n, held) & ~hidden
            visible[..., torch.arange(n), torch.arange(held - n, held)] = True  # its own token
            mask = visible
            if random.random() < 0.5:
                bias = _normal(seed + 2, *rows)
                mask = bias.masked_fill(
                    ~visible, -torch.inf if random.random() < 0.5 else torch.finfo(torch.float32).min
                )
        want = tokens.attention(q, visible, bias=bias, softcap=softcap, scale=scale, sinks=sinks)
        by_kernels = fused or not cache.unfused()
        if seen is not None:
            found = cache.attend_chunk(q, scale=scale, sinks=sinks, seen=seen)
        elif fused:
            begin = torch.tensor(start, dtype=torch.int32) if start else None
            found = cache.attend(q, mask=mask, causal=is_causal, start=begin, **rules)
        else:
            found = cache.attend(q, mask=mask, causal=is_causal, chunk=random.choice((16, 1024)), **rules)
        tokens.check_attention(found, want, f"attention of {n} by {'kernels' if by_kernels else 'the reference'}")
        if not start and seen is None and by_kernels and random.random() < 0.3:
            found = attend(q, cache, mask=mask, causal=is_causal, chunk=random.choice((16, 1024)), **rules)
            tokens.check_attention(found, want, f"attention of {n} by the reference")


def run(setting: Setting, operations: list[Operation]) -> None:
    """Run a program; raises ``Mismatch`` if a cache differs from its oracle or raises what it should not."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        Machine(setting, folder).run(operations)
