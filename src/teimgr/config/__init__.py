"""Settings of the daemon: declaration, sources (TOML, environment, flags), validation and provenance."""
