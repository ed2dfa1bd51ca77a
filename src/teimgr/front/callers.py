"""Who an HTTP request is from: what its connection and its headers say, put before the policy."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from teimgr.access import ANYBODY, Caller, Certified, Policy, key_in, san
from teimgr.errors import Unauthenticated

# ASGI's scope of a request, and where in it there is the caller once it was let in, and what its connection certified.
Scope = MutableMapping[str, Any]
CALLER, CERTIFIED = "teimgr.caller", "teimgr.certified"

NOT_LISTED = "the client certificate names nobody who is let in"
_NOBODY = Certified()

# How getpeercert() calls the attributes whose short names OpenSSL, and so gRPC, prints.
_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "stateOrProvinceName": "ST",
    "localityName": "L",
    "domainComponent": "DC",
    "userId": "UID",
    "surname": "SN",
    "givenName": "GN",
    "streetAddress": "street",
}


def caller_of(scope: Scope) -> Caller:
    """Who asks, of a request that was let in; anybody where nobody is asked."""
    caller: Caller = scope.get(CALLER, ANYBODY)
    return caller


def caller_of_request(policy: Policy, scope: Scope) -> Caller:
    """Who sends a request.

    Raises:
        Unauthenticated: the certificate is none of those let in, or the key none of those known.
    """
    if not policy.certificates.admit(scope.get(CERTIFIED, _NOBODY)):
        raise Unauthenticated(NOT_LISTED)
    authorization, x_api_key = (_header(scope, name) for name in (b"authorization", b"x-api-key"))
    caller = policy.caller(key_in(authorization, x_api_key))
    if caller is None:
        raise Unauthenticated("send a valid API key, `Authorization: Bearer KEY`")
    return caller


def certified_by_tls(certificate: Mapping[str, Any]) -> Certified:
    """The names in a certificate as `SSLSocket.getpeercert()` gives it."""
    pairs = (pair for relative in certificate.get("subject", ()) for pair in relative)
    return Certified(
        frozenset(f"{_SHORT.get(kind, kind)}={value}" for kind, value in pairs),
        frozenset(san(kind, value) for kind, value in certificate.get("subjectAltName", ())),
    )


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
