"""Recipes: what the options of a spec make, the bytes of a token, and the bits that papers print."""

import pytest
import torch

import packedkv
from packedkv.codec import Codec, Dense, Sample, Site
from packedkv.codecs.fp8 import Fp8
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hessian import HessianRotated, OscarRotated
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.kmeans_residual import KMeansResidual
from packedkv.codecs.kvarn import KVarN
from packedkv.codecs.octopus import Octopus, OctopusQJL
from packedkv.codecs.outliers import Med
from packedkv.codecs.polarquant import PolarQuant
from packedkv.codecs.q4_0 import Q40
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant

from .support import normal

DENSE = {"dense_key_layers": 0, "dense_value_layers": 0}
RECIPES = {  # spec: key, value, and what else differs from the preset; goldens hold the presets themselves
    "fp8:scale=none": (Fp8(scaled=False), Fp8(scaled=False), {}),
    "hqmq-s24_r3:outliers=4,slots=1,packing=radix": (*[Med(Hqmq(24, 3, packing="radix"), 4, 1)] * 2, {}),
    "hqmq-s24_r3:slots=3": (Hqmq(24, 3), Hqmq(24, 3), {}),
    "int-4:outliers=5,slots=1,symmetric=true,group=32": (*[Med(GroupInt(4, 32, "channels", True), 5, 1)] * 2, {}),
    "innerq-small:norm=false": (InnerQ(3, "channels", "literal"), InnerQ(2, "tokens", "literal"), {}),
    "kvarn-k4v4:value_bits=3,group=64,rounds=1": (KVarN(4, "tokens", 64, 1), KVarN(3, "channels", 64, 1), {}),
    "octopus-1": (Octopus(1, 1), GroupInt(2, 32), {"window": 32, "dense_key_layers": 1}),
    "octopus-2:split=-1": (Octopus(1, 3), GroupInt(2, 32), {}),
    "octopus-3:split=0": (Octopus(3, 3), GroupInt(3, 32), {}),
    "octopus-4:split=-2": (Octopus(2, 6), GroupInt(4, 32), {}),
    "octopus-4:split=2": (Octopus(6, 2), GroupInt(4, 32), {}),
    "octopus-3:split=plus": (Octopus(4, 3), GroupInt(3, 32), {}),
    "octopus-3:rounding=scalar,window=0,group=16,dense_keys=0,norm=fp32": (
        Octopus(4, 2, "scalar", "fp32"), GroupInt(3, 16), {"window": 0, "dense_key_layers": 0},
    ),
    "octopus-qjl-1": (OctopusQJL(1, 1), GroupInt(2, 32), {"window": 32, "dense_key_layers": 1}),
    "octopus-qjl-3:rounding=full,split=plus,window=0,group=16,dense_keys=2,norm=fp32": (
        OctopusQJL(4, 3, "full", "fp32"), GroupInt(3, 16), {"window": 0, "dense_key_layers": 2},
    ),
    "polarquant-3:window=8,norm=fp32": (PolarQuant(3, "fp32"), PolarQuant(3, "fp32"), {"window": 8}),
    "q4_0:rotate=k": (Q40("whole"), Q40("none"), {}),
    "saw-int4:rotate=kv": (SawInt4(), SawInt4(), {}),
    "saw-int4:rotate=none": (SawInt4(1), SawInt4(1), {}),
    "saw-int4:hessian=true": (HessianRotated(SawInt4()), SawInt4(1), {}),
    "saw-int4:oscar=true": (OscarRotated(SawInt4()), SawInt4(1), {}),
    "saw-int4:rotate=none,hessian=true": (HessianRotated(SawInt4(1)), SawInt4(1), {}),
    "saw-int4:rotate=kv,block=16,hessian=true": (*[HessianRotated(SawInt4(16))] * 2, {}),
    "saw-int4:kmeans=16": (KMeansResidual(SawInt4(), 16), KMeansResidual(SawInt4(1), 16), {}),
    "saw-int4:zero=float,pack=halves,kmeans=2048,hessian=true": (
        KMeansResidual(HessianRotated(SawInt4(None, "float", "halves")), 2048),
        KMeansResidual(SawInt4(1, "float", "halves"), 2048),
        {},
    ),
    "turboquant-3:norm=fp32": (TurboQuant(3, "fp32"), TurboQuant(3, "fp32"), {}),
    "turboquant-qjl-2:variant=printed,window=16": (TurboQuantQJL(2, "fp16", "printed"), TurboQuant(2), {"window": 16}),
    "ultra-tq:norm=block,table=sphere,refit=0.5,group=64,dense_layers=0": (
        UltraTQ("block", "sphere", 0.5), GroupInt(4, 64), DENSE,
    ),
    "ultraquant:c=0.195,scale=real,queries=fp8,dense_layers=0": (
        UltraQuant(True, 0.195, "real", "fp8"), UltraQuant(False, 0.195, "real"), DENSE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec", RECIPES)
def test_what_options_make(spec: str) -> None:
    key, value, more = RECIPES[spec]
    scheme = packedkv.get(spec)
    assert (scheme.key, scheme.value) == (key, value)
    assert {name: getattr(scheme, name) for name in more} == more
    assert packedkv.from_json(scheme.to_json()) == scheme


@pytest.mark.parametrize(("layers", "mean"), [(48, 5.229), (62, 5.008), (80, 4.8375)])
def test_two_layers_at_either_end_are_dense(layers: int, mean: float) -> None:
    """UltraQuant's recipe, with the mean bits over the layers of three models."""
    each = [packedkv.get("ultraquant").for_layer(i, layers) for i in range(layers)]
    dense = [i for i, s in enumerate(each) if isinstance(s.key, Dense) and isinstance(s.value, Dense)]
    assert dense == [0, 1, layers - 2, layers - 1]
    assert sum(s.effective_bits(128) for s in each) / layers == pytest.approx(mean, abs=5e-4)


BYTES = {  # spec and head_dim: bytes of a block of keys and of values; goldens hold those of presets
    ("fp8:scale=none", 128): (128, 128),
    ("hqmq-s24_r3", 45): (22, 22),  # 12 chunks: 15 + 4.5 + 2
    ("hqmq-s24_r3:packing=radix", 128): (203, 203),  # four tokens: 96 + 51 + 48 + 8
    ("hqmq-s24_r3:outliers=3,slots=1", 128): (66, 66),  # 54 + 4 flags + 8
    ("hqmq-s24_r3:outliers=3,slots=3", 45): (48, 48),  # 22 + 2 + 24
    ("hqmq-s24_r3:outliers=3,slots=1,packing=radix", 128): (251, 251),  # 203 + 16 + 32
    ("int-4:outliers=3,slots=99", 16): (45, 45),  # 12 + 1 + 32: no more slots than chunks
    ("int-3:group=32", 80): (42, 42),  # 30 + 3 groups of 4
    ("int-4:group=32", 128): (80, 80),
    ("int-4:symmetric=true,group=32", 128): (72, 72),
    ("kvarn-k4v2:group=64", 128): (4736, 2560),  # 64 tokens: 4096 + 4 x 128 + 128, 2048 + 4 x 64 + 256
    ("octopus-1", 128): (19, 48),
    ("octopus-2:norm=fp32", 128): (42, 48),
    ("octopus-4:norm=fp32", 128): (74, 80),
    ("octopus-2:split=plus", 128): (45, 48),
    ("octopus-3:split=plus", 128): (62, 64),
    ("octopus-4:split=plus", 128): (78, 80),
    ("octopus-qjl-1", 128): (37, 48),
    ("octopus-qjl-2:norm=fp32", 128): (60, 48),
    ("octopus-qjl-4:split=plus", 128): (96, 80),
    ("polarquant-4:norm=fp32", 128): (68, 68),
    ("saw-int4:kmeans=1", 128): (68, 68),
    ("saw-int4:kmeans=256", 128): (69, 69),
    ("saw-int4:kmeans=2048", 128): (70, 70),
    ("turboquant-1", 128): (18, 18),
    ("turboquant-4:norm=fp32", 128): (68, 68),
    ("turboquant-qjl-3:norm=fp32", 128): (54, 52),
    ("ultra-tq:norm=block", 80): (46, 52),  # 40 + 3 norms: 32 + 32 + 16 channels
    ("ultra-tq:norm=block", 128): (72, 80),
    ("ultraquant:scale=real", 80): (46, 46),
    ("ultraquant:scale=real", 128): (72, 72),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "dim"), BYTES, ids=str)
def test_bytes_of_a_block(spec: str, dim: int) -> None:
    scheme = packedkv.get(spec)
    for codec, nbytes in zip((scheme.key, scheme.value), BYTES[spec, dim], strict=True):
        assert codec.layout(dim).block_bytes == nbytes
        x = normal(1, 1, 4096 if "kmeans" in spec else 3 * codec.block_tokens, dim)
        params = codec.fit(Site(0, "key", 1, dim), Sample(x))
        payload = codec.encode(codec.to_code(x[:, :, : 3 * codec.block_tokens], params), params)
        assert sum(field.nbytes for field in payload.values()) == 3 * nbytes


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        *[("additive:k=24,r=3", 3.04), ("additive-k48_r4", 3.79), ("additive:k=192,r=4", 4.79)],
        *[("hqmq-s24_r3", 3.04), ("hqmq-s24_r4", 3.29), ("hqmq-s24_r6", 3.79)],
        *[("hqmq-s48_r3", 3.29), ("hqmq-s48_r4", 3.54), ("hqmq-s48_r6", 4.04)],
        *[("hqmq-s96_r3", 3.54), ("hqmq-s96_r4", 3.79), ("hqmq-s96_r6", 4.29)],
        *[("hqmq-s192_r3", 3.79), ("hqmq-s192_r4", 4.04), ("hqmq-s192_r6", 4.54)],
        *[("octopus-2", 2 + 1 / 3), ("octopus-3", 3 + 1 / 3), ("octopus-4", 4 + 1 / 3)],
        *[("saw-int4:kmeans=16", 4.03), ("saw-int4:kmeans=256", 4.06), ("saw-int4:kmeans=2048", 4.09)],
    ],
)  # fmt: skip
def test_bits_that_papers_print(spec: str, bits: float) -> None:
    """Without norms, scales and padding: ``nominal_bits`` of keys."""
    assert packedkv.get(spec).key.layout(128).nominal_bits == pytest.approx(bits, abs=0.005)


@pytest.mark.parametrize("codec", [GroupInt(2, 0), GroupInt(3, 64), GroupInt(2, 16), Med(GroupInt(2, 32))], ids=str)
def test_versions_of_integers_at_128(codec: Codec) -> None:
    """Codes are interleaved, version 2, in groups of 32 alone; a codec around them has their version."""
    assert codec.layout(128).version == (2 if isinstance(codec, Med) else 1)
    assert codec.layout(64).version == 1
    if isinstance(codec, GroupInt):
        x = normal(1, 1, 32, 128)
        payload, width = codec.encode(x, {}), codec.group or 128
        scale, zero = (payload[name].float().repeat_interleave(width, 3) for name in ("scale", "zero"))
        codes = packedkv.ops.bitpack.unpack(payload["codes"], codec.bits, 128)
        assert torch.equal(codes.float(), ((x - zero) / scale).round().clamp(0, codec.steps))
