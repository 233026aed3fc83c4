"""The library's version: read by the package, the files it writes and the build."""

__version__ = "0.1.0"
