"""Optional Triton kernels; one module per codec, found by the stem of the codec's own module.

Nothing here imports triton: the modules of this package do, and only when somebody asks for them.
"""
