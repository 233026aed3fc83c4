"""The table of geometries against the default configurations of all causal models of transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

from tests.geometries import GEOMETRIES

INTERLEAVED = re.compile(r"\bx\[(\.\.\.|:, :, :), 0?::2\]|view_as_complex")
"""How a model's file takes the first channels of interleaved pairs."""
OTHERWISE = {"MLA": "kv_lora_rank", "no attention": "state_size"}
"""Attributes of configurations whose keys have another width than ``head_dim``, or that have no keys."""


def layers_of(name: str) -> set[tuple[int, int, int, bool]]:
    """Head_dim, rotated channels, query heads per KV head and pairing of a model's default configuration."""
    made = transformers.CONFIG_MAPPING[name]()
    config = made.get_text_config(decoder=True)
    config.allow_global_per_layer_attribute_access = True

    def get(*names: str) -> Any:
        return next((found for n in names if (found := getattr(config, n, None))), None)

    heads = get("num_attention_heads")
    if heads is None or get(*OTHERWISE.values()):
        return set()
    file = Path(transformers.__file__).parent / "models" / type(made).__module__.split(".")[-2]
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(file.glob("modeling_*.py")))
    rope = get("rope_parameters") or {}
    ropes = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    found = set()
    for dim in {get("head_dim") or config.hidden_size // heads, get("global_head_dim")} - {None}:
        for own in ropes:
            share = own.get("partial_rotary_factor") or 1.0
            if own.get("rope_type") == "proportional":  # the others' frequency is 0
                share = 1.0
            rotated = get("rotary_dim") or (int(dim * share) if "rope_theta" in own else 0)
            found.add((dim, rotated, heads // (get("num_key_value_heads") or heads), bool(INTERLEAVED.search(text))))
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_table_has_the_geometry_of_every_causal_model() -> None:
    supported, missing, seen = range(16, 513, 16), {}, 0
    rotations = {(g.head_dim, g.rotated, g.interleaved or not g.rotated) for g in GEOMETRIES}
    groups = {g.group for g in GEOMETRIES}
    for name in sorted(MODELS):
        try:
            layers = layers_of(name)
        except Exception:  # a configuration of several models, which has no default
            continue
        for dim, rotated, group, interleaved in layers:
            seen += 1
            if dim in supported:
                if (dim, rotated, interleaved or not rotated) not in rotations:
                    missing[name, "rotated"] = dim, rotated, interleaved
                if group not in groups:
                    missing[name, "group"] = group
    assert not missing
    assert seen > 100
