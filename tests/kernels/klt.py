"""Ghost with ``transform=klt`` as tests fit it: with random queries in the place of a model's."""

import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Params, Sample, Site
from packedkv.codecs.ghost import Ghost

MOST = 4096
"""Tokens of a sequence that constants are fitted on."""


def fit_klt(codec: Ghost, site: Site, sample: Tensor) -> Params:
    """Constants from keys or values and queries that ask more of some directions than of others."""
    rng, dim = torch.Generator().manual_seed(site.head_dim), site.head_dim
    queries = torch.randn(1, site.num_heads, 200, dim, generator=rng) * torch.logspace(-1, 1, dim)
    return codec.fit(site, Sample(sample[:, :, :MOST], queries @ torch.randn(dim, dim, generator=rng)))


class Klt(Ghost):
    """The codec, fitted like any other."""

    __module__ = Ghost.__module__  # by which its kernels are found

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """As ``fit_klt``; its own samples bring queries."""
        assert sample.tensor is not None
        return super().fit(site, sample) if sample.queries is not None else fit_klt(self, site, sample.tensor)
