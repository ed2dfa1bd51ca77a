"""Measurements, run from the checkout: `python -m bench NAME`. README.md explains each."""
