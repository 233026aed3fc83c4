"""Keys without their mean before RoPE are those of an explicit subtraction, whatever a cache does and keys turn."""

from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.cache.host import LayerCache, attend
from packedkv.codec import ROLES, Params, Role, Sample, Site, roundtrip
from packedkv.ops.rope import Rotary
from packedkv.store.site import LayerSite, MeanRemoval

DIM, HEADS, BATCH = 64, 2, 2
MEAN = 20 * torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
PADDED = torch.tensor([[5], [0]])


def frequencies(turning: int) -> Tensor:
    return (10_000.0 ** (-2 * torch.arange(turning // 2, dtype=torch.float64) / turning)).float()


def turned(positions: Tensor, turning: int, interleaved: bool, scaling: float) -> Tensor:
    """``R_t mu`` by the definition: float64 ``[B, H, n, D]``, of ``positions [B, n]``."""
    out = MEAN[:, :, None].expand(len(positions), -1, positions.shape[1], -1).clone()
    for p in range(turning // 2):
        a, b = (2 * p, 2 * p + 1) if interleaved else (p, p + turning // 2)
        angle = positions[:, None].double() * float(frequencies(turning)[p])
        x, y = MEAN[..., a, None], MEAN[..., b, None]
        out[..., a] = scaling * (x * angle.cos() - y * angle.sin())
        out[..., b] = scaling * (y * angle.cos() + x * angle.sin())
    return out


def constants(spec: str) -> dict[Role, Params]:
    """Constants of ghost, fitted on numbers whose channels differ; of other methods none."""
    gen, found = torch.Generator().manual_seed(2), {}
    for role in ROLES:
        codec = packedkv.get(spec).codec(role)
        if "tensor" in codec.needs:
            x, q = torch.randn(2, HEADS, 1, DIM, generator=gen).exp() * torch.randn(2, HEADS, 300, DIM, generator=gen)
            site = Site(0, role, HEADS, DIM, 0, torch.device("cpu"))
            found[role] = codec.settle([codec.fit(site, Sample(x[None], q[None]))])[0]
    return found


class Layer:
    """A cache, and what was appended to it, token by token."""

    def __init__(self, spec: str, turning: int = DIM, interleaved: bool = False, scaling: float = 1.0) -> None:
        self.turn = (turning, interleaved, scaling)
        rotary = Rotary(frequencies(turning), interleaved=interleaved, scaling=scaling)
        scheme = packedkv.get(f"{spec}:mean=pre,sink=0")
        removed = MeanRemoval("pre", rotary, MEAN.float(), "params")
        self.cache = LayerCache(LayerSite(scheme, fitted=constants(spec), mean=removed))
        self.keys, self.values = torch.empty(2, BATCH, HEADS, 0, DIM)
        self.positions = torch.empty(BATCH, 0, dtype=torch.long)

    def append(self, positions: Tensor) -> None:
        n = positions.shape[1]
        k, v = torch.randn(2, BATCH, HEADS, n, DIM, generator=torch.Generator().manual_seed(n))
        k, v = ((x.half().float()) for x in (k + turned(positions, *self.turn), v))  # a cache holds what is in fp16
        self.cache.append(k, v, positions)
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self.positions = torch.cat([self.positions, positions], 1)

    def keep(self, tokens: Any, rows: Any = slice(None)) -> None:
        self.keys, self.values = self.keys[rows][:, :, tokens], self.values[rows][:, :, tokens]
        self.positions = self.positions[rows][:, tokens]

    def agree(self) -> None:
        """Decoded keys and attention: the difference through the codec, and the mean added to it."""
        states: Any = self.cache.roles
        means = turned(self.positions, *self.turn)
        rest = roundtrip(states["key"].codec, (self.keys.double() - means).float(), states["key"].params)
        values = roundtrip(states["value"].codec, self.values, states["value"].params)
        wanted, found = rest.double() + means, self.cache.decode()
        near = (found[0] - wanted).abs() <= 2e-6 * float(MEAN.abs().max())
        apart = ~near.all(-1).all(1) & (self.positions >= 0)  # padding has whatever positions
        assert apart.double().mean() < 0.03  # the last bit of a difference may decide on a code
        torch.testing.assert_close(found[1], values, rtol=0, atol=1e-6)
        wanted = torch.where(near.all(-1, keepdim=True), wanted, found[0].double())
        q = torch.randn(len(wanted), 3 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(9))
        seen = (self.positions >= 0)[:, None, None]
        scores = (q.double() @ wanted.repeat_interleave(3, 1).mT * DIM**-0.5).masked_fill(~seen, -torch.inf)
        expected = scores.softmax(-1) @ values.double().repeat_interleave(3, 1)
        torch.testing.assert_close(attend(q, self.cache, mask=seen).double(), expected, rtol=0, atol=5e-5)


SCHEMES: dict[str, dict[str, Any]] = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "partial": {"turning": 32},
    "partial, interleaved": {"turning": 16, "interleaved": True},
    "scaled": {"scaling": 1.3},
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("spec", ["ghost-3", "saw-int4", "turboquant-4"])
def test_the_term_is_an_explicit_subtraction(spec: str, scheme: str) -> None:
    """Left padding, calls of any length, crops and what follows, evictions, beams, a batch repeated."""
    layer = Layer(spec, **SCHEMES[scheme])
    for first, n in ((0, 40), (40, 1), (41, 9)):
        layer.append((torch.arange(first, first + n) - PADDED).clamp_min(-1))
    layer.agree()
    layer.cache.crop(30)
    layer.keep(slice(30))
    layer.append(torch.arange(30, 80) - PADDED)
    layer.agree()
    layer.cache.evict(20, 4)
    layer.keep([*range(4), *range(24, 80)])
    layer.append(torch.tensor([[80]]) - PADDED)
    layer.agree()
    layer.cache.select(torch.tensor([1, 0]))
    layer.cache.repeat(2)
    layer.keep(slice(None), [1, 1, 0, 0])
    layer.agree()


def test_the_term_is_an_explicit_subtraction_far_out() -> None:
    layer = Layer("ghost-3")
    layer.append(torch.tensor([[100_000], [131_002]]) + torch.arange(70))
    layer.agree()
