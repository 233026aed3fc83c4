"""The kernels' halves of the codecs: readers, encoders, fits and look-up tables, one file for each of ``codecs/``."""
