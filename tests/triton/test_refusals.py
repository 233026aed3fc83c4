"""What the operators refuse, and with which words; and what importing the library must not do."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels.triton import _common, _int4_encode, group_int, saw_int4
from kvcodec.kernels.triton import decode_attention as decode

SIZES = {"key_block": 64, "value_block": 1, "page_tokens": 16}


def tensors(dim=64, heads=2, group=1):
    pages = torch.zeros(4, heads, saw_int4.page_bytes(dim, 16), dtype=torch.uint8)
    table = torch.zeros(1, 2, dtype=torch.int32)
    return torch.zeros(1, heads * group, 1, dim), pages, table, torch.zeros(1, dtype=torch.int32)


def attend(*args, **options):
    return decode.decode_attention(*args, **{"scale": 1.0, "num_kv_heads": 2, **SIZES, **options})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key_block": 48}, UnsupportedError, "key_block=48; allowed are powers of two that divide head_dim=64"),
        ({"page_tokens": 20}, UnsupportedError, "page_tokens=20; allowed are multiples of 16"),
        ({"codec": "hqmq"}, UnsupportedError, "no fused kernel for codec='hqmq'; there is one for"),
        ({"num_kv_heads": 4}, ShapeError, "2 query heads are no multiple of num_kv_heads=4"),
        ({"sinks": torch.zeros(5)}, ShapeError, "sinks has 5 logits; one per query head, 2"),
        ({"dense_k": torch.zeros(1, 2, 3, 64)}, ShapeError, "come together or not at all"),
    ],
)
def test_decode_refuses(change, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        attend(*tensors(), **change)


def test_decode_refuses_head_dim():
    with pytest.raises(UnsupportedError, match="head_dim=72; the saw-int4 kernels take"):
        attend(torch.zeros(1, 2, 1, 72), *tensors()[1:], key_block=8)


def test_decode_refuses_tensors():
    q, pages, table, lens = tensors()
    with pytest.raises(ShapeError, match="one query token per sequence"):
        attend(q.expand(1, 2, 3, 64), pages, table, lens)
    with pytest.raises(ShapeError, match=r"a contiguous uint8 \[num_pages, 2, 1152\] is needed"):
        attend(q, pages[..., :-16], table, lens)
    with pytest.raises(ShapeError, match=r"table is torch\.int64; contiguous int32 is needed"):
        attend(q, pages, table.long(), lens)


def test_encode_refuses():
    _, pages, table, start = tensors()
    x = torch.zeros(1, 2, 3, 64)
    with pytest.raises(ShapeError, match="of one dtype"):
        saw_int4.encode_to_pages(x, x.half(), pages, table, start, **SIZES)
    with pytest.raises(UnsupportedError, match=r"torch\.float64; use one of"):
        saw_int4.encode_to_pages(x.double(), x.double(), pages, table, start, **SIZES)
    with pytest.raises(ShapeError, match=r"start is torch\.int64"):
        saw_int4.encode_to_pages(x, x, pages, table, start.long(), **SIZES)


@pytest.mark.skipif(_common.INTERPRETED, reason="the interpreter takes CPU tensors")
def test_cpu_tensors_are_refused():
    q, pages, table, lens = tensors()
    x = torch.zeros(1, 2, 3, 64)
    with pytest.raises(UnsupportedError, match="decode_attention: the tensors are on the CPU"):
        attend(q, pages, table, lens)
    with pytest.raises(UnsupportedError, match="encode_to_pages: the tensors are on the CPU"):
        saw_int4.encode_to_pages(x, x, pages, table, lens, **SIZES)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_supports(head_dim):
    assert saw_int4.supports(head_dim, head_dim & -head_dim, 1, 64) == ""
    assert saw_int4.supports(head_dim + 8)
    assert group_int.supports(head_dim) == ""
    assert "the int-4 kernels take" in group_int.supports(head_dim + 8)
    assert "key_block=16, value_block=1; int-4 rotates nothing" in group_int.supports(head_dim, 16)


@pytest.mark.parametrize("stem", ["saw_int4", "group_int"])
def test_page_bytes_are_the_layouts(stem):
    from kernel_cases import codec_of

    from kvcodec.layout import PageLayout

    for dim in _int4_encode.HEAD_DIMS:
        for page in (16, 48, 64):
            layout = PageLayout(codec_of(stem, 1).layout(dim), codec_of(stem, 1).layout(dim), page)
            assert decode.CODECS[stem].page_bytes(dim, page) == layout.page_bytes


def test_importing_the_library_leaves_triton_alone():
    code = "import sys, kvcodec, kvcodec.kernels.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("units", [1, 4, 16, 256, 300, 1024, 5000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [16, 48, 64, 128])
def test_config_is_legal(units, head_dim, page):
    for tile in (8, 16):
        config = decode.config_for(units, tile, head_dim, page, 8192, 132)
        assert page % config.block_n == 0
        assert config.block_n >= 16
        assert 1 <= config.num_splits <= -(-8192 // config.block_n)
        assert config.num_warps < 4, "a form with four warps gave wrong sums"
