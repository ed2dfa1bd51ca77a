"""The HTTP inference gateway on the daemon's port."""
