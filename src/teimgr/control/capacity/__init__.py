"""Capacity: how many replicas an instance has, decided by the work that waits and by what replicas compute."""
