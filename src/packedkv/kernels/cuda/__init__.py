"""CUDA kernels for NVIDIA GPUs: arguments, compilation at run time, launches, and the engine of a layer."""
