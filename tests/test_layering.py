"""The import rules of the house: who may know whom, what `import kvcodec` costs, how long a file may be."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvcodec

ROOT = Path(kvcodec.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
BRICKS = {
    f"kvcodec.codecs.{name}"
    for name in ("dense", "group_int", "rotated", "wrapper", "hessian", "kmeans_residual", "med")
}
"""Codecs that others are built of; any other module of codecs/ is a paper and stands alone."""

SAME_PAPER = {("octopus_qjl", "kvcodec.codecs.octopus")}
"""A method and its extension, each with a page of its own."""

CONTRACT = ["errors", "layout", "codec", "scheme", "registry"]
"""Lowest first: each may import only those before it."""
MAY_IMPORT = (
    {
        "ops": {"errors", "codec", "ops"},  # codec for its constants
        "codecs": {*CONTRACT, "ops", "codecs"},
        "kernels": {"errors", "layout", "codec", "kernels"},
        "cuda": {*CONTRACT, "ops", "codecs", "attention", "cuda", "progress", "models"},  # models for the cache folder
        "pages": {*CONTRACT},
        "cache": {*CONTRACT, "pages"},
        "engine": {*CONTRACT, "codecs", "pages", "cache", "attention", "cuda", "kernels"},
        "fused": {*CONTRACT, "cache", "attention", "engine", "staged"},
        "staged": {"errors", "attention"},
        "attention": {*CONTRACT, "pages", "cache"},
        "compressed": {*CONTRACT, "cache"},
        "sealed": {"errors"},
        "persist": {*CONTRACT, "pages", "cache", "sealed"},
        "params": {*CONTRACT, "sealed", "integrations"},  # a model's layers are the integration's to read
        "eval_report": {*CONTRACT, "eval_report", "report", "plot", "bench"},  # of bench what reads its rows
    }
    | {name: set(CONTRACT[:i]) for i, name in enumerate(CONTRACT)}
)
LAZILY = {
    ("scheme", "kvcodec.codecs.dense"),  # boundary layers are dense; a function-level import breaks the cycle
    ("registry", "kvcodec.codecs"),
    ("registry", "kvcodec.engine"),  # which kernels there are
    ("registry", "kvcodec.mix"),  # a recipe file is a spec; its layers are schemes that the registry finds
    ("cache", "kvcodec.attention"),
    ("sealed", "kvcodec"),  # the version
}
ONLY_IN = {
    "triton": {"kernels"},
    "lm_eval": {"integrations"},
    "transformers": {"integrations", "models", "eval"},
    "matplotlib": {"plot", "report"},
    "vllm": {"integrations"},
}
MOST_LINES = {"codecs": 300}


def room(path: Path) -> str:
    """First folder below the package, or the module's name."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module with whether it is imported when the file is (``TYPE_CHECKING`` blocks left out)."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                package = child.module or ""
                names = [f"{package}.{a.name}" for a in child.names]
                bases = [ROOT.parent / n.replace(".", "/") for n in names]
                is_module = [b.is_dir() or b.with_suffix(".py").is_file() for b in bases]
                found.extend((n if m else package, top) for n, m in zip(names, is_module, strict=True))
            visit(child, top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(path.read_text()), True)
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_its_room_may(path):
    allowed = MAY_IMPORT.get(room(path))
    for module, _ in imports(path):
        top = module.split(".")[0]
        if top in ONLY_IN:
            assert room(path) in ONLY_IN[top], f"{name_of(path)} imports {module}; only {ONLY_IN[top]} may"
        if top != "kvcodec" or allowed is None or (room(path), module) in LAZILY:
            continue
        below = module.split(".")[1] if "." in module else "the package itself"
        assert below in allowed, f"{name_of(path)} imports {module}; {room(path)} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "codecs" and p.stem != "__init__"], ids=name_of)
def test_a_codec_knows_no_other_paper(path):
    for module, _ in imports(path):
        if module.startswith("kvcodec.codecs") and (path.stem, module) not in SAME_PAPER:
            assert module in BRICKS, f"{name_of(path)} imports {module}; share it in ops/ or as one of {sorted(BRICKS)}"


def test_a_kernel_is_the_sibling_of_a_codec():
    codecs = {p.stem for p in FILES if room(p) == "codecs"}
    lone = {
        p.stem
        for p in FILES
        if room(p) == "kernels" and not p.stem.startswith("_") and p.stem != "decode_attention" and p.stem not in codecs
    }
    assert not lone, f"kernels without a codec of that stem: {lone}"


def test_the_report_reads_files_and_runs_nothing():
    for module, _ in imports(ROOT / "report.py"):
        assert not module.startswith(("kvcodec.eval", "kvcodec.bench", "kvcodec.integrations")), module


READS_ROWS = ("kvcodec.bench.record", "kvcodec.bench.summary")


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "eval_report"], ids=name_of)
def test_the_page_of_a_run_reads_files_and_runs_nothing(path):
    for module, _ in imports(path):
        assert not module.startswith("kvcodec.bench") or module in READS_ROWS, module


def test_nothing_imports_the_command_line():
    for path in FILES:
        if path.stem not in ("cli", "__main__") and room(path) != "cli":
            assert not any(m.startswith("kvcodec.cli") for m, _ in imports(path)), name_of(path)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_short_and_have_a_purpose(path):
    most = MOST_LINES.get(room(path), 600)
    assert len(path.read_text().splitlines()) <= most, f"{name_of(path)} is longer than {most} lines: split it"
    assert path.stem not in ("utils", "helpers", "common", "misc"), f"{name_of(path)}: name it after what it does"
    assert ast.get_docstring(ast.parse(path.read_text())), f"{name_of(path)} has no module docstring"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.cuh")), ids=name_of)
def test_a_cuda_source_is_short_and_narrow(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400, f"{name_of(path)} is longer than 400 lines: split it"
    wide = [i for i, line in enumerate(lines, 1) if len(line) > 120]
    assert not wide, f"{name_of(path)}: lines {wide} are longer than 120 characters"
    assert lines[0].startswith("// "), f"{name_of(path)} does not begin with what it is for"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_switches_from_the_environment(path):
    """Other programs' variables (a cache folder, Triton's interpreter) are read where they matter; none are ours."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("KVCODEC_"):
            pytest.fail(f"{name_of(path)}:{node.lineno} knows {node.value}; make it an argument")


PROBE = """
import json, sys, torch
before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
import kvcodec
specs = kvcodec.presets()
shown = [kvcodec.describe(s) for s in specs]
x = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(0))
kvcodec.compress(specs[-1], x, x)
cache = kvcodec.LayerCache(kvcodec.get(specs[-1]))
cache.append(x, x)
cache.attend(x)
print(json.dumps({
    "heavy": [m for m in ("triton", "transformers", "matplotlib", "vllm", "lm_eval") if m in sys.modules],
    "own": sorted(m for m in sys.modules if m.startswith(("kvcodec.kernels.", "kvcodec.integrations", "kvcodec.eval"))),
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
