"""Sites: the scheme of one layer and its constants, without tokens; engines that own the pages have only this."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from packedkv.checks import check_constant, check_constants, params_by_role
from packedkv.codec import LIMIT, ROLES, Codec, Constant, Dense, Params, Role, Site, page_layout
from packedkv.errors import FitError, UnsupportedError
from packedkv.ops.rope import NOT_TURNED, Rotary
from packedkv.ops.sums import sum_by_halves
from packedkv.scheme import KVScheme
from packedkv.shared import seeded_params
from packedkv.store.pages import PageStore
from packedkv.store.role import RoleSite, RoleState, empty_roles

MEAN = "mean"
"""Name of the keys' mean among fitted constants: float32 ``[1, H, D]``, beside those of the codec."""
MEAN_TOKENS = 128
"""Tokens of which a mean is taken that neither a file nor the weights give."""
WITHOUT_MODEL = "these keys were saved without their mean; read the file with load_cache(path, model)."


@dataclass(frozen=True, eq=False)
class MeanRemoval:
    """Mean that a layer subtracts from its keys before encoding and adds when they are dequantized."""

    kind: Literal["pre", "post"]  # before RoPE, or after it
    rotary: Rotary | None = None  # of the keys, with ``pre``; None there: the keys are from a file, without their model
    given: Tensor | None = None  # float32 [1, H, D]; None: the mean of the first MEAN_TOKENS tokens of each sequence
    source: Literal["params", "weights", "first tokens"] = "first tokens"

    @cached_property
    def name(self) -> Hashable:
        """Equal for given means of equal numbers and rotation; reads the numbers."""
        given = None if self.given is None else (tuple(self.given.shape), tuple(self.given.flatten().tolist()))
        return self.kind, given, None if self.rotary is None else self.rotary.name

    def of(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Mean of ``keys [B, H, n, D]`` (after RoPE) at ``positions [B, n]``: float32 ``[B, H, D]``."""
        if self.kind == "pre":
            keys = self._known().turn_back(keys, positions)
        return (sum_by_halves(keys.double(), 2).squeeze(2) / keys.shape[2]).float()

    def at(self, mean: Tensor | None, positions: Tensor) -> Tensor:
        """Return the mean at ``positions [B, n]``: float32, broadcasts to ``[B, H, n, D]``.

        Raises UnsupportedError if the keys are from a file that was read without its model.
        """
        if mean is None:
            raise UnsupportedError(WITHOUT_MODEL)
        return mean[:, :, None] if self.kind == "post" else self._known().turn(mean[:, :, None], positions)

    @property
    def turning(self) -> Rotary:
        """Return the rotary embedding that rotates the mean; after RoPE it is the identity. Errors as ``at``."""
        return NOT_TURNED if self.kind == "post" else self._known()

    def _known(self) -> Rotary:
        if self.rotary is None:
            raise UnsupportedError(WITHOUT_MODEL)
        return self.rotary


class Removed(NamedTuple):
    """Mean that was subtracted from some keys of a layer, rotated to the positions of the keys."""

    mean: Tensor  # float32 [1 or B, H, D]
    turning: Rotary
    angles: tuple[Tensor, Tensor]  # ``turning.angles`` of the keys, [1 or B, n, R / 2]; layers of a pass may share them

    def first(self) -> "Removed":
        """Return what is removed from the first sequence."""
        if self.mean.shape[0] == 1 and self.angles[0].shape[0] == 1:
            return self
        cosines, sines = self.angles
        return self._replace(mean=self.mean[:1], angles=(cosines[:1], sines[:1]))

    def from_keys(self, keys: Tensor) -> Tensor:
        """Keys ``[B, H, n, D]`` without it: float32."""
        return keys.float() - self.turning.turned(self.mean[:, :, None], *self.angles)


class LayerSite:
    """Scheme of one layer, its index and its constants.

    Parameters
    ----------
    scheme, layer, seed
        As ``LayerCache``.
    fitted : mapping of role to Params, optional
        Fitted constants by role (``{"key": ..., "value": ...}``), the keys' mean included as ``mean``.
    first_head : int
        The model's index of this layer's KV head 0, ``Site.first_head``.
    mean : MeanRemoval, optional
        Mean of the layer's keys, for a scheme with ``mean=pre`` or ``post``. ``post`` needs no model: the default is
        the fitted mean or the mean of the first tokens. A scheme with ``mean=auto`` has no mean here.
    most : int, optional
        Most tokens of the layer at once (a sliding window), and most tokens to fit constants on.
    energy : Tensor, optional
        Mean squares of the queries of each KV head, ``[1, H, D]``, if known: as in ``Sample``.

    Raises FitError if the scheme needs the mean before RoPE and there is none, SpecError as ``params_by_role``.
    """

    def __init__(
        self,
        scheme: KVScheme,
        layer: int = 0,
        seed: int = 0,
        fitted: Mapping[Role, Params] | None = None,
        first_head: int = 0,
        mean: MeanRemoval | None = None,
        most: int | None = None,
        energy: Tensor | None = None,
    ) -> None:
        self.fitted = params_by_role(fitted)
        if scheme.mean == "auto":
            scheme = replace(scheme, mean="none")
        if scheme.mean == "pre" and mean is None:
            raise FitError(
                f"{scheme}: mean=pre encodes keys without their mean before RoPE, which only a model knows; "
                f"make the cache with cache_for(model, ...), or use mean=post or mean=none."
            )
        if scheme.mean == "post" and mean is None:
            given = self.fitted.get("key", {}).get(MEAN)
            mean = MeanRemoval("post", given=given, source="first tokens" if given is None else "params")
        self.scheme, self.layer, self.seed, self.first_head, self.mean = scheme, layer, seed, first_head, mean
        self.most, self.energy = most, energy

    def roles(
        self, heads: int, head_dims: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> dict[Role, RoleSite]:
        """Return the constants of both roles for tensors ``[B, heads, n, head_dim]`` of this dtype on this device.

        Raises FitError if the given constants differ from the codec's declaration.
        """
        made: dict[Role, RoleSite] = {}
        for role, head_dim in zip(ROLES, head_dims, strict=True):
            codec = self.scheme.codec(role).for_dtype(dtype)
            site = Site(self.layer, role, heads, head_dim, self.seed, device, self.first_head)
            given = codec_params(self.fitted, role)
            check_role(codec, site, self.fitted)
            self.check_energy(site)
            params: Mapping[str, Tensor] | None = None if given is None else {k: v.to(device) for k, v in given.items()}
            if given is None and "tensor" not in codec.needs:
                params = seeded_params(codec, site)
            made[role] = RoleSite(role, codec, site, params, given is None)
        return made

    def allocate(
        self, keys: Tensor, values: Tensor, page_tokens: int | None, capacity: int
    ) -> tuple[dict[Role, RoleState], PageStore]:
        """Return the constants, no tokens and the pages of a cache for tokens like these; errors as in ``roles``."""
        dims = keys.shape[3], values.shape[3]
        sites = self.roles(keys.shape[1], dims, keys.dtype, keys.device)
        page = page_layout(sites["key"].codec, sites["value"].codec, *dims, page_tokens)
        return empty_roles(sites, keys), PageStore(page, keys.shape[0], keys.shape[1], keys.device, capacity)

    def check_energy(self, site: Site) -> None:
        """Raise FitError unless the query energies are of the heads of ``site``."""
        if self.energy is not None and self.energy.shape != (1, site.num_heads, site.head_dim):
            raise FitError(
                f"the energies of the queries of layer {self.layer} are {list(self.energy.shape)}; expected "
                f"{[1, site.num_heads, site.head_dim]}: make the cache with the model that fills it."
            )

    @property
    def fit_tokens(self) -> int:
        """Number of tokens to fit missing constants on; 1: the tokens of the first call, 0: no constant is missing.

        Above 1 a cache keeps tokens dense until it has this number of each sequence.
        """
        tokens = self._codecs_fit_tokens
        if self.mean is not None and self.mean.given is None:
            tokens = max(tokens, MEAN_TOKENS)
        return tokens if self.most is None else min(tokens, max(self.most, 2))

    @cached_property
    def _codecs_fit_tokens(self) -> int:
        codecs = ((role, self.scheme.codec(role)) for role in ROLES)
        return max([codec.fit_tokens for role, codec in codecs if is_missing(codec, self.fitted, role)], default=0)

    @cached_property
    def recent(self) -> "LayerSite | None":
        """Site of the newest tokens, with age tiers: other codecs, the same place and mean."""
        if (of := self.scheme.recent) is None:
            return None
        mean = None if isinstance(of.key, Dense) else self.mean
        scheme = replace(of, mean="none" if mean is None else mean.kind)
        return LayerSite(scheme, self.layer, self.seed, first_head=self.first_head, mean=mean)

    @property
    def is_seeded(self) -> bool:
        """Whether every constant follows from the scheme, layer and seed alone: equal sites share them."""
        return not self.fitted and "tensor" not in self.scheme.key.needs | self.scheme.value.needs


def check_role(codec: Codec, site: Site, fitted: Mapping[Role, Params]) -> None:
    """Raise FitError unless the constants given for a role, the keys' mean among them, are as declared."""
    mean = fitted.get("key", {}).get(MEAN) if site.role == "key" else None
    if mean is not None:
        cure = "; pass what `packedkv fit` made, or leave it out."
        check_constant(f"the mean of the keys of layer {site.layer}", mean_constant(site), mean, 1, cure)
    if (params := codec_params(fitted, site.role)) is not None:
        check_constants(codec, site, params)


def mean_constant(site: Site) -> Constant:
    """Declare the keys' mean."""
    return Constant((site.num_heads, site.head_dim), low=-LIMIT, high=LIMIT, each=True)


def is_missing(codec: Codec, fitted: Mapping[Role, Params], role: Role) -> bool:
    """Whether a role's constants are to be fitted on first tokens."""
    return "tensor" in codec.needs and codec_params(fitted, role) is None


def codec_params(fitted: Mapping[Role, Params], role: Role) -> Params | None:
    """Return the constants of a role's codec without the keys' mean; None if there are no other constants."""
    if (given := fitted.get(role)) is None:
        return None
    params = {name: x for name, x in given.items() if role == "value" or name != MEAN}
    return params if params or MEAN not in given else None
