"""One order of bits on every device: CUDA encodes to the bytes of the CPU and decodes them to the same numbers."""

import pytest
import torch

import packedkv
from packedkv.cache.layer import LayerCache

from .support import KINDS, dim_of, fit, gaussian, kv, row_block, same_bits, sides, site_of, supported_dims

pytestmark = pytest.mark.gpu


def on(device: str, tensors):
    return {name: x.to(device) for name, x in tensors.items()}


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "zero"])
def test_cuda_encodes_to_the_bytes_of_the_cpu_and_decodes_to_its_numbers(spec, kind):
    for role, codec in sides(packedkv.get(spec)):
        for dim in {supported_dims(codec)[0], supported_dims(codec)[-1]}:
            params = fit(codec, site_of(role, dim=dim))
            x = row_block(kind, (2, 2, 4 * codec.block_tokens, dim), seed=3)
            here = codec.encode(codec.to_code(x, params), params)
            moved = on("cuda", params)
            there = codec.encode(codec.to_code(x.cuda(), moved), moved)
            for name, held in here.items():
                assert same_bits(there[name].cpu(), held), f"{role} {name} D={dim}"
            if kind == "normal":
                here, there = codec.decode(here, params), codec.decode(on("cuda", here), moved)
                here, there = codec.from_code(here, params), codec.from_code(there, moved).cpu()
                torch.testing.assert_close(there, here, rtol=2e-6, atol=2e-6 * float(x.abs().max()))


def test_constants_drawn_on_cuda_are_those_of_the_cpu(spec):
    for role, codec in sides(packedkv.get(spec)):
        if "tensor" in codec.needs:
            continue
        dim = supported_dims(codec)[0]
        site = site_of(role, dim=dim)
        here = codec.fit(site)
        there = codec.fit(type(site)(site.layer, role, site.num_heads, dim, site.seed, torch.device("cuda")))
        for name, value in here.items():
            assert same_bits(there[name].cpu(), value), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_cache_on_cuda_attends_as_one_on_the_cpu(spec, dtype):
    scheme = packedkv.get(spec)
    n = scheme.sink + scheme.window + 3 * max(scheme.key.block_tokens, scheme.value.block_tokens) + 1
    dim = dim_of(scheme)
    k, v = kv(n, dim=dim, dtype=dtype)
    q = gaussian(2, 4, 1, dim, seed=9, dtype=dtype)
    outs = []
    for device in ("cpu", "cuda"):
        cache = LayerCache(scheme)
        cache.append(k.to(device), v.to(device))
        outs.append(cache.attend(q.to(device)).float().cpu())
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-2, atol=2e-2)
