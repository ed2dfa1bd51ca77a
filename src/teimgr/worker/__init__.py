"""The process around an engine."""
