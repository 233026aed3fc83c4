"""Launch constants of the decode kernel: a pure function of sizes, without tuning at run time."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from packedkv.errors import UnsupportedError
from packedkv.kernels.cuda.build import shared_memory
from packedkv.kernels.mean import team_bytes
from packedkv.kernels.spec import DecodeSpec, align


class Config(NamedTuple):
    """Launch constants."""

    tile: int  # tokens that a warp fetches at a time; divides the page, a multiple of 16 (32 with blocks)
    warps: int  # of a CTA, or of a team
    stages: int  # tiles of a warp's ring buffer
    resident: int  # CTAs that share a multiprocessor: bounds the registers
    splits: int  # CTAs, or teams, that share the tokens of a sequence
    # teams of a CTA: above 1 they share its look-up tables, and each takes one sequence and head after another
    teams: int = 1
    table_shrink: int = 0  # how often the room of look-up tables is halved: fewer copies, for less shared memory
    overlap_prologue: int = 0  # 1: what only the start of a piece needs lies where the ring's later stages will be

    @property
    def resident_warps(self) -> int:
        """Warps of a multiprocessor."""
        return self.warps * self.teams * self.resident


class Machine(NamedTuple):
    """The properties of a GPU that determine launch constants: multiprocessors, and bytes of shared memory."""

    sms: int
    shared_block: int
    shared_sm: int


SHARED_KB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 110: 228, 120: 100, 121: 100}
"""Shared memory of a multiprocessor by compute capability; a block can have 1 KB less."""
H200 = Machine(132, 232448, 233472)
MOST_ROUNDS = 256
"""Sequences and KV heads for each multiprocessor up to which ``configs_for`` looks."""
TEAM_TOKENS = 4096
"""Capacity of a sequence up to which teams take whole ones: a long one among short ones would keep one team busy."""
WARPS = 8
"""Of a multiprocessor that hide memory's latency; where fewer fit, tables are smaller or have fewer copies."""
LESS_WARPS = 4
"""Of tables of a head, as ghost's, on GPUs of 99 KB: rather than the fewest copies, where a look-up takes four turns.
Under 100 KB on an H100, ``ghost-4`` at 32 x 32k: 5, 6, 7, 8 warps 664, 563, 489, 439 us, two teams of 4 421, with the
fewest copies 8 or 12 warps 737 to 752; at 1 x 64k 5, 6, 7 warps 47, 43, 42 us, 51 with the fewest copies.
"""
SHORT = 1 << 17
"""Bytes of shared memory of a block: GPUs of 99 KB have less."""
FEW_BYTES = 40960
"""Bytes under way on a multiprocessor, with eight warps, below which more warps hide memory's latency."""
MOST_TERM = 512
"""Pairs of channels of the term of the keys' mean, times query heads, whose numbers twelve warps have no registers for:
``ghost-2`` at 1 x 64k, 7 query heads to a KV head, takes 43.7 us with twelve and 31.5 with eight (an H100).
"""


def shares_tables(spec: DecodeSpec, config: Config) -> bool:
    """Whether teams share look-up tables, as ``kv::Decoder::BRIEF``."""
    return config.teams > 1 and spec.key.shared + spec.value.shared > 0


def _row_floats(channels: int) -> int:
    return channels + channels // 4 + 1  # kv::row_floats


def shared_bytes(spec: DecodeSpec, config: Config, dense: bool = False, heads: int = 8) -> int:
    """Bytes of dynamic shared memory of the decode kernel; the program asserts that its own number is this one.

    ``heads`` of a CTA count where there are teams.
    """
    spec = spec.halved(config.table_shrink)
    tables = align(align(spec.key.shared) + align(spec.value.shared), 128)
    most = 4 if spec.head_dim > 256 else 8
    rows = 4 * (heads if config.teams > 1 or config.overlap_prologue else most)
    query = align(rows * (_row_floats(spec.key.queries * spec.head_dim) + 1), 128)
    stage = config.warps * align(spec.tile_bytes(config.tile), 128)
    later = (config.stages - 1) * stage
    shared, start = team_bytes(spec.pairs, config.tile, heads, config.warps, config.overlap_prologue)
    # of teams that share tables, later stages take the query's place
    over = config.overlap_prologue or shares_tables(spec, config)
    team = stage + (max(query + start, later) if over else query + later) + shared
    team += config.warps * max(spec.key.scratch, spec.value.scratch)
    team += align(spec.key.by_head) + align(spec.value.by_head)
    merge = align(config.warps * rows * (_row_floats(spec.head_dim) + 2), 128)
    need = tables + config.teams * max(team, merge) if config.teams > 1 else max(tables + team, merge)
    if dense and not spec.joins:  # tiles of 16 tokens, one for a warp
        need = max(need, align(4 * most * (_row_floats(spec.head_dim) + 1), 128) + config.warps * 64 * spec.head_dim)
    return max(need, spec.key.min_shared, spec.value.min_shared)


def candidates(spec: DecodeSpec, stages: int = 2, shrink: int = 0, overlap: int = 0) -> list[Config]:
    """Return launch constants worth trying, without regard to the machine."""
    # warps, resident CTAs; wide heads take all registers of eight warps
    usual = [(4, 2), (6, 2), (8, 1), (11, 1), (12, 1), (16, 1), (4, 1), (2, 1)]
    shapes = usual if spec.head_dim <= 256 else [(4, 2), (8, 1), (6, 1), (4, 1), (2, 1)]
    shapes += [(7, 1), (5, 1)] if overlap else []
    return [Config(tile, n, stages, resident, 1, 1, shrink, overlap) for tile in _tiles(spec) for n, resident in shapes]


def _tiles(spec: DecodeSpec) -> list[int]:
    return [tile for tile in (64, 32, 16) if spec.page_tokens % tile == 0 and tile >= spec.least_tile]


def _fits(spec: DecodeSpec, config: Config, machine: Machine, dense: bool = False, heads: int = 8) -> bool:
    need = shared_bytes(spec, config, dense, heads)
    return need <= machine.shared_block and config.resident * (need + 1024) <= machine.shared_sm


@lru_cache(maxsize=256)
def config_for(
    spec: DecodeSpec, units: int, capacity: int, machine: Machine, dense: bool = False, heads: int = 8
) -> Config:
    """Choose launch constants; a pure function, without tuning at run time.

    ``units``: sequences x KV heads x tiles of query heads, which is the CTAs without any split. ``capacity``: tokens
    that the page table can hold per sequence. ``dense``: whether dense tokens have a CTA of their own for each unit.
    ``heads``: query heads of a CTA, ``DecodeSpec.heads``. Raises UnsupportedError if nothing fits the shared memory.
    """
    # tables in all copies, then in fewer; at last a ring of one tile
    short = int(machine.shared_block < SHORT and spec.key.by_head > 0)
    last = spec.table_shrink
    tries = [(2, 0, 0), *((2, n, short) for n in range(1 - short, last + 1)), (1, last, short)]
    fitting = []
    for which in tries:
        if (config := _config(spec, units, capacity, machine, dense, heads, *which)) is None:
            continue
        enough = LESS_WARPS if config.overlap_prologue and config.table_shrink >= last - 1 else WARPS
        if config.resident_warps >= min(_least_warps(spec, machine), enough):
            return config
        fitting.append(config)
    if fitting:
        return max(fitting, key=lambda config: config.resident_warps)
    least = min(shared_bytes(spec, c) for which in tries for c in candidates(spec, *which))
    raise UnsupportedError(
        f"{spec.name}: needs {least} bytes of shared memory in a block; this GPU has {machine.shared_block}."
    )


def _least_warps(spec: DecodeSpec, machine: Machine) -> int:
    """Least number of warps for which tables leave shared memory; 0 where every choice of tables fits."""
    return 0 if machine.shared_block >= H200.shared_block and spec.head_dim <= 256 else WARPS


def _config(
    spec: DecodeSpec, units: int, capacity: int, machine: Machine, dense: bool, heads: int, stages: int, shrink: int,
    overlap: int,
) -> Config | None:  # fmt: skip
    """As ``config_for`` with so many stages, so many copies of tables, and ``overlap`` or not; None: nothing fits."""
    # Measured on an H200. Eight warps a multiprocessor, or as many as fit, hide memory's latency, twelve where look-ups
    # are slow. Few sequences: one CTA a multiprocessor leaves the fewest partials to merge, and tiles of 32 tokens the
    # shortest last round. Many: long tiles cost the fewest instructions, two CTAs, or two teams that share tables too
    # large for that, overlap each other's ends, and where only one fits, more warps help.
    longest = min(spec.key.tile, spec.value.tile)
    if shared_out := None if dense or stages < 2 else _teams(spec, units, capacity, machine, heads, shrink):
        return shared_out
    counted = heads if machine.shared_block < SHORT else 8  # where more fits, choices were measured with eight's room
    fitting = [c for c in candidates(spec, stages, shrink, overlap) if _fits(spec, c, machine, dense, counted)]
    if 10 * units <= machine.sms:
        short = 16 * spec.tile_bytes(32) < FEW_BYTES and spec.pairs * heads < MOST_TERM
        least, tile = (12, 16) if longest <= 16 else (12 if short else 8, 32)
        fitting.sort(key=lambda c: (max(0, least - c.warps * c.resident), abs(c.tile - tile), c.resident, c.warps))
    else:
        fitting = [c for c in fitting if c.tile <= longest] or fitting
        if spec.key.by_head and not dense and stages > 1 and (overlap or machine.shared_block >= H200.shared_block):
            # two teams that share look-up tables, which would leave no room for two CTAs
            pairs = [Config(tile, 4, 2, 1, 1, 2, shrink, overlap) for tile in _tiles(spec)]
            fitting += [c for c in pairs if _fits(spec, c, machine, heads=heads)]

        def order(c: Config) -> tuple[int, ...]:
            ends = c.resident * c.teams  # that overlap
            warps = -c.warps if ends == 1 else abs(c.warps - spec.key.warps)
            return max(0, 8 - c.resident_warps), -c.tile, -ends, warps

        fitting.sort(key=order)
    if not fitting:
        return None
    splits = _splits(fitting[0], units, capacity, machine, dense, slow=spec.blocked or spec.key.shared > 0)
    return fitting[0]._replace(splits=splits)


def configs_for(
    spec: DecodeSpec, machine: Machine, dense: bool, heads: int, units: tuple[int, ...] = (), capacity: int = 0
) -> list[Config]:
    """Return all that ``config_for`` may choose, with one split, which programs do not depend on.

    Without ``units`` or ``capacity`` any are meant. The choice of teams is the same for all numbers of units between
    two multiples of the multiprocessors.
    """
    any_units = (1, *(n * machine.sms for n in (1, *range(3, MOST_ROUNDS))))
    tries = itertools.product(units or any_units, (capacity,) if capacity else (TEAM_TOKENS, TEAM_TOKENS + 1))
    configs = {config_for(spec, n, tokens, machine, dense, heads)._replace(splits=1) for n, tokens in tries}
    return sorted(configs)


def _teams(spec: DecodeSpec, units: int, capacity: int, machine: Machine, heads: int, shrink: int) -> Config | None:
    """Return teams for many short sequences: each takes whole ones, so little is merged; None: teams do not pay.

    Measured on an H200 at 128 x 1,024 and 64 x 2,048 tokens, 8 KV heads of 128: what counts is that as many teams as
    there are have a sequence in the last round as well, then as many warps as registers allow, and tiles of 32 tokens
    or more.
    """
    if capacity > TEAM_TOKENS or units < 3 * machine.sms or not min(spec.key.team_warps, spec.value.team_warps):
        return None
    best, most, least_warps = None, 0.0, _least_warps(spec, machine)
    longest = min(spec.key.tile, spec.value.tile)
    for tile in (t for t in _tiles(spec) if t <= longest):
        for warps, teams in ((w, n) for w in (1, 2, 3, 4) for n in range(2, 9)):
            config = Config(tile, warps, 2, 1, 1, teams, table_shrink=shrink)
            if not least_warps <= warps * teams <= spec.key.team_warps or not _fits(spec, config, machine, heads=heads):
                continue
            rounds = units / (machine.sms * teams)
            whole = math.ceil(rounds)
            score = rounds / whole / (1 + 0.08 * (whole - 1)) * (0.75 + warps * teams / 64)
            score *= 0.85 if tile < min(32, longest) else 1
            if score > most:
                best, most = config, score
    return best


def _splits(
    config: Config, units: int, capacity: int, machine: Machine, dense: bool = False, slow: bool = False
) -> int:
    """``slow``: each CTA loads tables first, or the sequence's unfinished block is a CTA of its own."""
    slots = config.resident * config.teams * machine.sms
    most = max(1, -(-capacity // (config.tile * config.warps)))  # a tile for every warp
    if 2 * units > slots:
        # whole sequences save the merge; splitting pays if the last wave is nearly empty
        waves = units / slots
        whole = waves / math.ceil(waves)
        wanted = 1 if whole > 0.8 or waves > 4 else 2 if (2 * waves) / math.ceil(2 * waves) > 1.2 * whole else 1
    else:
        wanted = max(1, slots // max(units, 1) - dense)
        if slow and capacity <= wanted * config.tile * config.warps:  # a tile for each warp: splits save nobody a tile
            wanted = max(1, wanted * 3 // 4)
    return min(wanted, most)


def machine_of(arch: str) -> Machine:
    """Properties of the GPUs of an architecture, e.g. ``sm_90``; the number of multiprocessors is an H200's.

    Raises UnsupportedError if the architecture is unknown.
    """
    known = {f"sm_{number}": kilobytes for number, kilobytes in SHARED_KB.items()}
    if arch not in known:
        raise UnsupportedError(f"arch={arch!r}: the CUDA kernels know {', '.join(known)}.")
    return Machine(H200.sms, (known[arch] - 1) * 1024, known[arch] * 1024)


def machine(device: torch.device) -> Machine:
    """Properties of this GPU; of an H200 where there is none."""
    gpu = _machine(device)
    most = _limits[-1]
    return gpu._replace(shared_block=min(gpu.shared_block, most - 1024), shared_sm=min(gpu.shared_sm, most))


@lru_cache
def _machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return H200
    gpu = torch.cuda.get_device_properties(device)
    return Machine(gpu.multi_processor_count, shared_memory(device), gpu.shared_memory_per_multiprocessor)


_limits = [1 << 30]


@contextlib.contextmanager
def limited(kilobytes: int) -> Iterator[None]:
    """Limit the shared memory of a multiprocessor, to time the programs that GPUs with less of it would run.

    What was chosen before stays; ``decode._plan`` and ``prefill.plan_of`` remember it. Decode attention is then
    launched with ``asked_bytes``.
    """
    _limits.append(kilobytes * 1024)
    try:
        yield
    finally:
        _limits.pop()


def asked_bytes(shared: int, device: torch.device) -> int:
    """Return the shared memory to launch blocks with that need ``shared`` bytes.

    Under ``limited`` it is more: no more of them share a multiprocessor than would on the GPU it is taken for.
    """
    there, here = machine(device), _machine(device)
    if there == here:
        return shared
    most = there.shared_sm // (shared + 1024)
    return max(shared, align(here.shared_sm // (most + 1) - 1023, 128))
