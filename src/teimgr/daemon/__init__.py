"""The daemon process: builds the parts and runs them."""
