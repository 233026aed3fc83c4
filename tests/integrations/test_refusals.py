"""Models, layers and options that are refused: by name, with the reason, before anything runs."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, JambaConfig, MambaConfig, T5Config, ViTConfig

from packedkv.errors import SpecError, UnsupportedError
from packedkv.integrations.transformers import cache_for, plan
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention import left_padding, packedkv_attention
from packedkv.kernels.cpu import library
from tests.conftest import tiny_config, tiny_model
from tests.integrations.test_generate import prompt


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (lambda: tiny_config("deepseek-v3"), r"layers 0\.\.1 use multi-head latent attention \(kv_lora_rank=16\)"),
        (lambda: tiny_config("falcon-h1"), r"layer 0 is 'hybrid': it holds attention and recurrent state"),
        (lambda: BertConfig(), "a model without an attention cache"),
        (lambda: ViTConfig(), "a model without an attention cache"),
        (lambda: MambaConfig(num_hidden_layers=2), "a model without an attention cache"),
        (
            lambda: object(),
            "got object; expected a transformers model or its config. For other models use packedkv.Layer",
        ),
        (lambda: torch.nn.Linear(2, 2), "got Linear; expected a transformers model"),
        (lambda: "org/model", r"got str; expected .* Load the model first, e\.g\. with AutoModelForCausalLM\.from_pre"),
    ],
    ids=["mla", "hybrid", "encoder", "vision", "ssm", "no-model", "module", "name"],
)
def test_model_that_cannot_be_served_is_refused(config: Any, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        cache_for(config(), "saw-int4")


def test_encoder_decoder_models_are_taken_by_cache_for_alone() -> None:
    with pytest.raises(UnsupportedError, match="an encoder-decoder model; those are taken by cache_for"):
        plan.plan_for(T5Config(), "decoded")


FULL, SLIDING = "full_attention", "sliding_attention"


def layers_described_as(monkeypatch: pytest.MonkeyPatch, found: Any) -> Any:
    monkeypatch.setattr(plan, "get_layer_types_and_kwargs", lambda _config: found)
    return tiny_config("llama-gqa")


@pytest.mark.parametrize(
    ("found", "windows"),
    [
        (([FULL, SLIDING], {"sliding_window": 12}), [None, 12]),  # transformers 5.17 and 5.18
        (([SLIDING, FULL, SLIDING], [{"sliding_window": 12}, {}, {"sliding_window": 20}]), [12, None, 20]),  # later
        (([FULL, "chunked_attention"], [{}, {"sliding_window": 16}]), [None, 16]),
        (([SLIDING], [{"sliding_window": None}]), [None]),  # vLLM, told to switch the window off
    ],
    ids=["one-for-all", "one-for-each", "chunked", "switched-off"],
)
def test_windows_are_those_of_each_layer(monkeypatch: pytest.MonkeyPatch, found: Any, windows: list[Any]) -> None:
    cache = cache_for(layers_described_as(monkeypatch, found), "saw-int4")
    assert [layer.window or None for layer in cache.packed_layers] == windows


@pytest.mark.parametrize(
    "found",
    [
        ([FULL, SLIDING], [{"sliding_window": 12}]),
        ([FULL, SLIDING], [{}, {"window": 12}]),
        ([FULL, SLIDING], {"window": 12}),
        ([FULL, 3], [{}, {}]),
        {0: FULL, 1: FULL},
    ],
    ids=["fewer", "no-window", "no-window-for-all", "no-name", "mapping"],
)
def test_unknown_description_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """A later transformers may describe layers otherwise, as 5.19 did; nothing is guessed then."""
    came = re.escape(f"LlamaConfig: transformers {transformers.__version__} describes the layers as {found};")
    with pytest.raises(UnsupportedError, match=came + r".* Install a transformers that it knows \(5\.17 to 5\.24\)"):
        cache_for(layers_described_as(monkeypatch, found), "saw-int4")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("indexed_attention", "it caches indexer keys beside K and V"),
        ("reference_sliding_attention", "the prompt stays visible"),
        ("dummy_attention", "unknown to packedkv"),
    ],
)
def test_layer_type_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch, kind: str, text: str) -> None:
    config = layers_described_as(monkeypatch, ([FULL, kind], [{}, {"sliding_window": 12}]))
    with pytest.raises(UnsupportedError, match=f"layer 1 is '{kind}': .*{text}"):
        cache_for(config, "saw-int4")


def test_layers_without_a_cache_hold_nothing() -> None:
    """An MLP layer, which transformers 5.23 calls a dummy: no state, so nothing that a file would miss."""
    cache = cache_for(tiny_config("llama-gqa", layer_types=["moe", "full_attention"]), "saw-int4")
    assert [layer.index for layer in cache.packed_layers] == [1]
    assert ["nothing to hold" in layer["note"] for layer in cache.report()["unpacked_layers"]] == [True]
    with pytest.raises(UnsupportedError, match="the cache is empty"):
        cache.save("never-written")


def test_state_layers_keep_their_state_and_attention_is_packed() -> None:
    cache = cache_for(JambaConfig(num_hidden_layers=8, attn_layer_offset=4, attn_layer_period=8), "saw-int4")
    assert [layer.index for layer in cache.packed_layers] == [4]
    with pytest.raises(UnsupportedError, match="linear_attention layers hold a state that is not packed"):
        cache.save("never-written")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefill": "exakt"}, "prefill='exakt': expected one of exact, decoded. Did you mean 'exact'"),
        (
            {"attention": "stream"},
            "attention='stream': expected one of decoded, streamed, fused. Did you mean 'streamed'",
        ),
        ({"probe": "wran"}, r"probe='wran': expected one of refuse, warn, off\. Did you mean 'warn'"),
        ({"max_len": 0}, "max_len=0: expected a whole number of tokens, at least 1, or None"),
        ({"max_len": "33k"}, "max_len='33k': expected a whole number of tokens"),
    ],
)
def test_option_that_does_not_exist_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        cache_for(tiny_config("llama-gqa"), "saw-int4", **options)


def test_packed_layer_is_never_taken_for_a_tensor(tiny: Any) -> None:
    model = tiny("llama-gqa")
    model.set_attn_implementation("packedkv")
    cache = cache_for(model, "saw-int4", attention="streamed")
    with torch.no_grad():
        model(prompt(), **passing(model, cache))
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedError, match="keys or values that are still packed"):
            model(prompt(1, 1), **passing(model, cache))


def test_streamed_refuses_what_it_does_not_compute() -> None:
    with pytest.raises(UnsupportedError, match="the last 2 layers borrow K and V"):
        cache_for(tiny_config("gemma3n"), "saw-int4", attention="streamed")
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    for option, value in (
        ("position_bias", {"position_bias": torch.zeros(1)}),
        ("dropout", {"dropout": 0.1, "softcap": 1.0}),
    ):
        with pytest.raises(UnsupportedError, match=option):
            packedkv_attention(torch.nn.Module(), q, k, v, None, **value)


LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize(("masked", "sinks"), [(False, None), (False, LOGITS), (True, LOGITS)])
def test_plain_tensors(masked: bool, sinks: Any) -> None:
    """The exact prefill; a learned sink is one more key with a fixed score and a zero value."""
    q, k, v = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    mask = causal & (torch.arange(300) != 3) if masked else causal
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) / 4).masked_fill(~mask, -torch.inf)
    extra = torch.full((4,), -torch.inf) if sinks is None else sinks
    with_sink = torch.cat([scores, extra.reshape(1, 4, 1, 1).expand(1, 4, 300, 1)], -1).softmax(-1)[..., :-1]
    expected = (with_sink @ v.repeat_interleave(2, 1)).transpose(1, 2)
    given = mask[None, None] if masked else None
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    out, _ = packedkv_attention(module, q, k, v, given, scaling=0.25, s_aux=sinks)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("additive", [False, True])
def test_left_padding_is_read_from_the_mask(additive: bool) -> None:
    seen = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()[:, None, None]
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min) if additive else seen
    assert left_padding(mask).tolist() == [2, 0, 1]


def test_fused_on_a_cpu(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, where the CPU kernels serve every layer and the model's attention is not eager."""
    model = tiny("llama-gqa")
    model.set_attn_implementation("eager")
    assert "runs attention 'eager'" in cache_for(model, "saw-int4").report()["unfused"]
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    left = cache_for(model, "polarquant-3").report()
    assert model.config._attn_implementation == "sdpa"
    served = cache_for(model, "saw-int4").report()
    assert (served["attention"], served["unfused"]) == ("fused", "")
    assert model.config._attn_implementation == "packedkv"
    assert left["attention"] == "decoded"
    assert "layer 0: no CPU kernel reads PolarQuant" in left["unfused"]
    with pytest.raises(UnsupportedError, match=r"layer 0: no CPU kernel reads PolarQuant.* Use attention='decoded'"):
        cache_for(model, "polarquant-3", attention="fused")
    monkeypatch.setattr(library, "chosen", lambda: Path("missing.so"))
    with pytest.raises(UnsupportedError, match=r"layer 0: the CPU kernels are not compiled.* Use attention='decoded'"):
        cache_for(model, "octopus-3", attention="fused")
    assert "compile.py" in cache_for(model, "octopus-3").report()["unfused"]


def test_a_transformers_that_gives_the_argument_for_the_cache_a_third_name_is_refused_by_name() -> None:
    model = tiny_model("llama-gqa")

    def forward(input_ids: Any = None, kv_cache: Any = None) -> None: ...

    model.forward = forward
    said = r"neither as 'cache' nor as 'past_key_values'.*gives the argument another name.*5\.17 to 5\.24"
    with pytest.raises(UnsupportedError, match=said):
        cache_for(model, "saw-int4")
    with pytest.raises(UnsupportedError, match="takes no cache, neither as 'cache'"):
        passing(model, None)


# -- the argument by which a model takes its cache: the signature decides ----------------------------------------------

NEWER = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_model_gets_its_cache_by_the_name_that_it_knows(name: str) -> None:
    """Both names, whatever the version: that of a model's own code may differ from transformers'."""
    model = tiny_model("llama-gqa")
    forward = model.forward
    seen: list[Any] = []

    def by_cache(input_ids: Any = None, cache: Any = None) -> Any:
        seen.append(cache)
        return forward(input_ids, **given)

    def by_past(input_ids: Any = None, past_key_values: Any = None) -> Any:
        seen.append(past_key_values)
        return forward(input_ids, **given)

    packed = cache_for(model, "saw-int4")
    given = passing(model, packed)
    model.forward = {"cache": by_cache, "past_key_values": by_past}[name]
    assert passing(model, packed) == {name: packed}
    with torch.no_grad():
        model(prompt(2, 9), **passing(model, packed))
    assert seen == [packed]
    assert int(packed.get_seq_length()) == 9
    assert cache_for(model, "saw-int4").report()["model"] == type(model).__name__


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_both_names_and_returns_the_cache(name: str) -> None:
    """The older name works in all versions; newer ones say that it is old."""
    if name == "cache" and not NEWER:
        pytest.skip("this version knows the older name only")
    model = tiny_model("llama-gqa")
    cache = cache_for(model, "saw-int4")
    old = NEWER and name != "cache"
    with pytest.warns(FutureWarning, match="Use `cache` instead") if old else nullcontext():
        out = model.generate(
            prompt(1, 9), **{name: cache}, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
    assert out["cache" if NEWER else "past_key_values"] is cache
    assert int(cache.get_seq_length()) == 11
