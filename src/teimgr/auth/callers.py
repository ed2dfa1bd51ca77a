"""Authentication of HTTP requests and gRPC calls: extracts certificate and API key, and applies the policy."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from teimgr.auth.policy import (
    ANONYMOUS,
    NO_CERTIFICATE,
    Caller,
    CertificateNames,
    InvalidKey,
    Policy,
    alternative_name,
    key_in,
    subject_attributes,
)
from teimgr.errors import Code, error_from_code

# An ASGI scope, and its keys for the authenticated caller and for the connection's client certificate.
Scope = MutableMapping[str, Any]
CALLER, CERTIFICATE = "teimgr.caller", "teimgr.certificate"

# TEI's text.
_INVALID_KEY = "No valid auth token"
# Attribute names of getpeercert() → the short names that OpenSSL, and so gRPC, prints.
_SHORT_NAMES = {
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
# Keys of gRPC's auth_context → kinds of alternative names.
_GRPC_SANS = {"peer_dns": "DNS", "peer_ip": "IP", "peer_uri": "URI", "peer_email": "email"}


def caller_of(scope: Scope) -> Caller:
    """The caller of an authenticated request; `ANONYMOUS` where authentication is off."""
    caller: Caller = scope.get(CALLER, ANONYMOUS)
    return caller


def authenticate_request(policy: Policy, scope: Scope) -> Caller:
    """Authenticate an HTTP request by its ASGI scope.

    Raises:
        Unauthenticated: the certificate is not allowed, or the key is unknown.
    """
    headers = dict(reversed(scope["headers"]))  # the first of several
    authorization, x_api_key = (
        None if (value := headers.get(name)) is None else value.decode("latin-1")
        for name in (b"authorization", b"x-api-key")
    )
    return policy.authenticate(scope.get(CERTIFICATE, NO_CERTIFICATE), key_in(authorization, x_api_key))


def authenticate_call(policy: Policy, context: Any) -> Caller:
    """Authenticate a gRPC call by its servicer context.

    Raises:
        Unauthenticated: the certificate is not allowed, or the key is unknown.
    """
    if policy.is_open:
        return ANONYMOUS
    certificate = certificate_from_grpc(context.auth_context()) if policy.certificates.required else NO_CERTIFICATE
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    try:
        return policy.authenticate(certificate, key_in(metadata.get("authorization"), metadata.get("x-api-key")))
    except InvalidKey as error:
        raise error_from_code(Code.UNAUTHENTICATED, _INVALID_KEY) from error


def certificate_from_tls(certificate: Mapping[str, Any]) -> CertificateNames:
    """The names in a certificate as returned by `SSLSocket.getpeercert()`."""
    pairs = (pair for relative in certificate.get("subject", ()) for pair in relative)
    return CertificateNames(
        frozenset(f"{_SHORT_NAMES.get(kind, kind)}={value}" for kind, value in pairs),
        frozenset(alternative_name(kind, value) for kind, value in certificate.get("subjectAltName", ())),
    )


def certificate_from_grpc(properties: Mapping[str, Sequence[bytes]]) -> CertificateNames:
    """The names in a certificate as returned by gRPC's `ServicerContext.auth_context()`."""
    subjects = (subject_attributes(value.decode("utf-8", "replace")) for value in properties.get("x509_subject", ()))
    sans = ((kind, value) for key, kind in _GRPC_SANS.items() for value in properties.get(key, ()))
    return CertificateNames(
        frozenset(part for subject in subjects for part in subject),
        frozenset(alternative_name(kind, value.decode("utf-8", "replace")) for kind, value in sans),
    )
