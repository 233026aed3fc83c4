"""Rope-pairs: keys whose bits differ by RoPE pair, values TurboQuant-MSE. After Block-GTQ, arXiv:2606.24033.

RoPE turns the channels p and p + D/2 of a head as one pair, so a score is a sum over pairs, and a few pairs carry most
of it. Pairs get bits by what their error costs the scores::

    e_p = mean of (k_p^2 + k_{p+D/2}^2) / 2 over the keys of a sample; f_p the same of the queries of the head's group
    w_p = e_p f_p              without queries (a prefill): w_p = e_p^2
    order the pairs of a head by falling w_p; cut them into D/8 steps of 4 pairs, 8 channels; W_s = sum of w_p in step s
    b_s in 0..8: one bit at a time to the step with the largest W_s (m_b - m_{b+1}), until sum b_s = b D/8

m_b is the mean squared error of 2^b Lloyd-Max levels of N(0, 1). A token, with z_j = k_c / sqrt(e) for the channel c
that is the j-th in this order::

    gamma = sqrt(mean of z_j^2 over the channels with bits)
    i_j = argmin_i |z_j / gamma - c_i|     c: the 2^b_s levels, about zero
    k^_c = gamma c[i_j] sqrt(e)            0 for a channel without bits

Block (one token of one head)::

    codes   uint8  [D b / 8]   step after step, b_s bytes each: 8 codes as a little-endian bit stream (ops/bitpack);
                               first the 4 channels p, then the 4 channels p + D/2
    norm    fp16   [1]         gamma

Every head has D b bits of codes, so every slot has the same size. Bits: b + 16/D; b = 3, D = 128: 50 bytes, 3.125.
Values the same (``turboquant``).

Constants: ``order [1, H, D]`` int16, the channels in coded order; ``scale [1, H, D]`` float32, sqrt(e) in that order;
``widths [1, H, D/8]`` uint8, b_s; ``levels [1, 511]`` float32, those of widths 0 (one, zero) to 8, one after the other.
`packedkv fit` makes them from keys and queries; without its file each sequence's prefill does, from its keys alone
(leading dimension B).

Deviations from the paper
1. One norm per token, and a constant scale per pair. The paper has a norm and a rotation per segment of equal bits, 16
   more bits per segment and token.
2. w_p is the product of the energies: the mean squared error of the scores, were the pair stored with 0 bits. Steps of
   4 pairs, so that a step is whole bytes. Widths 0..8; the paper's are 1..8.
3. An energy of n tokens is at least 1/n of the head's mean energy: what a few tokens do not show may be large later.

Pitfalls: both channels of a pair share a scale, because RoPE turns one into the other as positions grow; scales per
channel are a little better at the length they were fitted on, and wrong beyond it. Where a model pairs neighbouring
channels or rotates only some, the bits still follow the energies, but what shares a scale is no pair. Energies are
about zero: a key bias makes a pair large, and its constant part takes bits. Nothing is rotated, so a token's outlier
stays in its channel; at 2 bits a token of one large channel can come back worse than as zeros.

Use: 2 to 3 bits token by token (pages, prefix reuse, speculation), with a file of `packedkv fit`.

Not for: models without RoPE; serving without a file, since constants of a prefill are those of one sequence.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from packedkv.checks import check_fitted, needed
from packedkv.codec import FP16_MAX, NO_SAMPLE, Codec, Constant, Constants, Params, Part, Payload, Sample, Site, one_of
from packedkv.codecs.turboquant import TurboQuant
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, packed_bytes, unpack
from packedkv.ops.lloyd_max import NORMAL_REACH, normal_levels
from packedkv.ops.sums import in_pieces, sum_by_halves
from packedkv.ops.widths import allot, channel_squares, for_tokens, nearest_in, ordered, put_back, width_cuts
from packedkv.registry import register
from packedkv.scheme import KVScheme

STEP = 8
"""Channels that get their bits together: 4 pairs."""
WIDEST = 8
ERRORS = (1.0, 0.363380, 0.117482, 0.034548, 0.009501, 0.002505, 0.000644, 0.000163, 0.0000412)
"""m_b: mean squared error of 2^b Lloyd-Max levels of N(0, 1)."""


@lru_cache(maxsize=1)
def level_tables() -> Tensor:
    """Lloyd-Max levels of N(0, 1) of widths 0 to 8: float32 ``[511]``, those of width b from 2^b - 1 on."""
    tables = [normal_levels(2**b) for b in range(1, WIDEST + 1)]
    return torch.cat([torch.zeros(1, dtype=torch.float64), *tables]).float()


def pair_energy(squares: Tensor, tokens: int) -> Tensor:
    """e or f: mean square of each pair's channels, at least 1/tokens of the head's mean; float64 ``[B, H, D/2]``.

    ``squares [B, H, D]`` are sums over ``tokens`` tokens.
    """
    pairs = squares.unflatten(-1, (2, -1)).unbind(-2)
    energy = (pairs[0] + pairs[1]) / (2 * tokens)
    mean = sum_by_halves(energy) / energy.shape[-1]
    return torch.where(mean > 0, torch.maximum(energy, mean / tokens), 1.0)


def _channel_widths(params: Params) -> Tensor:
    """b of each channel in coded order: int64 ``[1 or B, H, D]``."""
    return params["widths"].long().repeat_interleave(STEP, -1)


def _bit_places(widths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Channel of each of a row's ``total`` bits, and the bit's place in its code: int64 ``[1 or B, H, total]``."""
    ends = widths.cumsum(-1)
    at = torch.arange(total, device=widths.device).expand(*widths.shape[:-1], total).contiguous()
    channel = torch.searchsorted(ends, at, right=True)
    return channel, at - (ends - widths).gather(-1, channel)


@dataclass(frozen=True)
class RopePairs(Codec):
    """Lloyd-Max levels of every channel over its pair's size, more bits for pairs that weigh more.

    Parameters
    ----------
    bits : {2, 3, 4}
        Bits of a channel, in keys on average; norms come on top.
    """

    bits: int = one_of(2, 3, 4, default=3)

    @property
    def needs(self) -> frozenset[Part]:
        return frozenset({"tensor"})

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("rope-pairs", head_dim, STEP)
        fields = (
            Field("codes", "uint8", (packed_bytes(head_dim, self.bits),)),
            Field("norm", "float16", (1,), "norms"),
        )
        return Layout(head_dim, 1, fields, nominal_bits=self.bits)

    def constants(self, site: Site) -> Constants:
        row, total = (site.num_heads, site.head_dim), self.bits * site.head_dim // STEP
        return {
            "order": Constant.order(*row, each=True),
            "scale": Constant.sizes(*row),
            "widths": Constant(
                (site.num_heads, site.head_dim // STEP), torch.uint8, 0, WIDEST,
                lambda x: bool((x.sum(-1) == total).all()), f"of sum {total} in a head", each=True,
            ),
            "levels": Constant((2 ** (WIDEST + 1) - 1,), low=-NORMAL_REACH, high=NORMAL_REACH),
        }  # fmt: skip

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Fit each sequence on its own by the energy of its keys; with queries all together by both energies, B = 1."""
        keys = needed("rope-pairs", sample.tensor)
        if (queries := sample.queries) is None:
            energy = pair_energy(channel_squares(keys), keys.shape[2])
            return self._constants(site, energy, energy * energy)
        check_fitted("rope-pairs", site, {"keys": keys, "queries": queries})
        total = sum_by_halves(channel_squares(keys), 0)
        heads = channel_squares(queries).unflatten(1, (site.num_heads, -1))  # [B, H, query heads of one, D]
        energy = pair_energy(total, keys.shape[0] * keys.shape[2])
        costs = pair_energy(sum_by_halves(sum_by_halves(heads, 2).squeeze(2), 0), queries.numel() // total.numel())
        return self._constants(site, energy, energy * costs)

    def _constants(self, site: Site, energy: Tensor, weight: Tensor) -> Params:
        """Constants for energies and weights of pairs, ``[B, H, D/2]`` each."""
        half = site.head_dim // 2
        ranked = weight.sort(dim=-1, descending=True, stable=True)
        pairs = ranked.indices.unflatten(-1, (-1, STEP // 2))  # [B, H, S, 4]
        order = torch.cat([pairs, pairs + half], -1).flatten(-2)
        steps = sum_by_halves(ranked.values.unflatten(-1, (-1, STEP // 2))).squeeze(-1)  # [B, H, S]
        params = {
            "order": order.to(torch.int16),
            "scale": torch.cat([energy, energy], -1).gather(-1, order).sqrt().float(),
            "widths": allot(steps, ERRORS, self.bits * steps.shape[-1]).to(torch.uint8),
            "levels": level_tables()[None],
        }
        return {name: value.to(site.device) for name, value in params.items()}

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        return ordered(x, params["order"]).float() / params["scale"].unsqueeze(2)

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        return ordered(q, params["order"]).float() * params["scale"].unsqueeze(2)

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        return put_back(x * params["scale"].unsqueeze(2), params["order"])

    def encode(self, x: Tensor, params: Params) -> Payload:
        widths = _channel_widths(params)
        channel, place = _bit_places(widths, x.shape[-1] * self.bits)
        cuts = width_cuts(params["levels"][0])[widths]
        coded = (widths > 0).unsqueeze(2)
        count = coded.sum(-1, keepdim=True)

        def encoded(piece: Tensor) -> tuple[Tensor, Tensor]:
            z = torch.where(coded, piece.double(), 0.0)
            gamma = (sum_by_halves(z * z) / count).sqrt()
            codes = nearest_in(cuts, torch.where(gamma > 0, z / gamma, 0.0))
            stream = codes.gather(-1, for_tokens(channel, codes)) >> place.unsqueeze(2) & 1
            return pack(stream.to(torch.uint8), 1), gamma.clamp_max(FP16_MAX).half()

        return dict(zip(("codes", "norm"), in_pieces(encoded, x), strict=True))

    def decode(self, payload: Payload, params: Params) -> Tensor:
        widths = _channel_widths(params)
        total = widths.shape[-1] * self.bits
        channel, place = _bit_places(widths, total)
        bits = unpack(payload["codes"], 1, total).long() << place.unsqueeze(2)
        index = (2**widths - 1).unsqueeze(2).expand(*bits.shape[:3], -1).clone()
        index.scatter_add_(-1, for_tokens(channel, bits), bits)
        return params["levels"][0].index_select(0, index.flatten()).view(index.shape) * payload["norm"].float()


@register(
    "rope-pairs",
    source="Block-GTQ, arXiv:2606.24033; TurboQuant, arXiv:2504.19874, Alg. 1",
    presets=("rope-pairs-4", "rope-pairs-3"),
)
def rope_pairs(bits: Literal[2, 3, 4] = 3, window: int = 0) -> KVScheme:
    """Keys with more bits for RoPE pairs that weigh more in the scores; values TurboQuant-MSE."""
    return KVScheme(key=RopePairs(bits), value=TurboQuant(bits), window=window)
