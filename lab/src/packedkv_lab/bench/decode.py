"""Times of one decode step over packed pages, beside 16-bit attention in the same run: ``packedkv bench decode``.

==============================  ====  ================================================================================
metric                          unit  what
==============================  ====  ================================================================================
``decode_us_cold``              us    one step in a CUDA graph after 512 MB were written: the L2 is full of dirty lines
``decode_us_clean``             us    after 512 MB were read: the L2 is full of foreign lines that cost nothing to drop
``decode_us_warm``              us    several steps in one graph, per step
``decode_us_cold_again``        us    the best bf16 form, cold, after the presets of its shape: the drift of the run
``speedup_vs_bf16_<state>``     x     fastest bf16 form of the run / preset, medians; p20 and p80 from the preset's
``roofline_us``                 us    bytes that the step must read / 4.3 TB/s
``roofline_share_cold``         x     that / ``decode_us_cold``
``attention_error``             x     relative error against float64 attention over the decoded K and V, before timing:
                                      the worst of some heads and of diffuse, plain and sharp queries
==============================  ====  ================================================================================

Rows of presets that encode keys without their mean say which one (``mean``): it is added in every step.

A preset is timed as it is used: its sink and window are dense tokens among the shape's tokens, and of presets with
dense outer layers a middle layer is timed. After a failed gate (``packed.gate``) nothing is timed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from packedkv.errors import KVError, UnsupportedError
from packedkv_lab.bench.attention_rivals import (
    MOST_ERROR,
    QUANTIZED_ERROR,
    AttentionRival,
    Dense,
    library_rivals,
    missing,
    torch_rivals,
)
from packedkv_lab.bench.packed import Packed, gate, packed_operator
from packedkv_lab.bench.record import Deadline, DeviceLostError, Recorder, Row, device_lost
from packedkv_lab.bench.shapes import PER_HEAD, SAW, SPINE, SWEEP, Shape
from packedkv_lab.bench.timing import Timer

ROOFLINE_BYTES_PER_US = 4.3e6
"""Bytes per microsecond of a copy on an H200, reads and writes together."""
COLD_ONLY = (*SWEEP, *SAW, *PER_HEAD)


class Bar(NamedTuple):
    """A rival that ran: its times by state, and the call that was timed."""

    rival: AttentionRival
    times: dict[str, dict[str, float]]
    call: Callable[[], object]


def times_of(timer: Timer, call: Callable[[], object], shape: Shape) -> dict[str, dict[str, float]]:
    """Time a call in the states that matter for a shape: all three, or cold alone at the studies' many shapes."""
    reps, calls = (60, 20) if shape.batch == 1 else (20, 6)
    if shape in COLD_ONLY:
        return {"cold": timer.cold(call, 30 if shape.batch == 1 else 16)}
    return {"cold": timer.cold(call, reps), "clean": timer.clean(call, reps), "warm": timer.warm(call, calls)}


def ratio(base: float, values: dict[str, float]) -> dict[str, float]:
    """``base`` over ``values``, so the slow percentiles become the low ones.

    >>> ratio(100.0, {"p20": 40.0, "p50": 50.0, "p80": 80.0})
    {'p20': 1.25, 'p50': 2.0, 'p80': 2.5}
    """
    return {p: round(base / values[q], 4) for p, q in (("p20", "p80"), ("p50", "p50"), ("p80", "p20"))}


def decode_rows(
    specs: Sequence[str],
    shapes: Sequence[Shape],
    recorder: Recorder,
    *,
    timer: Timer,
    device: torch.device,
    seed: int = 0,
    libraries: bool = True,
    deadline: Deadline | None = None,
) -> Iterator[Row]:
    """Time presets and rivals at every shape; what the recorder's file already holds is left out.

    Parameters
    ----------
    specs : sequence of str
    shapes : sequence of Shape
    recorder : Recorder
    timer : Timer
    device : torch.device
    seed : int
    libraries : bool
        Whether to time rivals outside torch's SDPA as well, at the spine's shapes.
    deadline : Deadline, optional
        Nothing is started after it.

    Returns
    -------
    iterator of dict
        Rows as they are measured.
    """
    deadline = deadline or Deadline()
    for shape in shapes:
        wanted = [spec for spec in specs if not recorder.has(spec, "speedup_vs_bf16_cold", shape.name)]
        if not wanted or deadline.passed:
            continue
        dense = Dense(shape, device, seed)
        found = list(torch_rivals(dense))
        if libraries and shape in SPINE:  # FlexAttention compiles for each shape
            found += library_rivals(dense)
        sixteen: list[Bar] = []
        for rival in found:
            yield from _rival_rows(rival, dense, recorder, timer, sixteen)
        if not sixteen:
            recorder.say(f"{shape.name}: no 16-bit attention runs here; nothing to compare with")
            continue
        for spec in wanted:
            if deadline.passed:
                recorder.say(f"{shape.name}: out of time before {spec}; run again to go on")
                break
            yield from _preset_rows(spec, shape, recorder, timer, sixteen, device, seed)
        best = min(sixteen, key=lambda bar: bar.times["cold"]["p50"])
        again = timer.cold(best.call, 20)
        more = {"backend": best.rival.backend, "form": best.rival.form, "sizes": shape.sizes()}
        yield recorder.add("dense", 16.0, "decode_us_cold_again", "us", shape.name, again, **more)
        del dense, found, sixteen, best
        if device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _rival_rows(
    rival: AttentionRival,
    dense: Dense,
    recorder: Recorder,
    timer: Timer,
    bars: list[Bar],
) -> Iterator[Row]:
    """Time a rival; one of 16 bits is a bar for the presets."""
    shape = dense.shape
    more: dict[str, Any] = {"backend": rival.backend, "form": rival.form, "sizes": shape.sizes()}
    alike = {"shape": shape.name, "backend": rival.backend, "form": rival.form}
    if any(str(r.get("status")).startswith("device lost") for r in recorder.rows if alike.items() <= r.items()):
        return
    try:
        call = rival.make()
        more["error"] = error = round(dense.error_of(call()), 5)
        if not error <= MOST_ERROR.get(rival.bits, QUANTIZED_ERROR):
            raise ValueError(f"its output differs from 16-bit attention by {error:.2g}")
        times = times_of(timer, call, shape)
    except Exception as error:  # the row of a failed rival has the reason, and the others are timed
        lost = device_lost(dense.q.device)
        status = f"device lost: {type(error).__name__}" if lost else missing(error)
        yield recorder.add(rival.spec, rival.bits, "decode_us_cold", "us", shape.name, None, status=status, **more)
        if lost:
            raise DeviceLostError(f"bench decode: {rival.form} at {shape.name} broke the CUDA context.") from error
        return
    if rival.bits == 16:
        bars.append(Bar(rival, times, call))
    for state, values in times.items():
        yield recorder.add(rival.spec, rival.bits, f"decode_us_{state}", "us", shape.name, values, **more)


@torch.no_grad()
def _preset_rows(
    spec: str,
    shape: Shape,
    recorder: Recorder,
    timer: Timer,
    bars: Sequence[Bar],
    device: torch.device,
    seed: int,
) -> Iterator[Row]:
    common: dict[str, Any] = {"sizes": shape.sizes()}

    def refused(status: str, bits: float | None = None) -> Row:
        return recorder.add(spec, bits, "decode_us_cold", "us", shape.name, None, status=status, **common)

    packed: Packed | None = None
    try:
        packed = packed_operator(spec, shape, device, seed)
        common["path"] = packed.path
        if packed.mean is not None:
            common["mean"] = packed.mean.kind  # that keys are encoded without
        bits = packed.effective_bits
        checked = gate(packed)
        if not checked.passed:
            yield refused(f"failed its gate: {checked}", bits)
            return
        times = times_of(timer, packed.attend, shape)
        bytes_read = packed.bytes_read
    except UnsupportedError as error:
        yield refused(f"no kernel: {error}")
        return
    except (KVError, RuntimeError) as error:  # a broken kernel is a result too, and the others are timed
        lost = device_lost(device)
        yield refused(f"{'device lost' if lost else 'failed'}: {type(error).__name__}: {str(error)[:300]}")
        if lost:
            raise DeviceLostError(f"bench decode: {spec} at {shape.name} broke the CUDA context.") from error
        return
    finally:
        del packed
    found = dict.fromkeys(("p20", "p50", "p80"), checked.error)
    limit = {"bf16_error": checked.bf16_error, **common}
    yield recorder.add(spec, bits, "attention_error", "x", shape.name, found, **limit)
    for state, values in times.items():
        yield recorder.add(spec, bits, f"decode_us_{state}", "us", shape.name, values, **common)
    floor = bytes_read / ROOFLINE_BYTES_PER_US
    flat = dict.fromkeys(("p20", "p50", "p80"), round(floor, 3))
    yield recorder.add(spec, bits, "roofline_us", "us", shape.name, flat, bytes=bytes_read, **common)
    share = ratio(floor, times["cold"])
    yield recorder.add(spec, bits, "roofline_share_cold", "x", shape.name, share, **common)
    # cold last: its row marks this preset as done at this shape
    for state, values in sorted(times.items(), key=lambda item: item[0] == "cold"):
        best = min(bars, key=lambda bar: bar.times[state]["p50"])
        base = best.times[state]["p50"]
        more = {"backend": best.rival.backend, "form": best.rival.form, "bf16_us": base, **common}
        yield recorder.add(spec, bits, f"speedup_vs_bf16_{state}", "x", shape.name, ratio(base, values), **more)
