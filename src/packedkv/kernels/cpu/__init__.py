"""Kernels for CPUs: C++ with vector instructions, compiled when the package is built, not while it runs.

``attend.h`` goes through the tokens, ``read_<name>.h`` unpack them, ``encode.h`` and ``encode_<name>.h`` write new
ones; ``attend.cpp`` and ``encode.cpp`` have the entry points. ``compile.py`` compiles them once per instruction set,
``library.py`` loads the best that this machine can run, ``attend.py`` and ``encode.py`` call it.
"""
