"""Which programs a scheme's kernels are made of, to compile them before a cache asks for them."""

import concurrent.futures
import functools
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from packedkv.codec import ROLES, Codec
from packedkv.kernels.cuda import basis, decode, encode, prefill
from packedkv.kernels.cuda.build import Program, compile_program, compiled
from packedkv.kernels.cuda.launch import Machine, configs_for
from packedkv.kernels.engine import fitters
from packedkv.kernels.mean import BLOCK, most_pairs
from packedkv.kernels.spec import DecodeSpec, decode_spec, encode_spec
from packedkv.kernels.structs import KINDS
from packedkv.progress import Progress
from packedkv.scheme import KVScheme


class Steps(NamedTuple):
    """Decode steps, as far as their programs depend on them; by default any."""

    groups: tuple[int, ...] = (4, 8)  # query heads that share a KV head
    dense: tuple[torch.dtype | None, ...] = (None, torch.bfloat16)  # dtypes of dense tokens; None: there are none
    softcap: bool = False  # whether scores have a soft cap
    heads: tuple[int, ...] = ()  # KV heads of all sequences together; empty: any number
    capacity: int = 0  # tokens of a sequence for which its page table has room; 0: any number
    queries: int = 1  # most query tokens of a sequence; with several there are no dense tokens


class LabelledProgram(NamedTuple):
    """A program, and what it does."""

    program: Program
    label: str


def of_scheme(
    scheme: KVScheme,
    head_dim: int,
    machine: Machine,
    steps: Steps | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_tokens: int | None = None,
    means: bool = False,
    served: int = 0,
) -> list[LabelledProgram]:
    """Return every program that caches of a scheme, or a mixture, ask for, or an engine that serves it, each once.

    ``dtype`` is the dtype of the model's keys and values. ``means``: also the programs for keys that are held without
    any mean, as a model with key biases needs them; codecs that always hold keys so need some of them anyway.
    ``served``: most query tokens of a request in an engine's decode step, 1 and its drafts; 0: caches. Raises
    UnsupportedError if no kernel reads the scheme, or it does not fit the machine.
    """
    programs: dict[Program, LabelledProgram] = {}
    for layer in _layers(scheme):
        key, value = (layer.codec(role).for_dtype(dtype) for role in ROLES)
        tokens = layer.page_layout(head_dim, page_tokens).page_tokens
        for pairs in _pairs(layer, head_dim, means):
            given, sink = (key, value, head_dim, tokens, machine, steps or Steps()), served > 0 and layer.sink > 0
            for one in of_codecs(*given, pairs=pairs, sink=sink, queries=served):
                programs.setdefault(one.program, one)
    return list(programs.values())


def of_codecs(
    key: Codec,
    value: Codec,
    head_dim: int,
    page_tokens: int,
    machine: Machine,
    steps: Steps,
    *,
    pairs: int = 0,
    sink: bool = False,
    queries: int = 0,
) -> Iterator[LabelledProgram]:
    """Programs that read and write the pages of two codecs, and fit their constants.

    ``pairs`` as ``DecodeSpec``, ``sink`` as ``encode.programs``, ``queries`` as ``served`` of ``of_scheme``.
    """
    spec = decode_spec(key, value, head_dim, page_tokens, pairs)
    grouped = max(key.block_tokens, value.block_tokens) > 1
    yield from _decoding(spec, machine, steps)
    # decode steps of several tokens meet no dense tokens, which kept ones and unfinished groups are
    if queries > 1 and not (sink or grouped):
        yield from _decoding(spec, machine, steps._replace(queries=queries, dense=(None,)))
    writing = encode_spec(key, value, head_dim, page_tokens, mean=pairs > 0)
    ways = [(writing, True), (writing.small_batch, True)] if queries else []  # by slots: prompts of an engine
    if grouped or not queries:
        ways.append((writing, False))
    for one, slots in dict.fromkeys(ways):
        for roles, program in encode.programs(one, sink=sink, slots=slots).items():
            yield LabelledProgram(program, f"{one.name}: {' and '.join(f'{role}s' for role in roles)}")
    for fitter in fitters(key, value):
        fitted = ", ".join(f"{codec} of {role}s" for role, codec in fitter.codecs.items())
        yield LabelledProgram(fitter.program(fitter.codecs, head_dim), f"fitting {fitted}")
    yield LabelledProgram(prefill.program(spec, *prefill.config_for(spec, machine)), f"unpacking {spec.name}")
    yield LabelledProgram(basis.program(head_dim), f"rows of {head_dim} channels")


def _decoding(spec: DecodeSpec, machine: Machine, steps: Steps) -> Iterator[LabelledProgram]:
    several, groups = steps.queries > 1, [group * steps.queries for group in steps.groups]
    for group in dict.fromkeys(map(spec.heads, groups)):
        units = tuple(heads * spec.tiles(size) for size in groups for heads in steps.heads)
        for dtype in steps.dense:
            # held as fp16 where a model computes in float32
            kind = -1 if dtype is None else KINDS[torch.float16 if dtype == torch.float32 else dtype]
            apart = kind >= 0 and not spec.joins
            for config in configs_for(spec, machine, apart, group, units, steps.capacity):
                shape = f"{config.teams} x {config.warps}" if config.teams > 1 else str(config.warps)
                suffix = "" if dtype is None else f", dense {str(dtype).removeprefix('torch.')}"
                name = f"{spec.name}, {group} heads, tiles of {config.tile}, {shape} warps{suffix}"
                yield LabelledProgram(decode.program(spec, config, steps.softcap, kind, group, several), name)


def _layers(scheme: KVScheme) -> Iterable[KVScheme]:
    """Return the schemes that layers of any model may have."""
    if scheme.layers:
        return dict.fromkeys(scheme.layers)
    count = 2 * max(scheme.dense_key_layers, scheme.dense_value_layers) + 1
    return dict.fromkeys(scheme.for_layer(i, count) for i in range(count))


def _pairs(scheme: KVScheme, head_dim: int, means: bool) -> list[int]:
    """Numbers of pairs of channels with a mean; 0: keys are held with their mean."""
    whole = most_pairs(head_dim)
    if scheme.mean in ("pre", "post") or (means and scheme.mean == "auto"):
        return [0, *range(BLOCK, whole, BLOCK), whole]
    return [0, whole] if scheme.mean == "auto" and scheme.key.without_mean else [0]


class Compiled(NamedTuple):
    """The outcome of a compilation: size in bytes, and seconds taken; 0: it had been compiled before."""

    label: str
    nbytes: int
    seconds: float


def compile_programs(needed: Iterable[LabelledProgram], arch: str, workers: int = 1) -> Iterator[Compiled]:
    """Compile for ``arch``, e.g. ``sm_90``, what is not in the cache folder yet, by so many processes.

    Raises UnsupportedError as ``build.compile_program``.
    """
    each = functools.partial(_compile, arch=arch)
    if workers == 1:
        yield from map(each, needed)
        return
    # processes, because NVRTC compiles one program at a time
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(each, needed)


def _compile(one: LabelledProgram, arch: str) -> Compiled:
    if (cubin := compiled(one.program, arch)) is not None:
        return Compiled(one.label, len(cubin), 0.0)
    begun = time.monotonic()
    cubin = compile_program(one.program, arch, one.label, Progress(enabled=False))
    return Compiled(one.label, len(cubin), time.monotonic() - begun)
