"""Constants that a server fits at its start: names, waiting, refusals. The engine itself: tests/serve."""

import dataclasses
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import packedkv
from packedkv.cli.main import parse
from packedkv.errors import FitError, FormatError, ModelError, SpecError
from packedkv.files.params import FittedParams, ModelIdentity, digest_of, figures, other_weights
from packedkv.integrations.vllm import fitting
from packedkv.integrations.vllm.options import read_options

WEIGHT = "model.layers.0.self_attn.k_proj.weight"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {WEIGHT: torch.randn(64, 64, generator=drawn), "model.norm.weight": torch.ones(8)}


def folder_of(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder_of(tmp_path / "some-model", weights())


def config_of(model: Path | str, **changed: Any) -> Any:
    hf = SimpleNamespace(quantization_config=changed.get("quantized"))
    hf.get_text_config = lambda: hf
    own = {"model": str(model), "hf_config": hf, "hf_overrides": changed.get("overrides", {})}
    return SimpleNamespace(
        model_config=SimpleNamespace(**own, dtype=torch.bfloat16, revision=None),
        load_config=SimpleNamespace(load_format=changed.get("form", "auto"), download_dir=None),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def options(preset: str = "ghost-3", **more: Any) -> Any:
    return read_options({"packedkv": {"preset": preset, "params": "fit", **more}})


def saved(file: Path, tensors: dict[str, torch.Tensor], spec: str = "ghost-3") -> FittedParams:
    """A file as the command writes it, without constants."""
    model = torch.nn.ParameterDict({name.replace(".", "/"): tensor for name, tensor in tensors.items()})
    found = {name.replace("/", "."): own for name, own in figures(model, [WEIGHT.replace(".", "/")]).items()}
    identity = ModelIdentity("mine", "llama", (0,), 1, 64, found)
    return FittedParams(packedkv.get(spec), identity, {}, 0, False, 1, 1, 1).save(file)


def test_params_fit_is_an_option_to_fit_and_the_file_that_was_made_is_read_as_any_other(tmp_path: Path) -> None:
    asked = options()
    assert (asked.to_fit, asked.fitted, asked.params) == ("ghost-3", True, None)
    plain = read_options({"packedkv": {"preset": "ghost-3"}})
    assert (plain.to_fit, plain.fitted) == ("", False)
    with pytest.raises(SpecError, match=r'saw-int4 has no constants to fit; leave "params": "fit" out'):
        options("saw-int4")
    file = saved(tmp_path / "made", weights())
    found = read_options({"packedkv": {"preset": "ghost-3", "params": "fit"}}, "auto", tmp_path / "made")
    same = options(params=str(tmp_path / "made"))
    assert (found.to_fit, found.params.sha256, same.params.sha256) == ("", file.sha256, file.sha256)


def test_the_name_has_weights_preset_seed_and_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = fitting.fit_of(config_of(folder), options())
    file = fit.file()
    assert file.parent == tmp_path / "cache" / "packedkv" / "params"
    assert file.name.startswith("ghost-3_seed0_some-model_")
    names = {file, *(fitting.fit_of(config_of(folder), o).file() for o in (options("ghost-4"), options(seed=1)))}
    assert len(names) == 3
    assert fit.file() == file
    with monkeypatch.context() as later:
        later.setattr(fitting.version, "__version__", "9.9")  # may fit other constants
        assert fit.file() not in names
    changed = weights()
    changed[WEIGHT][32] += 0.01  # a row in the middle
    assert fitting.fit_of(config_of(folder_of(folder, changed)), options()).file() not in names
    (folder / "config.json").write_text('{"rope_theta": 1}')
    other = fit.file()
    assert other not in names
    (folder / "consolidated.safetensors").write_text("the same once more")
    assert fit.file() == other


def test_the_command_takes_the_arguments(folder: Path) -> None:
    fit = fitting.fit_of(config_of(folder), options(seed=3))
    found = parse(fit.arguments("FILE"))
    assert (found.model, found.spec, found.out, found.text) == (str(folder), "ghost-3", "FILE", None)
    assert (found.seed, found.device, found.dtype) == (3, "cpu", "bfloat16")


def test_a_model_that_the_gpu_cannot_hold_is_fitted_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit = dataclasses.replace(fitting.fit_of(config_of(folder), options()), device="cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    size = (folder / "model.safetensors").stat().st_size
    for free, device in ((size + fitting.ROOM, "cuda:1"), (size + fitting.ROOM - 1, "cpu")):
        assert "slow" not in caplog.text
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 80 << 30))
        assert fitting._device(fit) == device
    assert "cuda:1 has 2.1 GB free" in caplog.text


def test_one_fits_and_the_others_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs, begun, waits = [], threading.Event(), threading.Event()

    def command(arguments: Any) -> tuple[int, list[str]]:
        runs.append(arguments)
        begun.set()
        assert waits.wait(60)
        saved(Path(arguments[arguments.index("-o") + 1]), weights())
        return 0, ["written"]

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits for it" in record.getMessage():
                waits.set()

    monkeypatch.setattr(fitting, "_output", command)
    monkeypatch.setattr(fitting.logger, "handlers", [Heard()])
    caplog.set_level(logging.INFO, "vllm.packedkv")
    found: list[Path] = []

    def start() -> None:
        found.append(fitting.fitted_file(config_of(folder), options()))

    first, second = threading.Thread(target=start), threading.Thread(target=start)
    first.start()
    assert begun.wait(60)
    second.start()
    first.join(60)
    second.join(60)
    assert len(runs) == 1
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0].is_file()
    assert "kept in" in caplog.text
    assert f"were fitted before and lie in {found[0]}" in caplog.text


def test_a_kept_file_that_is_damaged_is_refused(folder: Path) -> None:
    config = config_of(folder)
    file = fitting.fit_of(config, options()).file()
    file.parent.mkdir(parents=True)
    saved(file, weights())
    assert fitting.fitted_file(config, options()) == file
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(FitError, match=r"or it is cut .*Or delete .*, and the next start fits again"):
        fitting.fitted_file(config, options())


def test_constants_of_other_weights_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting.check_same_model(config_of(folder), saved(tmp_path / "own", weights()))
    other = saved(tmp_path / "other", weights(1))
    with pytest.raises(
        FormatError, match=rf"other was fitted to mine, whose {WEIGHT} is not that of .*some-model; run"
    ):
        fitting.check_same_model(config_of(folder), other)
    (folder / "model.safetensors").unlink()  # weights in another form cannot be compared, nor those that are not here
    fitting.check_same_model(config_of(folder), other)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("nobody/nothing", "s3://some/where"):
        fitting.check_same_model(config_of(name), other)


def test_a_repository_of_the_hub_is_its_folder_in_the_cache(folder: Path, tmp_path: Path) -> None:
    config, commit = config_of("some/model"), "0" * 40
    config.load_config.download_dir = str(tmp_path / "hub")
    held = tmp_path / "hub" / "models--some--model"
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text(commit)
    (held / "snapshots").mkdir()
    folder.rename(held / "snapshots" / commit)
    assert fitting.folder_of(config, local_files_only=True) == held / "snapshots" / commit
    with pytest.raises(FormatError, match=r"is not that of some/model; run packedkv fit"):
        fitting.check_same_model(config, saved(tmp_path / "other", weights(1)))


def test_weights_as_16_bit_or_codes_are_no_others(folder: Path) -> None:
    made = saved(folder / "made", weights()).model.weights
    assert other_weights(folder, made) == []
    assert other_weights(folder_of(folder, weights(1)), made) == [WEIGHT]
    assert other_weights(folder_of(folder, {WEIGHT: weights()[WEIGHT].bfloat16()}), made) == []
    assert other_weights(folder_of(folder, {WEIGHT: torch.ones(64, 64, dtype=torch.int8)}), made) == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"quantized": {"quant_method": "awq"}}, "its checkpoint is quantized"),
        ({"form": "dummy"}, "--load-format dummy takes its weights from elsewhere"),
        ({"overrides": {"rope_theta": 1}}, "--hf-overrides changes it"),
    ],
)
def test_what_transformers_would_load_otherwise_is_refused(changed: dict[str, Any], why: str, folder: Path) -> None:
    with pytest.raises(FitError, match=rf"{why}; run packedkv fit MODEL ghost-3 -o FILE with a MODEL that"):
        fitting.fit_of(config_of(folder, **changed), options())


def test_a_model_that_is_not_there_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **more: Any) -> Path:
        raise OSError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(FitError, match=r"neither a folder nor in reach on the hub \(no network\); run packedkv fit"):
        fitting.fit_of(config_of("some/model"), options())
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        FitError, match=r"not fitted to .*holds no weights as .safetensors.* Run packedkv fit .*some-mod"
    ):
        fitting.fitted_file(config_of(folder), options())


def test_a_command_that_fails_names_its_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fitting._output
    ends = [sys.executable, "-c", "import sys; print('begun'); sys.exit('packedkv: error: a window is too long.')"]
    monkeypatch.setattr(fitting, "_output", lambda command: own(ends))
    with pytest.raises(FitError, match=r"a window is too long\. Run packedkv fit .*-o FILE --seed 0 --device cpu") as e:
        fitting.fitted_file(config_of(folder), options())
    assert str(e.value).endswith('give {"params": FILE}.')
    assert own([sys.executable, "-c", "print('one'); print(); print('two')"]) == (0, ["one", "two"])


def test_a_broken_checkpoint_is_an_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "broken", weights())
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="cannot be read: it is cut, or not safetensors"):
        digest_of(folder)
