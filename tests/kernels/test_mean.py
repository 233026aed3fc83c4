"""Keys held without their mean before RoPE: the term of the scores, unpacked keys, encoded bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.ops.hadamard import power_of_two_divisor
from tests.kernels.decode_cases import CASES, Case, Geometry, Means, Side, check, check_all

SAW = Side(SawInt4(), "kv::ReadSaw<{D}>", "read_saw.cuh", order=power_of_two_divisor)


def test_one() -> None:
    check(SAW, SAW, 64, Case((130, 7, 64), heads=2, group=4, means=Means((0, 5, 1000))))


@pytest.mark.parametrize("kw", [dict(), dict(few=16), dict(few=5, each=True), dict(rotary=32), dict(neighbours=True, scaling=1.3), dict(size=350.0, first=(100000, 131072, 7))])
@pytest.mark.parametrize("group", [1, 3, 4, 6, 12])
@pytest.mark.parametrize("dim", [64, 128])
def test_kinds(kw, group, dim):
    kw = {"first": (0, 5, 100000), **kw}
    check(SAW, SAW, dim, Case((130, 7, 64), heads=2, group=group, means=Means(**kw)))
