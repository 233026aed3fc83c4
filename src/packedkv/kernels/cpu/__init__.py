"""Kernels for CPUs: C++ with vector instructions, compiled when the package is built, not while it runs."""
