"""InnerQ's norms by a kernel, on the emulated machine: the reference's, number by number."""

from typing import Any

import pytest
import torch

from packedkv import codec as codecs
from packedkv.codec import Site
from packedkv.codecs.innerq import InnerQ
from packedkv.kernels.codecs import innerq
from packedkv.kernels.constants import constants_for
from packedkv.kernels.cuda.fit import FitBuffers
from packedkv.kernels.engine import FirstTokens
from packedkv.kernels.spec import encoder, reader


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 1), (96, 130), (256, 300)])
def test_the_references_norms(head_dim: int, tokens: int, dtype: torch.dtype, machine: dict[str, Any]) -> None:
    codec = InnerQ(3, norm=True)
    x = torch.randn(2, tokens, 3, head_dim, generator=torch.Generator().manual_seed(tokens)).to(dtype).transpose(1, 2)
    x[0, 1, :, 5], x[0, 1, :, 5 + head_dim // 2] = 0, 0
    x[1, 2, tokens // 2, 7] = torch.inf
    x[1, 0, tokens // 2, 9] = torch.nan
    site, found = (
        Site(0, "key", 3, head_dim),
        innerq.fit({"key": codec}, head_dim, {"key": FirstTokens(x)}, FitBuffers())["key"],
    )
    want = codec.fit(site, codecs.Sample(x))
    assert found.params.keys() == want.keys()
    torch.testing.assert_close(found.params["norm"], want["norm"], rtol=0, atol=0, equal_nan=True)
    assert found.params["norm"][0, 1, 5] == 1
    for made, kernel in ((found.reading, reader), (found.writing, encoder)):
        built = constants_for(kernel(codec, head_dim, "key"), want, 3, head_dim)
        assert (made.order, made.tables) == (built.order, built.tables)
        assert made.factor is not None
        assert built.factor is not None
        torch.testing.assert_close(made.factor, built.factor, rtol=0, atol=0, equal_nan=True)
