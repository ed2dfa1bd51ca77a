"""Placement of workers on hosts and GPUs; CPU threads and batch tokens."""
