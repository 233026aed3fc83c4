"""Constants fitted by a kernel: the reference's, number by number."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from packedkv import codec as codecs
from packedkv.codec import ROLES, Role, Site
from packedkv.codecs.ghost import Ghost
from packedkv.codecs.innerq import InnerQ
from packedkv.kernels.codecs import ghost, innerq
from packedkv.kernels.constants import constants_for
from packedkv.kernels.engine import FirstTokens, FitBuffers
from packedkv.kernels.spec import encoder, reader
from packedkv.ops.rope import Rotary
from packedkv.store.site import MeanRemoval
from tests.kernels.conftest import Server, by, normal

HEADS, BATCH = 2, 2


def rows(head_dim: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Tokens of channels of very different sizes and means; some unlike all others, some channels silent."""
    draw = torch.Generator().manual_seed(head_dim)
    x = torch.randn(BATCH, tokens, HEADS, head_dim, generator=draw)
    x = x * (2 * torch.randn(BATCH, 1, HEADS, head_dim, generator=draw)).exp()
    x = x + 3 * torch.randn(BATCH, 1, HEADS, head_dim, generator=draw)
    x[:, 5::61] *= 9
    x[0, :, 1, 7 :: head_dim // 2] = 0
    x[1, :, 0, 3] = x[1, :, 0, 4]  # equals: the first comes first
    return x.to(dtype).transpose(1, 2)


def fitted(codec: Ghost, role: Role, x: Tensor, tokens: int, padding: Tensor | None, turn: Rotary | None,
           energy: Tensor | None, every: int = 1) -> Any:  # fmt: skip
    """As ``LayerCache`` fits: the mean before RoPE of the sample, then the constants of what is left."""
    at = every * torch.arange(tokens)[None] + (
        torch.zeros(BATCH, 1, dtype=torch.long) if padding is None else padding[:, None]
    )
    sample = x.gather(2, at[:, None, :, None].expand(-1, HEADS, -1, x.shape[3]))
    mean = None
    if turn is not None:
        removal = MeanRemoval("pre", turn)
        mean = removal.of(sample, at - 3)
        sample = sample.float() - removal.at(mean, at - 3)
    site = Site(0, role, HEADS, x.shape[3])
    return codec.fit(site, codecs.Sample(sample, energy=energy)), mean


@by(
    "bits, head_dim, tokens, dtype, case",
    cuda=[
        (3, 64, 256, torch.bfloat16, "turned"),
        (4, 128, 129, torch.bfloat16, "turned, padded, every second"),
        (2, 96, 256, torch.float16, "turned, interleaved, scaled, padded"),
        (3.5, 64, 100, torch.float16, "turned in part, energy, every second"),
        (5, 256, 256, torch.bfloat16, "turned"),
        (3, 192, 37, torch.float16, "energy"),
        (4.5, 128, 256, torch.bfloat16, "silent"),
    ],
    gpu=[(bits, dim, 128, torch.bfloat16, "turned, padded, every second") for dim, bits in ((64, 3), (128, 4))],
)
def test_the_references_constants(
    bits: float, head_dim: int, tokens: int, dtype: torch.dtype, case: str, served_by: Server
) -> None:
    codec, x = Ghost(bits), rows(head_dim, 280, dtype)
    if case == "silent":
        x = torch.zeros_like(x)
    padding = torch.tensor([20, 3], dtype=torch.int32) if "padded" in case else None
    energy = torch.rand(1, HEADS, head_dim) if "energy" in case else None
    turn = back = angles = None
    if "turned" in case:
        width = head_dim // 4 if "in part" in case else head_dim // 2
        frequencies = 10_000.0 ** -(torch.arange(width) / width)
        turn = Rotary(frequencies, 1.25 if "scaled" in case else 1.0, "interleaved" in case)
        places = (torch.arange(280) - 3).expand(BATCH, -1)
        angles = turn.angles(places)
        back = turn.angles_back(places) if "scaled" in case else None
    every = 2 if "every second" in case else 1
    there, pads, angles = tree_map_only(Tensor, lambda y: y.to(served_by.device), (x, padding, angles))
    keys = FirstTokens(there, tokens, every, pads, angles, back, turn is not None and turn.interleaved, energy)
    values, others = (FirstTokens(y, tokens, every, pads) for y in (there, there.flip(2)))
    own, buffers, other = dict.fromkeys(ROLES, codec), FitBuffers(), FitBuffers()
    buffers.layers = 2
    both = ghost.fit(own, head_dim, {"key": keys, "value": values}, buffers)
    alone = ghost.fit(own, head_dim, {"value": values}, other)
    other.launch()
    again = ghost.fit(own, head_dim, {"key": keys, "value": others}, buffers)
    buffers.launch()  # two layers
    assert served_by.name == "gpu" or served_by.counted() == {"kv_fit": 2}
    for role in ROLES:
        keys, found = role == "key", both[role]
        assert torch.equal(found.params["factor"], again[role].params["factor"]) == (keys or case == "silent")
        assert keys or all(torch.equal(x, alone[role].params[name]) for name, x in found.params.items())
        want, mean = fitted(codec, role, x, tokens, padding, turn if keys else None, energy if keys else None, every)
        assert set(found.params) == set(want)
        assert found.mean is None if mean is None else torch.equal(found.mean.cpu(), mean)
        for name, one in want.items():
            assert found.params[name].dtype == one.dtype, name
            assert torch.equal(found.params[name].cpu(), one), (role, name)
        for made, kernel in ((found.reading, reader), (found.writing, encoder)):
            built = constants_for(kernel(codec, head_dim, role), want, HEADS, head_dim)
            assert built.order == made.order
            assert torch.equal(built.tables, made.tables.cpu()), (role, kernel)
            assert torch.equal(built.factor, made.factor.cpu()), (role, kernel)


def test_a_token_that_is_no_number_gives_an_order_of_all_channels(machine: dict[str, Any]) -> None:
    """It is refused at the pass's end; until then kernels read tables made of it."""
    x = rows(64, 256, torch.bfloat16).clone()
    x[0, 0, 9, 3:6], x[0, 1, 200] = torch.nan, torch.inf
    for role in ROLES:
        buffers = FitBuffers()
        found = ghost.fit({role: Ghost(3)}, 64, {role: FirstTokens(x, 256)}, buffers)[role].params
        buffers.launch()
        assert torch.equal(found["order"].sort(-1).values, torch.arange(64).expand(BATCH, HEADS, -1).short())
        assert (found["widths"].long().sum(-1) == 64 * 3 - 4).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 1), (96, 130), (256, 300)])
def test_the_references_norms(head_dim: int, tokens: int, dtype: torch.dtype, machine: dict[str, Any]) -> None:
    codec = InnerQ(3, norm=True)
    x = normal(2, tokens, 3, head_dim, seed=tokens).to(dtype).transpose(1, 2)
    x[0, 1, :, 5], x[0, 1, :, 5 + head_dim // 2] = 0, 0
    x[1, 2, tokens // 2, 7] = torch.inf
    x[1, 0, tokens // 2, 9] = torch.nan
    found = innerq.fit({"key": codec}, head_dim, {"key": FirstTokens(x)}, FitBuffers())["key"]
    want = codec.fit(Site(0, "key", 3, head_dim), codecs.Sample(x))
    assert found.params.keys() == want.keys()
    torch.testing.assert_close(found.params["norm"], want["norm"], rtol=0, atol=0, equal_nan=True)
    assert found.params["norm"][0, 1, 5] == 1
    for made, kernel in ((found.reading, reader), (found.writing, encoder)):
        built = constants_for(kernel(codec, head_dim, "key"), want, 3, head_dim)
        assert (made.order, made.tables) == (built.order, built.tables)
        torch.testing.assert_close(made.factor, built.factor, rtol=0, atol=0, equal_nan=True)
