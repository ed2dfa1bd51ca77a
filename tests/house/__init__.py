"""Figures of the code base's structure: `python -m tests.house [--root CHECKOUT] [--paths]`."""
