"""Caches of one layer: packed pages, the schedule of sink, pages and window, and what kernels read."""
