"""Attention-output error: recorded inputs, and the error of a scheme on them."""

import gc
import weakref

import pytest
import torch

import packedkv
from packedkv.cli.measure import fidelity
from packedkv.codec import Sample, Site
from packedkv.errors import UnsupportedError
from tests.cli.tiny import tiny_llama
from tests.conftest import tiny_config, tiny_model


@pytest.fixture(scope="module")
def recorded():
    model = tiny_llama()
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(1))
    outputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda _, args, __: outputs.append(args[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad(), fidelity.record(model, queries=32) as records:
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return model, records, outputs


def test_recomputed_outputs_are_the_models_own(recorded):
    _, records, outputs = recorded
    assert [r.layer for r in records] == [0, 1, 2]
    for r, seen in zip(records, outputs, strict=True):
        mine = r.output(r.k, r.v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mine, seen[:, -32:], atol=1e-5, rtol=1e-4)


def test_error_is_zero_for_16_bit_and_grows_as_bits_fall(recorded):
    _, records, _ = recorded
    exact = [r.output(r.k, r.v) for r in records]
    errors = [fidelity.attention_error(records, exact, spec).mean for spec in ("dense", "int-8", "int-4", "int-2")]
    assert errors[0] < 1e-3
    assert errors == sorted(errors)
    assert errors[3] > 0.1


def test_boundary_layers_count_as_the_scheme_says(recorded):
    _, records, _ = recorded
    exact = [r.output(r.k, r.v) for r in records]
    by_layer = fidelity.attention_error(records, exact, "octopus-2:dense_keys=1,window=0").by_layer
    assert by_layer[1] > by_layer[0], "keys of the first layer are dense"
    assert by_layer[1] > by_layer[2], "and of the last"


def test_rounded_queries_and_given_constants_enter_the_error(recorded):
    _, records, _ = recorded
    exact = [r.output(r.k, r.v) for r in records]

    def error(spec, params=None):
        return fidelity.attention_error(records, exact, spec, params=params).mean

    plain, rounded = (error(f"ultraquant:queries={q},dense_layers=0") for q in ("exact", "fp8"))
    assert plain != rounded
    assert rounded == pytest.approx(plain, rel=0.2)
    norm = {layer: {"key": {"norm": torch.full((1, 2, 64), 3.0)}} for layer in range(3)}
    same = {layer: {"key": {"norm": torch.ones(1, 2, 64)}} for layer in range(3)}
    assert error("innerq-base:sink=0,window=0", norm) != error("innerq-base:sink=0,window=0", same)
    assert error("innerq-base:sink=0,window=0", same) == error("innerq-base:norm=false,sink=0,window=0")


def test_error_of_one_layer_is_its_definition(recorded):
    _, records, _ = recorded
    r = records[1]
    exact = r.output(r.k, r.v)
    k, v = packedkv.compress("int-4", r.k, r.v, layer=1).decode()
    expected = ((r.output(k, v) - exact).norm() / exact.norm()).item()
    found = fidelity.attention_error([r], [exact], "int-4")
    assert found.by_layer == {1: pytest.approx(expected)}
    assert (found.mean, found.worst_layer) == (pytest.approx(expected), 1)


def test_masks_soft_caps_and_learned_sinks_enter_the_scores():
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = torch.ones(1, 1, 3, 6, dtype=torch.bool).tril(3)
    mask[..., 0] = False
    sinks = torch.randn(4)
    got = fidelity.LayerRecord(0, q, k, v, mask, 0.3, 5.0, sinks).output(k, v)
    scores = torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3 / 5) * 5
    e = scores.exp() * mask
    expected = e @ v.repeat_interleave(2, 1) / (e.sum(-1, keepdim=True) + sinks.exp().view(1, 4, 1, 1))
    torch.testing.assert_close(got, expected)
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(fidelity.LayerRecord(0, q, k, v, additive, 0.3, 5.0, sinks).output(k, v), got)


def test_a_model_without_attention_is_refused():
    model = tiny_llama()
    with pytest.raises(UnsupportedError, match="no attention layer was seen"), fidelity.record(model):
        pass


def test_sliding_layers_are_recorded_with_their_own_mask():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("mistral")).eval()
    outputs = []
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda _, args, __: outputs.append(args[0]))
    with torch.no_grad(), fidelity.record(model, queries=8) as records:
        model(torch.randint(0, 128, (1, 50)), use_cache=False)
    mine = records[0].output(records[0].k, records[0].v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mine, outputs[0][:, -8:], atol=1e-5, rtol=1e-4)


def test_nothing_keeps_alive_what_was_recorded():
    model = tiny_llama()
    with torch.no_grad(), fidelity.record(model, queries=4) as records:
        model(torch.arange(20)[None], use_cache=False)
    held = [weakref.ref(r.k) for r in records]
    del records
    gc.collect()
    assert [r() for r in held] == [None] * 3, "transformers keeps the attention function that was registered"


def test_layers_that_borrow_keys_are_compressed_as_their_lenders():
    model = tiny_model("gemma3n")  # layers 2 and 3 borrow from 0 and 1
    with torch.no_grad(), fidelity.record(model, queries=8) as records:
        model(torch.randint(1, 128, (1, 64)), use_cache=False)
    assert [(r.layer, r.owner) for r in records] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert records[2].k is records[0].k
    exact = [r.output(r.k, r.v) for r in records]
    ends = packedkv.KVScheme(packedkv.get("int-2").key, packedkv.get("dense").value, dense_key_layers=1)
    errors = fidelity.attention_error(records, exact, ends).by_layer
    assert list(errors) == [0, 1, 2, 3]
    assert max(errors.values()) < 1e-3, "layers 0 and 1 are all that cache: the first and the last"
    # constants that only queries give: there are none for layers 2 and 3
    scheme = packedkv.get("saw-int4:hessian=true")
    given = {r.layer: {"key": scheme.key.fit(Site(r.layer, "key", 2, 64), Sample(r.k, r.q))} for r in records[:2]}
    assert fidelity.attention_error(records, exact, scheme, params=given).worst < 1
