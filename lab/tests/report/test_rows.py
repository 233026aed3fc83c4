"""One reader of result files: every form is read, and damage is named."""

from pathlib import Path

import pytest

from packedkv.cli.page.rows import read_rows
from packedkv.errors import FormatError
from packedkv_lab.report.results import runs_of


def test_files_of_every_form_are_read_in_order(tmp_path: Path) -> None:
    for name, text in {"a.json": '[{"spec": "a"}]', "b.json": '{"rows": [{"spec": "b"}]}', "c.json": '{"spec": "c"}',
                       "d.jsonl": '{"spec": "d"}\n{"spec": "e", "kl": null}\n{"sp',
                       "e.jsonl": '{"spec": "f"}'}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    rows = read_rows(sorted(tmp_path.iterdir()))
    assert "".join(row["spec"] for row in rows) == "abcdef"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("r.json", "[{", "r.json is not JSON"),
        ("r.json", "3", "holds no rows: a list, or an object with rows"),
        ("r.json", '[{"spec": "a"}, 3]', "r.json, row 2 is damaged: 3 is no object; measure it again."),
        ("r.json", '[{"kl": 1}]', "row 1 is damaged: it has no spec"),
        ("r.json", '[{"spec": "a", "values": 3}]', "values is 3, not an object"),
        ("r.json", '[{"spec": "a", "kl": true}]', "kl is True, not a number"),
        ("r.json", '[{"spec": ["a"]}]', r"spec is \['a'\], not a text"),
        ("r.jsonl", '{"sp\n{"spec": "a"}\n', "r.jsonl, line 1 is damaged"),
    ],
)
def test_a_damaged_row_is_named_with_its_file(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=told):
        read_rows([tmp_path / name])


def test_runs_are_told_by_when_they_began() -> None:
    row = {"run": "2026-01-01", "gpu": "G", "commit": "c", "seed": 0, "versions": {"torch": "2", "vllm": "0"}}
    assert runs_of([row, row]) == {"2026-01-01": "G; commit c; seed 0; torch 2, vllm 0"}
