"""A wrapper that changes nothing: every member of the contract, the constants and the bytes are the inner codec's."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import packedkv
from packedkv.codec import ROLES, Codec, Dense, Params, Sample, Site
from packedkv.codecs.wrapper import Wrapper, inside
from packedkv.errors import FitError, SpecError

from .support import normal

OPTIONS = (
    "ghost-3:transform=klt", "ultra-tq:table=calibrated", "saw-int4:hessian=true", "saw-int4:kmeans=1",
    "innerq-base:norm=false", "int-4:outliers=3", "turboquant-4:scale=search",
)  # fmt: skip
OWN = {"config", "for_dtype", "constants", "fit", "settle"}
"""Members whose results name the wrapper or its constants."""


@cache
def codecs() -> dict[str, Codec]:
    """Every codec that a preset or one of the options uses, by its text."""
    found = [packedkv.get(spec).codec(role) for spec in (*packedkv.presets(), *OPTIONS) for role in ROLES]
    return {repr(codec): codec for codec in found}


def same(one: Params, other: Params) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def cases() -> list[tuple[str, str]]:
    """Every codec with keys; with values too where its constants depend on the role."""
    return [(name, role) for name in codecs() for role in ROLES if role == "key" or "Ghost" in name]


@pytest.mark.parametrize(("name", "role"), cases())
def test_a_wrapper_is_its_inner_codec(name, role):
    bare = codecs()[name]
    codec, site = Wrapper(bare), Site(1, role, 2, 64)
    for member, value in vars(Codec).items():
        if isinstance(value, property) and not member.startswith("_"):
            assert getattr(codec, member) == getattr(bare, member), member
    assert codec.layout(64) == bare.layout(64)
    assert codec.for_dtype(torch.bfloat16) == Wrapper(bare.for_dtype(torch.bfloat16))
    assert codec.held_dtype(torch.float32) == bare.held_dtype(torch.float32)
    declared = {name: replace(one, rule=None) for name, one in inside(codec.constants(site)).items()}
    assert declared == {name: replace(one, rule=None) for name, one in bare.constants(site).items()}

    x, q = normal(1, 2, 128, 64, seed=1), normal(1, 4, 128, 64, seed=2)
    everything = Sample(x, q, normal(1, 2, 128, 64, seed=3))
    for sample in (Sample(x), Sample(x, energy=q[:, ::2].square().mean(2)), everything):
        try:
            params = bare.fit(site, sample)
        except FitError as error:
            with pytest.raises(FitError, match=f"^{str(error)[:20]}"):
                codec.fit(site, sample)
            continue
        assert same(inside(codec.fit(site, sample)), params)
    (settled,), (own,) = bare.settle([params]), codec.settle([codec.fit(site, everything)])
    assert same(inside(own), settled)

    y = bare.to_code(x, settled)
    assert torch.equal(codec.to_code(x, own), y)
    assert torch.equal(codec.query_to_code(x, own), bare.query_to_code(x, settled))
    assert torch.equal(codec.from_code(y, own), bare.from_code(y, settled))
    payload = bare.encode(y, settled)
    assert same(codec.encode(y, own), payload)
    assert torch.equal(codec.decode(payload, own), bare.decode(payload, settled))


def test_every_member_of_the_contract_is_a_wrappers():
    """A member that is added to the contract is forwarded before anyone writes it here."""
    members = {name for name in vars(Codec) if not name.startswith("_")}
    assert members <= vars(Wrapper).keys()
    assert members > OWN
    assert Wrapper(Dense()).config() == {"codec": "Wrapper", "inner": {"codec": "Dense", "dtype": None}}
    with pytest.raises(SpecError, match="is not a codec"):
        Wrapper("int-4")
