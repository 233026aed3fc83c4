"""The reader of ghost: every width at every place of a stream, then whole decoders."""

import pytest
import torch
from torch import Tensor

from kvcodec.codec import Params, Site
from kvcodec.codecs.ghost import Ghost
from kvcodec.kernels.ghost import read_tables, sizes
from tests.kernels.decode_cases import CASES, Case, Means, Side, check_all


class One(Ghost):
    """Ghost whose constants are those of all sequences together."""

    def fit(self, site: Site, sample: Tensor | None = None) -> Params:
        """As ``Ghost.fit``, with B = 1."""
        assert sample is not None
        return super().fit(site, sample.transpose(0, 1).flatten(1, 2)[None])


def side(codec: Ghost, values: bool) -> Side:
    """How keys or values of this codec are read."""
    name = f"kv::ReadGhost<{{D}}, {int(2 * codec.bits)}, {str(values).lower()}, {str(values).lower()}>"
    return Side(
        codec, name, "read_ghost.cuh", table=lambda params, _: read_tables(params), factor=lambda p, _: sizes(p)
    )


MEANS = (
    Case((130, 64), means=Means((5, 1000), each=True), group=8),
    Case((130, 64), means=Means((5, 1000), few=8), heads=2),
)


@pytest.mark.parametrize(("codec", "dim"), [(Ghost(3), 128), (One(2.5), 64)])
def test_decode(codec: Ghost, dim: int) -> None:
    check_all(side(codec, False), side(codec, True), dim, (*CASES, *(MEANS if dim == 128 else ())))
