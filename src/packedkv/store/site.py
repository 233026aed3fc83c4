"""Sites: the scheme of one layer and its constants, without tokens; engines that own the pages have only this."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from packedkv.checks import check_constant, check_constants, params_by_role
from packedkv.codec import LIMIT, ROLES, Codec, Constant, Dense, Params, Payload, Role, Site, page_layout, saturated
from packedkv.errors import FitError, UnsupportedError
from packedkv.ops.rope import NOT_TURNED, Rotary
from packedkv.ops.sums import sum_by_halves
from packedkv.scheme import KVScheme
from packedkv.shared import seeded_params
from packedkv.store.pages import PageStore

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
            keys = self.turning.turn_back(keys, positions)
        return (sum_by_halves(keys.double(), 2).squeeze(2) / keys.shape[2]).float()

    def at(self, mean: Tensor | None, positions: Tensor) -> Tensor:
        """Return the mean at ``positions [B, n]``: float32, broadcasts to ``[B, H, n, D]``.

        Raises UnsupportedError if the keys are from a file that was read without its model.
        """
        if mean is None:
            raise UnsupportedError(WITHOUT_MODEL)
        return mean[:, :, None] if self.kind == "post" else self.turning.turn(mean[:, :, None], positions)

    @property
    def turning(self) -> Rotary:
        """Return the rotary embedding that rotates the mean; after RoPE it is the identity. Errors as ``at``."""
        if self.kind == "post":
            return NOT_TURNED
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


@dataclass(eq=False, repr=False)
class RoleSite:
    """Codec and constants of the keys, or of the values, of one layer."""

    role: Role
    codec: Codec  # for the model's dtype (``for_dtype``)
    site: Site
    params: Params | None = None  # None: they are fitted on the first prefill
    seeded: bool = False  # whether constants that need no sample follow from codec and site alone: not those of a file

    def encode(self, x: Tensor) -> Payload:
        """Encode whole blocks of tokens ``[B, H, n, D]``, model basis."""
        assert self.params is not None
        return self.codec.encode(self.codec.to_code(x.float(), self.params), self.params)

    def read(self, store: PageStore, first: int, last: int, dtype: torch.dtype, mean: Tensor | None = None) -> Tensor:
        """Dequantize the slots ``[first, last)`` of every sequence: ``[B, H, last - first, D]`` of ``dtype``.

        ``mean`` broadcasts to that shape and is added; it was subtracted before encoding.
        """
        skip = first % self.codec.block_tokens
        assert self.params is not None
        x = self.codec.decode(store.read(self.role, first, last), self.params)
        x = self.codec.from_code(x, self.params)[:, :, skip : skip + last - first]
        return saturated(x if mean is None else x + mean, dtype)


class RoleState(RoleSite):
    """Keys or values of a layer: dense sink and window ``[B, H, t, D]`` (model basis), live runs of slots in pages.

    A slot is never rewritten while its token is cached: cropping or evicting inside a block leaves dead slots.
    """

    def __init__(self, of: RoleSite, sink: Tensor, window: Tensor) -> None:
        super().__init__(of.role, of.codec, of.site, of.params, of.seeded)
        self.sink, self.window = sink, window
        self.runs: list[tuple[int, int]] = []
        self.remembered: Tensor | None = None

    @property
    def encoded(self) -> int:
        """Live encoded tokens."""
        return sum(b - a for a, b in self.runs)

    @property
    def next_slot(self) -> int:
        """Slot of the next block to write: the first block boundary after the last live slot."""
        unit = self.codec.block_tokens
        return -(-self.runs[-1][1] // unit) * unit if self.runs else 0

    def extend(self, slots: int) -> None:
        """Mark ``slots`` more slots live from ``next_slot`` on."""
        first = self.next_slot
        if self.runs and self.runs[-1][1] == first:
            self.runs[-1] = (self.runs[-1][0], first + slots)
        else:
            self.runs.append((first, first + slots))

    def write(self, store: PageStore, x: Tensor, mean: Tensor | None = None) -> None:
        """Encode whole blocks of tokens ``[B, H, n, D]``, model basis, less ``mean``, into the next slots."""
        payload, n = self.encode(x if mean is None else x.float() - mean), x.shape[2]
        store.ensure(self.next_slot + n, exact=n > 1 and not self.runs)
        store.write(self.role, self.next_slot, payload)

    def remove(self, first: int, last: int) -> None:
        """Drop the encoded tokens ``[first, last)``, counted among the live encoded ones."""
        live, at = [], 0
        for a, b in self.runs:
            for lo, hi in ((0, first), (last, at + b - a)):
                x, y = a + max(lo - at, 0), a + min(hi, at + b - a) - at
                if x < y:
                    live.append((x, y))
            at += b - a
        self.runs = live

    @property
    def dense_tokens(self) -> int:
        """Number of dense tokens."""
        return self.sink.shape[2] + self.window.shape[2]

    def pending(self, x: Tensor) -> Tensor:
        """Tokens of the window, then ``x``."""
        return torch.cat([self.window, x], 2) if self.window.shape[2] else x


def empty_roles(sites: Mapping[Role, RoleSite], like: Tensor) -> dict[Role, RoleState]:
    """Return the state of an empty layer for tokens ``[B, H, n, D]`` of this batch, dtype and device.

    Raises FitError if the constants are of another number of sequences.
    """
    batch, heads = like.shape[:2]
    roles = {}
    for role, of in sites.items():
        if sizes := {len(x) for x in (of.params or {}).values() if x.ndim} - {1, batch}:
            raise FitError(
                f"the {role} constants of layer {of.site.layer} are of {sizes.pop()} sequences, the cache has "
                f"{batch}; pass constants of one, or of the batch."
            )
        empty = no_tokens(batch, heads, of.site.head_dim, of.codec.held_dtype(like.dtype), like.device)
        roles[role] = RoleState(of, empty, empty)
    return roles


@lru_cache(maxsize=64)
def no_tokens(batch: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty sink or window, shared by the layers of a model."""
    with torch.inference_mode(False):
        return torch.empty(batch, heads, 0, head_dim, dtype=dtype, device=device)


class LayerSite:
    """Scheme of one layer, its index and its constants.

    Raises FitError if the scheme needs the mean before RoPE and there is none, SpecError as ``params_by_role``.
    """

    def __init__(
        self,
        scheme: KVScheme,
        layer: int = 0,
        seed: int = 0,
        fitted: Mapping[Role, Params] | None = None,  # the keys' mean included as ``mean``
        first_head: int = 0,  # as in ``Site``
        # for mean=pre or post; post needs no model: by default the fitted mean, or the mean of the first tokens
        mean: MeanRemoval | None = None,
        most: int | None = None,  # most tokens of the layer at once (a sliding window), and most to fit constants on
        energy: Tensor | None = None,  # mean squares of each KV head's queries, [1, H, D]: as in ``Sample``
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
        sites: dict[Role, RoleSite] = {}
        for role, head_dim in zip(ROLES, head_dims, strict=True):
            codec = self.scheme.codec(role).for_dtype(dtype)
            site = Site(self.layer, role, heads, head_dim, self.seed, device, self.first_head)
            given = codec_params(self.fitted, role)
            check_role(codec, site, self.fitted)
            self.check_energy(site)
            params: Mapping[str, Tensor] | None = None if given is None else {k: v.to(device) for k, v in given.items()}
            if given is None and "tensor" not in codec.needs:
                params = seeded_params(codec, site)
            sites[role] = RoleSite(role, codec, site, params, given is None)
        return sites

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
