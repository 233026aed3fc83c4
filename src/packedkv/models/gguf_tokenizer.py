"""Whether the tokenizer that transformers makes of a GGUF file encodes text as the file asks for.

transformers 5.17 reads Gemma's merging scores as log-probabilities of a unigram model: " capital" becomes " c", "ap",
"it", "al", and no BOS is set. Nothing fails, but Gemma 3 270M has a perplexity of 95 instead of 12.6 (WikiText-2).
"""

import re
from pathlib import Path
from typing import Any

from packedkv.errors import ModelError

SPACES = {"llama": "\u2581", "t5": "\u2581", "gpt2": "\u0120"}
"""``tokenizer.ggml.model`` -> what stands for a space at the head of a piece."""
BOS_UNLESS_TOLD = {"llama3", "llama-v3", "llama-bpe"}
"""``tokenizer.ggml.pre`` of vocabularies with BOS if ``add_bos_token`` is missing, like those of SentencePiece."""
WORDS = 256
"""Words that are tried, evenly spread over the vocabulary's."""
FEWEST = 16
"""With fewer words than this nothing is said about them."""
SHARE = 0.9
"""Smallest share of them that must be one token. SmolLM2's and Qwen2.5's files give 1.000, Gemma 3's 0.004."""
TEXT = 'In 1897, they said: "No café is (ever) too small; 3.5 + 2 = 5.5!"'
NORMAL = 1
"""A piece's type in ``tokenizer.ggml.token_type``; others are special, unused or bytes."""


def check_tokenizer(tokenizer: Any, path: str) -> str:
    """Make a tokenizer set BOS as its GGUF file asks for, and refuse one that encodes wrongly.

    The tokenizer is changed in place. Returns a sentence for the user that says what was changed, or "".
    """
    import gguf
    import transformers

    name, maker = Path(path).name, f"transformers {transformers.__version__}"
    fields = gguf.GGUFReader(path).fields
    if wrong := [*_words(tokenizer, fields), *_round_trip(tokenizer)]:
        raise ModelError(
            f"{name}: the tokenizer that {maker} makes of this GGUF file does not encode as the file asks for: "
            f"{'; '.join(wrong)}. Every number measured with it would be wrong. Load the model with its own tokenizer: "
            f"a hub id, or a folder as save_pretrained writes it."
        )
    return (
        f"{name} asks for BOS before a text; {maker} sets none from it, packedkv does."
        if _bos(tokenizer, fields)
        else ""
    )


def _words(tokenizer: Any, fields: Any) -> list[str]:
    """Say how many of the vocabulary's words are not encoded as their one piece, if they are many."""
    space = SPACES.get(_value(fields, "model"))
    if space is None:
        return []
    pieces = _pieces(fields)
    words = [i for i, piece in pieces.items() if re.fullmatch(f"{space}[A-Za-z]{{4,12}}", piece)]
    words = words[:: max(len(words) // WORDS, 1)]
    # after another word, as in a text: how a first word is treated differs
    encoded = {i: tokenizer(f"a {pieces[i][1:]}", add_special_tokens=False)["input_ids"] for i in words}
    split = [i for i in words if encoded[i][-1:] != [i]]
    if len(words) < FEWEST or len(split) <= (1 - SHARE) * len(words):
        return []
    shown = " ".join(map(repr, tokenizer.convert_ids_to_tokens(encoded[split[0]])[1:]))
    return [
        f"{len(split)} of {len(words)} words that are one piece of its vocabulary come out otherwise, "
        f"{pieces[split[0]]!r} as {shown}"
    ]


def _pieces(fields: Any) -> dict[int, str]:
    """Token id -> piece, of a vocabulary's normal pieces."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type")
    normal = [types is None or types.parts[types.data[i]][0] == NORMAL for i in range(len(tokens.data))]
    raw = {i: tokens.parts[at] for i, at in enumerate(tokens.data) if normal[i]}
    return {i: bytes(piece).decode("utf-8", "replace") for i, piece in raw.items()}


def _round_trip(tokenizer: Any) -> list[str]:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return [] if back.strip() == TEXT else [f"the text {TEXT!r} is decoded to {back!r}"]


def _bos(tokenizer: Any, fields: Any) -> bool:
    """Set BOS before a text if the file asks for it and the tokenizer does not do so; whether that was needed."""
    from tokenizers.processors import Sequence, TemplateProcessing

    adds, bos = _value(fields, "add_bos_token"), _value(fields, "bos_token_id")
    if adds is None:
        adds = _value(fields, "model") == "llama" or _value(fields, "pre") in BOS_UNLESS_TOLD
    if bos is None or not adds or tokenizer(TEXT)["input_ids"][0] == bos:
        return False
    piece, backend = tokenizer.convert_ids_to_tokens(bos), tokenizer.backend_tokenizer
    template = TemplateProcessing(single=[piece, "$A"], pair=[piece, "$A", piece, "$B"], special_tokens=[(piece, bos)])
    backend.post_processor = Sequence([backend.post_processor, template]) if backend.post_processor else template
    return True


def _value(fields: Any, key: str) -> Any:
    field = fields.get(f"tokenizer.ggml.{key}")
    return field.contents() if field else None
