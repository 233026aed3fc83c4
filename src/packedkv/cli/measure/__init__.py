"""Measure presets on a model: perplexity, KL, attention error, generation speed."""
