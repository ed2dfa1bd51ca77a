"""Capacity: autoscaling by waiting work and measured throughput, and recommendations."""
