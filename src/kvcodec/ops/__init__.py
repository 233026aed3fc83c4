"""PyTorch maths that two codecs or more share: bit packing, Hadamard, Lloyd-Max, groups. Imports torch only."""
