"""Supervision of instances, workers and muxes: state machine, restarts, rolling updates, state file, reload."""
