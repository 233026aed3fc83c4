"""Heads of 80, 192 and 512 channels: which presets have kernels, and refusals."""

from typing import Any

import torch

import packedkv
from packedkv.codec import ROLES
from packedkv.description import kernels_for
from packedkv.kernels.choose import refusal

GPU = torch.device("cuda")
OF_80 = ["dense", "fp8", "int-2", "int-4", "int-8", "saw-int4", "turboquant-2", "turboquant-4"]
READ = [p for p in packedkv.presets() if packedkv.describe(p)["kernels"]["decode"] == "cuda"]
READ_AT_ONCE = [p for p in READ if packedkv.get(p).key.fit_tokens == 1]
OF_192 = [p for p in READ_AT_ONCE if packedkv.describe(p, 192)["kernels"]["decode"] == "cuda"]
OF_512 = [p for p in READ_AT_ONCE if all(packedkv.get(p).codec(role).block_tokens == 1 for role in ROLES)]


def test_which_presets_have_kernels() -> None:
    """Of 80 channels without ghost-3, which its codec refuses; of 192 all but sketches."""
    found = {p: kernels_for(packedkv.get(p), 80) for p in packedkv.presets() if p != "ghost-3"}
    assert sorted(p for p, kernels in found.items() if kernels["decode"] == "cuda") == OF_80
    assert {found[p]["encode"] for p in OF_80} == {"cuda"}
    assert set(READ_AT_ONCE) - set(OF_192) == {"octopus-qjl-4", "octopus-qjl-3", "octopus-qjl-2", "turboquant-qjl-3"}


REFUSED = {
    **dict.fromkeys(
        ((p, 80) for p in ("hqmq-s24_r3", "octopus-3", "kivi-4", "innerq-base", "ghost-4", "ultraquant", "int-3")),
        "head_dim 80 is no multiple of 32",
    ),
    ("ghost-3", 512): "the kernels number a channel of ghost in a byte: head_dim up to 256, not 512",
    ("hqmq-s24_r3:outliers=3", 512): "the kernels take outliers of head_dim up to 256, not 512",
    ("octopus-qjl-3", 512): "",
}


def test_what_is_refused_says_why(machine: dict[str, Any]) -> None:
    for (spec, dim), why in REFUSED.items():
        found = refusal(packedkv.get(spec), dim, GPU)
        assert why in found if why else not found, spec
