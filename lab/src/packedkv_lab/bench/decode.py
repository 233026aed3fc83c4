"""``packedkv bench decode``: time one decode step over packed pages, beside 16-bit attention in the same run.

- ``decode_us_<state>``: the L2 as ``timing`` describes it; ``decode_us_cold_again``: the best bf16 form after the
  presets of its shape, which shows the drift of the run
- ``speedup_vs_bf16_<state>``: fastest bf16 form / preset, medians; p20 and p80 from the preset's
- ``roofline_us``: bytes that the step must read / 4.3 TB/s; ``roofline_share_cold``: that / ``decode_us_cold``
- ``attention_error``: of ``packed.gate``; after a failed gate nothing is timed

Sink and window of a preset are dense tokens among the shape's; ``mean`` is the one that keys are encoded without.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from packedkv_lab.bench.packed import gate, packed_operator
from packedkv_lab.bench.record import GateError, Recorder
from packedkv_lab.bench.rivals import (
    MOST_ERROR,
    QUANTIZED_ERROR,
    AttentionRival,
    Dense,
    library_rivals,
    torch_rivals,
)
from packedkv_lab.bench.shapes import PER_HEAD, SAW, SPINE, SWEEP, Shape
from packedkv_lab.bench.timing import Spread, Timer, flat, ratio

ROOFLINE_BYTES_PER_US = 4.3e6
"""Bytes per microsecond of a copy on an H200, reads and writes together."""
COLD_ONLY = (*SWEEP, *SAW, *PER_HEAD)


class Bar(NamedTuple):
    """A rival that ran: its times by state, and the call that was timed."""

    rival: AttentionRival
    times: dict[str, Spread]
    call: Callable[[], object]


def times_of(timer: Timer, call: Callable[[], object], shape: Shape) -> dict[str, Spread]:
    """Time a call in the states that matter for a shape: all three, or cold alone at the studies' many shapes."""
    reps, calls = (60, 20) if shape.batch == 1 else (20, 6)
    if shape in COLD_ONLY:
        return {"cold": timer.cold(call, 30 if shape.batch == 1 else 16)}
    return {"cold": timer.cold(call, reps), "clean": timer.clean(call, reps), "warm": timer.warm(call, calls)}


def decode_rows(specs: Sequence[str], shapes: Sequence[Shape], recorder: Recorder) -> None:
    """Time presets and rivals (other libraries at the spine's shapes alone); what the recorder holds is left out."""
    for shape in shapes:
        wanted = [spec for spec in specs if not recorder.has(spec, "speedup_vs_bf16_cold", shape.name)]
        if not wanted or recorder.out_of_time:
            continue
        dense = Dense(shape, recorder.device, recorder.seed)
        rivals = list(torch_rivals(dense))
        if recorder.libraries and shape in SPINE:  # FlexAttention compiles for each shape
            rivals += library_rivals(dense)
        bars = [bar for rival in rivals if (bar := _rival_rows(rival, dense, recorder)) is not None]
        if not bars:
            recorder.say(f"{shape.name}: no 16-bit attention runs here; nothing to compare with")
            continue
        for spec in wanted:
            if recorder.late(f"{spec} at {shape.name}"):
                break
            _preset_rows(spec, shape, recorder, bars)
        best = min(bars, key=lambda bar: bar.times["cold"]["p50"])
        again = recorder.timer.cold(best.call, 20)
        more = {"backend": best.rival.backend, "form": best.rival.form, "sizes": shape.sizes()}
        recorder.add("dense", 16.0, "decode_us_cold_again", "us", shape.name, again, **more)
        del dense, rivals, bars, best
        if recorder.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _rival_rows(rival: AttentionRival, dense: Dense, recorder: Recorder) -> Bar | None:
    """Time a rival; return one of 16 bits, a bar for the presets."""
    shape = dense.shape
    named = {"backend": rival.backend, "form": rival.form}
    alike = {"shape": shape.name, **named}
    if any(str(r.get("status")).startswith("device lost") for r in recorder.rows if alike.items() <= r.items()):
        return None
    more = {**named, "sizes": shape.sizes()}
    with recorder.case(rival.spec, shape.name, "decode_us_cold", bits=rival.bits, name=rival.form, more=more) as case:
        call = rival.make()
        case.more["error"] = error = round(dense.error_of(call()), 5)
        if not error <= MOST_ERROR.get(rival.bits, QUANTIZED_ERROR):
            raise GateError(f"its output differs from 16-bit attention by {error:.2g}")
        times = times_of(recorder.timer, call, shape)
        for state, values in times.items():
            case.add(f"decode_us_{state}", "us", values)
        return Bar(rival, times, call) if rival.bits == 16 else None
    return None


@torch.no_grad()
def _preset_rows(spec: str, shape: Shape, recorder: Recorder, bars: Sequence[Bar]) -> None:
    with recorder.case(spec, shape.name, "decode_us_cold", more={"sizes": shape.sizes()}) as case:
        packed = packed_operator(spec, shape, recorder.device, recorder.seed)
        case.more["path"] = packed.path
        if packed.mean is not None:
            case.more["mean"] = packed.mean.kind  # that keys are encoded without
        checked = gate(packed)
        if not checked.passed:
            case.bits = packed.effective_bits
            raise GateError(str(checked))
        times = times_of(recorder.timer, packed.attend, shape)
        case.bits = packed.effective_bits
        case.add("attention_error", "x", flat(checked.error, 12), bf16_error=checked.bf16_error)
        for state, values in times.items():
            case.add(f"decode_us_{state}", "us", values)
        floor = packed.bytes_read / ROOFLINE_BYTES_PER_US
        case.add("roofline_us", "us", flat(floor), bytes=packed.bytes_read)
        case.add("roofline_share_cold", "x", ratio(floor, times["cold"]))
        # cold last: its row marks this preset as done at this shape
        for state, values in sorted(times.items(), key=lambda item: item[0] == "cold"):
            best = min(bars, key=lambda bar: bar.times[state]["p50"])
            base = best.times[state]["p50"]
            more = {"backend": best.rival.backend, "form": best.rival.form, "bf16_us": base}
            case.add(f"speedup_vs_bf16_{state}", "x", ratio(base, values), **more)
