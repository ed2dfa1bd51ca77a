"""The choice of dtype and batching: candidates, their speed, and the comparison of their results with a reference."""
