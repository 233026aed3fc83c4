"""Attention kernels for CPUs: C++ with vector instructions, compiled when the package is built, not while it runs.

``attend.h`` goes through the tokens, ``read_<name>.h`` unpack them, ``attend.cpp`` has the entry points. ``compile.py``
compiles them once per instruction set, ``library.py`` loads the best that this machine can run, ``attend.py`` calls it.
"""
