"""``packedkv advise``: which preset, or which mixture of presets, for a model, a context and a memory."""
