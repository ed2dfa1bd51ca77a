"""Launching and adopting processes: launcher protocol, local launcher, fork server, process handles."""
