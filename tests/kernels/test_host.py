"""What the host does around the CUDA kernels: compiled programs in the cache, structs, launch constants, refusals."""

import ctypes
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import packedkv
from packedkv.codec import ROLES, Codec, Role
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import ShapeError, SpecError, UnsupportedError
from packedkv.kernels import spec as specs
from packedkv.kernels import structs
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cuda import arguments, build, encode, launch
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda.build import Program
from packedkv.kernels.mean import key_mean
from packedkv.kernels.tokens import NewTokens, Rules, StepTokens
from tests.kernels import harness

CPU = torch.device("cpu")
SAW = packedkv.get("saw-int4:rotate=kv")

# -- structs ---------------------------------------------------------------------------------------------------------


def fields_of(struct: type[ctypes.Structure], before: str = "", at: int = 0) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each number, those of structs within named ``struct.number``."""
    for name, kind, *_ in struct._fields_:
        field = getattr(struct, name)
        if issubclass(kind, ctypes.Structure):
            yield from fields_of(kind, f"{before}{name}.", at + field.offset)
        else:
            yield before + name, at + field.offset, field.size


@pytest.mark.parametrize(
    ("header", "struct"),
    [
        ("args.cuh", arguments.DecodeArgs),
        ("encode_args.cuh", arguments.EncodeArgs),
        ("unpack.cuh", arguments.UnpackArgs),
        ("basis.cuh", arguments.Rows),
        ("fit_ghost.cuh", arguments.FitGhostLayers),
        ("fit_innerq.cuh", arguments.FitNormArgs),
    ],
)
def test_structs_are_laid_out_as_the_compiler_does(header: str, struct: type[ctypes.Structure]) -> None:
    fields, name = list(fields_of(struct)), f"kv::{struct.__name__}"
    offsets = ", ".join(f"(int)__builtin_offsetof({name}, {field})" for field, *_ in fields)
    sizes = ", ".join(f"(int)sizeof((({name}*)0)->{field})" for field, *_ in fields)
    library = harness.build(
        f'#include "{header}"\nconstexpr int O[] = {{{offsets}}}, S[] = {{{sizes}}};\n'
        f'extern "C" int size() {{ return sizeof({name}); }}\n'
        'extern "C" int offset(int i) { return O[i]; }\nextern "C" int bytes(int i) { return S[i]; }\n'
    )

    def ask(what: str, *args: int) -> int:
        return library.enter(what, *args, result=ctypes.c_int)

    assert ask("size") == ctypes.sizeof(struct) == sum(size for *_, size in fields)  # no field of C++ is left out
    for i, (field, offset, size) in enumerate(fields):
        assert (ask("offset", i), ask("bytes", i)) == (offset, size), field


def test_a_struct_that_no_source_declares_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.cuh").write_text("\nstruct Args {\n  float* x;\n};\n")
    assert structs.structure(tmp_path / "a.cuh", "Args")._fields_ == [("x", ctypes.c_void_p)]
    with pytest.raises(ValueError, match=r"a\.cuh has no struct Other"):
        structs.structure(tmp_path / "a.cuh", "Other")
    with pytest.raises(FileNotFoundError, match=r"b\.cuh"):
        structs.structure(tmp_path / "b.cuh", "Args")


# -- the cache of compiled programs ----------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: pathlib.Path) -> Program:
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#ifdef KV_EMULATE\n#include "emulator.h"\n#endif\nint b;\n')
    (tmp_path / "c.cuh").write_text("int c;\n")
    return Program('#include "a.cuh"\n', folders=(str(tmp_path),))


def test_a_program_is_kept_by_all_it_is_made_of(sources: Program) -> None:
    folder = pathlib.Path(sources.folders[0])
    assert [pathlib.Path(p).name for p in build.included(sources)] == ["a.cuh", "b.cuh"]
    key = build.cache_key(sources, "sm_90")
    assert key == build.cache_key(sources, "sm_90")
    (folder / "c.cuh").write_text("int changed;\n")
    assert key == build.cache_key(sources, "sm_90")  # not included
    (moved := folder / "elsewhere").mkdir()
    for name in ("a.cuh", "b.cuh"):
        (moved / name).write_bytes((folder / name).read_bytes())
    assert key == build.cache_key(sources._replace(folders=(str(moved),)), "sm_90")  # a copy of the package
    others = [
        build.cache_key(sources, "sm_80"),
        build.cache_key(sources._replace(fma=False), "sm_90"),
        build.cache_key(sources._replace(source='#include "a.cuh"\n\n'), "sm_90"),
    ]
    (folder / "b.cuh").write_text("int changed;\n")
    others.append(build.cache_key(sources, "sm_90"))
    assert len({key, *others}) == 5
    with pytest.raises(FileNotFoundError, match=r"'gone\.cuh' is in none of"):
        build.included(sources._replace(source='#include "gone.cuh"\n'))


def test_damaged_programs_are_not_taken_from_the_cache(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "x.cubin"
    assert build.read_cached(path) is None
    build.write_cached(path, b"machine code")
    assert build.read_cached(path) == b"machine code"
    assert [p.name for p in path.parent.iterdir()] == ["x.cubin"]
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole[:-1] + b"?", b"?" + whole[1:], b"machine code"):
        path.write_bytes(damaged)
        assert build.read_cached(path) is None
    build.write_cached(path, b"again")
    assert build.read_cached(path) == b"again"
    blocked = tmp_path / "file"
    blocked.write_text("")
    build.write_cached(blocked / "x.cubin", b"code")  # no folder can be made there: only slower


def test_a_program_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, sources: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compiler_version", lambda: "nvrtc 13.0")
    monkeypatch.setattr(build, "_nvrtc", lambda program, arch: compiled.append(arch) or arch.encode())
    for arch in ("sm_90", "sm_90", "sm_80"):
        assert build.compile_program(sources, arch, "a test") == arch.encode()
    assert compiled == ["sm_90", "sm_80"]
    said = capsys.readouterr().err
    assert said.count("compiling a test for sm_90") == 2  # that it starts, and how long it took
    file = next((tmp_path / "cache" / "packedkv" / "cuda").glob("*.cubin"))
    file.write_bytes(file.read_bytes()[:-1])
    for arch in ("sm_90", "sm_80"):
        assert build.compile_program(sources, arch) == arch.encode()
    assert len(compiled) == 3


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.refusal(CPU) == "device cpu is not a CUDA GPU"
    monkeypatch.setattr(build, "_capability", lambda device: (7, 5))
    monkeypatch.setattr(build, "_installed", lambda name: name == "cuda.bindings")
    assert (
        build.refusal(gpu) == "cuda-core is not installed, and nothing was compiled ahead; pip install packedkv[cuda]"
    )
    build.write_cached(build.cache_folder() / "x.cubin", b"compiled ahead")
    assert build.refusal(gpu) == "the GPU has compute capability 7.5; 8.0 is the least"
    monkeypatch.setattr(build, "_installed", lambda name: True)
    assert build.refusal(gpu) == "the GPU has compute capability 7.5; 8.0 is the least"
    monkeypatch.setattr(build, "_capability", lambda device: (8, 0))
    assert build.refusal(gpu) == ""
    assert build.architecture(gpu) == "sm_80"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert build.refusal(gpu) == "the CUDA kernels do not run on an AMD GPU, which the PyTorch reference serves"
    monkeypatch.setattr(build.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(UnsupportedError, match=r"need cuda-core.*pip install packedkv\[cuda\]"):
        build._core()


def decode_call(**changes: Any) -> None:
    """Decode attention of two sequences with consistent arguments, but for ``changes``."""
    pair = specs.decode_spec(SAW.key, SAW.value, 64, 64, changes.get("pairs", 0))
    pages, table = torch.zeros(3, 2, pair.tile_bytes(64), dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int32)
    tokens, side = StepTokens(pages, table, torch.zeros(2, dtype=torch.int32)), Constants(None, None, 64)
    given = {"q": torch.zeros(2, 4, 1, 64), "spec": specs.text_of(pair), "key": side, "value": side}
    given |= {name: x for name, x in changes.items() if name in given}
    tokens = tokens._replace(**{name: x for name, x in changes.items() if name in tokens._fields})
    rules = Rules(1.0, sinks=changes.get("sinks"))
    attention.decode_attention(**given, tokens=tokens, rules=rules, mean=changes.get("mean"))


def encode_call(**changes: Any) -> None:
    """Keys of two sequences to their pages with consistent arguments, but for ``changes``."""
    target = specs.EncodeSpec(specs.Encoder("kv::EncodeSaw<64>", "encode_saw.cuh"), None, 64, 64, 4608, 0, 2304)
    target = target._replace(mean=changes.pop("subtracts", "less" in changes))
    pages, table = torch.zeros(3, 2, 4608, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int32)
    x = {"key": changes.pop("keys", torch.zeros(2, 2, 3, 64)), "value": changes.pop("values", None)}
    new = NewTokens({role: x[role] for role in ROLES if x[role] is not None}, torch.zeros(2, dtype=torch.int32))
    new = new._replace(**{name: changes.pop(name) for name in new._fields if name in changes})
    given = {"pages": pages, "table": table, "spec": specs.text_of(target)}
    given |= dict.fromkeys(("key", "value"), Constants(None, None, 1))
    encode.encode_to_pages(new, **given | changes)


MEAN = torch.ones(1, 2, 64)
HELD = key_mean(MEAN, [1.0] * 32)
LESS = encode.RotatedMean(MEAN, torch.ones(1, 3, 32), torch.ones(1, 3, 32))
PLACED = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "changes", "error", "text"),
    [
        (decode_call, {}, UnsupportedError, "device cpu is not a CUDA GPU"),
        (decode_call, {"q": torch.zeros(2, 4, 2, 64)}, ShapeError, "one query token per sequence"),
        (decode_call, {"q": torch.zeros(2, 4, 1, 128)}, ShapeError, "does not fit head_dim=64"),
        (decode_call, {"q": torch.zeros(2, 3, 1, 64)}, ShapeError, "must divide the query heads"),
        (decode_call, {"spec": "int-5"}, UnsupportedError, "is unknown"),
        (
            decode_call,
            {"pages": torch.zeros(3, 2, 64, dtype=torch.uint8)},
            ShapeError,
            r"\[num_pages, H, 4608\] or longer",
        ),
        (decode_call, {"table": torch.zeros(2, 1, dtype=torch.int64)}, ShapeError, "table is torch.int64"),
        (decode_call, {"seq_lens": torch.zeros(3, dtype=torch.int32)}, ShapeError, "seq_lens 3; they must agree"),
        (decode_call, {"dense_k": torch.zeros(2, 2, 1, 64)}, ShapeError, "come together"),
        (
            decode_call,
            {"dense_k": torch.zeros(2, 2, 1, 64), "dense_v": torch.zeros(2, 2, 1, 64).half()},
            ShapeError,
            "use one floating dtype",
        ),
        (decode_call, {"sinks": torch.zeros(3)}, ShapeError, "one per query head, 4"),
        (decode_call, {"key": Constants(None, torch.ones(3, 2, 64), 1)}, ShapeError, "constants are of 3 sequences"),
        (encode_call, {}, UnsupportedError, "device cpu is not a CUDA GPU"),
        (encode_call, {"values": torch.zeros(2, 2, 3, 64)}, UnsupportedError, "no kernel encodes these values"),
        (encode_call, {"keys": torch.zeros(2, 2, 3, 32)}, ShapeError, r"\[2, 2, N, 64\] is needed"),
        (encode_call, {"pages": torch.zeros(3, 2, 100, dtype=torch.uint8)}, ShapeError, "4608"),
        (encode_call, {"first": torch.zeros(2)}, ShapeError, "first is torch.float32"),
        (decode_call, {"pairs": 32, "mean": HELD, "origin": PLACED}, UnsupportedError, "device cpu is not a CUDA GPU"),
        *(
            (decode_call, {"pairs": n, "mean": mean}, UnsupportedError, f"the spec is of {n} pairs of channels")
            for n, mean in ((0, HELD), (16, HELD), (32, None))
        ),
        (
            decode_call,
            {"pairs": 32, "mean": key_mean(MEAN.expand(3, -1, -1), [1.0] * 32), "origin": PLACED},
            ShapeError,
            "do not fit 2 sequences and 2 KV heads",
        ),
        *(
            (decode_call, {"pairs": 32, "mean": HELD, "origin": wrong}, ShapeError, "position of slot 0 of each")
            for wrong in (None, PLACED.long(), PLACED[:1])
        ),
        (encode_call, {"less": LESS}, UnsupportedError, "device cpu is not a CUDA GPU"),
        (encode_call, {"subtracts": True}, UnsupportedError, "pass mean=False to encode_spec"),
        (encode_call, {"subtracts": False, "less": LESS}, UnsupportedError, "pass mean=True to encode_spec"),
        *(
            (encode_call, {"less": wrong}, ShapeError, r"float32 \[1 or 2, 3, R / 2\] is needed")
            for wrong in (LESS._replace(sines=torch.ones(1, 2, 32)), LESS._replace(cosines=torch.ones(1, 3, 33)))
        ),
        (encode_call, {"less": LESS._replace(mean=MEAN[:, :1])}, ShapeError, r"float32 \[1 or 2, 2, 64\] is needed"),
        (lambda: key_mean(MEAN, [1.0] * 33), {}, ShapeError, r"expected \[1 or B, H, D\]"),
    ],
)
def test_operators_refuse_what_does_not_fit(
    call: Any, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(**changes)


# -- which codec has which kernel ------------------------------------------------------------------------------------


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    class Odd(SawInt4):
        pass

    assert isinstance(specs.reader(SawInt4(), 128, "key"), specs.Reader)
    with pytest.raises(UnsupportedError, match=r"no CUDA kernel reads .*Odd"):
        specs.reader(Odd(), 128, "key")
    with pytest.raises(UnsupportedError, match=r"no CUDA kernel encodes .*Odd"):
        specs.encoder(Odd(), 128, "key")
    with pytest.raises(UnsupportedError, match="head_dim 64, 80, 96, 128, 192, 256, 512, not 72"):
        specs.reader(SawInt4(), 72, "key")


def test_a_codec_of_another_package_adds_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(GroupInt):
        pass

    monkeypatch.setattr(specs, "_ADDED", dict(specs._ADDED))
    mine = specs.Reader("mine::Read<64>", "mine.cuh", folder="/elsewhere")

    def find(codec: Codec, dim: int, role: Role) -> specs.Reader:
        if role == "key":
            raise UnsupportedError("keys are not read")
        return mine

    specs.add_reader(Mine, find)
    assert specs.decode_spec(SawInt4(), Mine(), 128, 64).value == mine
    with pytest.raises(UnsupportedError, match="keys are not read"):
        specs.decode_spec(Mine(), Mine(), 128, 64)
    pair = specs.decode_spec(SawInt4(), Mine(), 128, 64)
    made = attention.program(pair, launch.Config(64, 4, 2, 1, 1))
    assert made.folders == (str(build.CSRC), "/elsewhere")
    assert '#include "mine.cuh"' in made.source


def test_what_a_reader_lacks_is_said() -> None:
    """To the author of a codec in another package."""
    with pytest.raises(SpecError, match=r"kv::X: shared=512 needs tables, .* computes=True where fill computes them"):
        specs.Reader("kv::X", "x.cuh", shared=512)
    specs.Reader("kv::X", "x.cuh", shared=512, computes=True)
    norm = torch.rand(2, 3, 64).double()
    found = constants_for(specs.Reader("kv::X", "x.cuh", factor="norm", order=4), {"norm": norm}, 3, 64)
    assert (found.tables, found.order) == (None, 4)
    assert torch.equal(found.factor, norm.float())
    one = constants_for(specs.Reader("kv::X", "x.cuh", factor="norm"), {"norm": norm[:1, :1]}, 3, 64)
    assert (one.factor.shape, one.factor.is_contiguous()) == ((1, 3, 64), True)
    wrong = specs.Reader("kv::X", "x.cuh", tables=lambda params: torch.zeros(2, 8, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match=r"expected uint8 \[3 or 1, bytes\]"):
        constants_for(wrong, {}, 3, 64)
    for held, returns in (({"norm": norm}, "'norm'"), ({}, "none")):
        with pytest.raises(UnsupportedError, match=f"wants the constant 'signs'; its codec's fit returns {returns}"):
            constants_for(specs.Reader("kv::Y", "y.cuh", factor="signs"), held, 3, 64)


def test_every_header_and_layout_named_for_a_preset_is_there() -> None:
    for spec in packedkv.presets():
        scheme = packedkv.get(spec)
        for role in ROLES:
            codec = scheme.codec(role)
            for find in (specs.reader, specs.encoder):
                try:
                    found = find(codec, 128, role)
                except UnsupportedError:
                    with pytest.raises(UnsupportedError, match=re.escape(str(codec))):
                        find(codec, 128, role)
                    continue
                assert pathlib.Path(found.folder, found.header).is_file(), found
                assert found.block == codec.block_tokens, spec
        if packedkv.describe(spec)["kernels"]["decode"] == "cuda":
            page = scheme.page_layout(128)
            pair = specs.decode_spec(scheme.key, scheme.value, 128, page.page_tokens)
            assert pair.tile_bytes(page.page_tokens) == page.page_bytes, spec
