"""The public names: `__all__` says what exists, nothing else is public, and each is explained."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import packedkv

FIXED = {
    *("presets", "get", "names", "describe", "register", "load_file", "from_json", "compress", "fake_quant"),
    *("Compressed", "LayerCache", "cache_for", "load_cache", "Codec", "KVScheme", "Layout", "Field", "Site"),
    *("Params", "Payload", "KVError", "SpecError", "ShapeError", "FitError", "FormatError", "ModelError"),
    "UnsupportedError",
}
"""Names that everything outside relies on: add, do not rename."""


def test_exported_names_exist_and_are_explained_and_typed():
    assert set(packedkv.__all__) >= FIXED
    assert len(packedkv.__all__) == len(set(packedkv.__all__))
    for name in packedkv.__all__:
        value = getattr(packedkv, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"packedkv.{name} has no docstring"
            assert value.__module__.startswith("packedkv"), name
        if inspect.isfunction(value):
            hints = typing.get_type_hints(value)
            assert set(inspect.signature(value).parameters) | {"return"} == set(hints), name
    with pytest.raises(AttributeError, match="no attribute 'compres'"):
        packedkv.compres  # noqa: B018


def test_signatures_that_users_call():
    compress = inspect.signature(packedkv.compress).parameters
    assert list(compress) == ["spec", "keys", "values", "layer", "num_layers", "seed", "params"]
    assert compress["layer"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(packedkv.fake_quant).parameters) == list(compress)
    for method in ("append", "attend", "crop", "evict", "select", "repeat", "reset", "nbytes", "decode"):
        assert inspect.getdoc(getattr(packedkv.LayerCache, method)), method


def test_nothing_else_is_public():
    """Submodules aside, a name without underscore is either exported or a leak."""
    submodules = {p.stem for p in Path(packedkv.__file__).parent.iterdir()}
    leaks = {n for n in vars(packedkv) if not n.startswith("_")} - set(packedkv.__all__) - submodules
    assert leaks <= {"Any", "TYPE_CHECKING"}


def test_no_submodule_has_the_name_of_an_export():
    """Importing it would put the module in the place of the function."""
    assert not {m.name for m in pkgutil.iter_modules(packedkv.__path__)} & set(packedkv.__all__)


def test_importing_the_package_imports_nothing_heavy_and_its_names_are_there():
    code = (
        "import sys, packedkv; assert 'torch' not in sys.modules; assert set(packedkv.__all__) <= set(dir(packedkv)); "
        "from packedkv import KVScheme, get; assert isinstance(get('int-4'), KVScheme); "
        "assert packedkv.registry.get is get"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_are_those_of_the_package_and_of_python():
    tree = {
        "SpecError": ValueError,
        "ShapeError": ValueError,
        "FitError": RuntimeError,
        "FormatError": ValueError,
        "ModelError": RuntimeError,
        "UnsupportedError": NotImplementedError,
    }
    for name, builtin in tree.items():
        error = getattr(packedkv, name)
        assert issubclass(error, packedkv.KVError)
        assert issubclass(error, builtin)


def test_models_are_loaded_by_the_name_they_had():
    assert importlib.import_module("packedkv.models").load is importlib.import_module("packedkv.models.loading").load
