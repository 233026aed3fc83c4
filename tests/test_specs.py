"""Specs that were accepted stay accepted: names of presets, values of options, and the marks of presets."""

import json

import pytest

import packedkv
from packedkv.cli.main import main
from packedkv.errors import SpecError

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
