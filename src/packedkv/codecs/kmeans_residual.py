"""KMeansResidual: the nearest of C centroids and an inner codec for what is left. arXiv:2604.19157, App. A.2.

    id = argmin_j |x - c_j|^2          Eq. 5; exact, a tie to the lowest j
    x^ = c_id + Dequant(Quant(x - c_id))        Eq. 5-6; Quant is the inner codec

Centroids belong to a layer, a KV head and a role. They live in the inner codec's code basis: an orthogonal rotation
changes neither the clusters nor the assignment, so rotating before or after is the same, and bases stay the inner
codec's. C = 1 subtracts the mean.

Block (one block of the inner codec)::

    (fields of the inner codec)
    ids    uint8  [G w]     w = ceil(ceil(log2 C) / 8) bytes a token, low byte first; no field for C = 1

Bits: the inner codec's + 8 w / D; the paper prints + log2(C) / D, where no byte ends.

Constants: ``centroids [1 or B, H, C, D]`` fp16; the inner codec's as ``inner.NAME``. They are not counted in the bits:
C = 2048 at D = 128 are 512 KB per head and role. Fitted by ``packedkv fit`` (leading dimension 1), or on each
sequence's prefill (B).

Deviations from the paper
1. C = 1 is NOT plain INT4, although App. C calls it so: it subtracts the mean vector, and scores 53.6 where plain INT4
   scores 0.
2. Codebooks per KV head, in fp16; the paper says only "its own codebook" for keys and for values.

Pitfalls: a prefill must have C tokens at least, and with few more than C its centroids ARE its tokens while later ones
find none near. A row of zeros does not come back as zeros, but within an inner step of its distance to a centroid. A
decode step prepares and reads all C centroids of a head: beyond a few hundred that is what takes the time.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from packedkv.checks import needed
from packedkv.codec import FP16_MAX, NO_SAMPLE, Constant, Constants, Params, Part, Payload, Sample, Site
from packedkv.codecs.wrapper import Wrapper, around, inside
from packedkv.errors import FitError, SpecError
from packedkv.layout import Field, Layout
from packedkv.ops.exact import dot_bits, to_grid

MOST = 1 << 16
STREAM = 101
"""Apart from the streams that inner codecs draw from."""
SCORES = 1 << 21
"""Distances held at once: float64 temporaries of 16 MB each."""


@dataclass(frozen=True)
class KMeansResidual(Wrapper):
    """``clusters`` centroids C, 1 to 65536, and an inner codec for the residual."""

    clusters: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.clusters, bool) or not isinstance(self.clusters, int) or not 1 <= self.clusters <= MOST:
            raise SpecError(f"kmeans={self.clusters} is not allowed; use 1 to {MOST} clusters (0 in a spec: none).")
        if isinstance(self.inner, KMeansResidual):
            raise SpecError("kmeans: the inner codec subtracts centroids already; wrap its inner codec instead.")

    @property
    def needs(self) -> frozenset[Part]:
        return self.inner.needs | {"tensor"}

    @property
    def id_bytes(self) -> int:
        """Bytes w of a token's id.

        >>> from packedkv.codec import Dense
        >>> [KMeansResidual(Dense(), c).id_bytes for c in (1, 2, 256, 257, 65536)]
        [0, 1, 1, 2, 2]
        """
        return -(-(self.clusters - 1).bit_length() // 8)

    def layout(self, head_dim: int) -> Layout:
        inner = self.inner.layout(head_dim)
        ids = (Field("ids", "uint8", (inner.block_tokens * self.id_bytes,)),) if self.id_bytes else ()
        bits = inner.nominal_bits + math.log2(self.clusters) / head_dim
        return Layout(head_dim, inner.block_tokens, inner.fields + ids, bits, inner.version)

    def constants(self, site: Site) -> Constants:
        shape = (site.num_heads, self.clusters, site.head_dim)
        return {"centroids": Constant(shape, torch.float16, each=True), **super().constants(site)}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Cluster each sequence of the sample on its own; with queries all together, B = 1.

        Raises FitError if there are fewer tokens than clusters, or scikit-learn is missing (C > 1).
        """
        inner = self.inner.fit(site, sample)
        code = self.inner.to_code(needed(f"kmeans={self.clusters}", sample.tensor).float(), inner)
        if sample.queries is not None:
            code = code.transpose(0, 1).flatten(1, 2)[None]
        if code.shape[2] < self.clusters:
            raise FitError(
                f"kmeans={self.clusters} needs at least {self.clusters} tokens to fit on, got {code.shape[2]}; use "
                f"fewer clusters, a longer prompt, or `packedkv fit MODEL SPEC --text FILE -o PARAMS` and pass params."
            )
        centroids = [
            fit_centroids(points, self.clusters, site.generator(head, STREAM))
            for sequence in code
            for head, points in enumerate(sequence)
        ]
        table = torch.stack(centroids).clamp(-FP16_MAX, FP16_MAX).half().unflatten(0, code.shape[:2])
        return around({"centroids": table.to(site.device)}, inner)

    def encode(self, x: Tensor, params: Params) -> Payload:
        if not self.id_bytes:
            return self.inner.encode(x - params["centroids"].float(), inside(params))
        ids = nearest_centroid(x, params["centroids"])
        payload = self.inner.encode(x - self._look_up(ids, params), inside(params))
        parts = torch.stack([(ids >> 8 * i) & 0xFF for i in range(self.id_bytes)], -1).to(torch.uint8)
        g = self.block_tokens
        return {**payload, "ids": parts.unflatten(2, (ids.shape[2] // g, g)).flatten(3)}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        residual = self.inner.decode({n: t for n, t in payload.items() if n != "ids"}, inside(params))
        if not self.id_bytes:
            return residual + params["centroids"].float()
        parts = payload["ids"].unflatten(3, (self.block_tokens, self.id_bytes)).flatten(2, 3).long()
        ids = sum((parts[..., i] << 8 * i for i in range(1, self.id_bytes)), start=parts[..., 0])
        # slots that were never written hold any byte
        return residual + self._look_up(ids.clamp_max(self.clusters - 1), params)

    def _look_up(self, ids: Tensor, params: Params) -> Tensor:
        """Centroids of tokens: float32 ``[B, H, N, D]`` for ids ``[B, H, N]``."""
        table = params["centroids"].expand(ids.shape[0], -1, -1, -1)
        return table.gather(2, ids[..., None].expand(*ids.shape, table.shape[-1])).float()


def nearest_centroid(x: Tensor, centroids: Tensor) -> Tensor:
    """``argmin_j |x - c_j|^2``, a tie to the lowest j: int64 ``[B, H, N]``.

    Of ``|x|^2/2 - x c_j + |c_j|^2/2`` the last two terms decide. Both are taken of points on grids (``ops/exact``),
    relative to the middle of the centroids, so their sums are exact and only the difference is rounded: the result is
    exact for points whose components are moved by at most ``2^-22`` of their largest one (D up to 256; more beyond),
    whatever else is in the call. ``x`` is ``[B, H, N, D]``, ``centroids [1 or B, H, C, D]``.
    """
    batch, heads, _, dim = x.shape
    wide = centroids.double()
    middle = (wide.amin(2, keepdim=True) + wide.amax(2, keepdim=True)) / 2
    bits = dot_bits(dim)
    c, c_unit = to_grid(wide - middle, bits)
    half = ((c * c).sum(-1, keepdim=True) * (c_unit * c_unit / 2)).transpose(2, 3)  # [., H, 1, C]
    c, c_unit = c.transpose(2, 3), c_unit.transpose(2, 3)
    ids = []
    for piece in x.split(max(1, SCORES // max(1, batch * heads * half.shape[-1])), 2):
        whole, unit = to_grid(piece.double() - middle, bits)
        ids.append((half - (whole @ c).mul_(unit).mul_(c_unit)).argmin(-1))
    return torch.cat(ids, 2)


def fit_centroids(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Cluster points ``[N, D]`` by k-means++ and Lloyd's iteration: float64 ``[count, D]``, on the CPU.

    One centroid is the mean. Fewer distinct points than ``count`` are all centroids, the first of them several times.
    """
    points = points.detach().cpu().double()  # scikit-learn converts float32 again in every step of k-means++
    if count == 1:
        return points.mean(0, keepdim=True)
    distinct = points.unique(dim=0)
    if len(distinct) <= count:
        return torch.cat([distinct, distinct[:1].expand(count - len(distinct), -1)])
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise FitError(
            f"k-means of {count} clusters needs scikit-learn, which is not here ({error}); "
            f"install packedkv[fit], or use one cluster (the mean)."
        ) from error
    seed = int(torch.randint(2**31 - 1, (1,), generator=generator))
    means = KMeans(count, init="k-means++", n_init=1, random_state=seed)
    # one thread: threads would add partial means in the order in which they finish
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # nearly equal points: spare centroids do no harm
        means.fit(points.numpy())
    return torch.from_numpy(means.cluster_centers_)
