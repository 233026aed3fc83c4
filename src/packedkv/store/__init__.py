"""What caches and kernels share: pages and their memory, the constants of a layer, positions, sink rows."""
