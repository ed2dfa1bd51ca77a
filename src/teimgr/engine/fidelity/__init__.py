"""The choice of dtype and batching: candidates, their speed, and their results beside a reference."""
