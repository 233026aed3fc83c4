"""What ``benchmarks/serve_stock.py`` says of a server's answers."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("serve_stock", ROOT / "benchmarks/serve_stock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, ""),
        ({"again_equal": False}, "repeated answers differ"),
        ({"hit_tokens": [[0, 9], [8, 9], [0, 9]]}, "no prompt was found in the prefix cache"),
        ({"pieces": 1}, "a streamed answer differs"),
        ({"at_once": [48] * 7 + [47]}, "an answer is short"),
        ({"said": []}, "the log does not name the kernels"),
        ({"loss": 3.56}, "the loss is not the library's"),
        ({"loss": 3.44}, "the loss is not the library's"),
    ],
    ids=str,
)
def test_faults_of_a_server(wrong, said, program):
    fine = {
        "again_equal": True, "hit_tokens": [[0, 9], [8, 9], [8, 9]], "streamed_equal": True, "pieces": 48,
        "at_once": [48] * 8, "said": ["kvcodec: 30 of 30 layers are served by the kernels 'cuda'"],
        "loss": 3.49, "library_loss": 3.5,
    }  # fmt: skip
    assert program.faults("saw-int4", fine | wrong, 3.3) == [said] * bool(said)


@pytest.mark.parametrize(("loss", "fine"), [(3.3, True), (3.4, True), (3.54, True), (3.2, False), (3.6, False)])
def test_groups_may_do_better_than_the_library(loss, fine, program):
    """Their own group is read in 16 bit; not better than the uncompressed model."""
    found = {
        "again_equal": True, "hit_tokens": [[0, 9], [8, 9], [8, 9]], "streamed_equal": True, "pieces": 48,
        "at_once": [48] * 8, "loss": loss, "library_loss": 3.5,
        "said": ["kvcodec: 30 of 30 layers are served by the kernels 'cuda'", "kvcodec: ... unfinished groups of 32"],
    }  # fmt: skip
    assert (not program.faults("kivi-2", found, 3.3)) is fine
