"""What cannot be served: the engine does not start, and one sentence says what to do."""

from typing import Any

import pytest

from packedkv.errors import KVError
from tests.serve.engines import engine

REFUSED = {
    "unknown preset": ({"preset": "saw-int5"}, {}, r"unknown codec 'saw-int5'\. Did you mean 'saw-int4'"),
    "unknown key": ({"presets": "saw-int4"}, {}, r"unknown key 'presets'\. Did you mean 'preset'"),
    "no preset": ({}, {}, r"preset=''; name one of `packedkv list`"),
    "dense window": ({"preset": "octopus-3"}, {}, r'keeps the newest 32 tokens dense.*; give "window": 0 to serve'),
    "another window": ({"preset": "octopus-3", "window": 8}, {}, r"window=8; only 0 can be served"),
    "statistics": ({"preset": "hqmq-s24_r3:outliers=3"}, {}, r"each sequence's own tokens.*run packedkv fit"),
    "block size": ({"preset": "saw-int4"}, {"block_size": 24}, r"--block-size 24; pages are multiples of 16"),
    "sink and block": (
        {"preset": "int-8:sink=20"},
        {"block_size": 16},
        r"the first 20 tokens lie in one page, give as",
    ),
    "another dtype": ({"preset": "saw-int4"}, {"kv_cache_dtype": "fp8"}, r"--kv-cache-dtype fp8.*; leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_engine_does_not_start(case: str, llama: Any) -> None:
    given, options, sentence = REFUSED[case]
    with pytest.raises(KVError, match=sentence) as error, engine(llama.folder, given, **options):
        pass
    assert "\n" not in str(error.value)


def test_a_head_size_that_a_codec_cannot_take(saved: Any) -> None:
    folder = saved("llama-gqa", head_dim=80).folder
    with (
        pytest.raises(KVError, match=r"q4_0: head_dim=80 is not a multiple of 32; use"),
        engine(folder, {"preset": "q4_0"}),
    ):
        pass


def test_attention_in_chunks(saved: Any) -> None:
    """vLLM cuts such requests into several; a layer of its own tables must not be served by the plain ones."""
    folder = saved("llama4").folder
    with (
        pytest.raises(KVError, match=r"attention of a kind of its own .*; serve the model without"),
        engine(folder, {"preset": "saw-int4"}, dtype="bfloat16", load_format="dummy"),
    ):
        pass


def test_latent_attention_is_refused(saved: Any) -> None:
    """The CPU platform has other backends for it, which would serve it unpacked."""
    folder = saved("deepseek-v3").folder
    with (
        pytest.raises(KVError, match=r"multi-head latent attention.*; serve it without packedkv"),
        engine(folder, {"preset": "saw-int4"}, dtype="bfloat16"),
    ):
        pass
