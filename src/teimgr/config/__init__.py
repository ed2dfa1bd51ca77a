"""Settings of the daemon: declaration, sources (TOML, environment, flags), validation.

Also validates keys of instances, which are declared in `spec.py`.
"""
