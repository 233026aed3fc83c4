"""docs/format.md says what the code does: its tables, its reader, its lists of names."""

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open

import kvcodec
from kvcodec import params, persist
from kvcodec.fit import fit_model
from kvcodec.ops.bitpack import pack
from tests.eval.tiny import TEXT, tiny_loaded

DOC = (Path(__file__).parents[1] / "docs" / "format.md").read_text()


def test_the_table_of_planes_is_the_code_s():
    written = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+) \| (\w+)\.(\w+) \| (\w+) \| ([\dx ]+) \| (\d+) \|$", DOC, re.M)
    specs = list(dict.fromkeys(row[0] for row in written))
    assert len(specs) == 3
    real = []
    for spec in specs:
        page = kvcodec.get(spec).page_layout(128)
        for p in page.planes:
            shape = " x ".join(str(n) for n in p.field.shape)
            row = (spec, page.page_bytes, p.offset, p.role, p.field.name, p.field.dtype, shape, p.blocks)
            real.append(tuple(str(x) for x in row))
    assert written == real


def saved(path: Path) -> kvcodec.LayerCache:
    cache = kvcodec.LayerCache(kvcodec.get("saw-int4"))
    x = torch.randn(2, 1, 2, 70, 128, generator=torch.Generator().manual_seed(0)).half()
    cache.append(x[0], x[1])
    persist.save_layers(path, [cache], {})
    return cache


def test_the_reader_without_the_library_gives_the_first_key(tmp_path, monkeypatch):
    cache = saved(tmp_path / "cache.safetensors")
    code = re.search(r"^```python\n(.*?)^```", DOC, re.S | re.M)[1]
    assert "kvcodec." not in code
    assert "import kvcodec" not in code
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "docs/format.md", "exec"), names)
    key = cache.decode(0, 1)[0][0, 0, 0]
    torch.testing.assert_close(torch.from_numpy(names["key"]).half(), key, rtol=2**-10, atol=1e-5)


def test_the_names_in_the_file_are_listed(tmp_path):
    saved(tmp_path / "c")
    with safe_open(tmp_path / "c", "pt") as file:
        metadata = file.metadata()
        for name in sorted(file.keys()):
            assert re.sub(r"^0\.", "<i>.", name).replace("key", "<role>").replace("value", "<role>") in DOC, name
    assert list(metadata) == [persist.KIND.mark]
    header = json.loads(metadata[persist.KIND.mark])
    assert f"of this file format: {header['version']}." in DOC
    layer = header["layers"][0]
    for name in [*header, *layer, *layer["held"], *layer["held"]["roles"]["key"]]:
        assert f"`{name}`" in DOC or name == "roles", name


def test_the_names_in_a_params_file_are_listed(tmp_path):
    fitted = fit_model(tiny_loaded(), "innerq-base", TEXT, windows=1, window_tokens=96).save(tmp_path / "p")
    with safe_open(tmp_path / "p", "pt") as file:
        metadata = file.metadata()
        assert all(re.fullmatch(r"params\.[0-9a-f]{16}", name) for name in file.keys())  # noqa: SIM118
    assert list(metadata) == [params.KIND.mark]
    section = DOC.split("## The params file")[1].split("\n## ")[0]
    header = json.loads(metadata[params.KIND.mark])
    assert f"of this file format: {header['version']}." in section
    for name in [*header, *header["model"], *header["text"], "key", "value"]:
        assert f"`{name}`" in section, name
    assert header["sha256"] == fitted.sha256
    assert (params.WEIGHTS, params.ELEMENTS, params.TOLERANCE) == (8, 65536, 1 / 64)


def test_the_bit_stream_is_as_written():
    codes = torch.arange(11) % 8
    packed = pack(codes, 3)
    bits = [int(packed[k // 8]) >> (k % 8) & 1 for k in range(len(packed) * 8)]
    assert [sum(bits[3 * i + j] << j for j in range(3)) for i in range(11)] == codes.tolist()
    assert not any(bits[33:]), "spare bits are zero"
