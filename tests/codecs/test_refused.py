"""Refusals of every codec: the text says what came, what is allowed, and what to do."""

import pytest
import torch

import packedkv
from packedkv.codec import Sample, Site
from packedkv.codecs.additive import Additive
from packedkv.codecs.e8 import E8
from packedkv.codecs.ghost import Ghost
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hessian import HessianRotated, OscarRotated
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.kmeans_residual import KMeansResidual
from packedkv.codecs.kvarn import KVarN
from packedkv.codecs.octopus import Octopus, OctopusQJL, split_bits
from packedkv.codecs.outliers import Med
from packedkv.codecs.polarquant import PolarQuant
from packedkv.codecs.q4_0 import Q40
from packedkv.codecs.rope_pairs import RopePairs
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant
from packedkv.errors import FitError, ShapeError, SpecError

OPTIONS = [
    (Additive, {"k": 25}, "k=25 is not allowed; use 24, 48, 96 or 192"),
    (Additive, {"r": 5}, "r=5 is not allowed; use 3, 4 or 6"),
    (Additive, {"reading": "best"}, "reading='best' is not allowed; use normalised, raw or greedy"),
    (Ghost, {"bits": 6}, r"bits=6 is not allowed; use 2, 2\.5, 3"),
    (Ghost, {"transform": "dct"}, "transform='dct' is not allowed; use channels or klt"),
    (GroupInt, {"bits": 5}, "bits=5 is not allowed; use 2, 3, 4 or 8"),
    (GroupInt, {"along": "heads"}, "along='heads' is not allowed; use channels or tokens"),
    (GroupInt, {"group": -1}, "group=-1 along channels is not allowed; use a positive number, e.g. 32, or 0"),
    (GroupInt, {"group": 0, "along": "tokens"}, "group=0 along tokens is not allowed; use a positive number"),
    (GroupInt, {"scale": "best"}, "scale='best' is not allowed; use own or search"),
    (HessianRotated, {"inner": "saw-int4"}, "HessianRotated: inner='saw-int4' is not a codec; pass one"),
    (Hqmq, {"s": 25}, "s=25 is not allowed; use 24, 48, 96 or 192"),
    (Hqmq, {"packing": "floor"}, "packing='floor' is not allowed; use ceil or radix"),
    (Hqmq, {"codebook": "fp8"}, "codebook='fp8' is not allowed; use fp16 or int8"),
    (InnerQ, {"bits": 4}, "bits=4 is not allowed; use 2 or 3"),
    (InnerQ, {"symmetric": "odd"}, "symmetric='odd' is not allowed; use literal, signed or full"),
    (InnerQ, {"hybrid": True}, "along='channels' with hybrid is not allowed; use tokens"),
    (KMeansResidual, {"inner": SawInt4(), "clusters": 0}, "is not allowed; use 1 to 65536 clusters"),
    (KMeansResidual, {"inner": SawInt4(), "clusters": 65537}, "is not allowed; use 1 to 65536 clusters"),
    (KMeansResidual, {"inner": SawInt4(), "clusters": 2.0}, "is not allowed; use 1 to 65536 clusters"),
    (KMeansResidual, {"inner": KMeansResidual(SawInt4(), 2)}, "the inner codec subtracts centroids already"),
    (KVarN, {"bits": 5}, "bits=5 is not allowed; use 2, 3 or 4"),
    (KVarN, {"group": 1}, "group=1 is not allowed; use 2 or more"),
    (KVarN, {"rounds": -1}, "rounds=-1 is not allowed; use 0 or more"),
    (Med, {"inner": SawInt4(), "c": 0}, "c=0 is not allowed; use a positive number of medians"),
    (Med, {"inner": SawInt4(), "c": float("nan")}, "c=nan is not allowed; use a positive number of medians"),
    (Med, {"inner": SawInt4(), "slots": 1.5}, r"slots=1\.5 is not allowed; use at least 1"),
    (Med, {"inner": SawInt4(), "slots": 0}, "slots=0 is not allowed; use at least 1"),
    (Octopus, {"norm_bits": 0}, "norm_bits=0 is not allowed; use at least 1 each"),
    (Octopus, {"direction_bits": 8}, "direction_bits=8, norm_bits=3 is not allowed"),
    (Octopus, {"rounding": "3x3"}, "rounding='3x3' is not allowed; use scalar, local_2x2, local_3x3 or full"),
    (Octopus, {"norm": "bf16"}, "norm='bf16' is not allowed; use fp16 or fp32"),
    (OctopusQJL, {"scale": "search"}, "scale='search' is not allowed; only octopus searches scales"),
    (PolarQuant, {"bits": 1}, "bits=1 is not allowed; use 2, 3, 4, 5 or 6"),
    (Q40, {"rotation": "32"}, "rotation='32' is not allowed; use whole, 64 or none"),
    (RopePairs, {"bits": 5}, "bits=5 is not allowed; use 2, 3 or 4"),
    (SawInt4, {"block": 48}, "block=48 is not a power of two; use 16, 32, 64 or 128"),
    (SawInt4, {"zero": "half"}, "zero='half' is not allowed; use rounded or float"),
    (SawInt4, {"pack": "thirds"}, "pack='thirds' is not allowed; use neighbours or halves"),
    (TurboQuant, {"bits": 7}, "bits=7 is not allowed; use 1, 2, 3, 4, 5 or 6"),
    (TurboQuantQJL, {"bits": 5}, "bits=5 is not allowed; use 2, 3 or 4"),
    (TurboQuantQJL, {"variant": "other"}, "variant='other' is not allowed; use correct or printed"),
    (TurboQuantQJL, {"scale": "search"}, "scale='search' is not allowed; only turboquant searches scales"),
    (UltraQuant, {"c": 0}, r"c=0 is not allowed; use 0.156, 0.195 or another number in \(0, 2\]"),
    (UltraQuant, {"c": float("nan")}, "c=nan is not allowed"),
    (UltraQuant, {"scale": "int8"}, "scale='int8' is not allowed; use pow2, real or search"),
    (UltraQuant, {"queries": "fp4"}, "queries='fp4' is not allowed; use exact or fp8"),
    (UltraTQ, {"norm": "head"}, "norm='head' is not allowed; use token or block"),
    (UltraTQ, {"table": "beta"}, "table='beta' is not allowed; use gaussian, sphere or calibrated"),
    (UltraTQ, {"refit": 1.5}, "refit=1.5 is not allowed; use a share of the layers, 0 to 1"),
    (UltraTQ, {"refit": float("nan")}, "refit=nan is not allowed; use a share of the layers, 0 to 1"),
    (split_bits, {"bits": 5, "split": "paper"}, "bits=5 is not allowed; use 1, 2, 3 or 4"),
    (split_bits, {"bits": 4, "split": "even"}, r"split='even' is not allowed; use paper, plus, or d of -2\.\.2"),
]
SPECS = {
    "int-4:outliers=3,scale=search": "scale=search with outliers=3 is not allowed",
    "int-4:outliers=2": "outliers='2' is not allowed",
    "kivi-8:values=turboquant": "bits=8 with values=turboquant is not allowed; use 2, 3 or 4 bits",
    "octopus-2:split=2": "norm_bits=0 is not allowed",
    "saw-int4:kmeans=-1": "kmeans=-1 is not allowed",
    "saw-int4:hessian=true,oscar=true": "hessian=true and oscar=true are two bases of the same keys",
}
HEAD_DIMS = [
    (Additive(), 0, "additive: head_dim=0 is not a positive number; use 64, 80"),
    (E8(), 100, "e8: head_dim=100 is not a multiple of 8; use 64, 80, 96, 128, 192 or 256"),
    (Ghost(2.5), 80, r"ghost: head_dim=80 at 2\.5 bits .* use 64 or 128"),
    (Hqmq(), 0, "hqmq: head_dim=0 is not a positive number; use 64, 80"),
    (OctopusQJL(), 184, "octopus-qjl: head_dim=184 has no Hadamard matrix"),
    (TurboQuantQJL(), 232, "turboquant-qjl: head_dim=232 has no Hadamard matrix"),
    (Q40(), 80, "q4_0: head_dim=80 is not a multiple of 32; use 64, 96, 128, 192 or 256"),
    (SawInt4(64), 96, "block=64 does not divide head_dim=96; use block<=32"),
    (RopePairs(), 100, "rope-pairs: head_dim=100 is not a multiple of 8; use 64, 80"),
]
ROTATIONS = [HessianRotated(SawInt4()), OscarRotated(SawInt4())]


@pytest.mark.parametrize(("make", "options", "text"), OPTIONS)
def test_an_option_that_does_not_exist(make, options, text):
    with pytest.raises(SpecError, match=text):
        make(**options)


@pytest.mark.parametrize("spec", SPECS)
def test_options_that_exclude_each_other(spec):
    with pytest.raises(SpecError, match=SPECS[spec]):
        packedkv.get(spec)


def test_outliers_of_outliers():
    with pytest.raises(SpecError, match=r"Med: Med has a field '(flags|outliers)' of its own"):
        Med(Med(SawInt4())).layout(64)


@pytest.mark.parametrize(("codec", "head_dim", "text"), HEAD_DIMS)
def test_a_head_dim_that_a_codec_cannot_take(codec, head_dim, text):
    with pytest.raises(ShapeError, match=text):
        codec.layout(head_dim)


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (Ghost(), r"ghost needs sample keys or values .* `packedkv fit MODEL SPEC --text FILE"),
        (Ghost(3, "klt"), r"transform=klt is fitted with the model's queries.* `packedkv fit MODEL"),
        (InnerQ(norm=True), "norm=true needs sample keys .* use norm=false"),
        (KMeansResidual(SawInt4(), 16), "kmeans=16 needs sample keys .* got none"),
        (Med(SawInt4()), "needs sample keys .* outliers=off"),
        (RopePairs(), r"rope-pairs needs sample keys .* `packedkv fit MODEL SPEC --text FILE"),
        (UltraTQ(table="calibrated"), r"table=calibrated needs sample keys .* use table=gaussian"),
        *((codec, 'packedkv fit MODEL "saw-int4:hessian=true" --text FILE -o PARAMS') for codec in ROTATIONS),
    ],
    ids=str,
)
def test_a_fit_without_what_it_needs(codec, text):
    with pytest.raises(FitError, match=text):
        codec.fit(Site(0, "key", 2, 64))


@pytest.mark.parametrize("codec", [*ROTATIONS, RopePairs(), Ghost()], ids=str)
def test_a_calibration_on_queries_of_another_shape(codec):
    site, keys = Site(0, "key", 2, 64), torch.randn(1, 2, 9, 64)
    for shape in ((1, 4, 0, 64), (1, 4, 9, 128)):
        with pytest.raises(FitError, match=rf"got queries \({', '.join(map(str, shape))}\) for head_dim=64; .*longer"):
            codec.fit(site, Sample(keys, torch.randn(shape)))


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (Ghost(), r"got keys or values \(1, 2, 0, 64\) for head_dim=64; .* longer text"),
        (RopePairs(), r"got keys \(1, 2, 0, 64\) for head_dim=64; .* longer text"),
        (Med(SawInt4()), "needs sample keys .* outliers=off"),
    ],
    ids=str,
)
def test_a_fit_on_no_tokens(codec, text):
    with pytest.raises(FitError, match=text):
        codec.fit(Site(0, "key", 2, 64), Sample(torch.empty(1, 2, 0, 64), torch.randn(1, 2, 9, 64)))


@pytest.mark.parametrize("codec", ROTATIONS, ids=str)
def test_a_calibration_on_queries_that_are_not_finite(codec):
    with pytest.raises(FitError, match="the queries of layer 0 are not finite"):
        codec.fit(Site(0, "key", 2, 64), Sample(None, torch.full((1, 4, 9, 64), torch.inf)))


def test_gradients_of_another_shape():
    queries, keys = torch.randn(1, 4, 9, 64), torch.randn(1, 2, 9, 64)
    with pytest.raises(FitError, match="got gradients"):
        Ghost(3, "klt").fit(Site(0, "key", 2, 64), Sample(keys, queries, keys[:, :, :3]))


@pytest.mark.parametrize("tokens", [15, 1])
def test_fewer_tokens_than_clusters(tokens):
    text = rf"kmeans=16 needs at least 16 tokens to fit on, got {tokens}; .*`packedkv fit MODEL"
    with pytest.raises(FitError, match=text):
        KMeansResidual(SawInt4(), 16).fit(Site(0, "key", 2, 64), Sample(torch.randn(1, 2, tokens, 64)))
