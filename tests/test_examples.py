"""The examples run as users run them, and print what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcodec

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_tensor_shows_every_preset_with_its_bits_and_a_bounded_cache() -> None:
    text = run("01_one_tensor.py")
    bits = {m[1]: float(m[2]) for m in re.finditer(r"^(\S+) +\d+ +([\d.]+) +[\d.]+$", text, re.M)}
    assert list(bits) == kvcodec.presets()
    assert bits["saw-int4"] == 4.25
    assert bits["dense"] == 16
    assert "saw-int4 cache: 256 tokens" in text


@pytest.mark.slow
def test_generate_shows_bytes_and_text_for_each_spec() -> None:
    text = run("02_generate.py", "dense", "saw-int4")
    bits = {m[1]: float(m[2]) for m in re.finditer(r"^(\S+): \d+ bytes, ([\d.]+) bits", text, re.M)}
    assert list(bits) == ["dense", "saw-int4"]
    assert bits["saw-int4"] < bits["dense"] / 2
    assert len(re.findall(r"^  \.\.\. \w+ .*\w", text, re.M)) == 2
