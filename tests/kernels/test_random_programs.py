"""Random programs on caches whose kernels run on the emulated GPU, beside the oracle of ``tests/fuzz``."""

from random import Random
from typing import Any

import pytest

from packedkv.store.site import MEAN_TOKENS
from tests.fuzz import bare, oracle, script
from tests.fuzz import program_of as program

SPECS = ("saw-int4", "kivi-2", "innerq-base", "octopus-3", "turboquant-3", "hqmq-s24_r3", "ghost-3")
PROGRAMS = 6
"""Programs of each preset and kind of cache; the fuzz runs thousands on the kernels of CPUs."""


def program_of(spec: str, kind: str, seed: int) -> tuple[dict[str, Any], list[list[Any]]]:
    """A program of the fuzz with this preset and cache, at a head_dim of 64."""
    random = Random(f"{spec} {kind} {seed}")
    mean = random.choice(("none", "post", "pre")) if spec != "ghost-3" else "pre"
    if (spec, kind) == ("kivi-2", "static"):
        mean = "none"  # no kernel encodes blocks without a mean, which static caches need
    found = program(random.randrange(1 << 30), "bare")
    setting = {
        **found.setting, "spec": f"{spec}:sink={random.choice((0, 4))},window={random.choice((0, 7))},mean={mean}",
        "values": "", "kind": kind, "dim": 64, "rotated": random.choice((64, 32)), "remember": False, "most": 70,
        "heads": 1, "ratio": random.choice((3, 8)), "batch": 2, "padding": [0, random.choice((0, 5))],
    }  # fmt: skip
    first = ["append", 0, MEAN_TOKENS // 2 + random.randrange(60), random.randrange(1 << 16), 0]
    # a single token that cannot be stored is told by the next check, not at once
    others = [step for step in found.operations if step[0] != "refused" or step[2] % 40]
    return setting, [first, *others]


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("spec", SPECS)
def test_caches_hold_and_attend_as_the_oracle(
    spec: str, kind: str, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are the reference's; attention has the error of fp16 queries and weights."""
    monkeypatch.setattr(oracle, "CLOSE", 1e-2)
    for seed in range(PROGRAMS):
        setting, operations = program_of(spec, kind, seed)
        try:
            bare.run(setting, operations)
        except oracle.Mismatch as error:
            error.add_note(script(type(program(0))("bare", setting, operations)))
            raise
    assert {"kv_decode", "kv_encode"} <= set(machine)
