"""Key norms folded into W_K and W_Q: the same logits, keys divided, the same codes, the way back, and refusals."""

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

import packedkv
from packedkv.errors import FitError, ShapeError, UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.fold import fold_key_norms

from ..conftest import tiny_config, tiny_model, unchanged, weights

FOLDED = ("llama-gqa", "llama-mqa", "llama-mha", "qwen2", "mistral", "gpt-oss")


def prompt(n=160, vocab=128, seed=0, batch=1):
    return torch.randint(1, vocab, (batch, n), generator=torch.Generator().manual_seed(seed))


def logits_and_keys(model, ids):
    """Logits ``[B, n, V]`` and the keys ``[B, H, n, D]`` that each layer would cache."""
    cache = DynamicCache(config=model.config)
    held: list[torch.Tensor] = []
    for layer in cache.layers:

        def update(k, v, *rest, layer=layer, whole=layer.update, **options):
            held.append(k)
            return whole(k, v, *rest, **options)

        layer.update = update
    with torch.no_grad():
        logits = model(ids, **passing(model, cache)).logits
    return logits, held


def fitted(model, ids):
    """Norms that innerq-base fits on a prompt, as ``cache_for(params=)`` takes them."""
    cache = packedkv.cache_for(model, "innerq-base:mean=none", probe=False)
    with torch.no_grad():
        model(ids, **passing(model, cache))
    return {layer.index: {"key": layer.cache.roles["key"].params} for layer in cache.packed_layers}


def ones(layer=0, heads=2, dim=64, value=1.0):
    return {layer: {"key": {"norm": torch.full((1, heads, dim), value)}}}


# -- what stays and what changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDED)
def test_logits_stay_for_any_prompt(name):
    model = tiny_model(name)
    params = fitted(model, prompt())
    for seed in (0, 5):  # the prompt that was fitted, and another one
        ids = prompt(seed=seed)
        before, _ = logits_and_keys(model, ids)
        with fold_key_norms(model, params) as folded:
            assert folded.layers == sorted(params)
            after, _ = logits_and_keys(model, ids)
        assert not torch.equal(before, after)
        assert float((after - before).abs().max()) <= 1e-4 * float(before.abs().max())


@pytest.mark.parametrize("name", FOLDED)
def test_the_largest_key_of_a_pair_becomes_its_root(name):
    model, ids = tiny_model(name), prompt(11)  # inside every sliding window, so that the norms are those of all keys
    params = fitted(model, ids)
    _, before = logits_and_keys(model, ids)
    fold_key_norms(model, params)
    _, after = logits_and_keys(model, ids)
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        norm = params[layer]["key"]["norm"]
        torch.testing.assert_close(new * norm[:, :, None], old, rtol=1e-3, atol=1e-4 * float(old.abs().max()))
        # of float32 keys, fitted on their 16-bit rounding
        pairs = [k.abs().amax(2).unflatten(-1, (2, -1)).amax(-2) for k in (old, new)]
        torch.testing.assert_close(pairs[1], pairs[0].sqrt(), rtol=2e-3, atol=0)
        assert not torch.allclose(pairs[0], pairs[1], rtol=0.1)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
def test_codes_without_norms_on_the_folded_model_are_those_with_norms(name):
    """Keys, codes and later logits are those of innerq-base with these norms: the 16-bit rounding, which meets keys
    before or after their division, tips a code here and there."""
    model, ids, filled = tiny_model(name), prompt(232), 224
    params = fitted(model, ids[:, :filled])

    def run(spec, params):
        cache = packedkv.cache_for(model, spec, params=params, probe=False)
        with torch.no_grad():
            model(ids[:, :filled], **passing(model, cache))  # attends exact keys, so each layer's input is exact
            codes = [c.store.read("key", 0, c.roles["key"].encoded)["codes"] for c in cache.layer_caches]
            keys = [c.decode()[0] for c in cache.layer_caches]
            steps = [model(ids[:, i : i + 1], **passing(model, cache)).logits for i in range(filled, ids.shape[1])]
        return codes, keys, torch.cat(steps, 1)

    logits, exact = logits_and_keys(model, ids)
    codes, keys, expected = run("innerq-base:mean=none", params)
    with fold_key_norms(model, params):
        folded_codes, folded_keys, found = run("innerq-base:norm=false,mean=none", None)
    for layer, k in enumerate(exact):
        assert float((codes[layer] == folded_codes[layer]).float().mean()) > 0.995  # bytes, of two codes each
        other = folded_keys[layer] * params[layer]["key"]["norm"][:, :, None]
        assert mean_square(other - keys[layer]) < 0.03 * mean_square(keys[layer] - k[:, :, :filled])
    assert mean_square(found - expected) < 0.03 * mean_square(expected - logits[:, filled:])


def mean_square(x):
    return float(x.double().square().mean())


def test_layers_without_norms_stay_as_they_are():
    model = tiny_model("llama-gqa")
    params, before = fitted(model, prompt()), weights(model)
    folded = fold_key_norms(model, {0: {"key": {}}, 1: params[1]})
    assert folded.layers == [1]
    assert repr(folded) == "FoldedKeyNorms(LlamaForCausalLM, layers=[1])"
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qk"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_16_bit_weights_are_scaled_in_float32(dtype):
    model = tiny_model("llama-gqa").to(dtype)
    before, params = weights(model), fitted(model, prompt())
    fold_key_norms(model, params)
    norm, name = params[0]["key"]["norm"].flatten()[:, None], "model.layers.0.self_attn.k_proj.weight"
    expected = (before[name].float() / norm).to(dtype)
    got = dict(model.named_parameters())[name]
    assert got.dtype == dtype
    assert float((got == expected).float().mean()) > 0.999  # norm or 1 / norm: the last bit of float32


# -- the way back ----------------------------------------------------------------------------------------------------


def test_unfold_is_exact_and_once():
    model = tiny_model("qwen2")
    before, params = weights(model), fitted(model, prompt())
    first = fold_key_norms(model, params)
    second = fold_key_norms(model, ones(heads=1, value=1.7))
    assert not unchanged(model, before)
    second.unfold()
    first.unfold()
    assert unchanged(model, before)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
    first.unfold()  # knows nothing any more
    assert not model.model.layers[0].self_attn.k_proj.weight.any()
    assert first.layers == []


def test_a_block_that_fails_unfolds():
    model = tiny_model("llama-gqa")
    before = weights(model)

    def fail():
        with fold_key_norms(model, ones(value=3.0)):
            assert not unchanged(model, before)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert unchanged(model, before)


def test_fp16_weights_that_would_overflow_leave_the_model_as_it_was():
    model = tiny_model("llama-gqa").half()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 3] = 6e4
    before = weights(model)
    with pytest.raises(UnsupportedError, match=r"push a torch.float16 weight beyond its range.*bfloat16 or float32"):
        fold_key_norms(model, ones(0, value=2.0) | ones(1, value=2.0))
    assert unchanged(model, before)


# -- refusals --------------------------------------------------------------------------------------------------------


def from_config(family, **options):
    common = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{family}Config")(**common | options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("make", "heads", "dim", "message"),
    [
        (lambda: tiny_model("qwen3"), 2, 64, r"layer 0: Qwen3Attention has k_norm, q_norm: its gains are shared"),
        (lambda: tiny_model("gemma3"), 2, 256, r"Gemma3Attention has k_norm, q_norm"),
        (lambda: tiny_model("phi3"), 1, 96, r"Phi3.*0 attention modules with q_proj and k_proj.*fused projections"),
        (lambda: tiny_model("deepseek-v3"), 2, 64, r"multi-head latent attention"),
        (lambda: tiny_model("gemma3n"), 2, 64, r"the last 2 layers read keys of earlier ones"),
        (lambda: tiny_model("llama4"), 2, 64, r"Llama4.*has qk_norm|could not be tried"),
        (lambda: from_config("Cohere"), 2, 64, r"does not rotate the pairs \(i, i \+ 32\), neighbouring channels"),
        (lambda: from_config("StableLm"), 2, 64, r"only 0.25 of a head's channels are rotated"),
        (lambda: from_config("Olmo", clip_qkv=8.0), 2, 64, r"clip_qkv=8.0 clips keys and queries"),
        (lambda: tiny_config("llama-gqa"), 2, 64, r"LlamaConfig has no weights"),
    ],
    ids=["qwen3", "gemma3", "phi3", "mla", "gemma3n", "llama4", "cohere", "stablelm", "olmo", "config"],
)
def test_models_that_cannot_be_folded(make, heads, dim, message):
    model = make()
    before = weights(model) if isinstance(model, nn.Module) else {}
    with pytest.raises(UnsupportedError, match=message):
        fold_key_norms(model, ones(heads=heads, dim=dim, value=2.0))
    assert not before or unchanged(model, before)


def test_projections_that_are_not_plain():
    class Adapted(nn.Linear):
        pass

    model = tiny_model("llama-gqa")
    model.model.layers[0].self_attn.q_proj = Adapted(64, 256, bias=False)
    with pytest.raises(UnsupportedError, match=r"q_proj is Adapted with torch.float32 weights on cpu.*plain nn.Linear"):
        fold_key_norms(model, ones())
    model = tiny_model("llama-gqa")
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight
    with pytest.raises(UnsupportedError, match="the weight of k_proj serves another place"):
        fold_key_norms(model, ones())


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, FitError, "params hold no key norms"),
        ({0: {"key": {}, "value": {}}}, FitError, "params hold no key norms"),
        (ones(layer=7), FitError, r"norms of layers \[7\]; LlamaForCausalLM caches keys in layers \[0, 1\]"),
        (ones(value=0.0), FitError, "layer 0: a key norm is not positive and finite"),
        ({0: {"key": {"norm": torch.ones(3, 2, 64)}}}, ShapeError, "norms of 3 sequences; one set of weights takes"),
        ({0: {"key": {"norm": torch.ones(2, 64)}}}, ShapeError, r"got key norms \(2, 64\); one set"),
        ({0: {"key": {"norm": torch.linspace(1, 2, 128).view(1, 2, 64)}}}, ShapeError, r"i and i \+ 32 of a rotary"),
        (ones(dim=32), ShapeError, r"k_proj gives 128 channels, norms \(1, 2, 32\) .* mean 64"),
        (ones(heads=4, dim=32), ShapeError, r"q_proj gives 256 channels, .* mean 128"),
    ],
    ids=["none", "empty", "layer", "zero", "batch", "2-d", "pairs", "dim", "heads"],
)
def test_norms_that_cannot_be_folded(params, error, message):
    model = tiny_model("llama-gqa")
    before = weights(model)
    with pytest.raises(error, match=message):
        fold_key_norms(model, params)
    assert unchanged(model, before)
