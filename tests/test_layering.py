"""The import rules of the house: who may know whom, what `import packedkv` costs, which names are public."""

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import packedkv

LIBRARY = Path(packedkv.__file__).parent
SRC = LIBRARY.parent
LABORATORY = SRC.parent / "lab" / "src" / "packedkv_lab"
FILES = sorted([*LIBRARY.rglob("*.py"), *LABORATORY.rglob("*.py")])

ROOMS = (
    "errors", "version", "atomic", "progress", "layout", "codec", "ops", "attention",
    "checks", "shared", "scheme", "registry", "codecs", "compressed", "store",
    "kernels", "description", "cache", "files", "key_layer", "key_bias", "probe",
    "integrations.transformers", "models", "fitting", "integrations.vllm", "integrations", "packedkv", "cli",
    "__main__",
)  # fmt: skip
"""Folders and files of the library, lowest first: each imports from itself and from those before it."""

BRICKS = {f"packedkv.codecs.{name}" for name in ("group_int", "wrapper", "hessian", "kmeans_residual", "outliers")}
"""Codecs that others are built of; any other module of codecs/ is a paper and stands alone."""
PAIRED = {("kivi", "packedkv.codecs.turboquant"), ("rope_pairs", "packedkv.codecs.turboquant")}
"""A recipe whose keys are one method's and whose values another one's."""

ONLY_IN = {
    "triton": set(),
    "transformers": {
        "packedkv/integrations",
        "packedkv/models",
        "packedkv/fitting",
        "packedkv/cli/measure",
        "packedkv_lab",
    },
    "vllm": {"packedkv/integrations"},
    "lm_eval": {"packedkv_lab/eval"},
    "matplotlib": set(),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC if path.is_relative_to(SRC) else LABORATORY.parent))


def module_of(path: Path) -> str:
    return ".".join(Path(name_of(path)).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def room(module: str) -> str:
    """The room of a module of the library; for the package itself and its doors their own names."""
    inside = module.removeprefix("packedkv.")
    return next((name for name in ROOMS if f"{inside}.".startswith(f"{name}.")), inside)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every imported module, inside functions and under ``TYPE_CHECKING`` too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            package = node.module or ""
            names = [f"{package}.{alias.name}" for alias in node.names]
            found.extend(name if name in MODULES else package for name in names)
    return tuple(found)


def test_no_modules_import_each_other():
    graph = {name: {m for m in imports(path) if m in MODULES and m != name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_every_file_has_a_room_and_imports_no_higher_one():
    assert not {room(module) for module in MODULES if module.startswith("packedkv.")} - set(ROOMS)
    for module, path in MODULES.items():
        below = ROOMS[: ROOMS.index(room(module)) + 1] if room(module) in ROOMS else ROOMS
        for other in imports(path):
            if other.split(".")[0] == "packedkv" and module.startswith("packedkv."):
                assert room(other) in below, f"{module} imports {other}; {room(module)} may import {below}"


READS_ROWS = ("packedkv_lab.bench", "packedkv_lab.bench.record", "packedkv_lab.eval.store")
RUNS = ("packedkv_lab.eval", "packedkv_lab.bench", "packedkv.integrations", "packedkv.cli.measure")


def outside_its_room(path: Path, module: str) -> bool:
    places = ONLY_IN.get(module.split(".")[0])
    return places is not None and not name_of(path).startswith(tuple(places))


def another_paper(path: Path, module: str) -> bool:
    """What several papers need belongs into ops/ or is one of ``BRICKS``."""
    paper = path.parent == LIBRARY / "codecs" and path.stem != "__init__" and module.startswith("packedkv.codecs")
    return paper and module not in BRICKS and (path.stem, module) not in PAIRED


def another_machine(path: Path, module: str) -> bool:
    other = {"cpu": "cuda", "cuda": "cpu"}.get(path.parent.name)
    places = tuple(f"packedkv.kernels.{folder}" for folder in (other, "codecs"))
    return other is not None and path.is_relative_to(LIBRARY / "kernels") and module.startswith(places)


def runs_something(path: Path, module: str) -> bool:
    report = path.is_relative_to(LABORATORY / "report") or path.is_relative_to(LIBRARY / "cli" / "page")
    return report and module.startswith(RUNS) and module not in READS_ROWS


FORBIDDEN: dict[str, Callable[[Path, str], bool]] = {
    "the library does not know the laboratory": lambda path, module: (
        path.is_relative_to(LIBRARY) and module.split(".")[0] == "packedkv_lab"
    ),
    "other libraries are imported in their rooms only": outside_its_room,
    "a codec knows no other paper": another_paper,
    "machines import neither each other nor a codec": another_machine,
    "a report reads files and runs nothing": runs_something,
    "nothing imports the command line": lambda path, module: (
        path.stem != "__main__" and module.startswith("packedkv.cli.main")
    ),
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_no_import_breaks(rule: str):
    forbidden = FORBIDDEN[rule]
    assert not [f"{name_of(path)} imports {m}" for path in FILES for m in imports(path) if forbidden(path, m)]


def test_a_file_says_what_it_is_for():
    assert not [name_of(path) for path in FILES if path.stem in ("utils", "helpers", "common", "misc")]
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), name_of(path)
        # variables of other programs (a cache folder, Triton's interpreter) are read; the library has none
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        own = [text for text in texts if isinstance(text, str) and text.startswith("PACKEDKV_")]
        assert not own, f"{name_of(path)} names a variable of our own, {own}; use an argument"
    for path in LIBRARY.rglob("*.cuh"):
        lines = path.read_text().splitlines()
        wide = [i for i, line in enumerate(lines, 1) if len(line) > 120]
        assert not wide, f"{name_of(path)}: lines {wide} are longer than 120 characters"
        assert lines[0].startswith("// "), f"{name_of(path)} does not begin with what it is for"


PROBE = """
import json, sys, packedkv
lazy = "torch" not in sys.modules and set(packedkv.__all__) <= set(dir(packedkv))
import torch
before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
from packedkv import KVScheme, get
assert lazy and isinstance(get("int-4"), KVScheme) and packedkv.registry.get is get
specs = packedkv.presets()
shown = [packedkv.describe(s) for s in specs]
x = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(0))
packedkv.compress(specs[-1], x, x)
cache = packedkv.LayerCache(packedkv.get(specs[-1]))
cache.append(x, x)
cache.attend(x)
print(json.dumps({
    "heavy": [m for m in ("triton", "transformers", "matplotlib", "vllm", "lm_eval") if m in sys.modules],
    "own": sorted(m for m in sys.modules if m.startswith(("packedkv.integrations", "packedkv_lab"))),
    "cuda": torch.cuda.is_initialized(),
    "changed": not (torch.equal(before[0], torch.get_rng_state())
                    and before[1:] == (torch.get_num_threads(), torch.get_default_dtype())),
}))
"""


def test_importing_and_using_the_core_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"heavy": [], "own": [], "cuda": False, "changed": False}


# -- public names ------------------------------------------------------------------------------------------------------

FIXED = {
    *("presets", "get", "names", "describe", "register", "load_file", "from_json", "compress", "fake_quant"),
    *("Compressed", "LayerCache", "cache_for", "load_cache", "Codec", "KVScheme", "Layout", "Field", "Site"),
    *("Params", "Payload"),
}
ERRORS = {
    "KVError": Exception,
    "SpecError": ValueError,
    "ShapeError": ValueError,
    "FitError": RuntimeError,
    "FormatError": ValueError,
    "ModelError": RuntimeError,
    "UnsupportedError": NotImplementedError,
}
"""Names that everything outside relies on: add, do not rename."""


def test_exported_names_exist_are_explained_and_typed_and_nothing_else_is_public():
    exported = set(packedkv.__all__)
    assert exported >= FIXED | set(ERRORS)
    assert len(packedkv.__all__) == len(exported)
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
    submodules = {p.stem for p in LIBRARY.iterdir()}
    assert {n for n in vars(packedkv) if not n.startswith("_")} - exported - submodules <= {"Any", "TYPE_CHECKING"}
    # importing a submodule of an export's name would put the module in the place of the function
    assert not {m.name for m in pkgutil.iter_modules(packedkv.__path__)} & exported
    for name, builtin in ERRORS.items():
        assert issubclass(getattr(packedkv, name), packedkv.KVError)
        assert issubclass(getattr(packedkv, name), builtin)


def test_signatures_that_users_call():
    compress = inspect.signature(packedkv.compress).parameters
    assert list(compress) == ["spec", "keys", "values", "layer", "num_layers", "seed", "params"]
    assert compress["layer"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(packedkv.fake_quant).parameters) == list(compress)
    for method in ("append", "attend", "crop", "evict", "select", "repeat", "reset", "nbytes", "decode"):
        assert inspect.getdoc(getattr(packedkv.LayerCache, method)), method
    assert importlib.import_module("packedkv.models").load is importlib.import_module("packedkv.models.loading").load
