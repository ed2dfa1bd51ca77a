"""A multiplexer and a daemon for the load generator."""

import pytest
from tests.client.conftest import api_url, certificates, daemon, mtls_urls, multiplexer, mux_url, unused_port

__all__ = ["api_url", "certificates", "daemon", "mtls_url", "mtls_urls", "multiplexer", "mux_url", "unused_port"]


@pytest.fixture
def mtls_url(mtls_urls: tuple[str, str]) -> str:
    """The port of a server that asks for client certificates, by a name that is not in its own."""
    return mtls_urls[0].replace("localhost", "127.0.0.1")
