"""Bytes: frames between processes, Arrow batches, the status table. No torch, no FastAPI."""
