"""OscarRotated: keys in the eigenbasis of their own queries, before the inner codec's rotation. arXiv:2605.17757.

    M_h = mean of q q^T over the query heads of KV head h          uncentred, queries in the model basis
    M_h = U_h Lambda U_h^T                                         eigenvalues descending
    k^ = (k U_h) H,  q^ = (q U_h) H                                H is the inner codec's own rotation

A score is off by q^T dk, in the mean square dk^T M dk. U_h makes M diagonal, so the Hadamard matrix behind it spreads
the large and the silent directions evenly over all channels. ``hessian`` has a layer's eigenvectors behind the
Hadamard matrix.

Block: the inner codec's, unchanged. Bits: the inner codec's; the rotations of a layer are constants of the site.

Constants: ``rotation [1, H, D, D]``, float32 multiples of 2^-24, signs as in ``hessian``; the inner codec's as
``inner.NAME``.

Deviations from the paper
1. A rotation per KV head, not per layer. The authors' later rotation files have one per head as well.
2. Values keep their inner codec. The paper turns them by the eigenvectors of their second moment, weighted by the
   scores of their keys; a fit of values sees no keys here.
3. No permutation behind the Hadamard matrix: with one scale per token the order of channels changes nothing.
4. No clipping. The authors cut a token's channels at the magnitude of rank 0.96 D before they round to four levels; at
   sixteen levels this lost more on the small model than the smaller step gained.
5. The paper has 2 bits and 16-bit first and newest tokens; here the inner codec and the recipe say.

Pitfalls: the rotations need the model's queries: ``packedkv fit`` makes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from packedkv.codec import Constant, Constants, Params, Site
from packedkv.codecs.hessian import HessianRotated, hessian_rotation, second_moment
from packedkv.codecs.wrapper import inside
from packedkv.ops.exact import cut_rotation, rotate_exactly


@dataclass(frozen=True)
class OscarRotated(HessianRotated):
    """An inner codec behind the eigenbasis of each KV head's queries."""

    def constants(self, site: Site) -> Constants:
        shape = (site.num_heads, site.head_dim, site.head_dim)
        return {**super().constants(site), "rotation": Constant(shape, low=-1, high=1)}

    def _rotation(self, site: Site, queries: Tensor) -> Tensor:
        heads = queries.unflatten(1, (site.num_heads, -1)).unbind(1)
        rotation = torch.stack([cut_rotation(hessian_rotation(second_moment(own).cpu())) for own in heads])
        return rotation[None].to(site.device)

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        return self.inner.to_code(rotate_exactly(x, params["rotation"][0]), inside(params))

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        return self.inner.query_to_code(rotate_exactly(q, params["rotation"][0]), inside(params))

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        return rotate_exactly(self.inner.from_code(x, inside(params)), params["rotation"][0].mT)
