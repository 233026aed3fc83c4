"""Optional CUDA kernels, compiled while the program runs: one skeleton, small readers and encoders per codec.

Nothing here imports cuda-core: ``build`` does, and only when a kernel is wanted.
"""
