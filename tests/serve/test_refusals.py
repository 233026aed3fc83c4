"""What cannot be served and is known only when layers are built: no start, and one sentence says what to do."""

from typing import Any

import pytest

from packedkv.errors import KVError
from tests.serve.engines import engine

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "block size": (
        *("llama-gqa", {"preset": "saw-int4"}, {"block_size": 24}),
        r"--block-size 24; pages are multiples of 16",
    ),
    "sink and block": (
        *("llama-gqa", {"preset": "int-8:sink=20"}, {"block_size": 16}),
        r"the first 20 tokens lie in one page, give as",
    ),
    "group and block": (
        *("llama-gqa", {"preset": "kivi-2:window=0"}, {"block_size": 48}),
        r"--block-size 48; kivi-2.* encodes 32 tokens together and pages are multiples of 32 tokens, give one of these",
    ),
    "group and connector": (
        *("llama-gqa", {"preset": "kivi-2:window=0"}, {"kv_transfer_config": NIXL}),
        r"in whole blocks only, and NixlConnector is not known to do so; use one of ExampleConnector",
    ),
    # vLLM cuts such requests into several; a layer of its own tables must not be served by the plain ones
    "chunked attention": (
        *("llama4", {"preset": "saw-int4"}, {"dtype": "bfloat16", "load_format": "dummy"}),
        r"attention of a kind of its own .*; serve the model without",
    ),
    # the CPU platform has other backends for it, which would serve it unpacked
    "latent attention": (
        *("deepseek-v3", {"preset": "saw-int4"}, {"dtype": "bfloat16"}),
        r"multi-head latent attention.*; serve it without packedkv",
    ),
    "drafts and group": (
        *("llama-gqa", {"preset": "kivi-2:window=0"}, {"speculative_config": {**NGRAMS, "num_speculative_tokens": 32}}),
        r"32 tokens together, and a request may have fewer drafts than that",
    ),
    "group of a draft model": (
        *("llama-gqa", {"preset": "saw-int4", "draft": "kivi-2:window=0"}, {"speculative_config": NGRAMS}),
        r'the layers of a draft model .* give "draft" a preset',
    ),
    "head size": ("llama-gqa", {"preset": "q4_0"}, {}, r"q4_0: head_dim=80 is not a multiple of 32; use"),
    "first tokens of a hybrid": (
        *("falcon-h1", {"preset": "int-8:sink=4"}, {"dtype": "bfloat16"}),
        r'first 4 tokens dense.*hybrid model.*; give "sink": 0 to serve it without',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_engine_does_not_start(case: str, saved: Any) -> None:
    name, given, options, sentence = REFUSED[case]
    folder = saved(name, **({"head_dim": 80} if case == "head size" else {})).folder
    with pytest.raises(KVError, match=sentence) as error, engine(folder, given, **options):
        pass
    assert "\n" not in str(error.value)
