"""Authentication and authorisation policy: rights, API keys, client certificate rules.

REST and gRPC apply the same `Policy` (`authenticate_request`, `authenticate_call`). Keys are stored and compared as
SHA-256, which suffices for random keys.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from fnmatch import translate
from functools import lru_cache
from typing import Any

from teimgr.errors import Code, Forbidden, Unauthenticated, error_from_code

# The SHA-256 of a shorter key can be reversed by brute force.
MIN_KEY_CHARS = 16
DEFAULT_MAX_WORKERS = 16
"""Limit of the workers of all instances of a restricted key."""
_KEY_PREFIX = "teimgr_"
_KEY_BYTES = 32

# A comma, semicolon or plus ends an attribute of a subject, unless it is escaped.
_ATTRIBUTE = re.compile(r"(?:\\.|[^\\,;+])+", re.DOTALL)
_ESCAPED = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)
# Kinds of alternative names as OpenSSL prints them, and our name for each.
_SAN_KINDS = ("DNS", "IP", "URI", "email")
_SAN_ALIASES = {"IP Address": "IP"}

# An ASGI scope, and its keys for the authenticated caller and for the connection's client certificate.
Scope = MutableMapping[str, Any]
CALLER, CERTIFICATE = "teimgr.caller", "teimgr.certificate"

# TEI's text.
_INVALID_KEY = "No valid auth token"
# Attribute names of getpeercert() → the short names that OpenSSL prints.
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


class Right(str, Enum):
    """A right of a caller; no right includes another."""

    ADMIN = "admin"  # change the fleet, its models and its settings
    INFERENCE = "inference"  # send inference requests
    READ = "read"  # read the state of the fleet, its logs and its metrics


_OPERATORS = (Right.ADMIN, Right.READ)


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client. `instances` are names and globs; None means all instances.

    `max_workers` limits the workers of all instances of a restricted caller. Its calls are charged to and counted for
    `tenant`, 0 for none; `has_quota`: calls that exceed its quotas are refused.
    """

    name: str
    rights: frozenset[Right]
    instances: tuple[str, ...] | None = None
    max_workers: int = DEFAULT_MAX_WORKERS
    tenant: int = 0
    has_quota: bool = False

    @property
    def is_restricted(self) -> bool:
        return self.instances is not None

    @property
    def is_operator(self) -> bool:
        """True if the caller may know where models are and why they failed; clients of inference need neither."""
        return not self.rights.isdisjoint(_OPERATORS)

    def covers(self, instance: str) -> bool:
        return self.instances is None or _cover_of(self.instances)(instance)

    def require(self, rights: frozenset[Right]) -> None:
        """Check that the caller has one of `rights`; an empty set requires none.

        Raises:
            Forbidden: the caller has none of them.
        """
        if rights and not rights & self.rights:
            wanted = " or ".join(sorted(right.value for right in rights))
            raise Forbidden(f"The key '{self.name}' lacks the right {wanted}")

    def require_instance(self, instance: str) -> None:
        """Check that the caller may use this instance. The answer does not reveal whether the instance exists.

        Raises:
            Forbidden: the caller may not use it.
        """
        if not self.covers(instance):
            allowed = ", ".join((self.instances or ())[:_SHOWN_PATTERNS]) or "none"
            raise Forbidden(f"The key '{self.name}' is not for instance '{instance}'; it is for {allowed}")


@lru_cache(1024)
def _cover_of(instances: tuple[str, ...]) -> Callable[[str], bool]:
    """Return whether a name is one of `instances`, or matches a glob of them: thousands are compared.

    Only globs are in the pattern: to compile 5,000 names takes 260 ms.
    """
    names = frozenset(each for each in instances if _GLOB.isdisjoint(each))
    globs = re.compile("|".join(translate(each) for each in instances if each not in names) or "(?!)")
    return lambda name: name in names or globs.match(name) is not None


_GLOB = frozenset("*?[")


_SHOWN_PATTERNS = 8  # of a key's instances in a message

ANONYMOUS = Caller("", frozenset(Right))
"""The caller if authentication is off, with all rights."""


class InvalidKey(Unauthenticated):
    """No API key was sent, or an unknown one."""

    def __init__(self) -> None:
        super().__init__("send a valid API key, `Authorization: Bearer KEY`")


@dataclass(frozen=True, slots=True)
class CertificateNames:
    """Names in a verified client certificate: subject attributes (`CN=indexer`) and alternative names (`DNS:x`)."""

    subject: frozenset[str] = frozenset()
    sans: frozenset[str] = frozenset()


NO_CERTIFICATE = CertificateNames()


@dataclass(frozen=True, slots=True)
class CertificateRules:
    """Allow-lists for client certificates that the TLS handshake has verified. An empty list allows all."""

    subjects: tuple[str, ...] = ()
    sans: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        return bool(self.subjects or self.sans)

    def allow(self, certificate: CertificateNames) -> bool:
        """True if one of `subjects` and one of `sans` matches.

        A subject matches when all its attributes are in the certificate's, in any order; an attribute without a type,
        `search`, matches any attribute with that value. A name matches with its kind (`DNS:x`) or without (`x`).
        """
        subject_matches = not self.subjects or any(_has_subject(certificate, wanted) for wanted in self.subjects)
        return subject_matches and (not self.sans or any(_has_san(certificate, wanted) for wanted in self.sans))


@dataclass(frozen=True, slots=True)
class Key:
    """One API key: its hex SHA-256, rights, instances and limit of workers."""

    name: str
    sha256: str
    rights: tuple[str, ...]
    instances: tuple[str, ...] | None = None
    max_workers: int = DEFAULT_MAX_WORKERS
    tenant: int = 0
    has_quota: bool = False

    def caller(self) -> Caller:
        rights = frozenset(map(Right, self.rights))
        return Caller(self.name, rights, self.instances, self.max_workers, self.tenant, self.has_quota)


@dataclass(frozen=True, slots=True)
class Policy:
    """The callers accepted by the listeners. `keys` is None if no key is required; an empty tuple accepts no caller.

    With certificate rules and keys, both are required: the certificate identifies the machine, the key its rights.
    `is_certified`: the handshake requires a certificate signed by our authority.
    """

    certificates: CertificateRules = CertificateRules()
    keys: tuple[Key, ...] | None = None
    is_certified: bool = False

    @property
    def is_open(self) -> bool:
        """True if authentication is off."""
        return self.keys is None and not self.certificates.required

    def authenticate(self, certificate: CertificateNames, key: str | None) -> Caller:
        """Return the caller with this client certificate and API key. HTTP and gRPC both decide by this method.

        Every known key is compared, each in constant time.

        Raises:
            InvalidKey: the key is missing or unknown.
            Unauthenticated: the certificate is not allowed.
        """
        return self.authenticate_digest(certificate, digest(key) if key else None)

    def authenticate_digest(self, certificate: CertificateNames, sha256: str | None) -> Caller:
        """Like `authenticate`, with the hex SHA-256 of the key, which a session stores."""
        if not self.certificates.allow(certificate):
            raise Unauthenticated("the client certificate's subject or names are not allowed")
        if self.keys is None:
            return ANONYMOUS
        found = [each for each in self.keys if hmac.compare_digest(sha256 or "", each.sha256)]
        if not found:
            raise InvalidKey
        return found[0].caller()

    def numbered(self, tenants: Mapping[str, int]) -> Policy:
        """Return the policy with tenant numbers set, by the name of each key."""
        if self.keys is None:
            return self
        return replace(self, keys=tuple(replace(key, tenant=tenants.get(key.name, 0)) for key in self.keys))

    def to_json(self) -> str:
        """Return the policy as one line of JSON, with the digests of the keys."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Policy:
        values = json.loads(text)
        rules = CertificateRules(**{name: tuple(names) for name, names in values["certificates"].items()})
        keys = None if values["keys"] is None else tuple(map(_key, values["keys"]))
        return cls(rules, keys, values["is_certified"])


class PolicyInForce:
    """The current policy, read at each request and replaced by a reload of the configuration."""

    def __init__(self, policy: Policy) -> None:
        self.now = policy
        self._listeners: list[Callable[[], None]] = []

    def swap(self, policy: Policy) -> None:
        """Replace the policy for new requests; requests in flight continue."""
        self.now = policy
        for listener in tuple(self._listeners):
            listener()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change; call the returned function to unsubscribe."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)


def caller_of(scope: Scope) -> Caller:
    """Return the caller of an authenticated request; `ANONYMOUS` if authentication is off."""
    caller: Caller = scope.get(CALLER, ANONYMOUS)
    return caller


def authenticate_request(policy: Policy, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
    """Authenticate an HTTP request by its ASGI scope and its headers; of a repeated header the first value counts.

    Raises:
        Unauthenticated: the certificate is not allowed, or the key is unknown.
    """
    authorization, x_api_key = (
        None if (value := headers.get(name)) is None else value.decode("latin-1")
        for name in (b"authorization", b"x-api-key")
    )
    return policy.authenticate(scope.get(CERTIFICATE, NO_CERTIFICATE), key_in(authorization, x_api_key))


def authenticate_call(policy: Policy, certificate: CertificateNames, metadata: Mapping[str, str]) -> Caller:
    """Authenticate a gRPC call by the certificate of its connection and its metadata.

    Raises:
        Unauthenticated: the certificate is not allowed, or the key is unknown.
    """
    if policy.is_open:
        return ANONYMOUS
    try:
        return policy.authenticate(certificate, key_in(metadata.get("authorization"), metadata.get("x-api-key")))
    except InvalidKey as error:
        raise error_from_code(Code.UNAUTHENTICATED, _INVALID_KEY) from error


def certificate_from_tls(certificate: Mapping[str, Any]) -> CertificateNames:
    """Return the names in a certificate as returned by `SSLSocket.getpeercert()`."""
    pairs = (pair for relative in certificate.get("subject", ()) for pair in relative)
    return CertificateNames(
        frozenset(f"{_SHORT_NAMES.get(kind, kind)}={value}" for kind, value in pairs),
        frozenset(alternative_name(kind, value) for kind, value in certificate.get("subjectAltName", ())),
    )


def new_key() -> str:
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest(key: str) -> str:
    """Return the SHA-256 of a key in hex digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_in(authorization: str | None, x_api_key: str | None) -> str | None:
    """Return the API key in a request's headers: `Authorization: Bearer KEY`, else `x-api-key: KEY`."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return x_api_key.strip() if x_api_key else None


def subject_attributes(subject: str) -> frozenset[str]:
    """Parse the attributes of a subject written `O=Search, CN=indexer`, or as in RFC 2253 `CN=indexer,O=Search`."""
    found = (_unescaped(part.strip()) for part in _ATTRIBUTE.findall(subject))
    return frozenset(part for part in found if part)


def alternative_name(kind: str, value: str) -> str:
    """Return a subject alternative name with its kind, `DNS:x`."""
    return f"{_SAN_ALIASES.get(kind, kind)}:{value}"


def _has_subject(certificate: CertificateNames, wanted: str) -> bool:
    # Compared as a whole first: a value may contain a comma that the configuration does not escape.
    subject = certificate.subject
    attributes = {wanted.strip()} if wanted.strip() in subject else subject_attributes(wanted)
    values = {attribute.partition("=")[2] for attribute in subject}
    return bool(attributes) and all(part in (subject if "=" in part else values) for part in attributes)


def _has_san(certificate: CertificateNames, wanted: str) -> bool:
    kind, _, value = wanted.partition(":")
    kind = _SAN_ALIASES.get(kind, kind)
    if kind in _SAN_KINDS:
        return f"{kind}:{value}" in certificate.sans
    return any(name.partition(":")[2] == wanted for name in certificate.sans)


def _unescaped(text: str) -> str:
    """Remove the backslashes of RFC 2253, which precede a character or the two hex digits of a byte."""

    def plain(match: re.Match[bytes]) -> bytes:
        return bytes.fromhex(match[1].decode()) if len(match[1]) == 2 else match[1]

    return _ESCAPED.sub(plain, text.encode()).decode("utf-8", "replace")


def _key(values: Mapping[str, Any]) -> Key:
    instances = values["instances"]
    return Key(
        str(values["name"]),
        str(values["sha256"]),
        tuple(values["rights"]),
        None if instances is None else tuple(instances),
        int(values.get("max_workers", DEFAULT_MAX_WORKERS)),
        int(values.get("tenant", 0)),
        bool(values.get("has_quota", False)),
    )
