"""A multiplexer and a daemon for embedding files."""

from tests.client.conftest import api_url, certificates, daemon, multiplexer, mux_url

__all__ = ["api_url", "certificates", "daemon", "multiplexer", "mux_url"]
