"""The daemon's process: it puts the parts together and runs them."""
