"""Credentials of gRPC's listener: of PEM files on this host, or of what the daemon sends to a mux on another one."""

from __future__ import annotations

from typing import Any

import grpc

from teimgr.auth.tls_files import Pems


class GrpcCertificates:
    """Server credentials; new connections use what `take` got last."""

    def __init__(self, pems: Pems) -> None:
        self._demand_client = pems.ca is not None
        self._newest = _configuration(pems)

    def credentials(self) -> Any:
        """Credentials of one listener, which follow `take`."""
        used = self._newest

        def fetch() -> Any:
            """Called on a thread of gRPC for each new connection; None keeps the current configuration."""
            nonlocal used
            former, used = used, self._newest
            return None if used is former else used

        return grpc.dynamic_ssl_server_credentials(used, fetch, self._demand_client)

    def take(self, pems: Pems) -> None:
        """Use these for new connections."""
        self._newest = _configuration(pems)


def _configuration(pems: Pems) -> Any:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
