"""Generate with a packed cache: the same model and call, a fraction of the bytes.

Run: python examples/02_generate.py [SPEC ...]      (downloads a model of 98 MB once)
"""

import sys
from importlib.resources import files

import packedkv
from packedkv.models.loading import load

text = (files("packedkv") / "data/wikitext2_test_head.txt").read_text(encoding="utf-8")
lm = load("smollm2-135m")
prompt = text[:1500].rpartition(" . ")[0] + " ."  # whole sentences
inputs = lm.tokenizer(prompt, return_tensors="pt")
print(f"{inputs['input_ids'].shape[1]} tokens of a text, and its continuation:")
for spec in sys.argv[1:] or ["dense", "int-4", "saw-int4", "octopus-4"]:
    cache = packedkv.cache_for(lm.model, spec)
    # from transformers 5.24 on the argument is named `cache`; `past_key_values` works and warns
    output = lm.model.generate(**inputs, past_key_values=cache, max_new_tokens=32, do_sample=False)
    text = lm.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    report = cache.report()
    print(f"\n{spec}: {report['total_bytes']} bytes, {report['effective_bits']:.2f} bits per element")
    print(f"  ... {' '.join(text.split())}")
