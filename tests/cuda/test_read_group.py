"""Readers of int-b, kivi, innerq, fp8 and of group-wise integer values, in the pairings of the presets."""

from typing import Any

import pytest
from torch import Tensor

from kvcodec.codec import Params
from kvcodec.codecs.fp8 import Fp8
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.innerq import InnerQ
from tests.cuda.decode_cases import OPTIONS, Case, Side, check


def _int(bits: int, symmetric: bool = False) -> Side:
    name = f"kv::ReadInt<{{D}}, {bits}, {str(symmetric).lower()}>"
    return Side(GroupInt(bits, 0, "channels", symmetric), name, "read_int.cuh")


def _group(bits: int) -> Side:
    return Side(GroupInt(bits, 32, "channels"), f"kv::ReadGroupInt<{{D}}, {bits}>", "read_group.cuh")


def _tokens(bits: int) -> Side:
    return Side(GroupInt(bits, 32, "tokens"), f"kv::ReadTokenInt<{{D}}, {bits}>", "read_group.cuh")


def _norm(params: Params, _: int) -> Tensor:
    return params["norm"]


def _inner_key(bits: int, symmetric: Any = "literal", norm: bool = True) -> Side:
    codec = InnerQ(bits, "channels", symmetric, norm=norm)
    name = f"kv::ReadInnerKey<{{D}}, {codec.width}>"
    return Side(codec, name, "read_group.cuh", factor=_norm if norm else None)


def _inner_value(bits: int, symmetric: Any = "literal", hybrid: bool = False) -> Side:
    codec = InnerQ(bits, "tokens", symmetric, hybrid)
    name = f"kv::ReadInnerValue<{{D}}, {codec.width}, {str(hybrid).lower()}>"
    return Side(codec, name, "read_group.cuh")


def _fp8(scaled: bool) -> Side:
    return Side(Fp8(scaled), f"kv::ReadFp8<{{D}}, {str(scaled).lower()}>", "read_fp8.cuh")


PAIRS = {
    **{f"int-{bits}": (_int(bits), _int(bits)) for bits in (2, 3, 4, 8)},
    "int-4 symmetric": (_int(4, True), _int(4, True)),
    "int-2 symmetric": (_int(2, True), _int(2, True)),
    **{f"kivi-{bits}": (_tokens(bits), _group(bits)) for bits in (2, 3, 4, 8)},
    "innerq-base": (_inner_key(3), _inner_value(3)),
    "innerq-small": (_inner_key(3), _inner_value(2)),
    "innerq-hybrid": (_inner_key(3), _inner_value(2, hybrid=True)),
    "innerq full": (_inner_key(3, "full", norm=False), _inner_value(2, "full")),
    "fp8": (_fp8(True), _fp8(True)),
    "fp8 unscaled": (_fp8(False), _fp8(False)),
    "int-4 and kivi-4 values": (_int(4), _group(4)),
    **{f"group keys {bits}": (_group(bits), _int(bits)) for bits in (2, 3, 4, 8)},
}


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", PAIRS)
def test_reader(name: str, dim: int) -> None:
    key, value = PAIRS[name]
    for options in OPTIONS:
        if "spread" in options and "innerq" in name:  # its groups of tokens share a scale: sizes differ less
            options = {**options, "spread": 1}
        check(key, value, dim, Case(**options), tolerance=2)
