"""Misuse says what came, what is allowed and what to do; a failure leaves nothing half done."""

import pytest
import torch

import packedkv
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.integrations.transformers import layers
from packedkv.integrations.transformers.argument import passing
from packedkv.layout import PageLayout
from packedkv.registry import Method, register
from packedkv.scheme import KVScheme
from tests.conftest import tiny_config, tiny_model

SAW = packedkv.get("saw-int4")
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
    ("bad", "what", "dtype"),
    [
        (float("nan"), "is not finite", torch.float32),
        (float("inf"), "is not finite", torch.float32),
        (1e5, "is above 65504", torch.float32),
        (65536.0, "is above 65504", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("which", ["keys", "values"])
def test_values_that_no_codec_can_store(which, bad, what, dtype):
    tensors = {"keys": X.to(dtype).clone(), "values": X.to(dtype).clone()}
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
    for width in (7, 12):
        with pytest.raises(packedkv.ShapeError, match="does not fit 8 tokens"):
            cache.attend(X[:, :, :1], mask=torch.ones(1, 1, 1, width, dtype=torch.bool))
    with pytest.raises(packedkv.ShapeError, match="chunk=0"):
        cache.attend(X[:, :, :1], chunk=0)
    with pytest.raises(packedkv.ShapeError, match="batch of 1"):
        cache.select(torch.tensor([0, 1]))
    assert len(cache) == 8


def test_arguments_of_caches():
    with pytest.raises(packedkv.SpecError, match=r"pass packedkv.get\('saw-int4'\)"):
        packedkv.LayerCache("saw-int4")
    with pytest.raises(packedkv.ShapeError, match="page_tokens=0"):
        packedkv.LayerCache(SAW, page_tokens=0)
    with pytest.raises(packedkv.SpecError, match="max_len='10'"):
        packedkv.cache_for(tiny_config("llama-gqa"), "saw-int4", max_len="10")
    with pytest.raises(packedkv.ShapeError, match="page_tokens=48"):
        packedkv.cache_for(tiny_config("llama-gqa"), "kivi-2", page_tokens=48)


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


# -- what a failure or a long life leaves behind -----------------------------------------------------------------------


def kv(tokens, dim=64):
    return torch.randn(2, 1, 2, tokens, dim, generator=torch.Generator().manual_seed(tokens)).unbind()


def fail_once(monkeypatch, at):
    """The ``at``-th call of the codec's encode runs out of memory."""
    real, calls = SawInt4.encode, []

    def encode(self, x, params):
        calls.append(x)
        if len(calls) == at:
            raise MemoryError("no memory left")
        return real(self, x, params)

    monkeypatch.setattr(SawInt4, "encode", encode)


def test_keys_and_values_stay_in_step_when_an_append_dies_between_them(monkeypatch):
    cache, expected = packedkv.LayerCache(SAW), packedkv.LayerCache(SAW)
    cache.append(*kv(100))
    fail_once(monkeypatch, 2)
    with pytest.raises(MemoryError):
        cache.append(*kv(3))
    for c, sizes in ((cache, (5,)), (expected, (100, 5))):
        for n in sizes:
            c.append(*kv(n))
    assert len(cache) == 105
    for a, b in zip(cache.decode(), expected.decode(), strict=True):
        assert torch.equal(a, b)


def test_half_a_prefill_is_no_prefill(monkeypatch):
    monkeypatch.setattr(layers, "APPEND_TOKENS", 16)
    model = tiny_model("llama-gqa")
    cache = packedkv.cache_for(model, "saw-int4", attention="decoded", probe=False)
    ids = torch.arange(40)[None]
    fail_once(monkeypatch, 3)
    with torch.no_grad():
        with pytest.raises(MemoryError):
            model(ids, **passing(model, cache))
        assert len(cache.layer_caches[0]) == 0
        model(ids, **passing(model, cache))
    assert cache.get_seq_length() == 40


def test_sliding_layer_does_not_count_a_refused_token():
    layer = packedkv.cache_for(tiny_model("mistral"), "saw-int4", probe=False).packed_layers[0]
    k, v = kv(20)
    layer.update(k, v)
    seen = layer.get_seq_length(), layer.get_mask_sizes(1)
    with pytest.raises(ValueError, match="not finite"):
        layer.update(torch.full_like(k[:, :, :1], torch.nan), v[:, :, :1])
    assert (layer.get_seq_length(), layer.get_mask_sizes(1)) == seen


def test_reserved_cache_of_fixed_length_stays_bounded():
    cache = packedkv.LayerCache(SAW, capacity=128)
    sizes = []
    for _ in range(60):
        cache.append(*kv(10))
        cache.evict(max(len(cache) - 64, 0))
        sizes.append(sum(cache.nbytes().values()))
    assert max(sizes[30:]) <= max(sizes[:30])


def test_a_mask_is_broadcast_over_chunks():
    cache, q = packedkv.LayerCache(SAW), kv(1)[0]
    cache.append(*kv(100))
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(cache.attend(q, mask=everything, chunk=30), cache.attend(q))


def test_dense_in_32_bit_is_lossless():
    k, v = kv(70)
    packed = packedkv.compress("dense:dtype=float32", k, v)
    assert packed.effective_bits == 32
    cache = packedkv.LayerCache(packedkv.get("dense:dtype=float32"))
    cache.append(k, v)
    for hat in (packed.decode(), cache.decode()):
        assert torch.equal(hat[0], k)
        assert torch.equal(hat[1], v)


def test_class_of_the_package_is_not_replaced_by_a_namesake():
    type("SawInt4", (SawInt4,), {})
    assert packedkv.from_json(SAW.to_json()) == SAW
    assert type(packedkv.from_json(SAW.to_json()).key) is SawInt4


CODECS = ("dense", "fp8", "int-4", "kivi-2:window=8", "octopus-3:window=8", "saw-int4")


@pytest.mark.parametrize("spec", CODECS)
def test_wide_stride_views_give_the_right_bytes(spec):
    """K and V as slices of one fused projection, heads and tokens exchanged: strides as attention modules make them."""
    fused = torch.randn(2, 70, 3 * 2 * 64, generator=torch.Generator().manual_seed(0))
    _, k, v = (x.view(2, 70, 2, 64).transpose(1, 2) for x in fused.chunk(3, -1))
    assert not k.is_contiguous()
    strided, plain = packedkv.LayerCache(packedkv.get(spec)), packedkv.LayerCache(packedkv.get(spec))
    strided.append(k, v)
    plain.append(k.contiguous(), v.contiguous())
    for a, b in zip(strided.tensors(), plain.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("dim", [512, 576])
def test_wide_heads_are_not_corrupted(spec, dim):
    """Heads of 512 beside 256 in one model, rows of 576: every codec decodes them as it does 64."""
    errors = []
    for width in (64, 256, dim):
        k, v = kv(96, dim=width)
        k_hat, v_hat = packedkv.fake_quant(spec, k, v)
        errors.append(max((a - b).square().mean().item() for a, b in ((k, k_hat), (v, v_hat))))
    assert errors[-1] <= 2.0 * errors[0] + 1e-6, errors
