"""The import rules of the house: who may know whom, what `import packedkv` costs, what a file says of itself."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import packedkv

LIBRARY = Path(packedkv.__file__).parent
SRC = LIBRARY.parent
LABORATORY = SRC.parent / "lab" / "src" / "packedkv_lab"
FILES = sorted([*LIBRARY.rglob("*.py"), *LABORATORY.rglob("*.py")])

ROOMS = (
    "errors", "version", "atomic", "paths", "progress", "layout", "codec", "ops", "attention",
    "checks", "shared", "scheme", "recipe", "registry", "codecs", "compressed", "store",
    "kernels", "description", "cache", "files", "key_layer", "key_bias", "probe",
    "integrations.transformers", "models", "fitting", "integrations.vllm", "integrations", "packedkv", "cli",
    "__main__",
)  # fmt: skip
"""Folders and files of the library, lowest first: each imports from itself and from those before it."""

BRICKS = {
    f"packedkv.codecs.{name}" for name in ("group_int", "wrapper", "hessian", "kmeans_residual", "oscar", "outliers")
}
"""Codecs that others are built of; any other module of codecs/ is a paper and stands alone."""
SAME_PAPER = {("octopus_qjl", "packedkv.codecs.octopus")}
"""A method and its extension, each with a page of its own."""

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


def circles() -> list[set[str]]:
    """Modules that import each other, directly or by way of others (strongly connected, by Tarjan's algorithm)."""
    graph = {name: [m for m in imports(path) if m in MODULES and m != name] for name, path in MODULES.items()}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            found.append(set(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in number:
            visit(name)
    return [circle for circle in found if len(circle) > 1]


def test_no_modules_import_each_other():
    assert circles() == []


def breaches(forbidden: Callable[[Path, str], bool]) -> list[str]:
    """Every import that is forbidden to the file it stands in."""
    return [
        f"{name_of(path)} imports {module}" for path in FILES for module in imports(path) if forbidden(path, module)
    ]


def test_the_library_knows_nothing_of_the_laboratory():
    assert not breaches(lambda path, m: path.is_relative_to(LIBRARY) and m.split(".")[0] == "packedkv_lab")


def test_every_file_of_the_library_has_a_room():
    outside = {room(module) for module in MODULES if module.startswith("packedkv.")} - set(ROOMS)
    assert not outside


def test_no_room_imports_a_higher_one():
    for module, path in MODULES.items():
        below = ROOMS[: ROOMS.index(room(module)) + 1] if room(module) in ROOMS else ROOMS
        for other in imports(path):
            if other.split(".")[0] == "packedkv" and module.startswith("packedkv."):
                assert room(other) in below, f"{module} imports {other}; {room(module)} may import {below}"


def test_machines_do_not_import_each_other_and_no_codec():
    for machine, others in {"cpu": ("cuda", "codecs"), "cuda": ("cpu", "codecs")}.items():
        for path in (LIBRARY / "kernels" / machine).glob("*.py"):
            over = [m for m in imports(path) if m.startswith(tuple(f"packedkv.kernels.{other}" for other in others))]
            assert not over, f"{name_of(path)} imports {over}"


def test_other_libraries_are_imported_in_their_rooms_only():
    def outside(path: Path, module: str) -> bool:
        places = ONLY_IN.get(module.split(".")[0])
        return places is not None and not name_of(path).startswith(tuple(places))

    assert not breaches(outside)


def test_a_codec_knows_no_other_paper():
    """What several papers need belongs into ops/ or is one of ``BRICKS``."""

    def other_paper(path: Path, module: str) -> bool:
        paper = path.parent == LIBRARY / "codecs" and path.stem != "__init__" and module.startswith("packedkv.codecs")
        return paper and module not in BRICKS and (path.stem, module) not in SAME_PAPER | PAIRED

    assert not breaches(other_paper)


READS_ROWS = ("packedkv_lab.bench", "packedkv_lab.bench.record", "packedkv_lab.eval.store")


def test_a_report_reads_files_and_runs_nothing():
    runs = ("packedkv_lab.eval", "packedkv_lab.bench", "packedkv.integrations", "packedkv.cli.measure")

    def runs_something(path: Path, module: str) -> bool:
        report = path.is_relative_to(LABORATORY / "report") or path.is_relative_to(LIBRARY / "cli" / "page")
        return report and module.startswith(runs) and module not in READS_ROWS

    assert not breaches(runs_something)


def test_nothing_imports_the_command_line():
    assert not breaches(lambda path, m: path.stem != "__main__" and m.startswith("packedkv.cli.main"))


def test_a_file_says_what_it_is_for():
    assert not [name_of(path) for path in FILES if path.stem in ("utils", "helpers", "common", "misc")]
    assert not [name_of(path) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_a_cuda_source_is_narrow_and_says_what_it_is_for():
    for path in LIBRARY.rglob("*.cuh"):
        lines = path.read_text().splitlines()
        wide = [i for i, line in enumerate(lines, 1) if len(line) > 120]
        assert not wide, f"{name_of(path)}: lines {wide} are longer than 120 characters"
        assert lines[0].startswith("// "), f"{name_of(path)} does not begin with what it is for"


def test_no_switches_from_the_environment():
    """Variables of other programs (a cache folder, Triton's interpreter) are read; the library has none."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            own = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("PACKEDKV_")
            assert not own, f"{name_of(path)}:{getattr(node, 'lineno', 0)} names a variable of our own; use an argument"


PROBE = """
import json, sys, torch
before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
import packedkv
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
    """In a process of its own: neither triton, transformers nor matplotlib, no CUDA, no global state."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"heavy": [], "own": [], "cuda": False, "changed": False}
