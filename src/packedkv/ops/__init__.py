"""PyTorch maths that several codecs share: bit packing, Hadamard, Lloyd-Max, groups. Imports torch only."""
