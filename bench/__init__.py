"""Measurements, run from the checkout: `python -m bench NAME`. README.md says what each one shows."""
