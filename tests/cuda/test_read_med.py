"""The reader of outliers held beside hqmq's codes and integers."""

import pytest

from kvcodec.codec import Codec, Role
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.med import Med
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.cuda import sides
from kvcodec.ops.hadamard import power_of_two_divisor
from tests.cuda.decode_cases import OPTIONS, Case, Side, check, each_in_turn

DIMS = (64, 96, 128, 256)
SAW = Side(SawInt4(), "kv::ReadSaw<{D}>", "read_saw.cuh", order=power_of_two_divisor)


def med(codec: Codec, role: Role | None) -> Side:
    """``role``: keys and values are both held by ``codec``."""
    found = sides.reader(codec, 64, role or "key")
    assert isinstance(found, sides.Reader)
    name = (role and found.both) or found.type
    tables = found.tables
    return Side(
        codec,
        name.replace("<64,", "<{D},").replace(", 64,", ", {D},"),
        found.header,
        table=None if tables is None else lambda params, _: tables(params),
        also=found.also,
    )


# with c = 1.2 nearly all slots are taken, with 1.9 some; Gaussian chunks longer than three medians do not occur
CODECS = {
    "hqmq": Med(Hqmq(24, 3), 1.9),
    "hqmq int8": Med(Hqmq(48, 4, codebook="int8"), 1.2),
    "hqmq-s96_r4": Med(Hqmq(96, 4), 3),
    "one slot": Med(Hqmq(24, 6), 1.5, slots=1),
    "three slots": Med(Hqmq(192, 6), 1.2, slots=3),
    "five slots": Med(GroupInt(4, 0), 1.0, slots=5),
    **{f"int-{bits}": Med(GroupInt(bits, 0), 1.5) for bits in (2, 3, 4, 8)},
    "int symmetric": Med(GroupInt(4, 0, "channels", True), 1.9),
}


@pytest.mark.parametrize(("name", "dim"), each_in_turn(CODECS, DIMS))
def test_decode(name: str, dim: int) -> None:
    codec = CODECS[name]
    for options in OPTIONS:
        # two keys may nearly tie, and chance says whose rounding tells them apart better
        check(med(codec, "key"), med(codec, "value"), dim, Case(**options), tolerance=2.0)
