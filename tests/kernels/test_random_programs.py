"""Random programs on caches whose kernels run on the emulated GPU, beside the oracle of ``tests/fuzz``."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import packedkv
from packedkv.codec import ROLES
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda import prefill
from packedkv.kernels.cuda.build import Program
from packedkv.store.site import MEAN_TOKENS
from tests.fuzz import bare, oracle, script
from tests.fuzz import program_of as program
from tests.kernels.test_machines import OF_80, OF_192, OF_512, SMALL

SPECS = ("saw-int4", "kivi-2", "innerq-base", "octopus-3", "turboquant-3", "hqmq-s24_r3", "ghost-3")
OFTEN = {
    64: {"kivi-g64-3", "kivi-tq-4", "innerq-hybrid", "hqmq-s24_r3:outliers=3"},
    80: {"saw-int4"},
    192: {"ultra-tq", "kivi-g64-3", "kivi-tq-4", "innerq-base", "turboquant-3", "octopus-4", "hqmq-s96_r6", "fp8",
          "hqmq-s24_r3:outliers=3", "int-4:outliers=3"},
    512: {"turboquant-4", "octopus-3"},
}  # fmt: skip
"""One preset for each kind of reader at other head_dims in every run; the others are wide."""


def rows() -> Iterator[Any]:
    """Preset, head_dim, kind of cache, machine, and how many programs: the fuzz runs thousands on the CPU's kernels."""
    for spec in SPECS:
        for kind in ("growing", "static"):
            yield pytest.param(spec, 64, kind, "", 4, id=f"{spec}-{kind}")
    for spec in ("hqmq-s24_r3", "hqmq-s96_r4", "octopus-3"):
        yield pytest.param(spec, 128, "growing", "99 KB", 1, id=f"{spec}-99 KB")
    for dim, specs in ((64, OFTEN[64]), (80, OF_80), (192, {*OF_192, *OFTEN[192]}), (512, OF_512)):
        for i, spec in enumerate(sorted(specs)):
            blocks = "outliers" in spec or any(packedkv.get(spec).codec(role).block_tokens > 1 for role in ROLES)
            kind = "growing" if blocks or i % 2 else "static"
            marks = [] if spec in OFTEN[dim] else [pytest.mark.wide]
            yield pytest.param(spec, dim, kind, "", 1, id=f"{spec}-{kind}-{dim}", marks=marks)


def program_of(spec: str, dim: int, kind: str, seed: int) -> tuple[dict[str, Any], list[list[Any]]]:
    """A program of the fuzz with this preset, head_dim and cache."""
    random = Random(f"{spec} {kind} {seed}")
    mean = random.choice(("none", "post", "pre")) if not spec.startswith("ghost") else "pre"
    if (spec, kind) == ("kivi-2", "static"):
        mean = "none"  # no kernel encodes blocks without a mean, which static caches need
    found = program(random.randrange(1 << 30), "bare")
    window = f"sink={random.choice((0, 4))},window={random.choice((0, 7))},mean={mean}"
    setting = {
        **found.setting, "spec": f"{spec}{',' if ':' in spec else ':'}{window}",
        "values": "", "kind": kind, "dim": dim, "rotated": random.choice((64, 32)), "remember": False, "most": 70,
        "heads": 1, "ratio": random.choice((3, 8)), "batch": 2, "padding": [0, random.choice((0, 5))],
    }  # fmt: skip
    unit = max(packedkv.get(spec).codec(role).block_tokens for role in ROLES)
    tokens = max(MEAN_TOKENS // 2, unit) + 16 + random.randrange(60)  # more than static caches fit on, with padding
    first = ["append", 0, tokens, random.randrange(1 << 16), 0]
    # a single token that cannot be stored is told by the next check, not at once
    others = [step for step in found.operations if step[0] != "refused" or step[2] % 40]
    return setting, [first, ["attend", 0, 1, 5, 1], ["attend", 0, 4, 6, 1], *others]


@pytest.mark.parametrize(("spec", "dim", "kind", "there", "programs"), rows())
def test_caches_hold_and_attend_as_the_oracle(
    spec: str, dim: int, kind: str, there: str, programs: int, machine: dict[str, Any], asked: list[Program],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bytes are the reference's; attention has the error of fp16 queries and weights."""
    monkeypatch.setattr(oracle, "CLOSE", 1e-2)
    for module in (attention, prefill) if there else ():
        monkeypatch.setattr(module, "machine", lambda device: SMALL[there])
    for seed in range(programs):
        setting, operations = program_of(spec, dim, kind, seed)
        try:
            bare.run(setting, operations)
        except oracle.Mismatch as error:
            error.add_note(script(type(program(0))("bare", setting, operations)))
            raise
    assert {"kv_decode", "kv_unpack"} <= set(machine)
    assert ("kv_encode" in machine) == (spec != "int-4:outliers=3")  # PyTorch splits outliers off integers
    assert there == "" or any(program.source.startswith("#define KV_HALVINGS") for program in asked)
