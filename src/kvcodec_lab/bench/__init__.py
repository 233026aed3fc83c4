"""Timing of kernels in CUDA graphs, cold and warm; see `kvcodec_lab.bench.timing`."""
