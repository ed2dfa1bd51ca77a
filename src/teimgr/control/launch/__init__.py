"""Launching and adopting processes: the launcher protocol, the local launcher and its fork server, process handles."""
