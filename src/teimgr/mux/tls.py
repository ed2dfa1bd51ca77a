"""TLS of the gRPC listener, with certificate reload."""

from __future__ import annotations

from typing import Any

import grpc

from teimgr.auth.tls_files import TlsFiles, TlsWatch


class GrpcCertificates:
    """Server credentials from files; new connections use the files as of the last `take`.

    `watch`, while it runs, calls `take` when the files change.

    Raises:
        InvalidConfig: the files cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._demand_client = files.ca is not None
        self._first = _configuration(files)
        self._fresh: Any = None
        self.watch = TlsWatch(files, self.take)

    def credentials(self) -> Any:
        """For `grpc.aio.Server.add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(self._first, self._fetch, self._demand_client)

    async def take(self, files: TlsFiles) -> None:
        """Use these for new connections. Raises as above, and then keeps the ones before."""
        self._fresh = _configuration(files)

    def _fetch(self) -> Any:
        """Called on a thread of gRPC for each new connection; None keeps the current configuration."""
        fresh, self._fresh = self._fresh, None
        return fresh


def _configuration(files: TlsFiles) -> Any:
    pems = files.pems()
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
