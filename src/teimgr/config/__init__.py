"""Settings of the daemon: declaration, sources (TOML, environment, flags), validation. Validation of instances' keys.

The keys of instances are declared in `spec.py`.
"""
