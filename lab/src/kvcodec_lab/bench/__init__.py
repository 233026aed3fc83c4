"""Benchmarks of the GPU kernels and of the CPU; how kernels are timed: `kvcodec_lab.bench.timing`."""

PARTS = ("decode", "encode", "prefill", "generate", "first")
"""The GPU benches; the rows of each are ``PART.jsonl`` in a run's folder."""
