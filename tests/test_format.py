"""docs/format.md says what the code does: its tables, its reader, its lists of names."""

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open

import packedkv
from packedkv.codecs.group_int import interleave
from packedkv.files import caches as persist
from packedkv.files import params
from packedkv.fitting.fit import fit_model
from packedkv.ops.bitpack import pack
from tests.cli.tiny import TEXT, tiny_loaded

DOC = (Path(__file__).parents[1] / "docs" / "format.md").read_text()


def test_the_table_of_planes_is_the_code_s():
    written = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+) \| (\w+)\.(\w+) \| (\w+) \| ([\dx ]+) \| (\d+) \|$", DOC, re.M)
    specs = list(dict.fromkeys(row[0] for row in written))
    assert len(specs) == 3
    real = []
    for spec in specs:
        page = packedkv.get(spec).page_layout(128)
        for p in page.planes:
            shape = " x ".join(str(n) for n in p.field.shape)
            row = (spec, page.page_bytes, p.offset, p.role, p.field.name, p.field.dtype, shape, p.blocks)
            real.append(tuple(str(x) for x in row))
    assert written == real


def saved(path: Path) -> packedkv.LayerCache:
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    x = torch.randn(2, 1, 2, 70, 128, generator=torch.Generator().manual_seed(0)).half()
    cache.append(x[0], x[1])
    persist.save_layers(path, [cache], {})
    return cache


def test_the_reader_without_the_library_gives_the_first_key(tmp_path, monkeypatch):
    cache = saved(tmp_path / "cache.safetensors")
    code = re.search(r"^```python\n(.*?)^```", DOC, re.S | re.M)[1]
    assert "packedkv." not in code
    assert "import packedkv" not in code
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


def test_interleaved_codes_are_as_written():
    section = DOC.split("### Interleaved codes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d) \| codes `(\d) i \.\. \d i \+ (\d)` \| `(\d) s` \| (.*) \|$", section, re.M)
    assert [int(row[0]) for row in rows] == [2, 3, 4]
    for b, each, last, step, top in ((*map(int, row[:4]), row[4]) for row in rows):
        assert (last + 1, step) == (each, b)
        codes = torch.randint(0, 1 << b, (128,), generator=torch.Generator().manual_seed(b))
        words = interleave(codes, b).view(torch.int16).long() & 0xFFFF
        own = {4 * q + p: codes[32 * q + 12 + p] for q in range(4) for p in range(4)}  # g = 3
        for i in range(b):
            unit = sum(int(own[each * i + s]) << step * s for s in range(each))
            if "code 15" in top:
                unit |= (int(own[15]) >> i & 1) << 15
            assert int(words[8 * i + 3]) == unit
        assert torch.equal(interleave(codes, b), pack(codes, b)) == (b == 4)


def test_the_presets_with_interleaved_codes_are_listed():
    section = DOC.split("### Interleaved codes")[1].split("\n## ")[0].split("\n\n")[1]
    scheme = {name: packedkv.get(name) for name in packedkv.presets()}
    interleaved = {
        n for n, s in scheme.items() if type(s.value).__name__ == "GroupInt" and s.value.layout(128).version == 2
    }
    assert interleaved == {name for name in re.findall(r"`([\w-]+)`", section) if name in scheme}
