"""Evaluate, benchmark, reproduce and report: the laboratory of packedkv."""
