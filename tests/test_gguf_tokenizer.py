"""Tokenizers that transformers makes of GGUF files: one that splits words is refused, BOS is set."""

import io
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
from tokenizers.normalizers import Replace
from transformers import AutoTokenizer

from packedkv.errors import ModelError
from packedkv.models import gguf_tokenizer
from packedkv.models.gguf_tokenizer import check_tokenizer
from packedkv.models.loading import load, load_text

WIDTH, HEADS, LAYERS = 32, 2, 1
UNKNOWN, BOS, EOS = 0, 1, 2


@pytest.fixture(scope="module")
def vocabulary():
    """Pieces, scores and types of a small SentencePiece vocabulary of merged pairs, like Llama's and Gemma's."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(load_text().text[:60_000].splitlines()), model_writer=out, model_type="bpe",
        vocab_size=1500, byte_fallback=True, hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    made = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(made.get_piece_size())
    kinds = [6 if made.is_byte(i) else 2 if made.is_unknown(i) else 3 if made.is_control(i) else 1 for i in ids]
    return [made.id_to_piece(i) for i in ids], [made.get_score(i) for i in ids], kinds


@pytest.fixture
def write(tmp_path, vocabulary):
    """Write a GGUF model of one layer."""

    def make(architecture, **more):
        pieces, scores, kinds = vocabulary
        path = tmp_path / f"{architecture}.gguf"
        file = gguf.GGUFWriter(path, architecture)
        file.add_context_length(64)
        file.add_embedding_length(WIDTH)
        file.add_block_count(LAYERS)
        file.add_feed_forward_length(WIDTH)
        file.add_head_count(HEADS)
        file.add_head_count_kv(HEADS)
        file.add_rope_dimension_count(WIDTH // HEADS)
        file.add_layer_norm_rms_eps(1e-5)
        file.add_vocab_size(len(pieces))
        file.add_tokenizer_model("llama")
        file.add_token_list(pieces)
        file.add_token_scores(scores)
        file.add_token_types(kinds)
        file.add_bos_token_id(BOS)
        file.add_eos_token_id(EOS)
        file.add_unk_token_id(UNKNOWN)
        for key, value in more.items():
            file.add_bool(f"tokenizer.ggml.{key}", value)
        names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
        shapes = {f"blk.0.{name}.weight": (WIDTH, WIDTH) for name in names}
        shapes |= {f"blk.0.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {"output_norm.weight": (WIDTH,), "token_embd.weight": (len(pieces), WIDTH)}
        shapes["output.weight"] = shapes["token_embd.weight"]
        for name, shape in shapes.items():
            file.add_tensor(name, np.full(shape, 0.1, np.float32))
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
        return str(path)

    return make


def test_a_llama_file_loads_and_gets_the_bos_that_it_asks_for_or_none(write, capfd):
    loaded = load(write("llama"))
    assert "llama.gguf asks for BOS before a text; transformers" in capfd.readouterr().err
    ids = loaded.tokenizer("They said", return_tensors="pt").input_ids
    assert ids[0, 0] == BOS
    assert (ids == BOS).sum() == 1
    assert loaded.tokenizer("one", "two").input_ids.count(BOS) == 2
    assert loaded.tokenizer.decode(ids[0], skip_special_tokens=True).strip() == "They said"
    assert loaded.tokenizer("They said", add_special_tokens=False).input_ids == ids[0, 1:].tolist()
    assert loaded.model(ids).logits.isfinite().all()
    assert check_tokenizer(loaded.tokenizer, write("llama")) == "", "nothing is left to change"
    loaded = load(write("llama", add_bos_token=False))
    assert "BOS" not in capfd.readouterr().err
    assert BOS not in loaded.tokenizer("They said").input_ids


def test_what_was_loaded_of_a_gguf_can_be_saved_as_a_folder(write, tmp_path):
    made = load(write("llama"), progress=False, dtype="bfloat16")
    made.model.save_pretrained(tmp_path / "folder")
    made.tokenizer.save_pretrained(tmp_path / "folder")
    again = load(str(tmp_path / "folder"), progress=False, dtype="bfloat16")
    ids = made.tokenizer("They said", return_tensors="pt").input_ids
    assert made.model(ids).logits.equal(again.model(ids).logits)
    assert again.tokenizer("They said").input_ids == ids[0].tolist()


def test_gemma_of_a_gguf_is_refused_because_its_words_are_split(write):
    with pytest.raises(ModelError) as caught:
        load(write("gemma3"), progress=False)
    text = str(caught.value)
    found = re.search(
        r"(\d+) of (\d+) words that are one piece of its vocabulary come out otherwise, '(\S+)' as (.+?)\. ", text
    )
    split, of = int(found[1]), int(found[2])
    assert split > of / 2
    pieces = [piece.strip("'") for piece in found[4].split(" ")]
    assert "".join(pieces) == found[3]
    assert len(pieces) > 1
    assert text.startswith("gemma3.gguf: the tokenizer that transformers ")
    assert "Load the model with its own tokenizer: a hub id, or a folder" in text


def test_few_words_say_nothing(write, monkeypatch):
    path = Path(write("gemma3"))
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    with pytest.raises(ModelError, match="one piece of its vocabulary"):
        check_tokenizer(tokenizer, str(path))
    monkeypatch.setattr(gguf_tokenizer, "FEWEST", 10_000)
    check_tokenizer(tokenizer, str(path))


def test_a_tokenizer_that_loses_characters_is_refused(write):
    path = write("llama")
    tokenizer = load(path, progress=False).tokenizer
    tokenizer.backend_tokenizer.normalizer = Replace("é", "")
    with pytest.raises(ModelError, match=r"caf is \(ever\).*is decoded to|is decoded to .*caf is"):
        check_tokenizer(tokenizer, path)
