"""Settings of the daemon and keys of instances: declaration, sources (TOML, environment, flags), validation."""
