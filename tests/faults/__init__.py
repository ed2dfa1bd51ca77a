"""Fault injection: a real daemon under load, faults drawn by a seed, invariants checked after each.

`python -m tests.faults --faults 1000 --seed 1` is the long run; `test_soak.py` runs a few of each kind in the gate.
"""
