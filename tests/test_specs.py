"""Specs that were accepted stay accepted: names of presets, values of options, and the marks of presets."""

import json

import pytest
import torch

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.cli.main import main
from packedkv.codec import Dense
from packedkv.errors import FormatError, KVError, SpecError
from packedkv.fitting.fit import about, fit_model
from packedkv.integrations.transformers import cache_for, load_cache
from packedkv.integrations.transformers.argument import passing
from packedkv.registry import LayerChoice, read_choices, read_recipe, scheme_of, write_recipe
from packedkv.scheme import mix_of
from tests.cli.tiny import TEXT, tiny_loaded
from tests.conftest import tiny_config

PRESETS = [
    "dense", "additive-k48_r4", "e8-2", "fp8", "ghost-4", "ghost-3", "ghost-2", "hqmq-s24_r3", "hqmq-s24_r4",
    "hqmq-s24_r6", "hqmq-s48_r3", "hqmq-s48_r4", "hqmq-s48_r6", "hqmq-s96_r3", "hqmq-s96_r4", "hqmq-s96_r6",
    "hqmq-s192_r3", "hqmq-s192_r4", "hqmq-s192_r6", "innerq-base", "innerq-small", "innerq-hybrid", "int-2",
    "int-3", "int-4", "int-8", "kivi-2", "kivi-4", "kivi-sink-2", "kivi-g64-4", "kivi-g64-3", "kivi-g128-4",
    "kivi-tq-4", "kivi-tq-3", "kvarn-k4v4", "kvarn-k4v2", "kvarn-k3v3", "octopus-4", "octopus-3", "octopus-2",
    "octopus-qjl-4", "octopus-qjl-3", "octopus-qjl-2", "polarquant-4", "polarquant-3", "polarquant-2", "q4_0",
    "rope-pairs-4", "rope-pairs-3", "saw-int4", "turboquant-4", "turboquant-3", "turboquant-2", "turboquant-qjl-3",
    "ultra-tq", "ultraquant",
]  # fmt: skip
OPTIONS = [
    "additive-k48_r4:k=24", "additive-k48_r4:k=96", "additive-k48_r4:k=192", "additive-k48_r4:r=3",
    "additive-k48_r4:r=6", "additive-k48_r4:reading=raw", "additive-k48_r4:reading=greedy", "dense:dtype=float16",
    "dense:dtype=bfloat16", "dense:dtype=float32", "fp8:scale=none", "ghost-4:transform=klt", "hqmq-s24_r3:s=48",
    "hqmq-s24_r3:s=96", "hqmq-s24_r3:s=192", "hqmq-s24_r3:r=4", "hqmq-s24_r3:r=6", "hqmq-s24_r3:outliers=3",
    "hqmq-s24_r3:outliers=4", "hqmq-s24_r3:outliers=5", "hqmq-s24_r3:slots=1", "hqmq-s24_r3:packing=radix",
    "hqmq-s24_r3:codebook=int8", "innerq-base:variant=small", "innerq-base:variant=hybrid",
    "innerq-base:symmetric=signed", "innerq-base:symmetric=full", "innerq-base:norm=false", "int-2:symmetric=true",
    "int-2:group=1", "int-2:outliers=3", "int-2:outliers=4", "int-2:outliers=5", "int-2:slots=1",
    "int-2:scale=search", "kivi-2:group=1", "kivi-2:values=turboquant", "kivi-2:scale=search",
    "kvarn-k4v4:key_bits=2", "kvarn-k4v4:key_bits=3", "kvarn-k4v4:value_bits=2", "kvarn-k4v4:value_bits=3",
    "kvarn-k4v4:group=64", "kvarn-k4v4:rounds=1", "octopus-4:rounding=scalar", "octopus-4:rounding=local_2x2",
    "octopus-4:rounding=full", "octopus-4:split=plus", "octopus-4:split=-2", "octopus-4:split=-1",
    "octopus-4:split=0", "octopus-4:split=1", "octopus-4:split=2", "octopus-4:group=1", "octopus-4:dense_keys=2",
    "octopus-4:norm=fp32", "octopus-4:scale=search", "octopus-qjl-4:rounding=scalar",
    "octopus-qjl-4:rounding=local_2x2", "octopus-qjl-4:rounding=full", "octopus-qjl-4:split=plus",
    "octopus-qjl-4:split=-2", "octopus-qjl-4:split=-1", "octopus-qjl-4:split=0", "octopus-qjl-4:split=1",
    "octopus-qjl-4:split=2", "octopus-qjl-4:group=1", "octopus-qjl-4:dense_keys=2", "octopus-qjl-4:norm=fp32",
    "polarquant-4:norm=fp32", "q4_0:rotate=k", "q4_0:rotate=none", "saw-int4:block=1", "saw-int4:rotate=kv",
    "saw-int4:rotate=none", "saw-int4:zero=float", "saw-int4:pack=halves", "saw-int4:kmeans=1",
    "saw-int4:hessian=true", "saw-int4:oscar=true", "saw-int4:scale=search", "turboquant-4:norm=fp32",
    "turboquant-4:scale=search", "turboquant-qjl-3:variant=printed", "turboquant-qjl-3:norm=fp32",
    "ultra-tq:norm=block", "ultra-tq:table=sphere", "ultra-tq:table=calibrated", "ultra-tq:refit=0.5",
    "ultra-tq:group=1", "ultra-tq:dense_layers=1", "ultra-tq:scale=search", "ultraquant:c=0.5",
    "ultraquant:scale=real", "ultraquant:scale=search", "ultraquant:queries=fp8", "ultraquant:dense_layers=1",
    "int-4:sink=4,window=64", "saw-int4:window=128,recent=int-8", "turboquant-6:mean=pre",
    "kivi-2:sink=4,mean=post", "saw-int4:mean=none", "ghost-3:bits=3.5", "ghost-5",
]  # fmt: skip


def test_no_preset_is_gone():
    assert packedkv.presets() == PRESETS


@pytest.mark.parametrize("spec", OPTIONS)
def test_a_spec_with_options_is_accepted_and_keeps_its_name(spec):
    scheme = packedkv.get(spec)
    assert str(scheme) == spec
    assert packedkv.from_json(scheme.to_json()) == scheme


def test_each_preset_has_a_mark():
    marks = {mark: packedkv.presets(mark) for mark in ("recommended", "paper", "baseline")}
    assert sorted(preset for own in marks.values() for preset in own) == sorted(PRESETS)
    assert marks["recommended"] == ["ghost-4", "ghost-3", "ghost-2", "kivi-4", "kivi-tq-4", "saw-int4"]
    assert marks["baseline"] == ["dense", "additive-k48_r4", "fp8", "int-2", "int-3", "int-4", "int-8", "q4_0"]
    with pytest.raises(SpecError, match="use recommended, paper, baseline"):
        packedkv.presets("best")


def test_a_list_begins_with_the_recommended_presets_and_groups_the_others(capsys):
    main(["list"])
    _, *groups, _ = capsys.readouterr().out.split("\n\n")
    heads = [group.partition("\n")[0] for group in groups]
    names = [[line.split()[0] for line in group.splitlines()[1:]] for group in groups]
    assert (heads[0], names[0]) == ("recommended:", packedkv.presets("recommended"))
    assert (heads[-1], names[-1]) == ("baselines:", packedkv.presets("baseline"))
    assert names[heads.index("KIVI, arXiv:2402.02750:")][:2] == ["kivi-2", "kivi-sink-2"]
    assert sorted(name for group in names for name in group) == sorted(PRESETS)
    main(["list", "--json", "-"])
    rows = json.loads(capsys.readouterr().out)
    assert {row["spec"]: row["mark"] for row in rows}["saw-int4"] == "recommended"


# -- mixtures: a scheme per layer, and the recipe files that hold them -------------------------------------------------

CHOICES = [LayerChoice("int-8", "turboquant-4"), LayerChoice("kivi-4", "dense", window=64)]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.json"
    write_recipe(path, CHOICES, {"model": "tiny"})
    return str(path)


def test_a_recipe_file_is_a_spec(recipe):
    scheme = packedkv.get(recipe)
    assert scheme.layers
    assert str(scheme) == recipe
    first, second = scheme.for_layer(0, 2), scheme.for_layer(1, 2)
    assert (first.key, first.value) == (packedkv.get("int-8").key, packedkv.get("turboquant-4").value)
    assert (second.key, second.value, second.window) == (packedkv.get("kivi-4").key, Dense(), 64)
    assert read_choices(recipe) == (CHOICES, {"model": "tiny"})


def test_windows_come_from_the_presets_whose_codecs_are_used_and_dense_ones_have_none():
    assert scheme_of(LayerChoice("kivi-4", "dense")).window == packedkv.get("kivi-4").window
    assert scheme_of(LayerChoice("dense", "saw-int4")).window == 0
    both = scheme_of(LayerChoice("kivi-4", "innerq-base"))
    assert (both.sink, both.window) == (32, 128)
    assert scheme_of(LayerChoice("kivi-4", "innerq-base", sink=0, window=0)).window == 0
    assert packedkv.get("octopus-4").for_layer(0, 4).key == Dense()  # outer layers are the recipe's business
    assert mix_of([packedkv.get("octopus-4")] * 4).for_layer(0, 4).key == packedkv.get("octopus-4").key


def test_json_gives_an_equal_mixture_and_writes_equal_layers_once(recipe):
    scheme = packedkv.get(recipe)
    again = packedkv.from_json(scheme.to_json())
    assert again == scheme
    assert str(again) == recipe
    many = mix_of([packedkv.get("int-4")] * 30)
    assert len(json.loads(many.to_json())["schemes"]) == 1
    assert packedkv.from_json(many.to_json()) == many


def test_bits_are_means_over_the_layers(recipe):
    scheme = packedkv.get(recipe)
    layers = [scheme.for_layer(i, 2) for i in range(2)]
    assert scheme.key_bits(64) == sum(s.key_bits(64) for s in layers) / 2
    assert scheme.effective_bits(64) == sum(s.effective_bits(64) for s in layers) / 2
    found = packedkv.describe(recipe, 64)
    assert found["effective_bits"] == scheme.effective_bits(64)
    assert [layer["scheme"] for layer in found["layers"]] == ["int-8/turboquant-4", "kivi-4/dense"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.for_layer(0, 3),
        lambda s: s.for_layer(2, 2),
        lambda s: s.codec("key"),
        lambda s: s.page_layout(64),
        lambda s: s.encoded_tokens("key", 500),
        lambda s: packedkv.compress(s, torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64)),
        lambda s: LayerCache(s).append(torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64)),
        lambda s: mix_of([s, s]),
        lambda s: mix_of([]),
    ],
)
def test_what_is_of_one_layer_is_refused_of_the_mixture(recipe, ask):
    with pytest.raises(SpecError):
        ask(packedkv.get(recipe))


def test_one_layer_of_it_is_compressed_by_its_own_codecs(recipe):
    k, v = torch.randn(2, 1, 2, 200, 64)
    packed = packedkv.compress(recipe, k, v, layer=1, num_layers=2)
    assert packed.key.codec == packedkv.get("kivi-4").key
    assert packed.value.window.shape[2] == 64
    whole = packedkv.fake_quant(recipe, k, v, layer=1, num_layers=2)
    assert torch.equal(whole[1], v.half().float())


def test_a_model_is_served_saved_and_loaded_with_it(tiny, recipe, tmp_path):
    model = tiny("llama-gqa")
    ids = torch.randint(1, 128, (1, 150), generator=torch.Generator().manual_seed(3))
    cache = cache_for(model, recipe)
    model.generate(ids, **passing(model, cache), max_new_tokens=4, do_sample=False)
    for i, layer in enumerate(cache.layer_caches):
        held = packedkv.get(recipe).for_layer(i, 2)
        for role, state in layer.roles.items():
            assert state.codec == held.codec(role).for_dtype(torch.float32)
    report = cache.report()
    assert report["spec"] == recipe
    assert report["key_bits"] == packedkv.get(recipe).key_bits(64)
    cache.save(tmp_path / "cache.safetensors")
    again = load_cache(tmp_path / "cache.safetensors", model)
    assert again.scheme == cache.scheme
    for a, b in zip(cache.layer_caches, again.layer_caches, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.decode(), b.decode(), strict=True))


def test_a_model_with_another_number_of_layers_is_refused(recipe):
    with pytest.raises(SpecError, match=r"recipe for 2 KV layers, not for 3"):
        cache_for(tiny_config("llama-gqa", num_hidden_layers=3), recipe)


def test_constants_are_fitted_layer_by_layer(tmp_path):
    model = tiny_loaded()
    path = tmp_path / "recipe.json"
    plain = LayerChoice("int-8", "int-8")
    write_recipe(path, [plain, LayerChoice("innerq-base", "int-4"), plain])
    fitted = fit_model(model, str(path), TEXT, windows=1, window_tokens=256)
    assert {layer: list(roles) for layer, roles in fitted.items()} == {1: ["key"]}
    assert about(fitted)["constants"][0]["role"] == "key"
    saved = tmp_path / "fitted.safetensors"
    fitted.save(saved)
    cache_for(model.model, str(path), params=saved)
    with pytest.raises(FormatError, match="fitted for"):
        cache_for(model.model, "innerq-base", params=saved)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "no recipe"),
        ('{"format": "other"}', "no recipe"),
        (
            '{"format": "kvcodec-recipe", "version": 1, "layers": []}',
            'by kvcodec, the .* "format" to "packedkv-r',
        ),
        ('{"format": "packedkv-recipe", "version": 2, "layers": []}', "version 2"),
        ('{"format": "packedkv-recipe", "version": 1, "layers": []}', "one object per KV layer"),
        *((f'HEAD [{{"key": "int-4", "value": "int-4"}}], "about": {x}}}', "about is") for x in ("[1]", '"text"', "3")),
        ('HEAD [{"key": "int-4"}]}', "layer 0"),
        ('HEAD [{"key": 4, "value": "int-4"}]}', "layer 0"),
        ('HEAD [{"key": "int-4", "value": "int-4"}, "int-4"]}', "layer 1"),
        ('HEAD [{"key": "int-4", "value": "int-4", "window": true}]}', "layer 0"),
        ('HEAD [{"key": "int-4", "value": "int-4", "bits": 4}]}', "at most sink and window"),
    ],
)
def test_a_file_that_is_no_recipe_says_why(tmp_path, text, says):
    path = tmp_path / "recipe.json"
    path.write_text(text.replace("HEAD", '{"format": "packedkv-recipe", "version": 1, "layers":'))
    with pytest.raises(FormatError, match=says):
        packedkv.get(str(path))


def test_a_missing_file_and_a_misspelt_spec_are_named(tmp_path):
    with pytest.raises(FormatError, match=r"nowhere\.json.* cannot be read"):
        packedkv.get(str(tmp_path / "nowhere.json"))
    path = tmp_path / "recipe.json"
    path.write_text(
        '{"format": "packedkv-recipe", "version": 1, "layers": [{"key": "int-4", "value": "int-4"}, '
        '{"key": "saw-int5", "value": "int-4"}]}'
    )
    with pytest.raises(SpecError, match=r"layer 1: .*Did you mean 'saw-int4'"):
        read_recipe(path)
    with pytest.raises(SpecError, match="not another recipe"):
        scheme_of(LayerChoice(str(path), "int-4"))


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"NAME\.json"):
        write_recipe(tmp_path / "recipe.txt", CHOICES)
    with pytest.raises(KVError, match="cannot be written"):
        write_recipe(tmp_path / "no folder" / "recipe.json", CHOICES)
    with pytest.raises(SpecError):
        write_recipe(tmp_path / "recipe.json", [LayerChoice("int-5", "int-4")])
    assert not (tmp_path / "recipe.json").exists()
