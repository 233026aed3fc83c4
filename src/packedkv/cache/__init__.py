"""Caches of one layer: the schedule of sink tokens, packed pages and window, in host or device memory."""
