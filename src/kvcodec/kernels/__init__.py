"""Optional CUDA kernels, compiled at run time: one skeleton, with a small reader and encoder per codec.

Only ``build`` imports cuda-core, and only when a kernel is needed.
"""
