"""Params files: what comes back, what a cache makes of it, and every file that is refused."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES
from packedkv.errors import FitError, FormatError, SpecError
from packedkv.files import container
from packedkv.files.params import (
    KIND,
    FittedParams,
    match_params,
    read_params,
    same_weights,
)
from packedkv.fitting.fit import fit_model
from packedkv.integrations.transformers import layers
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.plan import identify, load_params
from tests.cli.tiny import TEXT, leaning, tiny_llama, tiny_loaded

SMALL = {"windows": 2, "window_tokens": 96}
SPECS = ["innerq-base", "hqmq-s24_r3:outliers=3", "ultra-tq:table=calibrated,dense_layers=1"]


@pytest.fixture(scope="module")
def model():
    return tiny_loaded()


@pytest.fixture(scope="module")
def fitted(model):
    return {spec: fit_model(model, spec, TEXT, text_name="my.txt", **SMALL) for spec in SPECS}


@pytest.fixture
def saved(fitted, tmp_path):
    """A good file, fitted for hqmq with outliers: it holds constants of both roles and needs its seed."""
    path = tmp_path / "params.safetensors"
    fitted[SPECS[1]].save(path)
    return path


def prefill(model, cache, n=70):
    ids = torch.randint(0, 256, (2, n), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ids, **passing(model, cache)).logits


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_what_was_saved_comes_back(model, fitted, spec, tmp_path):
    before = fitted[spec]
    kept = before.save(tmp_path / "p.safetensors")
    after = load_params(tmp_path / "p.safetensors", model.model, spec)
    assert isinstance(after, FittedParams)
    assert (after.file, after.sha256) == ("p.safetensors", kept.sha256)
    assert (after.scheme, after.model, after.seed, after.seeded) == (
        before.scheme, before.model, before.seed, before.seeded,
    )  # fmt: skip
    assert (after.spec, after.text_name, after.text_sha256) == (spec, "my.txt", before.text_sha256)
    assert (after.tokens, after.windows, after.window_tokens) == (192, 2, 96)
    assert {i: set(roles) for i, roles in after.items()} == {i: set(roles) for i, roles in before.items()}
    for layer, roles in before.items():
        for role, params in roles.items():
            assert params.keys() == after[layer][role].keys()
            assert all(torch.equal(after[layer][role][name], x) for name, x in params.items())


def test_saving_twice_gives_the_same_bytes_and_constants_that_are_equal_are_written_once(fitted, tmp_path):
    once, twice = tmp_path / "a", tmp_path / "b"
    fitted[SPECS[1]].save(once)
    read_params(once).save(twice)
    assert once.read_bytes() == twice.read_bytes()
    names = [params for roles in fitted[SPECS[1]].values() for params in roles.values()]
    assert len(load_file(once)) == len(names) * 3 + 1, "channels are the same for all layers and roles"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("way", ["path", "object", "mapping"])
def test_a_cache_works_with_the_constants_of_the_file(model, fitted, spec, way, tmp_path):
    fitted[spec].save(tmp_path / "p")
    given = {"path": tmp_path / "p", "object": fitted[spec], "mapping": dict(fitted[spec].layers)}[way]
    cache = packedkv.cache_for(model.model, spec, params=given, prefill="decoded", probe=False)
    prefill(model.model, cache)
    for layer in cache.layer_caches:
        for role in ROLES:
            wanted = fitted[spec].get(layer.site.layer, {}).get(role)
            if wanted is not None:
                held = layer.roles[role].params
                assert all(torch.equal(held[name], x) for name, x in wanted.items())


def test_a_long_prefill_is_encoded_in_parts_with_the_constants_of_the_file(model, fitted, monkeypatch):
    whole = packedkv.cache_for(model.model, SPECS[1], params=fitted[SPECS[1]], probe=False, attention="decoded")
    prefill(model.model, whole)
    monkeypatch.setattr(layers, "APPEND_TOKENS", 20)
    sizes = []
    append = LayerCache.append
    monkeypatch.setattr(
        LayerCache, "append", lambda self, k, v, *at: (sizes.append(k.shape[2]), append(self, k, v, *at))
    )
    parts = packedkv.cache_for(model.model, SPECS[1], params=fitted[SPECS[1]], probe=False, attention="decoded")
    prefill(model.model, parts)
    assert max(sizes) == 20
    for a, b in zip(whole.layer_caches, parts.layer_caches, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.decode(), b.decode(), strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda layers: {str(layer): roles for layer, roles in layers.items()}, r"layers \['0', '1', '2'\]; Llama"),
        (lambda layers: {7: layers[0]}, r"layers \[7\]; LlamaForCausalLM caches keys and values in layers \[0, 1, 2\]"),
        (lambda layers: {0: {"keys": layers[0]["key"]}}, r"params of layer 0 are for \['keys'\]; pass them for 'key'"),
        (lambda layers: 3, "params are int: expected the path of a file of `packedkv fit`"),
        (lambda layers: [], "params are list: expected the path"),
        (lambda layers: {0: [1.0]}, "params are dict: expected the path"),
    ],
)
def test_constants_that_nothing_would_use_are_refused(model, fitted, change, text):
    with pytest.raises(FitError, match=text):
        packedkv.cache_for(model.model, SPECS[1], params=change(fitted[SPECS[1]].layers))


def test_constants_of_the_file_and_of_the_prefill_differ(model, fitted):
    own = packedkv.cache_for(model.model, SPECS[1], prefill="decoded", probe=False)
    given = packedkv.cache_for(model.model, SPECS[1], prefill="decoded", probe=False, params=fitted[SPECS[1]])
    prefill(model.model, own)
    prefill(model.model, given)
    a, b = (cache.layer_caches[1].roles["key"].params for cache in (own, given))
    assert torch.equal(a["inner.codebook"], b["inner.codebook"]), "drawn from the seed"
    assert not torch.equal(a["threshold"], b["threshold"]), "from different texts"


def test_a_saved_cache_keeps_the_constants_it_was_given(model, tmp_path):
    scheme = leaning()
    given = fit_model(model, scheme, TEXT, **SMALL)
    cache = packedkv.cache_for(model.model, scheme, params=given, prefill="decoded", probe=False)
    prefill(model.model, cache)
    cache.save(tmp_path / "c")
    back = packedkv.load_cache(tmp_path / "c", model.model)
    more = torch.randint(0, 256, (2, 3))
    with torch.no_grad():
        a, b = (model.model(more, **passing(model.model, c)).logits for c in (cache, back))
    assert torch.equal(a, b)


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_another_scheme_and_another_seed_where_it_matters_are_refused(model, fitted, saved):
    with pytest.raises(FormatError, match=r"fitted for hqmq-s24_r3:outliers=3, not for hqmq-s24_r3:outliers=4; run"):
        packedkv.cache_for(model.model, "hqmq-s24_r3:outliers=4", params=saved)
    with pytest.raises(FormatError, match="not for innerq-base"):
        load_params(saved, model.model, "innerq-base")
    with pytest.raises(FormatError, match=r"fitted with seed 0, .*not with seed 1; pass seed=0"):
        packedkv.cache_for(model.model, SPECS[1], seed=1, params=saved)
    packedkv.cache_for(model.model, SPECS[0], seed=1, params=fitted[SPECS[0]])


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"num_hidden_layers": 2}, "2 KV layers"),
        ({"num_key_value_heads": 4}, "4 KV heads"),
        ({"head_dim": 32}, "head_dim 32"),
        ({"model_type": "mistral"}, "mistral"),
    ],
    ids=["layers", "heads", "head_dim", "type"],
)
def test_a_model_of_another_shape_is_refused_by_its_config_alone(model, saved, change, differs):
    config = copy.deepcopy(model.model.config)
    for name, value in change.items():
        setattr(config, name, value)
        if name == "model_type":
            type(config).model_type, before = value, type(config).model_type
    try:
        with pytest.raises(FormatError, match=rf"not for a model of another shape \(.*{differs}.*run packedkv fit"):
            packedkv.cache_for(config, SPECS[1], params=saved)
    finally:
        if "model_type" in change:
            type(config).model_type = before


def test_a_model_of_other_weights_is_refused_and_its_config_alone_is_not(model, saved):
    torch.manual_seed(1)
    other = type(model.model)(model.model.config).eval()
    with pytest.raises(FormatError, match=r"fitted for tiny, whose weights are not those of this LlamaForCausalLM"):
        packedkv.cache_for(other, SPECS[1], params=saved)
    packedkv.cache_for(other.config, SPECS[1], params=saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_same_weights_in_16_bit_are_the_same_model(saved, dtype):
    packedkv.cache_for(tiny_llama().to(dtype), SPECS[1], params=saved)


def test_weights_that_were_trained_on_are_others():
    model = tiny_llama()
    weights = identify(model).weights
    assert len(weights) == 8
    assert same_weights(model, weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.std())
    assert not same_weights(model, weights)
    assert not same_weights(model, {"no.such.weight": (1, 1.0, 1.0)})


def test_constants_that_need_queries_are_refused_without_a_file(model):
    with pytest.raises(
        FitError, match=r"the key constants of layer 0 .*run `packedkv fit MODEL .* --text FILE -o PARAMS`"
    ):
        packedkv.cache_for(model.model, leaning())
    given = fit_model(model, leaning(), TEXT, **SMALL)
    with pytest.raises(FitError, match="the key constants of layer 2"):
        packedkv.cache_for(model.model, leaning(), params={0: given[0], 1: given[1]})
    packedkv.cache_for(model.model, leaning(dense_layers=1), params={1: given[1]})


def test_each_spec_gets_its_file_or_files_are_refused(fitted, saved, tmp_path):
    fitted[SPECS[0]].save(tmp_path / "innerq")
    same = packedkv.get("hqmq:s=24,r=3,outliers=3")  # of another name
    schemes = [*(packedkv.get(spec) for spec in ("dense", *SPECS)), same]
    found = match_params([saved, tmp_path / "innerq"], schemes)
    assert [None if f is None else f.spec for f in found] == [None, SPECS[0], SPECS[1], None, SPECS[1]]
    with pytest.raises(SpecError, match=r"fitted for hqmq-s24_r3:outliers=3, which is not among the specs given \(den"):
        match_params([saved], [packedkv.get("dense")])
    with pytest.raises(SpecError, match=r"params.safetensors and .*both fitted for hqmq-s24_r3:outliers=3"):
        match_params([saved, saved], [same])


# -- files that are not right ------------------------------------------------------------------------------------------


def resave(path, change):
    """Change the header of a file, with a fitting sha256 unless the text says otherwise."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][KIND.mark])
    tensors = load_file(path)
    change(header)
    if header["text"].pop("seal", True):
        header["sha256"] = container.digest({k: v for k, v in header.items() if k != "sha256"}, tensors)
    save_file(tensors, path, metadata={KIND.mark: json.dumps(header, sort_keys=True)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda h: h["text"].update(tokens=8192, seal=False),
            "its sha256 does not match; copy it again or run",
        ),
        (lambda h: h.update(version=2, packedkv="9.9"), r"version 2, written by packedkv 9\.9.*Update packedkv"),
        (lambda h: h.pop("scheme"), "does not fit this version: 'scheme'"),
        (lambda h: h.update(scheme=h["scheme"].replace("Hqmq", "NeverWritten")), "unknown codec class 'NeverWritten'"),
        (lambda h: h["layers"]["0"]["key"].update(threshold="params.0"), "does not fit this version"),
        (lambda h: h["model"].update(weights=[1]), "does not fit this version"),
        (lambda h: h.pop("layout_versions"), r"bytes of versions \{'key': 1, 'value': 1\}, here are \{'key': 5"),
    ],
    ids=["altered", "newer", "no-scheme", "unknown-codec", "no-tensor", "weights", "other-bytes"],
)
def test_a_file_whose_content_is_not_understood_is_refused(saved, change, message):
    resave(saved, change)
    with pytest.raises(FormatError, match=message):
        read_params(saved)


@pytest.mark.parametrize(("dim", "version"), [(64, 1), (96, 1), (128, 2), (256, 2), (None, 2)])
def test_versions_are_those_of_the_model_s_head_dim(dim, version):
    """None: heads of several sizes, some of which may have bytes of the higher version."""
    assert packedkv.get("octopus-2").layout_versions(dim) == {"key": 2, "value": version}


def test_a_foreign_file_is_refused(model, tmp_path):
    path = tmp_path / "cache"
    layers = [packedkv.LayerCache(packedkv.get("dense"))]
    from packedkv.files.caches import load_layers, save_layers

    save_layers(path, layers, {})
    with pytest.raises(FormatError, match=r"without the mark 'packedkv-params'; pass a file written by packedkv fit"):
        packedkv.cache_for(model.model, SPECS[0], params=path)
    fit_model(model, SPECS[0], TEXT, **SMALL).save(path)
    with pytest.raises(FormatError, match="without the mark 'packedkv-cache'"):
        load_layers(path)
    with pytest.raises(FileNotFoundError, match="was not found; pass the file that packedkv fit wrote"):
        read_params(tmp_path / "no")


def test_a_file_of_the_former_name_is_refused_by_that_name(tmp_path):
    path = tmp_path / "params"
    save_file({"x": torch.zeros(2)}, path, metadata={"kvcodec-params": "{}"})
    with pytest.raises(FormatError, match="by kvcodec, the former name of packedkv; run packedkv fit again"):
        read_params(path)
