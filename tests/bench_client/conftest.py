"""A multiplexer and a daemon for the load generator."""

from tests.client.conftest import api_url, certificates, daemon, mtls_url, multiplexer, mux_url, unused_port

__all__ = ["api_url", "certificates", "daemon", "mtls_url", "multiplexer", "mux_url", "unused_port"]
