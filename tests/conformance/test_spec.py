"""Specs: every preset parses to itself, survives JSON and repr, and explains its options."""

from dataclasses import replace

import pytest

import packedkv
from packedkv.registry import codec_classes, method_of, options_of


def text_of(value: object) -> str:
    """An option's value as a spec writes it."""
    return (
        {True: "true", False: "false", None: "none"}.get(value, str(value))
        if value in (None, True, False) and not (isinstance(value, int) and not isinstance(value, bool))
        else str(value)
    )


def with_option(spec: str, option: str) -> str:
    return f"{spec}{',' if ':' in spec else ':'}{option}"


def test_dense_leads_and_no_preset_is_listed_twice():
    presets = packedkv.presets()
    assert presets[0] == "dense"
    assert len(presets) == len(set(presets))
    assert {method_of(p).name for p in presets} == set(packedkv.names())


def test_spec_json_and_repr_give_an_equal_scheme(spec):
    scheme = packedkv.get(spec)
    assert str(scheme) == spec
    assert packedkv.get(scheme) is scheme
    back = packedkv.from_json(scheme.to_json())
    assert back == scheme == packedkv.get(str(scheme))
    assert (back.spec, hash(back)) == (spec, hash(scheme))
    names = {"KVScheme": packedkv.KVScheme, **codec_classes()}
    assert eval(repr(scheme), names) == scheme
    for codec in (scheme.key, scheme.value):
        assert eval(repr(codec), names) == codec
        config = codec.config()
        assert config.pop("codec") == type(codec).__name__
        for name, value in config.items():
            assert isinstance(value, (int, float, str, bool, tuple, list, dict, type(None))), name
            with pytest.raises(AttributeError):  # frozen
                setattr(codec, name, None)


def test_every_option_given_as_it_is_changes_nothing(spec):
    scheme = packedkv.get(spec)
    for name, value in options_of(spec).items():
        same = packedkv.get(with_option(spec, f"{name}={text_of(value)}")) if ":" not in spec else scheme
        assert same == scheme, name
        assert str(same) == spec, f"{name}: an option at its default does not belong in the canonical spec"


def test_every_preset_keeps_as_many_first_tokens_dense_as_told(spec):
    preset = spec.partition(":")[0]
    more = packedkv.get(preset).sink + 3
    scheme = packedkv.get(f"{preset}:sink={more}")
    assert scheme == replace(packedkv.get(preset), sink=more)
    assert packedkv.get(str(scheme)) == scheme
    with pytest.raises(packedkv.SpecError, match="sink=-1: expected an integer >= 0"):
        packedkv.get(f"{preset}:sink=-1")


def test_describe_shows_every_option_with_a_text(spec):
    described = packedkv.describe(spec)
    shown = {o["name"]: o for o in described["options"]}
    assert set(shown) == set(options_of(spec))
    for name, option in shown.items():
        assert option["doc"], f"{spec}: option {name} has no text in the recipe's Parameters section"
        assert option["type"]
        assert option["value"] == options_of(spec)[name], name
        if option["choices"]:
            assert option["value"] in option["choices"]
    assert described["source"]
    assert described["summary"]
    assert described["spec"] == spec


def test_what_is_not_allowed_says_what_is(spec):
    preset = spec.partition(":")[0]
    with pytest.raises(packedkv.SpecError, match="no option 'no_such_option'") as error:
        packedkv.get(with_option(spec, "no_such_option=1"))
    assert all(name in str(error.value) for name in options_of(spec))
    for option in packedkv.describe(spec)["options"]:
        if option["type"] != "str":
            with pytest.raises(packedkv.SpecError, match=r"expected|allowed|use|not a") as error:
                packedkv.get(f"{preset}:{option['name']}=no-such-value")
            assert "no-such-value" in str(error.value)
    with pytest.raises(packedkv.SpecError, match="unknown codec") as error:
        packedkv.get(f"{preset}x")
    assert preset in str(error.value)
