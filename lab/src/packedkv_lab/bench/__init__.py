"""Benchmarks of the GPU kernels and of the CPU; how kernels are timed: `packedkv_lab.bench.timing`."""

PARTS = ("decode", "encode", "prefill", "generate", "first", "serve")
"""Benches whose rows go to a folder: those of each are ``PART.jsonl``."""
