"""State that caches and kernels share: pages and their memory, constants of a layer, positions, sink rows."""
