"""Hadamard rotations of several codecs: their orders, and what they do to a loud channel."""

import pytest
import torch

import packedkv
from packedkv.codec import roundtrip
from packedkv.codecs.e8 import E8
from packedkv.codecs.octopus import Octopus
from packedkv.codecs.polarquant import PolarQuant
from packedkv.codecs.q4_0 import Q40
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.turboquant import TurboQuant
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant

from .support import fitted, hadamard, normal, relative_mse

LARGEST = {64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256}
"""Largest power of two that divides a head_dim."""
KEYS_ONLY = {dim: (order, 1) for dim, order in LARGEST.items()}
ORDERS = {
    "saw-int4": KEYS_ONLY,
    "saw-int4:rotate=kv": {dim: (order, order) for dim, order in LARGEST.items()},
    "ultraquant": KEYS_ONLY,
    "q4_0": {64: (64, 64), 96: (1, 1), 128: (128, 64), 192: (64, 64), 256: (256, 64)},  # llama.cpp's
    "q4_0:rotate=k": {128: (128, 1)},
    "q4_0:rotate=none": {128: (1, 1)},
}


@pytest.mark.parametrize(("spec", "dim"), [(spec, dim) for spec, orders in ORDERS.items() for dim in orders])
def test_orders_of_keys_and_values(spec, dim):
    scheme, x = packedkv.get(spec), normal(1, 1, 3, dim, seed=1)
    for codec, order in zip((scheme.key, scheme.value), ORDERS[spec][dim], strict=True):
        torch.testing.assert_close(
            codec.to_code(x, {}).double(), x.double() @ hadamard(dim, order), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(
    ("codec", "rotated"),
    [
        *[(codec, True) for codec in (E8(), Octopus(5, 3), PolarQuant(4), Q40(), SawInt4(), TurboQuant(4))],
        *[(codec, True) for codec in (UltraQuant(), UltraTQ())],
        *[(codec, False) for codec in (Q40("none"), SawInt4(1), UltraQuant(False))],
    ],
    ids=str,
)
def test_a_loud_channel_costs_nothing_behind_a_rotation(codec, rotated):
    """Relative MSE with a channel 30 times as large, over the relative MSE without."""
    x, params = normal(1, 1, 1024, 128), fitted(codec)
    loud = x.clone()
    loud[..., 17] *= 30
    plain, cost = (relative_mse(rows, roundtrip(codec, rows, params)) for rows in (x, loud))
    assert cost < 1.3 * plain if rotated else cost > 2 * plain
