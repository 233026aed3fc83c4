"""Facts of FP8: E4M3's values, saturation, and a scale that is always finite and never zero."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codecs.fp8 import Fp8


def e4m3_values() -> torch.Tensor:
    """Every finite E4M3 magnitude, from the format's definition."""
    normal = [2.0 ** (e - 7) * (1 + f / 8) for e in range(1, 16) for f in range(8) if (e, f) != (15, 7)]
    return torch.tensor([f * 2.0**-9 for f in range(8)] + normal)


def test_every_e4m3_number_is_held_as_it_is():
    grid = torch.cat([e4m3_values(), -e4m3_values()]).view(1, 1, 1, -1)
    assert grid.max() == 448
    codec = Fp8(scaled=False)
    assert torch.equal(codec.decode(codec.encode(grid, {}), {}), grid)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    scaled=st.booleans(),
    kind=st.sampled_from(["normal", "halfway", "outlier", "extreme", "subnormal"]),
    power=st.integers(-14, 12),
    seed=st.integers(0, 999),
)
def test_codes_and_scale_by_definition(scaled, kind, power, seed):
    """Every number of the format is tried; only codes within 1e-6 of the best may differ, exact ties go to even."""
    codec, table = Fp8(scaled), e4m3_values().double()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    if kind == "halfway":  # between two numbers of the format
        x = (table[:-1] + table[1:])[torch.arange(256) * 7 % 126].view(8, 32).float() / 2
    elif kind == "outlier":
        x[:, 3] *= 500
    x = (x * 2.0**power).clamp(-65504, 65504).half().float() if kind != "halfway" else x
    if kind == "extreme":
        x = torch.where(x > 0, 65504.0, -65504.0)
    elif kind == "subnormal":
        x = (torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)) * 3).round() * 2.0**-24
    payload = codec.encode(x[None, None], {})
    codes, s = payload["codes"][0, 0], torch.ones(8, 1)
    if scaled:
        s = payload["scale"][0, 0].float()
        # 448 times the next fp16 number would be above 65504
        exact = (x.abs().amax(-1, keepdim=True).double() / 448).clamp(2.0**-24, 146.125)
        assert bool(((s - exact).abs() <= (exact * 2**-11).clamp_min(2.0**-25) * (1 + 1e-6)).all())
    assert torch.equal(codes >= 128, x.signbit())
    wanted = (x.abs().double() / s.double()).clamp_max(448)
    loss, chosen = (wanted[..., None] - table).abs(), (codes & 127).long()
    best = loss.min(-1)
    near = best.values + 1e-6 * wanted
    assert bool((loss.gather(-1, chosen[..., None])[..., 0] <= near).all())
    tied = (loss <= near[..., None]).sum(-1) > 1
    assert torch.equal(chosen[~tied], best.indices[~tied])
    if not scaled:  # nothing was rounded on the way: a tie is a tie
        assert not (chosen[(loss == best.values[..., None]).sum(-1) > 1] & 1).any()
