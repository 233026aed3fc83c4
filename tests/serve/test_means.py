"""Key biases and means: what the weights or a file give, whatever the scheduler does; what breaks does not start."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packedkv.cli.main import main
from packedkv.errors import BrokenPresetError, FormatError, KVError, UnsupportedError
from packedkv.integrations.vllm.layer import EngineLayer
from tests.serve.engines import WORDS, Biased, engine, generate, layers, library, metric, prompts
from tests.serve.test_server import IDS as PAIR
from tests.serve.test_server import by_two
from tests.test_key_bias import with_biases

IDS = prompts(40, 2, 33)
"""One is shorter than ghost's dense first tokens."""
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 16, "block_size": 16}


def sources(llm: Any) -> set[str]:
    found = [layer.impl.packed for layer in layers(llm).values() if isinstance(layer.impl.packed, EngineLayer)]
    return {"none" if one.site.mean is None else f"{one.site.mean.kind} {one.site.mean.source}" for one in found}


def generates(llm: Any, want: list[list[int]], source: str) -> None:
    """Chunks of prompts, requests beside each other, steps and a cached prefix; keys without a mean of this source."""
    assert sources(llm) == {source}
    assert generate(llm, IDS) == want
    assert generate(llm, IDS[:1]) == want[:1]
    assert metric(llm, "prefix_cache_hits") == 32


@pytest.mark.parametrize("preset", ["saw-int4", "turboquant-4:mean=pre"])
def test_the_weights_give_the_mean(preset: str, biased: Biased) -> None:
    want = [library(biased.model, preset, ids) for ids in IDS]
    dense = [library(biased.model, "dense", ids) for ids in IDS]
    broken = [library(biased.model, f"{preset.split(':')[0]}:mean=none", ids, probe="off") for ids in IDS]
    assert broken != dense
    with engine(biased.folder, {"preset": preset}, **CHUNKS) as llm:
        generates(llm, want, "pre weights")


@pytest.mark.parametrize("spec", ["ghost-3", "ghost-3:transform=klt", "int-8:mean=post"])
def test_a_file_gives_the_constants(spec: str, biased: Biased, tmp_path: Path) -> None:
    fitted = biased.fitted(spec, tmp_path / "fitted.safetensors")
    want = [library(biased.model, spec, ids, params=fitted) for ids in IDS]
    with engine(biased.folder, {"preset": spec, "params": str(tmp_path / "fitted.safetensors")}, **CHUNKS) as llm:
        generates(llm, want, f"{'post' if 'post' in spec else 'pre'} params")


def test_the_reference_serves_them_as_well(biased: Biased, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU kernels are not compiled, or do not read a codec."""
    want = [library(biased.model, "saw-int4", ids) for ids in IDS]
    monkeypatch.setattr("packedkv.kernels.cpu.library.refusal", lambda _: "not here")
    with engine(biased.folder, {"preset": "saw-int4"}, **CHUNKS) as llm:
        assert all(layer.impl.packed.unserved for layer in layers(llm).values())
        generates(llm, want, "pre weights")


ROPES: dict[str, tuple[dict[str, Any], str]] = {
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 256}, "pre"),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
        "pre",
    ),
    "linear": ({"factor": 4.0}, "pre"),
    "dynamic": ({"factor": 2.0}, "pre"),  # the engine turns all keys by the frequencies of the longest request
    "longrope": (
        {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 2.0, "original_max_position_embeddings": 256},
        "post",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n in ("yarn", "linear") else n for n in ROPES]
)
def test_rotary_embeddings(name: str, biased: Biased, tmp_path: Path) -> None:
    """The frequencies and the scaling of the model, or the mean after RoPE."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    (rope, kind), config = ROPES[name], copy.deepcopy(biased.model.config)
    config.rope_parameters = {"rope_theta": 10_000.0, "rope_type": name, **rope}
    config.save_pretrained(tmp_path)
    for file in biased.folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    with engine(tmp_path, {"preset": "saw-int4", "probe": "warn"}, **CHUNKS) as llm:
        assert sources(llm) == {f"{kind} weights"}
        found = generate(llm, IDS)
        assert generate(llm, IDS[:1]) == found[:1]
        assert metric(llm, "prefix_cache_hits") == 32
        packed = next(iter(layers(llm).values())).impl.packed
    if name in ("yarn", "llama3", "linear"):
        own = Qwen2RotaryEmbedding(config)
        torch.testing.assert_close(packed.turning.frequencies, own.inv_freq, rtol=3e-7, atol=0)
        assert packed.turning.scaling == pytest.approx(own.attention_scaling, abs=1e-6)


BROKEN = (
    r"packedkv: saw-int4:mean=none breaks on the key biases of .*channel 61, 4.*'saw-int4:mean=pre'.*"
    r"'kivi-4:window=0'.*\"probe\": \"warn\""
)


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        ("saw-int4:mean=none", BROKEN),
        ("ghost-3", r'run packedkv fit MODEL "ghost-3" --text TEXT -o FILE'),
        ("kivi-4:window=0,mean=pre", r"unfinished ones beside the pages keep their mean"),
        ("saw-int4:mean=pre without biases", r'weights add no large bias to keys; run packedkv fit MODEL "saw'),
    ],
)
def test_what_cannot_be_served_is_refused(preset: str, sentence: str, biased: Biased, llama: Any) -> None:
    preset, _, without = preset.partition(" ")
    kind = BrokenPresetError if sentence == BROKEN else UnsupportedError
    folder = llama.folder if without else biased.folder
    with pytest.raises(kind, match=sentence), engine(folder, {"preset": preset}):
        pass


@pytest.mark.parametrize(
    "given", [{"preset": "saw-int4:mean=none", "probe": "warn"}, {"preset": "kivi-4", "window": 0}], ids=str
)
def test_what_breaks_starts_when_told_and_what_holds_starts(given: dict[str, Any], biased: Biased) -> None:
    with engine(biased.folder, given, max_num_batched_tokens=64) as llm:
        assert len(generate(llm, IDS[:1])[0]) > 0


# -- attention modules of other forms ----------------------------------------------------------------------------------

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2": ({"n_head": 2}, "post"),  # learned positions; called with states alone
    "Starcoder2": ({"num_attention_heads": 2, "num_key_value_heads": 1}, "pre"),  # of the Transformers backend
}


@pytest.fixture(scope="module", params=FORMS)
def formed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A model with large key biases, and a bias of the norm before them."""
    changed, kind = FORMS[request.param]
    made = with_biases(request.param, vocab_size=WORDS, **changed)
    folder = tmp_path_factory.mktemp(request.param)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("ln_1.bias", "input_layernorm.bias")):
                weight.normal_()
    made.save_pretrained(folder)
    return kind, made, folder


def true_means(made: Any) -> list[torch.Tensor]:
    """Keys of a state of zeros behind the norm, layer by layer: its bias, through the projection, and the keys' own."""
    found = []
    with torch.no_grad():
        for block in made.base_model.h if hasattr(made.base_model, "h") else made.base_model.layers:
            before = block.ln_1 if hasattr(block, "ln_1") else block.input_layernorm
            y = before.bias[None]
            found.append(block.attn.c_attn(y)[:, 128:256] if hasattr(block, "attn") else block.self_attn.k_proj(y))
    return found


def test_the_weights_give_the_mean_of_any_attention(formed: tuple[str, Any, Path]) -> None:
    kind, made, folder = formed
    with engine(folder, {"preset": "int-8"}, max_num_batched_tokens=16, block_size=16) as llm:
        packed = [layer.impl.packed for layer in layers(llm).values()]
        assert {(own.site.mean.kind, own.site.mean.source) for own in packed} == {(kind, "weights")}
        for own, mean in zip(packed, true_means(made), strict=True):
            assert (own.site.mean.given.flatten() - mean.flatten()).norm() < 0.02 * mean.norm()
        ids = prompts(40, 2, 33)
        found = generate(llm, ids)
        assert [generate(llm, [own]) for own in ids] == [[own] for own in found]


def named(text: str) -> list[str]:
    return re.findall(r"'([a-z0-9_:=,-]+)'", text.partition(" cannot be followed")[2] or text.partition(" Use ")[2])


def test_advice_names_what_starts(formed: tuple[str, Any, Path]) -> None:
    """Both refusals: a mean that cannot be followed, and a preset that breaks; blocks of 16 are too small for some."""
    kind, _, folder = formed
    asked = "saw-int4:mean=pre" if kind == "post" else "saw-int4:mean=none"
    with pytest.raises(KVError) as error, engine(folder, {"preset": asked}, block_size=16):
        pass
    assert isinstance(error.value, UnsupportedError if kind == "post" else BrokenPresetError)
    assert str(error.value).startswith(f"packedkv: {asked}")
    assert named(str(error.value)) == [f"saw-int4:mean={kind}", "octopus-4:window=0", "int-8"]


@pytest.mark.nightly
@pytest.mark.parametrize("given", [{}, {"block_size": 16}], ids=["any blocks", "small blocks"])
def test_all_that_advice_names_starts(given: dict[str, Any], formed: tuple[str, Any, Path]) -> None:
    _, _, folder = formed
    with pytest.raises(BrokenPresetError) as error, engine(folder, {"preset": "saw-int4:mean=none"}, **given):
        pass
    found = named(str(error.value))
    assert len(found) >= 3
    for spec in found:
        with engine(folder, {"preset": spec}, **given) as llm:
            assert len(generate(llm, prompts(9), 2)[0]) == 2


# -- constants fitted at the first start, and found at the next one ----------------------------------------------------

GIVEN = {"preset": "ghost-3", "params": "fit"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packedkv" / "params"


def served(folder: Path, given: dict[str, Any]) -> tuple[list[list[int]], str]:
    with engine(folder, given, block_size=16) as llm:
        return generate(llm, PAIR), next(iter(layers(llm).values())).impl.digest


@pytest.mark.nightly
def test_the_first_start_fits_and_the_second_one_finds_the_file(
    biased: Biased, cache: Path, tmp_path: Path, told: list[str]
) -> None:
    def log() -> list[str]:
        """Lines about fitting, since the last call."""
        lines = [line for line in told if "fit" in line]
        told.clear()
        return lines

    first = served(biased.folder, GIVEN)
    (file,) = cache.glob("*.safetensors")
    lines = log()
    assert lines[0] == f"packedkv: fitting ghost-3 to {biased.folder} on cpu in float32"
    assert any(line.startswith("packedkv fit: drawing tokens") for line in lines)
    assert lines[-1].endswith(f"kept in {file} for the next start")
    assert served(biased.folder, GIVEN) == first
    assert log() == [f"packedkv: constants of ghost-3 were fitted before and lie in {file}"]
    own = tmp_path / "own"
    assert main(["fit", str(biased.folder), "ghost-3", "-o", str(own)]) == 0
    assert served(biased.folder, {"preset": "ghost-3", "params": str(own)}) == first
    assert first[0] == [library(biased.model, "ghost-3", ids, params=own) for ids in PAIR]


@pytest.mark.nightly
def test_two_processes_read_one_file(biased: Biased, cache: Path, tmp_path: Path) -> None:
    found = by_two(biased.folder, GIVEN, tmp_path)
    (file,) = cache.glob("*.safetensors")
    assert found == [library(biased.model, "ghost-3", ids, params=file) for ids in PAIR]


@pytest.mark.nightly
def test_processes_with_two_files_do_not_start(biased: Biased, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packedkv.integrations.vllm import bind

    own = bind._largest_on_any_process

    def beside_another(numbers: list[int]) -> list[int]:
        """As if another process had the number 1."""
        return own(numbers) if len(numbers) != 2 or numbers[0] != -numbers[1] else [max(numbers[0], 1), -1]

    biased.fitted("ghost-3", tmp_path / "fitted")
    monkeypatch.setattr(bind, "_largest_on_any_process", beside_another)
    with pytest.raises(UnsupportedError, match="fitted is not the same file on all hosts"):
        served(biased.folder, {"preset": "ghost-3", "params": str(tmp_path / "fitted")})


@pytest.mark.nightly
def test_a_file_of_another_models_weights_is_refused(biased: Biased, tmp_path: Path) -> None:
    """Of the same shape."""
    biased.fitted("ghost-3", tmp_path / "fitted")
    other = tmp_path / "other"
    shutil.copytree(biased.folder, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.1 * weight for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"was fitted to biased, whose .* is not that of .*other; run packedkv"):
        served(other, {"preset": "ghost-3", "params": str(tmp_path / "fitted")})


# -- new weights in a running engine -----------------------------------------------------------------------------------


def changed(biased: Biased, folder: Path, factor: float) -> Biased:
    """The model with other weights, and its key biases times ``factor``."""
    model = copy.deepcopy(biased.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.mul_(factor)
            weight = layer.self_attn.v_proj.weight
            weight.copy_(weight[torch.randperm(weight.shape[0], generator=generator)])
    for file in biased.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(folder)
    return Biased(folder, model, biased.tokenizer)


def load(llm: Any, folder: Path) -> None:
    """As a loop of reinforcement learning does."""
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()


def identity(llm: Any) -> str:
    """What the backend of the first layer is called, which connectors compare."""
    return str(next(iter(layers(llm).values())).attn_backend.get_name())


def test_means_are_those_of_the_new_weights(biased: Biased, tmp_path_factory: pytest.TempPathFactory) -> None:
    """From random weights, with which some engines start; from one mean to another, to no mean, and back."""
    preset = "saw-int4"
    larger, none = (changed(biased, tmp_path_factory.mktemp("changed"), factor) for factor in (-1.7, 0.0))
    want = {own.folder: [library(own.model, preset, ids) for ids in IDS] for own in (biased, larger, none)}
    assert want[biased.folder] != want[larger.folder]
    with engine(biased.folder, {"preset": preset}, load_format="dummy", block_size=16) as llm:
        generate(llm, IDS[:1])
        names = []
        for own in (biased, larger, none, biased):
            load(llm, own.folder)
            assert generate(llm, IDS) == want[own.folder]
            names.append(identity(llm))
        assert names[0] == names[1] == names[3] != names[2]  # pages with a mean, and without one
        assert re.fullmatch(r"[A-Z_]+-[0-9a-f]{12}-16", names[-1])


def test_weights_that_break_the_preset_stop_the_engine(biased: Biased) -> None:
    """What it would generate is noise."""
    with engine(biased.folder, {"preset": "saw-int4:mean=none"}, load_format="dummy", block_size=16) as llm:
        generate(llm, IDS[:1])
        with pytest.raises(BrokenPresetError, match=r"breaks on the key biases"):
            load(llm, biased.folder)
        with pytest.raises(UnsupportedError, match=r"weights were replaced, and they cannot be served: .*key biases"):
            generate(llm, IDS[:1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given", [{"preset": "kivi-2", "window": 0}, {"preset": "int-8:sink=4"}, {"preset": "ultraquant"}]
)
def test_layers_without_a_mean_stay(given: dict[str, Any], llama: Any, tmp_path: Path) -> None:
    """Groups of tokens that are not complete belong to requests, which go on."""
    second = copy.deepcopy(llama.model)
    with torch.no_grad():
        for p in second.parameters():
            p.mul_(1.1)
    second.save_pretrained(tmp_path)
    with engine(llama.folder, given, block_size=64) as llm:
        want = generate(llm, IDS)
        load(llm, tmp_path)
        assert generate(llm, IDS) != want
        load(llm, llama.folder)
        assert generate(llm, IDS) == want
