"""A codec is one file: the code block of docs/add-a-codec.md goes in by every road, and everything else follows.

Each road runs in a process and a folder of its own, so that this process's registry and the checkout stay as they are.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "add-a-codec.md"
PRESETS = ["spin-4", "spin-3"]


def code_block(number: int = 0) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.S | re.M)
    assert len(blocks) == 2, "the tutorial has two Python files: the codec, and what names its reader"
    return blocks[number]


def run(
    *command: str,
    source: Path = ROOT / "src",
    extra: Path | None = None,
    cwd: Path | None = None,
    fails=False,
    stderr=False,
):
    """Run Python with ``source`` (and ``extra``) before everything installed; return its standard output, or error."""
    paths = [str(p) for p in (source, extra) if p is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd or source.parent,
        check=False,
    )
    assert (done.returncode != 0) == fails, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stderr if stderr else done.stdout


@pytest.fixture
def codec_file(tmp_path) -> Path:
    path = tmp_path / "outside" / "spin.py"
    path.parent.mkdir()
    path.write_text(code_block())
    return path


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the checkout with one file more."""
    target = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.gguf")
    for name in ("src", "scripts", "docs", "tests/conformance", "tests/fuzz", "tests/golden"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "tests/__init__.py", "tests/conftest.py"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, target / name)
    (target / "src/packedkv/codecs/spin.py").write_text(code_block())
    return target


def check_rows(listed: str) -> None:
    rows = [row for row in json.loads(listed) if row["spec"].startswith("spin-")]
    assert [row["spec"] for row in rows] == PRESETS
    for row in rows:
        assert (row["method"], row["source"]) == ("spin", "docs/add-a-codec.md")
        bits = int(row["spec"][-1])
        assert row["key_bits"] == row["value_bits"] == bits + 16 / 128
        assert row["nominal_bits"] == bits
        assert row["kernels"] == {"encode": "none", "decode": "none"}


REFUSED = """
def refused(file, *said):
    try:
        packedkv.load_file(file)
    except packedkv.SpecError as error:
        assert all(part in str(error) for part in said), error
    else:
        raise AssertionError(f"{file} was loaded")
"""


def test_a_file_loaded_in_python(codec_file):
    program = f"""
import packedkv, torch
assert not [p for p in packedkv.presets() if p.startswith("spin")]
assert packedkv.load_file({str(codec_file)!r}) == {PRESETS}
assert set({PRESETS}) <= set(packedkv.presets())
assert packedkv.load_file({str(codec_file)!r}) == {PRESETS}, "loading it again after an edit"
x = torch.randn(1, 2, 40, 80)
assert packedkv.compress("spin-4:window=8", x, x).effective_bits > 4.2
assert str(packedkv.get("spin:bits=3")) == "spin:bits=3" and packedkv.get("spin:bits=3") == packedkv.get("spin-3")
assert packedkv.from_json(packedkv.get("spin-3").to_json()) == packedkv.get("spin-3")
"""
    run("-c", program)


def test_a_file_loaded_in_python_with_its_reader(codec_file):
    """Its folder need not be on the path, and the file can be loaded again; the codec's own file is not, beside it."""
    reader = codec_file.with_name("spin_cuda.py")
    reader.write_text(code_block(1))
    program = f"""
import packedkv, sys
{REFUSED}
before = list(sys.path)
for _ in range(2):
    assert packedkv.load_file({str(reader)!r}) == {PRESETS}
    assert packedkv.describe("spin-4")["kernels"] == {{"encode": "none", "decode": "cuda"}}
assert sys.path == before
refused({str(codec_file)!r}, "'spin' is registered already, by {codec_file}")
assert packedkv.describe("spin-4")["kernels"] == {{"encode": "none", "decode": "cuda"}}
assert packedkv.from_json(packedkv.get("spin-4").to_json()) == packedkv.get("spin-4"), "the class that was refused"
"""
    run("-c", program)
    said = "was loaded or imported before, load this one alone"
    run("-c", f"import packedkv, spin\n{REFUSED}\nrefused({str(reader)!r}, {said!r})", extra=codec_file.parent)
    first = f"import packedkv\n{REFUSED}\npackedkv.load_file({str(codec_file)!r})"
    run("-c", f"{first}\nrefused({str(reader)!r}, \"'spin' is registered already\", 'is given alone')")


def test_a_module_named_by_an_entry_point(codec_file, tmp_path):
    """As pip leaves it: a module and a dist-info folder beside it."""
    site = tmp_path / "site"
    info = site / "my_codecs-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(codec_file, site / "my_spin.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-codecs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[packedkv.codecs]\nspin = my_spin\n")
    out = run("-c", "import packedkv, json; print(json.dumps(packedkv.presets()))", extra=site)
    assert set(PRESETS) <= set(json.loads(out))


def test_a_file_named_on_the_command_line(codec_file):
    check_rows(run("-m", "packedkv.cli.main", "list", "--json", "-", "--codec-file", str(codec_file)))


def test_a_file_that_imports_what_is_not_there(codec_file):
    reader = codec_file.with_name("spin_cuda.py")
    reader.write_text(code_block(1))
    codec_file.unlink()
    done = run("-m", "packedkv.cli.main", "list", "--codec-file", str(reader), fails=True, stderr=True)
    assert done.strip() == (
        f"packedkv: error: codec file {reader} imports spin, which is not found; "
        "install it or put its folder on PYTHONPATH."
    )


def test_a_file_dropped_into_the_library_is_listed_and_described(copy):
    source = copy / "src"
    check_rows(run("-m", "packedkv.cli.main", "list", "--json", "-", source=source))
    described = json.loads(run("-m", "packedkv.cli.main", "describe", "spin-4:window=32", "--json", "-", source=source))
    described = described[0] if isinstance(described, list) else described
    options = {o["name"]: o for o in described["options"]}
    assert options["window"]["value"] == 32
    assert options["bits"]["doc"] == "Bits of a code."


@pytest.mark.slow
def test_the_conformance_suite_takes_it_up_and_passes(copy):
    """Without a golden it fails; with one made on purpose everything passes, and goes on passing."""
    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "spin-4")
    golden = "tests/conformance/test_golden.py"
    out = run(*pytest_, golden, source=copy / "src", cwd=copy, fails=True)
    assert "no golden for spin-4: run pytest" in out
    out = run(*pytest_, "tests/conformance", "--regen-golden", source=copy / "src", cwd=copy)
    assert int(re.search(r"(\d+) passed", out)[1]) > 50
    assert (copy / "tests/golden/spin-4/data.safetensors").is_file()
    run(*pytest_, golden, source=copy / "src", cwd=copy)


def test_the_short_example_runs_and_prints_its_true_bits():
    out = run(str(ROOT / "examples" / "03_my_codec.py"))
    bits = {line.split()[0]: float(line.split()[1]) for line in out.splitlines()}
    assert list(bits) == ["sign:window=0", "sign", "saw-int4", "dense"]
    assert 1 + 16 / 128 < bits["sign:window=0"] < 1.2  # a whole number of pages, and the table
    assert sorted(bits.values()) == list(bits.values())
