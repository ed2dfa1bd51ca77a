"""Residence: which models are loaded now, decided by the calls that ask for them and by the memory there is."""
