"""Wanted against actual: the manager, the supervisors, the store."""
