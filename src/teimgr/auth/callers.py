"""Who an HTTP request is from: what its connection and its headers say, put before the policy."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import grpc

from teimgr.auth.policy import ANYBODY, Caller, Certified, Policy, attributes, key_in, san
from teimgr.errors import Code, TeimgrError, Unauthenticated, error_from_code
from teimgr.wire.status import STATUS

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


# TEI's words.
_NO_KEY = "No valid auth token"
_STATUS_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}
# gRPC has the alternative names by kind.
_SANS = {"peer_dns": "DNS", "peer_ip": "IP", "peer_uri": "URI", "peer_email": "email"}


def caller_of_call(policy: Policy, context: Any) -> Caller:
    """Who makes a call, by its servicer context.

    Raises:
        Unauthenticated: the certificate is none of those let in, or the key none of those known.
    """
    if policy.certificates.ask and not policy.certificates.admit(certified_by_grpc(context.auth_context())):
        raise Unauthenticated(NOT_LISTED)
    if policy.keys is None:
        return ANYBODY
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    caller = policy.caller(key_in(metadata.get("authorization"), metadata.get("x-api-key")))
    if caller is None:
        raise error_from_code(Code.UNAUTHENTICATED, _NO_KEY)
    return caller


def certified_by_grpc(facts: Mapping[str, Sequence[bytes]]) -> Certified:
    """The names in a certificate as gRPC's `auth_context` gives it."""
    subjects = (attributes(value.decode("utf-8", "replace")) for value in facts.get("x509_subject", ()))
    sans = ((kind, value) for fact, kind in _SANS.items() for value in facts.get(fact, ()))
    return Certified(
        frozenset(part for subject in subjects for part in subject),
        frozenset(san(kind, value.decode("utf-8", "replace")) for kind, value in sans),
    )


def grpc_status(error: TeimgrError) -> grpc.StatusCode:
    """What gRPC calls a failure."""
    return _STATUS_BY_NUMBER[STATUS[error.code].grpc]
