"""Constants fitted on a text, in one file (``docs/format.md``), and the checks that they fit a model and a scheme."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Role
from packedkv.errors import FitError, FormatError, KVError, ModelError, SpecError
from packedkv.files.container import Kind, check_target, read, write
from packedkv.files.container import load_params as load_tensors
from packedkv.files.container import store_params as store_tensors
from packedkv.registry import from_json, get
from packedkv.scheme import KVScheme

LayerParams = Mapping[int, Mapping[Role, Params]]
"""Fitted constants: layer -> role -> Params."""

KIND = Kind("packedkv-params", 1, "params file", "packedkv fit", "run packedkv fit again")
OF_TEXT = "text_name", "text_sha256", "tokens", "windows", "window_tokens"
"""Fields of ``FittedParams`` about the text."""
WEIGHTS = 8
"""How many parameters of a model are sampled to recognise it."""
ELEMENTS = 1 << 16
"""About how many elements of each are sampled, evenly spaced."""
TOLERANCE = 2.0**-6
"""Largest difference of a figure between two loads of a model, times sqrt(elements) / mean magnitude.

Measured on SmolLM2-135M and a random llama: 0.005 for float32 against bf16, 0.002 against fp16; 0.03 to 0.04 where
every weight moved by 1 % of the spread.
"""


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a model."""

    name: str  # given by the user; not compared
    type: str  # transformers' model type, e.g. llama
    layers: tuple[int, ...]  # the layers that cache K and V
    kv_heads: int | None  # None, as head_dim, if the config does not have it
    head_dim: int | None
    # parameter -> (sampled elements, their mean magnitude, their mean), float64; empty if only a config was given
    weights: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        """Type, layers and heads in words."""
        return f"{self.type}, {len(self.layers)} KV layers, {self.kv_heads} KV heads, head_dim {self.head_dim}"


def same_weights(model: torch.nn.Module, weights: Mapping[str, tuple[int, float, float]]) -> bool:
    """Return whether a model has the weights of a ``ModelIdentity``, up to the rounding of a 16-bit load."""
    parameters = dict(model.named_parameters())
    # offloaded parameters (meta) are not accessible here
    return all(
        name in parameters and (parameters[name].is_meta or same_figures(parameters[name], weight))
        for name, weight in weights.items()
    )


def same_figures(tensor: Tensor, weight: tuple[int, float, float]) -> bool:
    """Whether a tensor is that parameter of a ``ModelIdentity``, up to the rounding of a 16-bit load."""
    here, allowed = _figures(tensor), TOLERANCE * weight[1] / max(weight[0], 1) ** 0.5
    return here[0] == weight[0] and all(abs(p - q) <= allowed for p, q in zip(here[1:], weight[1:], strict=True))


def figures(model: torch.nn.Module, names: Iterable[str]) -> dict[str, tuple[int, float, float]]:
    """Number of sampled elements, their mean magnitude and mean, by parameter; offloaded parameters are left out."""
    parameters = dict(model.named_parameters())
    return {name: _figures(parameters[name]) for name in names if name in parameters and not parameters[name].is_meta}


def _figures(tensor: Tensor) -> tuple[int, float, float]:
    flat = tensor.detach().flatten()
    x = flat[:: max(1, flat.numel() // ELEMENTS)].double()
    return x.numel(), x.abs().mean().item(), x.mean().item()


@dataclass(frozen=True, eq=False)
class FittedParams(Mapping[int, Mapping[Role, Params]]):
    """Constants of a model's layers for one scheme, and their source; a ``LayerParams``."""

    scheme: KVScheme
    model: ModelIdentity
    layers: LayerParams  # roles whose codec has nothing to fit are absent
    seed: int
    seeded: bool  # whether a codec sampled from the seed; if not, the constants are valid for any seed
    tokens: int  # per layer
    windows: int  # of the text
    window_tokens: int
    text_name: str = ""
    text_sha256: str = ""
    file: str = ""  # its name; this and the checksum are empty before it is saved
    sha256: str = ""

    def __getitem__(self, layer: int) -> Mapping[Role, Params]:
        return self.layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def spec(self) -> str:
        """The spec that the constants were fitted for."""
        return str(self.scheme)

    def check(
        self, here: ModelIdentity, spec: str | KVScheme, *, seed: int = 0, model: torch.nn.Module | None = None
    ) -> None:
        """Raise FormatError if the constants are for another scheme, seed or model than ``here``; the text says which.

        Of ``model`` the weights are compared as well.
        """
        scheme, name = get(spec), self.file or "these params"
        if not scheme.allows(self.scheme):
            raise FormatError(
                f"{name}: fitted for {self.spec}, not for {scheme}; run packedkv fit with {scheme}, or use {self.spec}."
            )
        if self.seeded and seed != self.seed:
            raise FormatError(
                f"{name}: fitted with seed {self.seed}, from which its constants are drawn, not with seed {seed}; "
                f"pass seed={self.seed}, or run packedkv fit with --seed {seed}."
            )
        cure = "run packedkv fit with this model"
        alike = ("type", "layers", "kv_heads", "head_dim")
        if any(getattr(here, part) != getattr(self.model, part) for part in alike):
            raise FormatError(
                f"{name}: fitted for {self.model.name} ({self.model.shape}), not for a model of another shape "
                f"({here.shape}); {cure}."
            )
        if model is not None and not same_weights(model, self.model.weights):
            raise FormatError(
                f"{name}: fitted for {self.model.name}, whose weights are not those of this {type(model).__name__}; "
                f"{cure}."
            )

    def save(self, path: str | Path) -> "FittedParams":
        """Write the constants to one file (``container.write``); return them with its name and checksum."""
        path = Path(path)
        check_target(path, KIND)
        tensors: dict[str, Tensor] = {}
        header = {
            "scheme": self.scheme.to_json(),
            "layout_versions": self.scheme.layout_versions(self.model.head_dim),
            "model": asdict(self.model),
            "seed": self.seed,
            "seeded": self.seeded,
            "text": {name.removeprefix("text_"): getattr(self, name) for name in OF_TEXT},
            "layers": {
                str(layer): {role: store_tensors(params, tensors) for role, params in roles.items()}
                for layer, roles in self.layers.items()
            },
        }
        return replace(self, file=path.name, sha256=write(path, KIND, json.loads(json.dumps(header)), tensors))


def read_params(path: str | Path) -> FittedParams:
    """Read a params file without checking it against a model; errors as in ``container.read``."""
    path = Path(path)
    header, tensors = read(path, KIND)
    try:
        model, text, cpu = header["model"], header["text"], torch.device("cpu")
        weights = {name: (int(n), float(a), float(b)) for name, (n, a, b) in model["weights"].items()}
        scheme = from_json(header["scheme"])
        saved = header.get("layout_versions", dict.fromkeys(ROLES, 1))
        here = scheme.layout_versions(model["head_dim"])
        if saved != here:  # a codebook is valid only for the code layout that it was fitted with
            raise FormatError(f"its constants belong to bytes of versions {saved}, here are {here}")
        return FittedParams(
            scheme=scheme,
            model=ModelIdentity(**model | {"layers": tuple(model["layers"]), "weights": weights}),
            layers={
                int(layer): {role: load_tensors(roles[role], tensors, cpu) for role in ROLES if role in roles}
                for layer, roles in header["layers"].items()
            },
            seed=header["seed"],
            seeded=header["seeded"],
            **{name: text[name.removeprefix("text_")] for name in OF_TEXT},
            file=path.name,
            sha256=header["sha256"],
        )
    except (KVError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{path} was written by packedkv {header.get('packedkv')} and does not fit this version: {error}; "
            f"use that version, or {KIND.again}."
        ) from error


def sites_to_fit(scheme: KVScheme, layers: Sequence[int]) -> list[tuple[int, Role, Codec]]:
    """Return layer, role and codec of all constants from data; ``layers`` are the model's KV layers, in order.

    The keys' mean is such a constant; ``mean=auto`` must be decided.
    """
    schemes = [scheme.for_layer(i, len(layers)) for i in range(len(layers))]
    return [
        (layer, role, of.codec(role))
        for layer, of in zip(layers, schemes, strict=True)
        for role in ROLES
        if of.codec(role).needs or (role == "key" and of.mean in ("pre", "post"))
    ]


def check_given(name: str, layers: Sequence[int], given: LayerParams) -> None:
    """Raise FitError unless the model ``name`` has all layers and roles that constants are given for."""
    if not isinstance(given, Mapping) or not all(isinstance(roles, Mapping) for roles in given.values()):
        raise FitError(
            f"params are {type(given).__name__}: expected the path of a file of `packedkv fit`, what load_params read "
            f"from it, or {{layer: {{'key': Params, 'value': Params}}}}."
        )
    if unknown := [layer for layer, roles in given.items() if roles and layer not in layers]:
        raise FitError(
            f"params hold constants of layers {unknown}; {name} caches keys and values in layers {list(layers)}, "
            f"which are integers. Pass {{layer: {{'key': Params, 'value': Params}}}}."
        )
    for layer, roles in given.items():
        if unknown_roles := [role for role in roles if role not in ROLES]:
            raise FitError(f"params of layer {layer} are for {unknown_roles}; pass them for 'key' and 'value'.")


def match_params(files: Sequence[str | Path | FittedParams], schemes: Sequence[KVScheme]) -> list[FittedParams | None]:
    """Match params to schemes; None for a scheme without params.

    Raises SpecError if params were fitted for a scheme that is not among them, or two for the same one.
    """
    matches: list[FittedParams | None] = [None] * len(schemes)
    for file in files:
        fitted = file if isinstance(file, FittedParams) else read_params(file)
        name = fitted.file or "params"
        allowed = [scheme.allows(fitted.scheme) for scheme in schemes]
        if not any(allowed):
            names = ", ".join(map(str, schemes))
            raise SpecError(
                f"{name}: fitted for {fitted.spec}, which is not among the specs given ({names}); add that spec, "
                f"or leave the file out."
            )
        if (other := matches[allowed.index(True)]) is not None:
            raise SpecError(
                f"{name} and {other.file or 'params'}: both fitted for {fitted.spec}; pass one file for each spec."
            )
        # two specs may name one scheme: int-4 and int:bits=4
        matches = [fitted if fits else match for fits, match in zip(allowed, matches, strict=True)]
    return matches


SAMPLE = 4096
"""Bytes of each tensor that go into the digest, from its middle."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights as transformers reads them, in order; ModelError if there are none."""
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not paths:  # `consolidated*` hold the same weights once more, in Mistral's own form
        raise ModelError(f"{folder} holds no weights as .safetensors; a model folder is what save_pretrained writes.")
    return paths


def digest_of(folder: Path) -> str:
    """Return the sha256 of a checkpoint: config, every tensor's name, dtype and shape, and some bytes of each.

    Raises ModelError if a file is missing or is not safetensors.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in weight_files(folder):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError("it is cut, or not safetensors")
                header: dict[str, Any] = json.loads(file.read(size))
                header.pop("__metadata__", None)
                digest.update(json.dumps(header, sort_keys=True).encode())
                for entry in header.values():
                    first, last = entry["data_offsets"]
                    count = min(SAMPLE, last - first)
                    file.seek(8 + size + (first + last - count) // 2)
                    digest.update(file.read(count))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the weights in {folder} cannot be read: {error}; copy them again.") from error
    return digest.hexdigest()


def other_weights(folder: Path, weights: Mapping[str, tuple[int, float, float]]) -> list[str]:
    """Return the names of a ``ModelIdentity.weights`` whose numbers differ in a checkpoint.

    Names that are missing or quantized in the checkpoint are ignored. Errors as ``weight_files``.
    """
    differ = []
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(weights.keys() & set(file.keys())):
                tensor = file.get_tensor(name)
                plain = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
                if plain and not same_figures(tensor, weights[name]):
                    differ.append(name)
    return differ
