"""Times of encoding into pages: ``packedkv bench encode``.

==========================  ====  ====================================================================================
metric                      unit  what
==========================  ====  ====================================================================================
``encode_us``               us    K and V of all tokens of a shape, in a CUDA graph, dirty L2
``encode_roofline_us``      us    bytes read and written / 4.3 TB/s
``encode_us_unfused``       us    saw-int4 in SAW-INT4's unfused form: keys rotated by a product (cuBLAS) and written
                                  back, then quantized and stored by the int-4 kernel
``encode_us_torch``         us    saw-int4's reference, a torch operation per step, eager
``append_us``               us    one new token per sequence, shapes ``append_b1`` ... ``append_b256``; of codecs with
                                  blocks of tokens a block's time / its tokens
``append_us_unfused``       us    the same of saw-int4 in the unfused form, as ``encode_us_unfused``
``differing_bytes``         x     share of bytes that are not the reference's, before timing; above 1e-4: not timed
==========================  ====  ====================================================================================

Other libraries (hqq, optimum-quanto: what transformers' QuantizedCache calls) quantize the same K and V eagerly, where
they are importable: ``encode_us`` with their name as spec.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES
from packedkv.errors import KVError, UnsupportedError
from packedkv.ops.qjl import hadamard_matrix
from packedkv_lab.bench.decode import ROOFLINE_BYTES_PER_US
from packedkv_lab.bench.packed import scheme_of
from packedkv_lab.bench.packed_encode import Encoding, differing_bytes, encode_operator
from packedkv_lab.bench.quantizer_rivals import quantizer_rivals
from packedkv_lab.bench.record import Deadline, DeviceLostError, Recorder, Row, device_lost
from packedkv_lab.bench.shapes import SHAPES, Shape, shapes_named
from packedkv_lab.bench.timing import Timer

ENCODE_SHAPES = tuple(SHAPES[name] for name in ("llm64k", "video", "audio", "b32_8k"))
APPEND_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_DIFFERENT = 1e-4
STEPS_OF = "saw-int4"


def append_shape(batch: int) -> Shape:
    """Pages of one block per sequence; 8 KV heads.

    >>> append_shape(4).name
    'append_b4'
    """
    return Shape(f"append_b{batch}", batch, 32, 8, 128, 64)


def encode_shapes(names: str) -> tuple[tuple[Shape, ...], tuple[int, ...]]:
    """Shapes and batches of ``encode_rows`` by name: any shape of the benches, ``append_b<n>``, or ``append`` for all.

    Raises
    ------
    SpecError
        As ``shapes_named``.

    Examples
    --------
    >>> shapes, batches = encode_shapes("llm64k,append_b8")
    >>> [shape.name for shape in shapes], batches
    (['llm64k'], (8,))
    """
    given = [name for part in names.split(",") if (name := part.strip())]
    found = {int(name[8:]) for name in given if name[:8] == "append_b" and name[8:].isdigit()}
    batches = APPEND_BATCHES if "append" in given else tuple(sorted(found - {0}))
    others = [name for name in given if name != "append" and not (name[:8] == "append_b" and name[8:].isdigit())]
    return tuple(shapes_named(",".join(others))) if others or not batches else (), batches


def encode_rows(
    specs: Sequence[str],
    recorder: Recorder,
    *,
    timer: Timer,
    device: torch.device,
    seed: int = 0,
    libraries: bool = True,
    deadline: Deadline | None = None,
    shapes: Sequence[Shape] = ENCODE_SHAPES,
    batches: Sequence[int] = APPEND_BATCHES,
) -> Iterator[Row]:
    """Time presets, the steps of saw-int4 and other libraries; what the recorder's file holds is left out.

    Parameters
    ----------
    specs : sequence of str
    recorder, timer, device, seed, libraries, deadline
        As ``decode.decode_rows``.
    shapes : sequence of Shape
        Of the prefill.
    batches : sequence of int
        Sequences that append one token each.

    Returns
    -------
    iterator of dict
        Rows as they are measured.
    """
    deadline = deadline or Deadline()
    for shape in (*shapes, *map(append_shape, batches)):
        metric = "append_us" if shape.name.startswith("append") else "encode_us"
        for spec in specs:
            if deadline.passed:
                recorder.say(f"out of time before {spec} at {shape.name}; run again to go on")
                return
            if not recorder.has(spec, metric, shape.name):
                yield from _preset_rows(spec, shape, metric, recorder, timer, device, seed)
        if metric == "encode_us" and libraries and shape.name == "llm64k":
            yield from _library_rows(shape, recorder, timer, device, seed)
        if device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _preset_rows(
    spec: str,
    shape: Shape,
    metric: str,
    recorder: Recorder,
    timer: Timer,
    device: torch.device,
    seed: int,
) -> Iterator[Row]:
    bits = scheme_of(spec).effective_bits(shape.head_dim)
    common: dict[str, Any] = {"sizes": shape.sizes()}

    def refused(status: str) -> Row:
        return recorder.add(spec, bits, metric, "us", shape.name, None, status=status, **common)

    try:
        work = encode_operator(spec, shape, device, seed)
        common["path"] = work.path
        share = differing_bytes(work)
        if share > MOST_DIFFERENT:
            yield refused(f"failed its gate: {share:.1e} of the bytes are not the reference's")
            return
        same = {"p20": share, "p50": share, "p80": share}
        if metric == "append_us":
            times = append_times(work, timer)
            if spec == STEPS_OF:
                token = [x[:, :, :1].clone() for x in (work.keys, work.values)]
                apart = timer.cold(rotated_apart(work, token[0], token[1]), 30)
                yield recorder.add(spec, bits, "append_us_unfused", "us", shape.name, apart, **common)
            yield recorder.add(spec, bits, metric, "us", shape.name, times, differing_bytes=share, **common)
            return
        reps = 30 if shape.batch == 1 else 12
        times = timer.cold(work.encode, reps)
        yield recorder.add(spec, bits, "differing_bytes", "x", shape.name, same, **common)
        floor = round(work.bytes_moved / ROOFLINE_BYTES_PER_US, 3)
        flat = {"p20": floor, "p50": floor, "p80": floor}
        yield recorder.add(spec, bits, "encode_roofline_us", "us", shape.name, flat, bytes=work.bytes_moved, **common)
        if spec == STEPS_OF and shape.name in ("llm64k", "b32_8k"):
            yield from _step_rows(work, recorder, timer, bits, common)
        yield recorder.add(spec, bits, metric, "us", shape.name, times, **common)
    except UnsupportedError as error:
        yield refused(f"no kernel: {error}")
    except (KVError, RuntimeError) as error:  # as in decode: the others are timed
        lost = device_lost(device)
        yield refused(f"{'device lost' if lost else 'failed'}: {type(error).__name__}: {str(error)[:300]}")
        if lost:
            raise DeviceLostError(f"bench encode: {spec} at {shape.name} broke the CUDA context.") from error


def append_times(work: Encoding, timer: Timer) -> dict[str, float]:
    """Time one token per sequence; a role with blocks of n tokens counts with a block's time / n."""
    given = dict(zip(ROLES, (work.keys, work.values), strict=True))
    groups: dict[int, list[Any]] = {}
    for role in ROLES:
        groups.setdefault(work.block(role), []).append(role)
    total = dict.fromkeys(("p20", "p50", "p80"), 0.0)
    for block, roles in groups.items():
        # contiguous, like the output of a model's projection
        token = {role: given[role][:, :, :block].clone() if role in roles else None for role in ROLES}
        found = timer.cold(lambda token=token: work.write(token["key"], token["value"]), 30)  # type: ignore[misc]
        total = {p: round(x + found[p] / block, 4) for p, x in total.items()}
    return total


def rotated_apart(work: Encoding, keys: Tensor, values: Tensor) -> Callable[[], None]:
    """Return the unfused form: rotated keys go to memory by a product, and ``int-4`` encodes them from there."""
    device = keys.device
    plain = encode_operator("int-4", work.shape, device, 0)
    order = work.shape.head_dim & -work.shape.head_dim
    matrix = hadamard_matrix(order, str(device)).to(torch.bfloat16) * order**-0.5

    def apart() -> None:
        plain.write(torch.matmul(keys, matrix), values)

    return apart


def _step_rows(work: Encoding, recorder: Recorder, timer: Timer, bits: float, common: dict[str, Any]) -> Iterator[Row]:
    shape = work.shape
    times = timer.cold(rotated_apart(work, work.keys, work.values), 20)
    yield recorder.add(work.spec, bits, "encode_us_unfused", "us", shape.name, times, **common)
    scheme = scheme_of(work.spec)

    def steps() -> None:
        for role, x in zip(ROLES, (work.keys, work.values), strict=True):
            codec, params = scheme.codec(role), work.params[role]
            for part, first in _pieces(x):
                work.store.write(role, first, codec.encode(codec.to_code(part.float(), params), params))

    yield recorder.add(work.spec, bits, "encode_us_torch", "us", shape.name, timer.eager(steps, 5), **common)


def _pieces(x: Tensor, tokens: int = 8192) -> Iterator[tuple[Tensor, int]]:
    """Pieces of the tokens and where they begin: the reference holds float64 copies of what it gets."""
    for first in range(0, x.shape[2], tokens):
        yield x[:, :, first : first + tokens], first


@torch.no_grad()
def _library_rows(shape: Shape, recorder: Recorder, timer: Timer, device: torch.device, seed: int) -> Iterator[Row]:
    size = (shape.kv_heads * shape.tokens * shape.batch, shape.head_dim)
    generator = torch.Generator(device).manual_seed(seed)
    kv = [torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in ROLES]
    for rival in quantizer_rivals(shape.head_dim):
        more = {"job": rival.job, "sizes": shape.sizes()}
        if recorder.has(rival.name, "encode_us", shape.name):
            continue
        if rival.missing:
            status = "not installed"
            yield recorder.add(rival.name, None, "encode_us", "us", shape.name, None, status=status, **more)
            continue
        try:
            held = [rival.encode(x) for x in kv]
            bits = sum(map(rival.nbytes, held)) * 8 / sum(x.numel() for x in kv)
            times = timer.eager(lambda rival=rival: [rival.encode(x) for x in kv], 5)  # type: ignore[misc]
        except Exception as error:  # another library's failure is a row
            status = f"not available: {type(error).__name__}: {str(error)[:160]}"
            yield recorder.add(rival.name, None, "encode_us", "us", shape.name, None, status=status, **more)
            continue
        yield recorder.add(rival.name, bits, "encode_us", "us", shape.name, times, **more)
