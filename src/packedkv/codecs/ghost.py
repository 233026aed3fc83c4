"""Ghost: keys without their mean, more bits where an error costs more, one searched scale a token. Our own method.

docs/ghost.md has the derivation and the reasons.

Means: the cache takes R_t mu from the key of position t, mu being the mean of a head's keys before RoPE, and adds it
again (``mean=pre``); no byte holds it. Values lose their mean m. What is left of channel c has variance v_c, and an
error in it costs f_c times its square. For keys f = E^(3/4), E_c the mean square of the queries; for values f = 1. RoPE
turns channels p and p + D/2 as a pair, so v and E of keys are means over a pair.

Bits: over sqrt(v_c) a normal channel of w bits has the error d(w); together they cost the sum of W_c d(w_c), W = v f.
Channels are sorted by falling W, and the i-th shares T = 2 b bits with the i-th from the end. A pair is of a kind k,
with widths h_k = ceil(b) + k, up to 7 or T, and l_k = T - h_k::

    m_k = number of i < D/2 - 4 with W_i (d(h_(k-1)) - d(h_k)) > W_(D-1-i) (d(l_k) - d(l_(k-1)))
    pair i has the last kind with i < m_k; as W falls, so do kinds

Four pairs give a bit to the scale: h = ceil((T - 1)/2), l = floor((T - 1)/2). They stand where h - l falls into the
order: behind kind 1 where T is even, else last.

Levels: ``A u + B u^3``, u = i - (2^w - 1)/2, the best of this form for N(0, 1).

Scale: one of 16 for each token; the encoder tries six and keeps the one of least cost::

    y_c = k_c / sqrt(v_c)                          keys without R_t mu; values x: (x_c - m_c) / sqrt(v_c)
    r = sqrt(mean of y_c^2 over channels with w > 0);  n: the n in 1..15 with 2^((n-6)/4) nearest to r
    for each s in S_0 = 0, S_i = 2^((i-6)/4), i = n + {-1, 0, 1, 2, 3, 4} cut to 1..15
        i_c(s) = argmin_i |y_c / s - l_i|          l: the 2^w levels; without bits l = 0
    keep the s with the least sum of v_c f_c (y_c - s l)^2, the first of equals
    y^_c = s l,  k^_c = sqrt(v_c) y^_c             values: + m_c

Block (one token of one head)::

    codes   uint8  [b D/8]   D/2 fields of T bits, a little-endian stream (ops/bitpack). Field p has the
                             codes of places 2p (low bits) and 2p + 1, the larger channel first. The highest bit of
                             field D/2 - 4 + t, t in 0..3, is bit t of the scale's number

The four short pairs have the last four fields. The others, in their order, have what is left of fields 0, D/8, D/4,
3D/8, then 1, D/8 + 1, and so on: so the lanes of a tensor-core fragment, which read a quarter or an eighth of a row
each, meet the same kinds at the same time.

``transform=klt`` encodes uncorrelated channels instead, for a product with a [D, D] matrix per token. S is the
covariance of the keys (values), H = E q q^T (values: I), both moved by half to their diagonals, H with a ridge of 0.1
of the mean of S_cc H_cc in units 1 / S_cc, so that scaling a channel changes nothing::

    H^(1/2) S H^(1/2) = U L U^T;  y = L^(-1/2) U^T H^(1/2) k       variance 1, cost L in place of v f

A token counts in S and m by the root of sum_c v_c g_c^2 over its mean, cut to 0.001 to 100, g the gradients that
`packedkv fit` takes. The product takes a token as multiples of 2^-15 of the power of two above its largest channel, and
a matrix, whose columns have length 1, in multiples of 2^-15: a tensor core's sums of these are exact. The inverse is
that of the rounded matrix.

The printed bits are the bytes, for every head and width. Bits: b; b = 3, D = 128: 48 bytes, 3.0.

Constants, by place: ``order [1, H, D]`` int16, the channels; ``factor [1, H, D]`` float32, 1 / sqrt(v), and ``weight``
float32, W over the head's largest; ``widths [1, H, D]`` uint8; of values ``centre [1, H, D]`` float32, m / sqrt(v).
klt: ``matrix`` and ``inverse [1, H, D, D]`` float32 in place of ``order``; the length that a column of ``matrix`` had
is in ``factor``. (Its layout version 1 had 24 bits.) Without a file of `packedkv fit` they are fitted on every second
of each sequence's first 512 tokens, and the leading dimension is B; E is then of queries of random tokens of the model,
and without a model f is sqrt(v).

Tokens unlike all others (mean of x^2/v above 6) do not count in v and m: a sink's key would. v is at least 1/n of the
head's mean over n tokens: what a few tokens do not show may be large later.

Known parts are reverse water-filling (Cover and Thomas, Sec. 10.3.3), Lloyd's and Max's conditions, and bits that
differ by RoPE pair (Block-GTQ, arXiv:2606.24033; see ``rope_pairs``).

Pitfalls: the first tokens must stay dense (``sink=4``): a sink's key is unlike all others and many scores hang on it.
The largest scale is 4.8 times the usual one; a token beyond comes back cut. Scale number 0 gives the mean itself, for
tokens of zeros; a list of exceptions could use it as a mark. Constants belong to the model's weights: after a change of
them (fine-tuning, LoRA on keys or values) they are fitted again.

Use: the least loss at 2 to 4.5 bits, token by token (pages, prefix reuse, speculation).

Not for: fewer than 512 tokens without a file.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from packedkv.checks import check_fitted, needed
from packedkv.codec import NO_SAMPLE, Codec, Constant, Constants, Params, Part, Payload, Sample, Site
from packedkv.errors import FitError, ShapeError, SpecError
from packedkv.layout import Field, Layout
from packedkv.ops.bitpack import pack, unpack
from packedkv.ops.exact import KERNEL_BITS, cut_rotation, rotate_exactly
from packedkv.ops.sums import in_pieces, sum_by_halves
from packedkv.ops.widths import channel_squares, nearest_in, ordered, put_back, width_cuts
from packedkv.registry import register
from packedkv.scheme import KVScheme

Transform = Literal["channels", "klt"]
ALLOWED = (2, 2.5, 3, 3.5, 4, 4.5, 5)
PARTS = 4
"""Quarters of a row, and pairs that give a bit to the scale."""
CUBIC = (
    (1.5958, 0.0),
    (0.89289, 0.050693),
    (0.47146, 0.011585),
    (0.24051, 0.0020975),
    (0.12183, 0.00033676),
    (0.061706, 5.0861e-05),
    (0.031279, 7.4065e-06),
)
"""A and B of the levels ``A u + B u^3`` of widths 1 to 7, of least squared error for N(0, 1)."""
ERRORS = (1.0, 0.363380, 0.117482, 0.034623, 0.009688, 0.002649, 0.000716, 0.000192)
"""d(w): that error, of widths 0 to 7."""
WIDEST = len(CUBIC)
QUARTERS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
"""2^0, 2^(1/4), 2^(1/2), 2^(3/4)."""
SCALES = 15
UNIT = 6
"""Number of the scale 1."""
TRIED = (-1, 0, 1, 2, 3, 4)
"""Scales tried, in numbers from the one nearest to the root mean square."""
FIT_TOKENS, FIT_EVERY = 512, 2
"""Constants are fitted on every second of so many tokens: neighbours are alike, and a text changes as it goes on."""
TRIM = 6.0
"""Mean of x^2/v from which a token does not count in the constants."""
ROUNDS = 2
SHRINK, RIDGE = 0.5, 0.1
"""Of the KLT: how far moments are moved to their diagonals, and the least share of a channel in the cost."""
LIMITS = 1e-3, 100.0
"""Of the KLT: least and largest cost of a token over the usual one, as ``token_weights`` counts it."""
KLT_VERSION = 2
"""Layout version of transform=klt: a token and the matrix have 15 bits in their product."""
SMALLEST = 2.0**-24
"""Smallest sqrt(v): fp16's smallest step."""
LARGEST_SIZE = 2.0**60
"""Beyond every size of a head, or one over it."""


@lru_cache(maxsize=1)
def levels() -> Tensor:
    """Levels of widths 0 to 7, one table after the other: float32 ``[255]``, those of width w from 2^w - 1 on."""
    tables = [[0.0]]
    for w, (a, b) in enumerate(CUBIC, 1):
        halves = [i - (2**w - 1) / 2 for i in range(2**w)]
        tables.append([u * (a + b * (u * u)) for u in halves])
    return torch.tensor([level for table in tables for level in table], dtype=torch.float32)


@lru_cache(maxsize=1)
def scales() -> Tensor:
    """S_0 to S_15: float32 ``[16]``.

    >>> scales()[[0, 2, 4, 6, 14]].tolist()
    [0.0, 0.5, 0.7071067690849304, 1.0, 4.0]
    """
    return torch.tensor([0.0] + [power(i - UNIT) for i in range(1, SCALES + 1)], dtype=torch.float32)


def power(quarters: int) -> float:
    """2^(quarters/4), the same on every machine."""
    return QUARTERS[quarters % 4] * 2.0 ** (quarters // 4)


def usual(x: Tensor, *, paired: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel of ``x [B, H, N, D]`` without outlier tokens, and a mask of the other tokens.

    ``paired``: of keys, whose mean was removed: the mean is 0, and both channels of a RoPE pair have the pair's
    variance. All float64: mean and variance ``[B, H, D]``, the variance at least 1/n of the head's mean, 1 where that
    is 0; the mask ``[B, H, N, 1]``, 1 or 0.
    """
    wide = x.double()
    mask = torch.ones_like(wide[..., :1])
    for turn in range(ROUNDS + 1):
        used = mask
        count = sum_by_halves(mask, 2).clamp_min(1)
        mean = torch.zeros_like(wide[:, :, :1]) if paired else sum_by_halves(wide * mask, 2) / count
        squares = (wide - mean).square()
        variance = sum_by_halves(squares * mask, 2) / count
        if paired:
            variance = over_pairs(variance)
        level = sum_by_halves(variance) / variance.shape[-1]
        variance = torch.where(level > 0, torch.maximum(variance, level / count), 1.0)
        if turn < ROUNDS:
            mask = (sum_by_halves(squares / variance) <= TRIM * x.shape[-1]).double()
    return mean.squeeze(2), variance.squeeze(2), used


def token_weights(gradients: Tensor, variance: Tensor, mask: Tensor) -> Tensor:
    """How much a token counts in a covariance: the root of what errors as large as its channels would cost.

    That cost is r = sum v g^2 over the channels, g the gradient of the loss, over its mean; limited to 0.001 to 100.
    The root, since a gradient is of this text and these labels, and trusted less. ``gradients [1, H, N, D]``, the rest
    float64: v of the channels ``[1, H, D]``, ``mask`` and the result ``[1, H, N, 1]``.
    """
    cost = sum_by_halves(gradients.double().square() * variance.unsqueeze(2))
    usual_cost = sum_by_halves(cost * mask, 2) / sum_by_halves(mask, 2).clamp_min(1)
    share = torch.where(usual_cost > 0, cost / usual_cost, 1.0)
    return mask * share.clamp(*LIMITS).sqrt()


def over_pairs(x: Tensor) -> Tensor:
    """Mean of channels p and p + D/2, for both."""
    low, high = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat([low + high, low + high], -1) / 2


def shrunk(moment: Tensor) -> Tensor:
    """(1 - SHRINK) M + SHRINK diag M of moments ``[..., D, D]``: off-diagonal moments of few tokens are noise."""
    return (1 - SHRINK) * moment + SHRINK * torch.diag_embed(moment.diagonal(dim1=-2, dim2=-1))


def klt(covariance: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Basis in which the channels of a head are uncorrelated and errors cost alike, from S and H; float64 ``[D, D]``.

    Returns E^T ``[D, D]``: x E^T has channels of variance 1; and L ``[D]``, falling: the cost of an error of a channel.
    """
    s, h = shrunk(covariance), shrunk(moment)
    sizes = s.diagonal().clamp_min(SMALLEST**2)
    h = h + torch.diag(RIDGE * (sizes * h.diagonal()).mean() / sizes)
    values, vectors = torch.linalg.eigh(h)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    cost, basis = torch.linalg.eigh(root @ s @ root)
    cost = cost.flip(0)
    cost = cost.clamp_min(max(float(cost[0]), SMALLEST**2) * SMALLEST)  # a head may be the same for all tokens
    return (root @ basis.flip(1)) / cost.sqrt(), cost


def query_cost(energy: Tensor) -> Tensor:
    """f of keys ``[1, H, D]``, float64: E^(3/4), E the queries' mean squares over each RoPE pair."""
    root = over_pairs(energy.double()).sqrt()
    return root * root.sqrt()


def kinds(total: int) -> list[tuple[int, int]]:
    """Widths of the two channels of a pair that shares ``total`` bits, the most even first.

    >>> kinds(6), kinds(9)
    ([(3, 3), (4, 2), (5, 1), (6, 0)], [(5, 4), (6, 3), (7, 2)])
    """
    return [(high, total - high) for high in range((total + 1) // 2, min(WIDEST, total) + 1)]


def short_kind(total: int) -> tuple[int, int]:
    """Widths of a pair that gives one of ``total`` bits to the scale.

    >>> short_kind(6), short_kind(9)
    ((3, 2), (4, 4))
    """
    return total // 2, (total - 1) // 2


def share_bits(cost: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Width of each place of a row, and the number, by falling cost, of the channel there: int64 ``[..., D]`` each.

    ``cost``, float64 ``[..., D]``, is W, falling; ``total`` is T, the bits of a pair.
    """
    dim = cost.shape[-1]
    full = dim // 2 - PARTS
    loud, quiet = cost[..., :full], cost.flip(-1)[..., :full]
    full_kinds = kinds(total)
    rises = [
        (loud * (ERRORS[a] - ERRORS[high]) > quiet * (ERRORS[low] - ERRORS[b])).sum(-1, keepdim=True)
        for (a, b), (high, low) in pairwise(full_kinds)
    ]
    rank = torch.arange(dim // 2, device=cost.device)
    short = rises[0] if total % 2 == 0 else torch.full_like(rises[0], full)
    behind = rank - PARTS * (rank >= short)  # which of the full pairs
    kind = torch.stack([behind < m for m in rises]).sum(0)
    cut = (rank >= short) & (rank < short + PARTS)
    table = torch.tensor([*full_kinds, short_kind(total)], device=cost.device)
    widths = table[torch.where(cut, len(full_kinds), kind)]
    # full pairs first, then the short ones, each kind in its order
    order = cut.to(torch.int8).sort(dim=-1, stable=True).indices
    field = _fields(dim, cost.device)
    pair = torch.empty_like(order).scatter_(-1, field.expand_as(order), order)
    channels = torch.stack([pair, dim - 1 - pair], -1).flatten(-2)
    return widths.gather(-2, pair.unsqueeze(-1).expand_as(widths)).flatten(-2), channels


def _fields(dim: int, device: torch.device) -> Tensor:
    """The field of each pair, full ones first: int64 ``[D/2]``."""
    by_turn = torch.arange(dim // 2, device=device).view(PARTS, -1).T.flatten()
    last = by_turn >= dim // 2 - PARTS
    return torch.cat([by_turn[~last], by_turn[last]])


@dataclass(frozen=True)
class Ghost(Codec):
    """Cubic levels of every channel over its usual size, more bits where errors cost more, a scale of 4 bits a token.

    Parameters
    ----------
    bits : int or float
        2, 2.5, 3, 3.5, 4, 4.5 or 5: bits of a channel on average, everything counted.
    transform : {"channels", "klt"}
        klt: uncorrelated channels; a product with a [D, D] matrix, from a file of `packedkv fit`.
    """

    bits: float = 3
    transform: Transform = "channels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in ALLOWED:
            raise SpecError(f"ghost: bits={self.bits} is not allowed; use {', '.join(map(str, ALLOWED))}.")

    @property
    def needs(self) -> frozenset[Part]:
        # a basis also needs queries, and gradients tell which tokens it should suit
        return frozenset({"tensor", "queries", "gradients"} if self.transform == "klt" else {"tensor"})

    @property
    def without_mean(self) -> bool:
        return True  # the ghost term is part of the method

    @property
    def fit_tokens(self) -> int:
        return FIT_TOKENS

    @property
    def fit_every(self) -> int:
        return FIT_EVERY

    def layout(self, head_dim: int) -> Layout:
        if head_dim < 2 * PARTS or head_dim % (2 * PARTS) or head_dim * self.bits % (8 * PARTS):
            raise ShapeError(
                f"ghost: head_dim={head_dim} at {self.bits} bits does not fill four quarters of whole bytes; "
                f"head_dim x bits must be a multiple of 32: use 64 or 128, or at 2, 3, 4 or 5 bits 96, 192 or 256."
            )
        version = KLT_VERSION if self.transform == "klt" else 1
        return Layout(head_dim, 1, (Field("codes", "uint8", (int(head_dim * self.bits) // 8,)),), self.bits, version)

    @property
    def total(self) -> int:
        """T, bits of a pair."""
        return int(2 * self.bits)

    def constants(self, site: Site) -> Constants:
        row, each = (site.num_heads, site.head_dim), partial(Constant, each=True)
        constants = {
            "weight": each(row, low=0, high=1),
            "widths": each(row, torch.uint8, 0, WIDEST, self._fill_pairs, "of pairs that the bits allow"),
        }
        if self.transform == "klt":
            constants["matrix"] = each((*row, site.head_dim), low=-1, high=1)
            constants["inverse"] = each((*row, site.head_dim), low=-LARGEST_SIZE, high=LARGEST_SIZE)
            constants["factor"] = each(row, low=1 / LARGEST_SIZE, high=LARGEST_SIZE)
        else:
            constants["order"] = Constant.order(*row, each=True)
            constants["factor"] = each(row, low=2.0**-20, high=1 / SMALLEST)
        if site.role == "value":
            constants["centre"] = each(row, low=-LARGEST_SIZE, high=LARGEST_SIZE)
        return constants

    def _fill_pairs(self, widths: Tensor) -> bool:
        """Whether every pair of widths ``[B, H, D]`` is of a kind, and the last ones give a bit to the scale."""
        high, low = widths[..., ::2], widths[..., 1::2]
        full = (high + low == self.total) & (high >= low)
        short = torch.stack([high, low], -1)[..., -PARTS:, :] == torch.tensor(short_kind(self.total)).to(widths)
        return bool(full[..., :-PARTS].all()) and bool(short.all())

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Fit each sequence on its own first 256 tokens at most; with queries all together on all tokens, B = 1.

        f of keys is ``query_cost`` of the energies of the queries, sqrt(v) where neither is given. For a basis, tokens
        count by ``token_weights`` of the gradients in the covariance and in the mean of values.
        """
        if self.transform == "klt" and sample.queries is None:
            raise FitError(
                "ghost: transform=klt is fitted with the model's queries, which a prefill does not show; run "
                '`packedkv fit MODEL "ghost-3:transform=klt" --text FILE -o PARAMS` (with your spec) and pass params.'
            )
        x = needed("ghost", sample.tensor)
        if sample.queries is not None:
            return self._calibrate(site, x, sample.queries, sample.gradients)
        mean, variance, _ = usual(x[:, :, : FIT_TOKENS // FIT_EVERY], paired=site.role == "key")
        costs = torch.ones_like(variance)
        if site.role == "key":
            costs = variance.sqrt() if sample.energy is None else query_cost(sample.energy).expand_as(variance)
        return self._constants(site, mean, variance, costs)

    def _calibrate(self, site: Site, x: Tensor, queries: Tensor, gradients: Tensor | None) -> Params:
        """Fit on all sequences together."""
        check_fitted("ghost", site, {"keys or values": x, "queries": queries})
        rows = x.transpose(0, 1).flatten(1, 2)[None]  # [1, H, N, D]
        mean, variance, weight = usual(rows, paired=site.role == "key")
        if self.transform == "channels":
            costs = torch.ones_like(variance)
            if site.role == "key":
                vectors = queries.transpose(0, 1).unflatten(0, (site.num_heads, -1)).flatten(1, 3)[None]  # [1, H, n, D]
                costs = query_cost(channel_squares(vectors) / vectors.shape[2])
            return self._constants(site, mean, variance, costs)
        if gradients is not None:
            if gradients.shape != x.shape:
                raise FitError(
                    f"ghost: got gradients {tuple(gradients.shape)} for keys or values {tuple(x.shape)}; pass those "
                    f"of each number."
                )
            weight = token_weights(gradients.transpose(0, 1).flatten(1, 2)[None], variance, weight)
            if site.role == "value":
                mean = sum_by_halves(rows.double() * weight, 2).squeeze(2) / sum_by_halves(weight, 2).squeeze(2)
        return self._bases(site, mean, rows, weight, queries)

    def _constants(self, site: Site, mean: Tensor, variance: Tensor, costs: Tensor) -> Params:
        """Constants of means m, variances v and costs f, ``[B, H, D]`` each."""
        size = variance.sqrt().clamp_min(SMALLEST)
        ranked = (size * size * costs).sort(dim=-1, descending=True, stable=True)
        widths, places = share_bits(ranked.values, self.total)
        order = ranked.indices.gather(-1, places)
        params = {"order": order.to(torch.int16), "factor": (1 / size).gather(-1, order).float()}
        if site.role == "value":
            params["centre"] = (mean / size).gather(-1, order).float()
        return self._with_widths(site, params, ranked.values, widths, places)

    def _bases(self, site: Site, mean: Tensor, rows: Tensor, weight: Tensor, queries: Tensor) -> Params:
        """Constants of the KLT, from tokens ``[1, H, N, D]`` and how much each counts ``[1, H, N, 1]``."""
        vectors = rows.double() - mean.unsqueeze(2)
        covariance = ((vectors * weight).mT @ vectors / weight.sum(2).unsqueeze(-1))[0].cpu()  # the CPU's eigenvectors
        moments = torch.eye(site.head_dim, dtype=torch.float64).expand_as(covariance)
        if site.role == "key":
            vectors = queries.transpose(0, 1).unflatten(0, (site.num_heads, -1)).flatten(1, 3).double().cpu()
            moments = vectors.mT @ vectors / vectors.shape[1]
        bases = [klt(s, h) for s, h in zip(covariance, moments, strict=True)]
        turn, cost = torch.stack([matrix for matrix, _ in bases]), torch.stack([cost for _, cost in bases])
        widths, places = share_bits(cost, self.total)
        turn = turn.gather(-1, places.unsqueeze(-2).expand_as(turn))
        length = turn.norm(dim=1, keepdim=True)
        matrix = cut_rotation(turn / length, KERNEL_BITS)
        params = {
            "matrix": matrix[None],
            "inverse": torch.linalg.inv(matrix.double()).float()[None],
            "factor": length.squeeze(1).float()[None],
        }
        if site.role == "value":
            params["centre"] = (mean.cpu().unsqueeze(2) @ turn).squeeze(2).float()
        return self._with_widths(site, params, cost[None], widths[None], places[None])

    def _with_widths(
        self, site: Site, params: dict[str, Tensor], cost: Tensor, widths: Tensor, places: Tensor
    ) -> Params:
        """Add widths, and the weights that follow from the costs W, falling ``[B, H, D]``."""
        weight = torch.where(cost[..., :1] > 0, cost / cost[..., :1], 1.0)
        params["weight"] = weight.gather(-1, places).float()
        params["widths"] = widths.to(torch.uint8)
        return {name: value.to(site.device) for name, value in params.items()}

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        if self.transform == "klt":
            return rotate_exactly(x, params["matrix"][0], KERNEL_BITS) * params["factor"].unsqueeze(2)
        return ordered(x, params["order"]).float() * params["factor"].unsqueeze(2)

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        if self.transform == "klt":
            return (q.double() @ params["inverse"].double().mT).float() / params["factor"].unsqueeze(2)
        return ordered(q, params["order"]).float() / params["factor"].unsqueeze(2)

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        channels = x / params["factor"].unsqueeze(2)
        if self.transform == "klt":
            return (channels.double() @ params["inverse"].double()).float()
        return put_back(channels, params["order"])

    def encode(self, x: Tensor, params: Params) -> Payload:
        upper = params["widths"][..., ::2].long().unsqueeze(2)  # where the second code of a field begins
        fields, turns = x.shape[-1] // 2, torch.arange(PARTS, device=x.device)

        def encoded(piece: Tensor) -> tuple[Tensor]:
            y = piece - params["centre"].unsqueeze(2) if "centre" in params else piece
            codes, number = self._quantize(y, params)
            pairs = codes[..., ::2] | codes[..., 1::2] << upper
            pairs[..., fields - PARTS :] |= (number >> turns & 1) << (self.total - 1)
            return (pack(pairs, self.total),)

        return {"codes": in_pieces(encoded, x)[0]}

    def _quantize(self, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Codes ``[B, H, N, D]`` and the scale's number ``[B, H, N, 1]`` of least cost, int64."""
        widths = params["widths"].long()
        cuts = width_cuts(levels()).float().to(y.device)[widths]
        tables = (2**widths - 1).unsqueeze(2)
        table, scale_table = levels().to(y.device), scales().to(y.device)
        weight, coded = params["weight"].unsqueeze(2), (widths > 0).unsqueeze(2)
        energy = sum_by_halves(torch.where(coded, y, 0.0).square())
        # r^2 between numbers i and i + 1: 2^((2 i + 1 - 2 UNIT) / 4)
        walls = torch.tensor([power(2 * i + 1 - 2 * UNIT) for i in range(1, SCALES)], dtype=torch.float32)
        walls = walls.to(y.device)
        nearest = 1 + (energy > coded.sum(-1, keepdim=True) * walls).sum(-1, keepdim=True)
        codes, number = nearest_in(cuts, torch.zeros_like(y)), torch.zeros_like(nearest)
        least = sum_by_halves(weight * y.square())
        for step in TRIED:
            i = (nearest + step).clamp(1, SCALES)
            scale = scale_table[i]
            trial = nearest_in(cuts, y / scale)
            error = y - scale * table[tables + trial]
            cost = sum_by_halves(weight * error.square())
            better = cost < least
            least = torch.where(better, cost, least)
            codes, number = torch.where(better, trial, codes), torch.where(better, i, number)
        return codes, number

    def decode(self, payload: Payload, params: Params) -> Tensor:
        widths = params["widths"].long().unsqueeze(2)
        first, second = widths[..., ::2], widths[..., 1::2]
        fields = unpack(payload["codes"], self.total, widths.shape[-1] // 2).long()
        number = (fields[..., -PARTS:] >> (self.total - 1) << torch.arange(PARTS, device=fields.device)).sum(-1, True)
        codes = torch.stack([fields & (1 << first) - 1, fields >> first & (1 << second) - 1], -1).flatten(-2)
        table, scale_table = levels().to(codes.device), scales().to(codes.device)
        y = table[2**widths - 1 + codes] * scale_table[number]
        return y + params["centre"].unsqueeze(2) if "centre" in params else y


@register(
    "ghost",
    source="packedkv: docs/ghost.md",
    presets=("ghost-4", "ghost-3", "ghost-2"),
    mark="recommended",
)
def ghost(bits: int | float = 3, transform: Transform = "channels", window: int = 0, sink: int = 4) -> KVScheme:
    """Keys without their mean before RoPE, values without theirs; channels get bits by what their errors cost."""
    codec = Ghost(bits, transform)
    return KVScheme(key=codec, value=codec, sink=sink, window=window)
