"""What all tests of kernels share: the emulated machine."""

from tests.kernels.emulation import machine

__all__ = ["machine"]
