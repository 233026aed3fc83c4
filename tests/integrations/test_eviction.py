"""Eviction and quantization together: what is left of a prefill goes into a packed cache, and decoding goes on.

docs/evaluate.md shows the same steps.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import packedkv
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention import ATTENTION_NAME
from tests.cli.tiny import tiny_llama

TOKENS, KEPT, NEW = 96, 48, 20
GUIDE = Path(__file__).parents[2] / "docs/evaluate.md"
SPECS = ("dense", "saw-int4", "q4_0", "kivi-2:group=16,window=16")


class CodedCache(DynamicCache):
    """Holds K and V as they come and hands out what the codec makes of all of them; whole, so by another way."""

    def __init__(self, config, spec):
        super().__init__(config=config)
        self.spec = spec

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return packedkv.compress(self.spec, keys, values, layer=layer_idx).decode()


def kept(layer):
    """Per head the tokens with the shortest keys (Devoto et al., arXiv:2406.11430), oldest first."""
    best = layer.keys.norm(dim=-1).topk(KEPT, largest=False).indices.sort(-1).values[..., None]
    return [x.gather(2, best.expand(-1, -1, -1, x.shape[-1])) for x in (layer.keys, layer.values)]


def decoded_after(model, cache, tokens):
    """Logits of ``tokens``, one by one, at the positions that they have where nothing was evicted."""
    with torch.no_grad():
        places = ((tokens[:, i : i + 1], torch.tensor([[TOKENS + i]])) for i in range(tokens.shape[1]))
        return torch.cat([model(t, **passing(model, cache), position_ids=p).logits for t, p in places], 1)


@pytest.mark.parametrize("attention", ["decoded", "streamed"])
@pytest.mark.parametrize("spec", SPECS)
def test_what_was_kept_is_packed_once_and_decoding_reads_it(spec, attention):
    model = tiny_llama()
    if attention == "streamed":
        model.set_attn_implementation(ATTENTION_NAME)
    generator = torch.Generator().manual_seed(3)
    ids, later = (torch.randint(0, 256, (1, n), generator=generator) for n in (TOKENS, NEW))
    with torch.no_grad():
        full, whole = DynamicCache(config=model.config), cache_for(model, spec, attention=attention)
        model(ids, **passing(model, full))
        model(ids, **passing(model, whole))
    packed, plain = cache_for(model, spec, attention=attention), CodedCache(model.config, spec)
    for i, layer in enumerate(full.layers):
        packed.update(*kept(layer), i)
        plain.update(*kept(layer), i)
    assert packed.report()["tokens"] == KEPT
    assert packed.report()["total_bytes"] < whole.report()["total_bytes"]
    found, expected = decoded_after(model, packed, later), decoded_after(model, plain, later)
    # the two add in another order, which moves a code of a later layer now and then
    assert float((found - expected).norm() / expected.norm()) < 0.01
    far = decoded_after(model, whole, later)
    assert float((far - expected).norm() / expected.norm()) > 0.1, "eviction changed nothing"


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # from transformers 5.24 on
def test_the_guide_shows_these_steps():
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "position_ids" in c]
    model, spec = tiny_llama(), "saw-int4"
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(4))
    names = {"model": model, "prompt_ids": ids}
    exec(code, names)
    packed = names["packed"]
    assert str(packed.scheme) == spec
    assert packed.report()["tokens"] == TOKENS // 2 + 1
    assert names["logits"].shape == (1, 1, 256)
