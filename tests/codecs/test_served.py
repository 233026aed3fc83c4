"""Which kernels serve a configuration, and why the CUDA kernels do not: said without a GPU as well."""

import pytest

import packedkv
from packedkv.codec import Codec
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.outliers import Med
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import UnsupportedError
from packedkv.kernels.spec import decode_spec

OUTLIERS, GROUPS = "the kernels read outliers beside", "in groups the kernels read asymmetric integers"
VARIANTS = "the kernels read zero=rounded and pack=neighbours, not SawInt4("
KERNELS = {  # spec: device of encode, and why the CUDA kernels do not read it
    **dict.fromkeys(("int-2", "int-3", "int-4", "int-8", "int-4:symmetric=true", "int-4:group=32"), ("cuda", "")),
    **dict.fromkeys(("kivi-4", "saw-int4:rotate=kv", "hqmq-s24_r3:outliers=3"), ("cuda", "")),
    "int-4:group=16": ("none", GROUPS),
    "int-4:outliers=3": ("none", ""),
    "int-4:group=32,outliers=3": ("none", OUTLIERS),
    "q4_0": ("none", "no CUDA kernel reads"),
    "saw-int4:zero=float": ("none", VARIANTS),
    "saw-int4:pack=halves": ("none", VARIANTS),
    "saw-int4:kmeans=16": ("none", "no CUDA kernel reads KMeansResidual("),
    "saw-int4:hessian=true": ("none", "no CUDA kernel reads HessianRotated("),
    "saw-int4:oscar=true": ("none", "no CUDA kernel reads OscarRotated("),
}


def cuda_refusal(scheme: packedkv.KVScheme, head_dim: int, page_tokens: int | None = None) -> str:
    """Return the reason, or ``""`` if they read it."""
    tokens = page_tokens or scheme.page_layout(head_dim).page_tokens
    try:
        decode_spec(scheme.key, scheme.value, head_dim, tokens)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spec", KERNELS)
def test_which_kernels_serve_which_configuration(spec):
    encode, why = KERNELS[spec]
    assert packedkv.describe(spec)["kernels"] == {"encode": encode, "decode": "none" if why else "cuda"}
    refused = cuda_refusal(packedkv.get(spec), 128)
    assert refused.startswith(why)
    assert bool(refused) == bool(why)


@pytest.mark.parametrize(
    ("key", "value", "device"),
    [
        (SawInt4(), GroupInt(4, 0), "cuda"),
        *[(Med(inner), Med(inner), "none") for inner in (SawInt4(), GroupInt(4, 32), InnerQ(3))],
    ],
    ids=str,
)
def test_keys_and_values_of_other_pairs(key, value, device):
    scheme = packedkv.KVScheme(key=key, value=value)
    assert packedkv.description.kernels_for(scheme) == {"encode": device, "decode": device}
    assert bool(cuda_refusal(scheme, 128)) == (device == "none")


def test_a_codec_of_another_package_is_not_taken_for_ours():
    class Stranger(Codec):
        layout = encode = decode = GroupInt.layout

    scheme = packedkv.KVScheme(key=Stranger(), value=Stranger())
    assert cuda_refusal(scheme, 128, page_tokens=64) == f"no CUDA kernel reads {Stranger()}"
