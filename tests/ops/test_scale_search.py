"""``scale=search``: the bytes are the method's, its decoder and kernels read them, and no row is worse than before."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, Codec, Role, Sample, Site
from packedkv.errors import UnsupportedError
from packedkv.kernels import spec as cuda
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu import spec as cpu
from packedkv.ops.scale_search import FACTORS, around_middle, least_error
from packedkv.registry import get

SPECS = (
    "turboquant-2",
    "turboquant-3",
    "turboquant-4:norm=fp32",
    "octopus-3",
    "octopus-4:rounding=scalar,norm=fp32",
    "saw-int4",
    "saw-int4:zero=float,pack=halves",
    "int-2:group=32",
    "int-3",
    "int-4:symmetric=true",
    "kivi-2",
    "kivi-tq-4",
    "ultraquant",
    "ultra-tq",
    "ultra-tq:norm=block",
)
KERNELS = [spec for spec in SPECS if "halves" not in spec and "zero=float" not in spec]


def both(spec: str) -> tuple[packedkv.KVScheme, packedkv.KVScheme]:
    """The scheme by the method's own rule, and with the search."""
    return get(spec), get(f"{spec}{',' if ':' in spec else ':'}scale=search")


def rows(dim: int, tokens: int = 128) -> Tensor:
    """Nearly normal rows, some with a loud channel, some of one sign, one of zeros, some tiny and some huge."""
    x = torch.randn(1, 2, tokens, dim, generator=torch.Generator().manual_seed(dim))
    x[:, :, ::3, 5] *= 8
    x[:, :, 7] = 0
    x[:, :, 9] = 4
    x[:, :, 11] += 8
    x[:, :, 13] *= 1e-6
    x[:, :, 15] *= 65504 / x[:, :, 15].abs().amax()
    return x.half().float()


def made(codec: Codec, role: Role, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows in the basis of the codes, and constants."""
    params = dict(codec.fit(Site(1, role, x.shape[1], x.shape[3]), Sample(x)))
    return codec.to_code(x, params), params


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("spec", SPECS)
def test_no_row_is_worse_and_the_ordinary_decoder_reads_it(spec: str, dim: int) -> None:
    for role in ROLES:
        own, searched = (scheme.codec(role) for scheme in both(spec))
        assert searched.searches
        assert not own.searches
        assert searched.layout(dim) == own.layout(dim)
        y, params = made(own, role, rows(dim))
        before, after = own.encode(y, params), searched.encode(y, params)
        assert {name: (x.dtype, x.shape) for name, x in before.items()} == {
            name: (x.dtype, x.shape) for name, x in after.items()
        }
        decoded = own.decode(after, params)
        assert torch.equal(decoded, searched.decode(after, params))
        old, new = ((y.double() - x).square() for x in (own.decode(before, params), decoded))
        # groups along tokens: a row is a channel of a block
        axis, block = (-1, 1) if own.block_tokens == 1 else (3, own.block_tokens)
        per = [x.unflatten(2, (-1, block)).sum(axis) for x in (old, new)]
        assert (per[1] <= per[0] * (1 + 1e-9)).all()
        usual = slice(16, None)
        assert new[:, :, usual].sum() < 0.995 * old[:, :, usual].sum()


@pytest.mark.parametrize("spec", SPECS)
def test_a_token_alone_has_the_bytes_that_it_has_in_a_batch(spec: str) -> None:
    for role in ROLES:
        codec = both(spec)[1].codec(role)
        y, params = made(codec, role, rows(64))
        whole, step = codec.encode(y, params), codec.block_tokens
        for at in (0, step * (len(range(0, 64, step)) // 2), 128 - step):
            alone = codec.encode(y[:, :, at : at + step], params)
            assert all(torch.equal(alone[n], whole[n][:, :, at // step : at // step + 1]) for n in whole)


@pytest.mark.parametrize("spec", KERNELS)
def test_kernels_read_it_as_ever_and_leave_the_writing_to_pytorch(spec: str) -> None:
    for role in ROLES:
        own, searched = (scheme.codec(role) for scheme in both(spec))
        for find in (cuda.reader, cpu.cpu_reader):
            try:
                want = find(own, 128, role)
            except UnsupportedError:
                with pytest.raises(UnsupportedError):
                    find(searched, 128, role)
                continue
            got = find(searched, 128, role)
            assert replace(got, tables_of=None) == replace(want, tables_of=None)
        for write in (cuda.encoder, cpu.cpu_encoder):
            with pytest.raises(UnsupportedError, match="no kernel tries scales"):
                write(searched, 128, role)


@pytest.mark.parametrize("spec", ["turboquant-3", "octopus-3:window=0", "saw-int4", "kivi-2:window=0", "ultraquant"])
def test_a_packed_cache_holds_the_same_bytes_as_the_reference(spec: str) -> None:
    if reason := library.refusal(torch.device("cpu")):
        pytest.skip(reason)
    scheme = both(spec)[1].for_layer(4, 8)
    fused, plain = FusedLayerCache(scheme), LayerCache(scheme)
    x = rows(64, 96).half()
    for part in x.split(32, 2):
        fused.append(part, part.flip(2))
        plain.append(part, part.flip(2))
    assert fused.kernels() == {"decode": f"cpu {library.variant()}", "encode.key": "torch", "encode.value": "torch"}
    for got, want in zip(fused.decode(), plain.decode(), strict=True):
        assert torch.equal(got, want)
    q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1)).half()
    torch.testing.assert_close(fused.attend(q).float(), plain.attend(q).float(), atol=2e-2, rtol=2e-2)


def test_the_first_of_equals_and_each_group_its_own() -> None:
    x = torch.tensor([[1.0, 2.0, 5.0, 0.0]])
    tried = []

    def quantize(factor: float) -> tuple[Tensor, Tensor]:
        tried.append(factor)
        return torch.ones(1, 4), torch.full((1, 2), factor)

    def value(codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale.repeat_interleave(2, -1)

    _codes, scale = least_error(x, quantize, value, 2, factors=(1.0, 2.0, 2.5, 3.0))
    assert tried == [1.0, 2.0, 2.5, 3.0]
    assert scale.tolist() == [[1.0, 2.5]]  # 1 and 2 are equal in the first pair


def test_norms_beyond_fp16_are_not_chosen() -> None:
    x = torch.full((1, 1, 1, 64), 65504.0)
    codec = get("turboquant-2:scale=search").key
    y, params = made(codec, "key", x)
    assert codec.decode(codec.encode(y, params), params).isfinite().all()


def test_a_range_of_factor_1_keeps_its_bits() -> None:
    low, high = torch.tensor([-0.0, -3.0]), torch.tensor([0.0, 5.0])
    same = around_middle(low, high, FACTORS[0])
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(same, (low, high), strict=True))
    assert [x.tolist()[1] for x in around_middle(low, high, 0.5)] == [-1.0, 3.0]
