"""Metrics, traces, request context and logs, shared by all processes."""
