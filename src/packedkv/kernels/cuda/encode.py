"""Encode keys and values into pages in CUDA, bit for bit as the reference: the host side of ``encode.cuh``."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.codec import ROLES, Role
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.constants import Constants, constants_of, tensors_of
from packedkv.kernels.cuda.arguments import EncodeArgs, aligned_rows, check_pages, fill_encoder, fill_rotated_mean
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.cuda.decode import MOST_SEQUENCES
from packedkv.kernels.cuda.launch import H200
from packedkv.kernels.mean import RotatedMean
from packedkv.kernels.spec import Encoder, EncodeSpec, spec_of, text_of
from packedkv.kernels.structs import KINDS, address
from packedkv.kernels.tokens import NewTokens
from packedkv.store.pages import rows_bytes

ROW_THREADS, TABLE_WARPS = 128, 8
TABLE_THREADS = 32 * TABLE_WARPS
"""Threads of a block, ``kv::ENCODE_THREADS`` and ``kv::TABLE_THREADS``."""
ROWS_PER_WARP = 4
"""Of the encoders of form "rows" whose rows are held by eight lanes; the others take four steps."""
MOST_BLOCKS = 1 << 16
"""Along the rows of a sequence; more rows than that share blocks."""


def _factor(encoder: Encoder) -> str:
    return "kv::FACTOR_NONE" if not encoder.factor else "kv::FACTOR_INVERSE" if encoder.divide else "kv::FACTOR_TIMES"


def _threads(spec: EncodeSpec, encoder: Encoder) -> int:
    if encoder.form == "blocks":
        return 2 * spec.head_dim
    return TABLE_THREADS if encoder.form == "table" else ROW_THREADS


def _program(spec: EncodeSpec, roles: tuple[Role, ...], sink: bool, slots: bool) -> Program:
    """Return the source of ``kv_encode`` for one role, or for both at once."""
    encoders = [spec.encoders[role] for role in roles]
    first = encoders[0]
    types = [
        f"kv::Role<{x.type}, {x.order}, {_factor(x)}{', true' if spec.mean and role == 'key' else ''}>"
        for role, x in zip(roles, encoders, strict=True)
    ]
    each = f"a.{roles[0]}" if len(encoders) == 1 else "kv::block_z() ? a.value : a.key"
    threads, tell = "kv::ENCODE_THREADS", ""
    # what is loaded of a mean must not take the registers of other blocks
    least = first.resident or (1 if not spec.mean else 3 if first.form == "rows" else 2)
    if first.form == "rows":
        call = f"encode_pair<{', '.join(types)}>(a)" if len(encoders) == 2 else f"encode_side<{types[0]}>(a, {each})"
    elif first.form == "blocks":
        call = f"encode_blocks<{first.type}, {_factor(first)}>(a, {each})"
        threads = f"{first.type}::THREADS"
    else:
        both = len(set(types)) == 2
        call = f"encode_tables<{', '.join(types)}>(a)" if both else f"encode_with_table<{types[0]}>(a, {each})"
        threads = "kv::TABLE_THREADS"
        tell = f"*a.bad = kv::table_bytes<{first.type}>();"
    return Program.of(
        [
            *(["#define KV_KEPT"] if sink else []),
            *(["#define KV_SLOTS"] if slots else []),
            *(f'#include "{name}"' for name in sorted({encoder.header for encoder in encoders})),
            f'static_assert({threads} == {_threads(spec, first)}, "threads as the host counts them");',
            f"KV_KERNEL void KV_BOUNDS({_threads(spec, first)}, {least}) "
            "kv_encode(KV_GRID_CONSTANT kv::EncodeArgs a) {",
            f"  kv::{call};",
            "}",
            *((f"KV_KERNEL void kv_shared(KV_GRID_CONSTANT kv::EncodeArgs a) {{ {tell} }}",) if tell else ()),
        ],
        [encoder.folder for encoder in encoders],
        fma=False,  # bit-exact: no multiply-add is contracted
    )


def programs(
    spec: EncodeSpec, roles: tuple[Role, ...] = ROLES, sink: bool = False, slots: bool = False
) -> dict[tuple[Role, ...], Program]:
    """Return the launches that write these roles: the roles of each, and its program.

    ``sink``: whether pages keep first tokens in 16 bit. ``slots``: those of a ``SlotWriter``.
    """
    there = tuple(role for role in roles if role in spec.encoders)
    groups: list[tuple[Role, ...]] = [(role,) for role in there]
    if len(there) == 2:
        key, value = spec.encoders.values()
        alike = (key.type, key.order, key.factor, key.divide) == (value.type, value.order, value.factor, value.divide)
        if key.form == value.form == "rows" or (key.form == value.form == "table" and alike):
            groups = [there]
    return {group: _program(spec, group, sink, slots) for group in groups}


class Launch(NamedTuple):
    """A loaded program that encodes one role or both."""

    roles: tuple[Role, ...]
    encoders: tuple[Encoder, ...]
    kernel: Kernel
    threads: int
    shared: int  # bytes of dynamic shared memory

    def run(self, args: Any, batch: int, heads: int, tokens: Sequence[int]) -> None:
        """Encode so many tokens of each sequence and role."""
        blocks = max([_blocks(encoder, heads, n) for encoder, n in zip(self.encoders, tokens, strict=True)])
        self.kernel.launch((blocks, batch, len(self.roles)), self.threads, self.shared, args)


@lru_cache(maxsize=256)
def _launches(
    text: str, roles: tuple[Role, ...], sink: bool, device: torch.device, slots: bool = False
) -> list[Launch]:
    spec, launches = spec_of(text, EncodeSpec), []
    for group, program in programs(spec, roles, sink, slots).items():
        encoders, shared = tuple(spec.encoders[role] for role in group), 0
        names = ("kv_encode", "kv_shared") if encoders[0].form == "table" else ("kv_encode",)
        kernel, *tell = load(program, names, device, spec.name)
        if tell:
            size = torch.zeros(1, dtype=torch.int32, device=device)
            tell[0].launch((1, 1, 1), 32, 0, EncodeArgs(bad=size.data_ptr()))
            shared = int(size)  # synchronises, once per program
        launches.append(Launch(group, encoders, kernel, _threads(spec, encoders[0]), shared))
    return launches


def _common(spec: EncodeSpec, pages: Tensor, bad: Tensor | None, sink: int) -> Any:
    """Arguments that do not depend on the tokens."""
    args = EncodeArgs()
    args.pages, args.bad = pages.data_ptr(), address(bad)
    args.page_bytes, args.page_tokens, args.heads = pages.shape[2], spec.page_tokens, pages.shape[1]
    args.kept, args.key.rows = sink, spec.page_bytes
    args.value.rows = spec.page_bytes + rows_bytes(sink, spec.head_dim) // 2
    return args


def _encode(new: NewTokens, pages: Tensor, table: Tensor, text: str, key: Constants, value: Constants) -> None:
    spec = spec_of(text, EncodeSpec)
    x = {role: aligned_rows(new.x[role], 4) for role in ROLES if role in new.x and new.x[role].numel()}
    if not x:
        return
    some = next(iter(x.values()))
    args = _common(spec, pages, new.bad, new.sink)
    args.page_table, args.table_row, args.kind = table.data_ptr(), table.stride(0), KINDS[some.dtype]
    args.capacity = table.shape[1] * spec.page_tokens
    if "key" in x and new.less is not None:
        fill_rotated_mean(args.mean, new.less)
    for role, part in x.items():
        side, const, plane = (args.key, key, spec.key_plane) if role == "key" else (args.value, value, spec.value_plane)
        side.x, side.first, side.tokens = part.data_ptr(), new.first.data_ptr(), part.shape[2]
        side.batch, side.head, side.token, _ = part.stride()
        fill_encoder(side, const, plane)
    for launch in _launches(text, tuple(x), new.sink > 0, some.device):
        launch.run(args, some.shape[0], some.shape[1], [x[role].shape[2] for role in launch.roles])


class SlotWriter:
    """Encodes tokens into any slots of an engine's pool of pages, in one launch where both roles allow it.

    Parameters as of ``encode_to_pages``, with one ``key`` and ``value`` for all sequences: prepared once for all calls.
    """

    def __init__(self, pages: Tensor, spec: str, key: Constants, value: Constants, bad: Tensor, sink: int = 0) -> None:
        known = spec_of(spec, EncodeSpec)
        args = _common(known, pages, bad, sink)
        self.args, self.key, self.value, self.mean = args, args.key, args.value, args.mean
        fill_encoder(self.key, key, known.key_plane)
        fill_encoder(self.value, value, known.value_plane)
        self.many, self.few = (
            _launches(text_of(one), ROLES, sink > 0, pages.device, True) for one in (known, known.small_batch)
        )
        # while all blocks of both roles run at once
        self.few_tokens = 2 * H200.sms // (len(ROLES) * args.heads) * TABLE_WARPS
        self.tensors = pages, key, value, bad

    def write(self, keys: Tensor, values: Tensor, slots: Tensor, less: RotatedMean | None = None) -> None:
        """Encode tokens ``keys, values [T, H, D]``, model basis; nothing synchronises.

        ``slots``, int64 ``[T]``: slot s is place ``s % P`` of page ``s // P``; below 0: the token is not stored. With
        groups of tokens T is a multiple of them, and the slot of a group's first token counts. ``less``: what is
        subtracted from the keys, of one sequence of T tokens.
        """
        if not keys.shape[0]:
            return
        if slots.dtype != torch.int64 or slots.shape[0] != keys.shape[0] or slots.stride(0) != 1:
            raise ShapeError(
                f"slots are {slots.dtype} {list(slots.shape)}; contiguous int64 [{keys.shape[0]}] is needed, one "
                f"of each token."
            )
        args, copies = self.args, []
        for side, x in ((self.key, keys), (self.value, values)):
            token, head, channel = x.stride()
            if channel != 1 or x.data_ptr() % 16 or token % 4 or head % 4:
                x = x.clone(memory_format=torch.contiguous_format)
                token, head, _ = x.stride()
                copies.append(x)  # until the launch
            side.x, side.tokens, side.token, side.head = x.data_ptr(), x.shape[0], token, head
        args.slots, args.kind = slots.data_ptr(), KINDS[keys.dtype]
        if less is not None:
            fill_rotated_mean(self.mean, less)
        for launch in self.few if keys.shape[0] <= self.few_tokens else self.many:
            launch.run(args, 1, keys.shape[1], [keys.shape[0]] * len(launch.roles))


def _blocks(encoder: Encoder, heads: int, tokens: int) -> int:
    """Blocks of threads along the rows of a sequence: one step each, unless rows are very many."""
    if encoder.form == "blocks":
        return max(1, min(heads * (tokens // encoder.block), MOST_BLOCKS))
    if encoder.form == "table":  # a block serves one head and loads its tables first, which a few steps amortise
        rows = TABLE_WARPS * (32 // encoder.team) * (2 if encoder.team == 8 else 1)
        most = encoder.resident * H200.sms or MOST_BLOCKS
        return heads * max(1, min(-(-tokens // rows), most // heads))
    return max(1, min(-(-heads * tokens // (ROWS_PER_WARP * ROW_THREADS // 32)), MOST_BLOCKS))


# compiled graphs trace the operator, which takes tensors, numbers and texts only; eager calls skip the dispatcher
@torch.library.custom_op("packedkv::cuda_encode_to_pages", mutates_args=("pages", "bad"))
def _op(
    x: Sequence[Tensor | None], pages: Tensor, table: Tensor, first: Tensor, bad: Tensor | None, text: str,
    constants: Sequence[Tensor | None], less: Sequence[Tensor], interleaved: bool, sink: int,
) -> None:  # fmt: skip
    given = {role: part for role, part in zip(ROLES, x, strict=True) if part is not None}
    turned = RotatedMean(less[0], less[1], less[2], interleaved) if less else None
    _encode(NewTokens(given, first, bad, turned, sink), pages, table, text, *constants_of(constants, (1, 1)))


@_op.register_fake
def _(*_args: Any) -> None:
    return None


def encode_to_pages(
    new: NewTokens, pages: Tensor, table: Tensor, *, spec: str, key: Constants, value: Constants, checked: bool = False
) -> None:
    """Encode new tokens into their slots.

    ``pages`` and ``table`` are as in ``kernels.tokens``, ``spec`` is ``spec.text_of`` a spec, ``key`` and ``value`` are
    the constants of its encoders. ``new.less`` is given if the spec has ``mean``. ``checked``: whether the arguments
    are known to fit each other, as a cache's do; otherwise raises ShapeError and UnsupportedError.
    """
    if not checked:
        _check(new, pages, table, spec)
    if not torch.compiler.is_compiling():
        _encode(new, pages, table, spec, key, value)
        return
    turned, interleaved = ([], False) if new.less is None else ([*new.less[:3]], new.less.interleaved)
    x = [new.x.get(role) for role in ROLES]
    _op(x, pages, table, new.first, new.bad, spec, tensors_of(key, value), turned, interleaved, new.sink)


def _check(new: NewTokens, pages: Tensor, table: Tensor, spec: str) -> None:
    name = "encode_to_pages"
    known, x = spec_of(spec, EncodeSpec), new.x
    least = known.page_bytes + rows_bytes(new.sink, known.head_dim)
    check_pages(name, pages, least, table=table, first=new.first)
    for role, part in x.items():
        if (encoder := known.encoder(role)) is None:
            raise UnsupportedError(f"{name}: no kernel encodes these {role}s; encode them with the codec.")
        want = [table.shape[0], pages.shape[1], known.head_dim]
        if part.dim() != 4 or [part.shape[0], part.shape[1], part.shape[3]] != want or part.dtype not in KINDS:
            raise ShapeError(
                f"{name}: {role}s are {part.dtype} {list(part.shape)}; fp16, bf16 or fp32 [{want[0]}, {want[1]}, N, "
                f"{want[2]}] is needed."
            )
        if new.sink and encoder.form == "blocks":
            raise UnsupportedError(f"{name}: {known.name} encodes groups of tokens, whose pages keep none in 16 bit.")
        if part.shape[2] % encoder.block or part.shape[0] > MOST_SEQUENCES:
            raise ShapeError(
                f"{name}: {part.shape[2]} tokens of {part.shape[0]} sequences; a multiple of {encoder.block} tokens "
                f"and at most {MOST_SEQUENCES} sequences are needed."
            )
    if "key" in x and x["key"].numel():
        _check_turned(name, known, new.less, x["key"])
    if len(dtypes := [part.dtype for part in x.values()]) == 2 and dtypes[0] != dtypes[1]:
        raise ShapeError(f"{name}: keys are {x['key'].dtype}, values {x['value'].dtype}; use one dtype.")


def _check_turned(name: str, spec: EncodeSpec, less: RotatedMean | None, keys: Tensor) -> None:
    if (less is None) == spec.mean:
        raise UnsupportedError(
            f"{name}: the spec is made {'with' if spec.mean else 'without'} a mean of the keys, and "
            f"{'none' if less is None else 'one'} is given; pass mean={not spec.mean} to encode_spec."
        )
    if less is None:
        return
    batch, heads, tokens, dim = keys.shape
    mean, cosines, sines, _ = less
    if mean.dtype != torch.float32 or mean.shape[0] not in (1, batch) or list(mean.shape[1:]) != [heads, dim]:
        raise ShapeError(
            f"{name}: mean is {mean.dtype} {list(mean.shape)}; float32 [1 or {batch}, {heads}, {dim}] is needed."
        )
    for what, x in (("cosines", cosines), ("sines", sines)):
        alike = (x.dtype, x.shape, x.stride()) == (torch.float32, cosines.shape, cosines.stride())
        if not alike or x.dim() != 3 or x.shape[0] not in (1, batch) or x.shape[1] != tokens or 2 * x.shape[2] > dim:
            raise ShapeError(
                f"{name}: {what} are {x.dtype} {list(x.shape)}; float32 [1 or {batch}, {tokens}, R / 2] is needed, R "
                f"at most {dim}, cosines and sines alike."
            )
    if not mean.is_contiguous() or cosines.stride(2) != 1:
        raise ShapeError(f"{name}: the mean, and the cosines of a token, must be contiguous.")
