"""Optional kernels: CUDA, compiled at run time, and C++ for CPUs, with a small reader and encoder for each codec."""
