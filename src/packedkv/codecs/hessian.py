"""Rotations by eigenvectors of the queries' second moment, around an inner codec that may rotate by its own H.

HessianRotated, arXiv:2604.19157, App. A.3, keys and values; one R for all heads of a layer, behind H::

    M = mean of q q^T                           Eq. 7, uncentred; all query heads of a layer, unrotated (model basis)
    M + 0.01 mean(diag M) I = R Lambda R^T      Eq. 9-10, eigenvalues descending
    k^ = (k H) R,  q^ = (q H) R                 Eq. 11

OscarRotated, arXiv:2605.17757, keys; R_h of the query heads of each KV head, before H::

    k^ = (k R_h) H,  q^ = (q R_h) H             H spreads large and silent directions evenly over all channels

A score is off by q^T dk, in the mean square dk^T M dk (Eq. 8). R is orthogonal, so the scores themselves stay. Values
use the R of their layer's queries; the inverse is applied once, to the attention output.

Block and bits: the inner codec's, unchanged. Constants: ``rotation [1, 1, D, D]`` or, per head, ``[1, H, D, D]``,
float32 multiples of 2^-24; the inner codec's as ``inner.NAME``.

Deviations from the papers
1. Signs are "canonicalized" by a rule that is not printed; here the largest-magnitude entry of each column, the first
   one of equals, is positive.
2. R is rounded to 2^-24, rows to 2^-24 of their largest component: the sums are then exact (``ops/exact``), and a token
   alone gives the bits of a prefill. That is float32's own rounding, so the transpose serves as inverse and as dual.
3. Oscar: a rotation per KV head, as in the authors' later files, not per layer. Values keep their inner codec, because
   a fit of values sees no keys, whose scores weigh the paper's moment. No permutation: with one scale per token the
   order of channels changes nothing. No clipping: at sixteen levels it lost more than the smaller step gained.
   The paper's 16-bit first and newest tokens are the scheme's sink and window.

Pitfalls: R needs the model's queries, which a cache never sees: ``packedkv fit`` makes it, nothing can stand in for it.
Damping moves eigenvalues, never R. Calibrated on queries that are rotated already, H cancels and R alone remains. One
(s, z) for all channels spreads its error evenly over them, whatever the basis; R helps only as far as it narrows the
range of a token, and may widen it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from packedkv.checks import check_fitted
from packedkv.codec import NO_SAMPLE, Constant, Constants, Params, Part, Sample, Site
from packedkv.codecs.wrapper import Wrapper, around, inside
from packedkv.errors import FitError
from packedkv.ops.exact import cut_rotation, rotate_exactly

DAMPING = 0.01


def second_moment(queries: Tensor) -> Tensor:
    """M of Eq. 7: float64 ``[D, D]`` of queries ``[B, HQ, N, D]``, on their device."""
    total = queries.new_zeros(queries.shape[-1], queries.shape[-1], dtype=torch.float64)
    for head in queries.unbind(1):  # head by head: all of them in float64 may not fit
        rows = head.flatten(0, 1).double()
        total += rows.T @ rows
    return total / (queries.numel() // queries.shape[-1])


def hessian_rotation(moment: Tensor) -> Tensor:
    """R of Eq. 9-10: eigenvectors as columns, eigenvalues descending, signs canonical; float64 ``[D, D]``.

    >>> hessian_rotation(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    damped = moment.double() + DAMPING * moment.double().diag().mean() * torch.eye(len(moment), device=moment.device)
    vectors = torch.linalg.eigh(damped).eigenvectors.flip(-1)
    largest = vectors.abs().argmax(0, keepdim=True)  # the first of equals
    return vectors * torch.where(vectors.gather(0, largest) < 0, -1.0, 1.0)


@dataclass(frozen=True)
class HessianRotated(Wrapper):
    """An inner codec in the eigenbasis of the queries' second moment."""

    @property
    def needs(self) -> frozenset[Part]:
        return self.inner.needs | {"queries"}

    def _rotations(self, site: Site) -> int:
        """How many rotations a layer has."""
        return 1

    def constants(self, site: Site) -> Constants:
        shape = (self._rotations(site), site.head_dim, site.head_dim)
        return {"rotation": Constant(shape, low=-1, high=1), **super().constants(site)}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Take the rotation from the queries; raises FitError if there are none, or they are not finite."""
        if sample.queries is None:
            raise FitError(
                "this rotation comes from a model's queries, which keys and values do not tell; run `packedkv fit "
                'MODEL "saw-int4:hessian=true" --text FILE -o PARAMS` (with your spec) and pass params.'
            )
        method = type(self).__name__
        check_fitted(method, site, {"queries": sample.queries})
        if not bool(sample.queries.isfinite().all()):
            raise FitError(
                f"{method}: the queries of layer {site.layer} are not finite; check the model's dtype (fp16 overflow?)."
            )
        groups = sample.queries.unflatten(1, (self._rotations(site), -1)).unbind(1)
        # the CPU's eigenvectors, whatever the device
        rotation = torch.stack([cut_rotation(hessian_rotation(second_moment(group).cpu())) for group in groups])
        return around({"rotation": rotation[None].to(site.device)}, self.inner.fit(site, sample))

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        return rotate_exactly(self.inner.to_code(x, inside(params)), params["rotation"][0, 0])

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        return rotate_exactly(self.inner.query_to_code(q, inside(params)), params["rotation"][0, 0])

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        return self.inner.from_code(rotate_exactly(x, params["rotation"][0, 0].T), inside(params))


@dataclass(frozen=True)
class OscarRotated(HessianRotated):
    """An inner codec behind the eigenbasis of each KV head's queries."""

    def _rotations(self, site: Site) -> int:
        return site.num_heads

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        return self.inner.to_code(rotate_exactly(x, params["rotation"][0]), inside(params))

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        return self.inner.query_to_code(rotate_exactly(q, params["rotation"][0]), inside(params))

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        return rotate_exactly(self.inner.from_code(x, inside(params)), params["rotation"][0].mT)
