"""CUDA kernels for NVIDIA GPUs: arguments, compilation at run time, launches, and the engine of a layer.

Only ``build`` imports cuda-core, and only when a kernel is needed.
"""
