"""Kernels and graphs that only a GPU runs: fused norms, attention within texts, captured forwards."""
