"""Misuse of the library: every refusal says what came, what is allowed and what to do."""

import pytest
import torch

import packedkv
from packedkv.layout import PageLayout
from packedkv.registry import Method, register
from packedkv.scheme import KVScheme

X = torch.zeros(1, 2, 8, 64)

SPECS = {
    "octopus4": (
        r"unknown codec 'octopus4'\. Did you mean .*'octopus-4'.*\? `packedkv list`.* all \d+ presets",
        "typo",
    ),
    "saw_int4": (r"unknown codec 'saw_int4'\. Did you mean 'saw-int4'", "underscore"),
    "": (r"unknown codec ''\. `packedkv list`", "empty"),
    "no-such-thing-9": (r"unknown codec 'no-such-thing-9'", "number"),
    "saw-int4:blok=64": (
        r"saw-int4 has no option 'blok'\. Did you mean 'block'\? Its options: block, rotate",
        "option",
    ),
    "saw-int4:block": (r"option 'block' has no value; write block=VALUE", "no value"),
    "saw-int4:block=64,block=32": (r"option 'block' is given twice; give it once", "twice"),
    "saw-int4:block=sixty": (r"option block='sixty' is not allowed; expected int\|none", "no integer"),
    "saw-int4:rotate=q": (r"option rotate='q' is not allowed; expected k\|kv\|none", "choice"),
    "saw-int4:block=48": (r"block=48 is not a power of two; use 16, 32, 64 or 128", "value"),
    "dense:dtype=int8": (r"option dtype='int8' is not allowed; expected auto\|float16\|bfloat16\|float32", "dtype"),
}


@pytest.mark.parametrize("spec", SPECS, ids=[name for _, name in SPECS.values()])
def test_specs_that_do_not_exist(spec):
    with pytest.raises(packedkv.SpecError, match=SPECS[spec][0]):
        packedkv.compress(spec, X, X)
    with pytest.raises(ValueError, match=SPECS[spec][0]):
        packedkv.get(spec)


@pytest.mark.parametrize("thing", [None, 4, b"dense", ["dense"]], ids=["none", "int", "bytes", "list"])
def test_something_that_is_no_spec(thing):
    with pytest.raises(packedkv.SpecError, match=rf"got {type(thing).__name__}; expected a spec such as 'saw-int4'"):
        packedkv.get(thing)


def test_schemes_built_by_hand():
    codec = packedkv.get("dense").key
    with pytest.raises(packedkv.SpecError, match=r"window=-1: expected an integer >= 0"):
        KVScheme(codec, codec, window=-1)
    with pytest.raises(packedkv.SpecError, match=r"sink=1.5: expected an integer >= 0"):
        KVScheme(codec, codec, sink=1.5)
    with pytest.raises(packedkv.SpecError, match=r"layer=4: expected 0 <= layer < num_layers=4"):
        packedkv.compress("dense", X, X, layer=4, num_layers=4)


def test_a_name_that_is_taken():
    with pytest.raises(packedkv.SpecError, match=r"'dense' is taken by packedkv.codecs.dense; choose another"):
        register("dense", source="here")(lambda: packedkv.get("saw-int4"))
    assert packedkv.get("dense").key.config()["codec"] == "Dense"


def test_recipes_whose_options_have_no_type_or_default():
    def no_type(bits=4):
        return packedkv.get("saw-int4")

    def no_default(bits: int):
        return packedkv.get("saw-int4")

    for recipe in (no_type, no_default):
        with pytest.raises(
            packedkv.SpecError, match=r"'mine': parameter 'bits' .* a type and a default; write e\.g\. bits: int"
        ):
            register("mine", source="here")(recipe)
    with pytest.raises(packedkv.SpecError, match="unknown codec 'mine'"):
        packedkv.get("mine")


def test_a_recipe_that_returns_no_scheme():
    method = Method("mine", lambda: packedkv.get("dense").key, "here", {"mine": {}}, {"mine": "paper"})
    with pytest.raises(packedkv.SpecError, match=r"the recipe of 'mine' returned Dense; return a KVScheme"):
        method.scheme({})


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (X[0], X, r"keys: got \(2, 8, 64\) torch.float32; expected a floating point tensor \[batch, kv_heads"),
        (X, X[None], r"values: got \(1, 1, 2, 8, 64\)"),
        (X.int(), X, r"keys: got \(1, 2, 8, 64\) torch.int32; expected a floating point tensor"),
        (X.tolist(), X, r"keys: got list; expected a floating point tensor"),
        (X, X[:, :, :3], r"keys \(1, 2, 8, 64\) and values \(1, 2, 3, 64\) differ"),
        (X, X[:, :1], r"keys \(1, 2, 8, 64\) and values \(1, 1, 8, 64\) differ"),
    ],
    ids=["3d", "5d", "integers", "list", "tokens", "heads"],
)
def test_tensors_of_the_wrong_shape(k, v, message):
    cache = packedkv.LayerCache(packedkv.get("dense"))
    for call in (lambda: packedkv.compress("dense", k, v), lambda: cache.append(k, v)):
        with pytest.raises(packedkv.ShapeError, match=message):
            call()
    assert len(cache) == 0


@pytest.mark.parametrize("dim", [33, 100, 7])
def test_head_dims_that_a_codec_cannot_take(dim):
    """Refused before any work, with the way out; or taken and right."""
    x, good = torch.zeros(1, 1, 256, dim), torch.zeros(1, 1, 4, 64)
    for preset in packedkv.presets():
        try:
            packedkv.get(preset).effective_bits(dim)
        except packedkv.ShapeError as refused:
            said = str(refused)
        else:
            assert not any(y.any() for y in packedkv.compress(preset, x, x).decode()), preset
            continue
        assert f"head_dim={dim}" in said, preset
        cache = packedkv.LayerCache(packedkv.get(preset))
        for call in (packedkv.compress, lambda _, *given, cache=cache: cache.append(*given)):
            with pytest.raises(packedkv.ShapeError, match=rf"head_dim={dim}.*(use|multiple)"):
                call(preset, x, x)
        assert (len(cache), cache.batch, cache.nbytes()) == (0, 0, {}), preset
        cache.append(good, good)
        assert len(cache) == 4, f"{preset}: a refused append must leave a usable cache"


@pytest.mark.parametrize(
    ("bad", "what"),
    [(float("nan"), "is not finite"), (float("inf"), "is not finite"), (1e5, "is above 65504")],
    ids=["nan", "inf", "1e5"],
)
@pytest.mark.parametrize("which", ["keys", "values"])
def test_values_that_no_codec_can_store(which, bad, what):
    tensors = {"keys": X.clone(), "values": X.clone()}
    tensors[which][0, 1, 3, 9] = bad
    place = rf"{which}\[batch=0, head=1, token=3, channel=9\] = .* {what}; .*Check the model's dtype"
    with pytest.raises(ValueError, match=place):
        packedkv.compress("saw-int4", **tensors)
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    cache.append(X, X)
    with pytest.raises(ValueError, match=place):
        cache.append(**tensors)
    assert len(cache) == 8


def test_tensors_that_do_not_fit_the_cache():
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    cache.append(X, X)
    for wrong in (X.repeat(2, 1, 1, 1), X[:, :1], torch.zeros(1, 2, 8, 128)):
        with pytest.raises(packedkv.ShapeError, match=r"holds batch=1, kv_heads=2, head_dim=64; .*reset\(\)"):
            cache.append(wrong, wrong)
    assert len(cache) == 8


def test_constants_of_a_role_that_there_is_not():
    with pytest.raises(packedkv.SpecError, match=r"params are given for 'keys'; pass"):
        packedkv.compress("saw-int4", X, X, params={"keys": {}})


def test_operations_beyond_what_the_cache_holds():
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    with pytest.raises(packedkv.UnsupportedError, match="append keys and values before decoding"):
        cache.decode()
    cache.append(X, X)
    with pytest.raises(packedkv.ShapeError, match=r"crop\(9\): the cache holds 8 tokens; pass 0..8"):
        cache.crop(9)
    with pytest.raises(packedkv.ShapeError, match=r"crop\(-1\)"):
        cache.crop(-1)
    with pytest.raises(packedkv.ShapeError, match=r"evict\(6, keep=3\): the cache holds 8 tokens"):
        cache.evict(6, keep=3)
    with pytest.raises(packedkv.ShapeError, match=r"q \(1, 3, 1, 64\) does not fit .*multiple of the KV heads"):
        cache.attend(torch.zeros(1, 3, 1, 64))
    for bounds in ((-5, 5), (5, 9), (5, 2)):
        with pytest.raises(packedkv.ShapeError, match=r"holds tokens 0\.\.8"):
            cache.decode(*bounds)
    assert len(cache) == 8


def test_pages_that_blocks_do_not_tile():
    dense = packedkv.get("dense").key.layout(64)
    grouped = packedkv.Layout(64, 32, dense.fields, 16)
    with pytest.raises(packedkv.ShapeError, match=r"page_tokens=48 is not a multiple of block_tokens=32; .*e\.g\. 64"):
        PageLayout(dense, grouped, 48)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not a packedkv scheme"),
        ("[]", "not a packedkv scheme"),
        ("{}", "not a packedkv scheme"),
        ('{"key": {"codec": "Nope"}, "value": {"codec": "Dense"}}', "unknown codec class 'Nope'; this installation"),
        ('{"key": {"codec": "Dense", "x": 1}, "value": {"codec": "Dense"}}', "not a packedkv scheme"),
    ],
    ids=["text", "list", "empty", "class", "option"],
)
def test_json_that_is_no_scheme(text, message):
    with pytest.raises(packedkv.FormatError, match=message):
        packedkv.from_json(text)


def test_codec_files_that_add_nothing(tmp_path):
    with pytest.raises(packedkv.SpecError, match=r"was not found; pass the path of a \.py file"):
        packedkv.load_file(tmp_path / "gone.py")
    (tmp_path / "notes.md").write_text("x = 1\n")
    with pytest.raises(packedkv.SpecError, match=r"notes\.md' is no \.py file; pass the path of one"):
        packedkv.load_file(tmp_path / "notes.md")
    (tmp_path / "empty_codec.py").write_text("x = 1\n")
    with pytest.raises(packedkv.SpecError, match=r"no new preset; decorate its recipe with @packedkv.register"):
        packedkv.load_file(tmp_path / "empty_codec.py")
    (tmp_path / "broken_codec.py").write_text("def (\n")
    with pytest.raises(packedkv.SpecError, match=r"broken_codec\.py is not Python: .*line 1"):
        packedkv.load_file(tmp_path / "broken_codec.py")
