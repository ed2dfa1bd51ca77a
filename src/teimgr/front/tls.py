"""Mutual TLS of the REST listener: what uvicorn is told, and which certified callers are let in.

The handshake verifies that a client's certificate chains to `ca_cert`. Subjects and alternative names are judged per
request, so that a refused caller reads why.
"""

from __future__ import annotations

import ssl
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from teimgr.front.answers import refusal
from teimgr.front.callers import permitted
from teimgr.listening import HttpProtocol
from teimgr.settings import Mtls

PUBLIC = ("/health", "/metrics")

_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "stateOrProvinceName": "ST",
    "localityName": "L",
    "domainComponent": "DC",
    "userId": "UID",
}


class CertifiedProtocol(HttpProtocol):
    """HTTP/1.1 that tells the application whom the TLS connection certifies.

    `scope["extensions"]["tls"]` holds `client_cert_name`, the subject as `O=y, CN=x`, and `client_cert_sans`, a list
    such as `["DNS:x"]`.
    """

    def on_message_begin(self) -> None:
        """Start a request's scope with the facts of the certificate."""
        super().on_message_begin()
        certificate = self.transport.get_extra_info("peercert") or {}
        extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
        extensions["tls"] = {
            "client_cert_name": subject_of(certificate),
            "client_cert_sans": [f"{kind}:{name}" for kind, name in certificate.get("subjectAltName", ())],
        }


def uvicorn_options(mtls: Mtls | None) -> dict[str, Any]:
    """Keyword arguments of `uvicorn.Config` that make the listener demand certificates; none without `mtls`."""
    if mtls is None:
        return {}
    return {
        "http": CertifiedProtocol,
        "ssl_certfile": str(mtls.server_cert),
        "ssl_keyfile": str(mtls.server_key),
        "ssl_ca_certs": str(mtls.ca_cert),
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    }


def subject_of(certificate: dict[str, Any]) -> str:
    """The subject of `SSLSocket.getpeercert()` as `O=y, CN=x`, in the certificate's order."""
    parts = (pair for relative in certificate.get("subject", ()) for pair in relative)
    return ", ".join(f"{_SHORT.get(name, name)}={value}" for name, value in parts)


class CertifiedCallers:
    """Answer 401 to callers that `permitted` refuses; probes are for everybody whom the handshake let in."""

    def __init__(self, app: ASGIApp, mtls: Mtls) -> None:
        self._app = app
        self._mtls = mtls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in PUBLIC:
            return await self._app(scope, receive, send)
        caller = scope.get("extensions", {}).get("tls", {})
        if permitted(self._mtls, caller.get("client_cert_name", ""), caller.get("client_cert_sans", ())):
            return await self._app(scope, receive, send)
        message = "Authentication required: the client certificate names nobody who is let in"
        return await refusal(401, "UNAUTHENTICATED", message)(scope, receive, send)
