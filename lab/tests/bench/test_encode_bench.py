"""Rows of ``packedkv bench encode``: bytes checked before timing, blocks counted per token, other libraries."""

import pytest
import torch

from lab.tests.bench.gpu_stubs import CPU, Clock, recorder
from packedkv.codec import ROLES
from packedkv.errors import SpecError, UnsupportedError
from packedkv_lab.bench import encode
from packedkv_lab.bench.encode import append_shape, append_times, differing_bytes, encode_operator, encode_rows
from packedkv_lab.bench.shapes import PRESETS, Shape

WRITER = encode.writer
SMALL = Shape("llm64k", 2, 4, 2, 64, 200)


def reference_writer(scheme, shape, store, params, first, mean):
    """What a kernel does, by the reference: whole blocks from slot 0 on."""

    def write(keys, values):
        for role, x in zip(ROLES, (keys, values), strict=True):
            if x is not None:
                codec, x = scheme.codec(role), x.float()
                if mean is not None and role == "key":
                    x = x - mean.at(mean.given, torch.arange(x.shape[2])[None])
                store.write(role, 0, codec.encode(codec.to_code(x, params[role]), params[role]))

    return write


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    monkeypatch.setattr(encode, "writer", reference_writer)


def run(specs, clock=None, shapes=(SMALL,), batches=(), **options):
    found = recorder(clock, **options)
    encode_rows(specs, found, shapes, batches)
    return found.new


@pytest.mark.parametrize("spec", [*PRESETS, "saw-int4:mean=pre", "turboquant-4:mean=post", "ghost-3"])
def test_every_presets_bytes_are_checked_in_pages_of_random_order(spec):
    work = encode_operator(spec, SMALL, CPU, 0)
    assert differing_bytes(work) == 0
    assert work.store.table.flatten().tolist() != list(range(8))
    right = work.write

    def wrong(keys, values):
        right(keys, values)
        work.store.pages[work.store.table[1, 0], 0, 5] ^= 1  # a byte of the last sequence's first codes

    work.write = wrong
    assert differing_bytes(work) > 0


def test_wrong_bytes_are_not_timed(monkeypatch):
    monkeypatch.setattr(encode, "differing_bytes", lambda _: 0.02)
    rows = run(["int-4"])
    assert [(r["metric"], r["values"]) for r in rows] == [("encode_us", None)]
    assert rows[0]["status"] == "failed its gate: 2.0e-02 of the bytes are not the reference's"


def test_rows_of_a_preset_with_its_floor():
    rows = {r["metric"]: r for r in run(["int-4"])}
    assert set(rows) == {"differing_bytes", "encode_roofline_us", "encode_us"}
    both = 2 * 2 * 2 * 200
    assert rows["encode_roofline_us"]["bytes"] == both * (64 * 2 + 32 + 4)
    assert rows["encode_us"]["path"] == "cuda"
    assert rows["encode_us"]["effective_bits"] == 4.5


@pytest.mark.parametrize(
    ("spec", "times", "expected"),
    [("int-4", [8.0], 8.0), ("kivi-2", [64.0, 3.0], 5.0), ("innerq-base", [3.0, 64.0], 5.0)],
)
def test_a_blocks_time_counts_by_its_tokens(spec, times, expected):
    clock = Clock()
    clock.next_times = list(times)
    work = encode_operator(spec, append_shape(2), CPU, 0)
    seen = []
    right = work.write
    work.write = lambda k, v: (seen.append([None if x is None else x.shape[2] for x in (k, v)]), right(k, v))
    assert append_times(work, clock)["p50"] == expected
    assert seen == {"int-4": [[1, 1]], "kivi-2": [[32, None], [None, 1]], "innerq-base": [[1, None], [None, 32]]}[spec]


@pytest.mark.parametrize("names", ["append_b", "append_bx", "llm", ""])
def test_shapes_of_the_encode_bench_are_named(names):
    with pytest.raises(SpecError, match="no shape"):
        encode.encode_shapes(names)


def test_a_preset_without_an_encoder_says_so(monkeypatch):
    monkeypatch.setattr(encode, "writer", WRITER)
    with pytest.raises(UnsupportedError, match="no kernel encodes octopus-4"):
        encode_operator("octopus-4", SMALL, CPU, 0)
    (row,) = run(["octopus-4"])
    assert row["status"].startswith("no kernel: no kernel encodes octopus-4: ")
