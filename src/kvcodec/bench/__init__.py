"""Timing of kernels in CUDA graphs, cold and warm; see `kvcodec.bench.timing`."""
