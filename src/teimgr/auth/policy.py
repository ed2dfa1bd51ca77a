"""Who may do what: rights, API keys, the names in certificates, and the policy that judges a caller by them.

Nothing here knows a server or a transport, so that REST and gRPC judge by the same lines. No key is ever held: what is
stored and compared is its SHA-256, which tells nothing of a random key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from fnmatch import fnmatchcase

from teimgr.errors import Forbidden

# Fewer characters than that can be guessed from the SHA-256.
MIN_KEY_CHARS = 16
_KEY_PREFIX = "teimgr_"
_KEY_BYTES = 32

# A comma, semicolon or plus ends an attribute of a subject, unless it is escaped.
_ATTRIBUTE = re.compile(r"(?:\\.|[^\\,;+])+", re.DOTALL)
_ESCAPED = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)
# Kinds of alternative names as OpenSSL prints them, and what they are here.
_SAN_KINDS = ("DNS", "IP", "URI", "email")
_SAN_ALIASES = {"IP Address": "IP"}


class Right(str, Enum):
    """What a caller may do; none includes another."""

    ADMIN = "admin"  # change the fleet, its models and its settings
    INFERENCE = "inference"  # ask models
    READ = "read"  # look at the fleet, its logs and its figures


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request is from, as far as the proofs say. `instances` are names and globs; None means all there are."""

    name: str
    rights: frozenset[Right]
    instances: tuple[str, ...] | None = None

    @property
    def is_restricted(self) -> bool:
        """Whether it is for some instances only."""
        return self.instances is not None

    def covers(self, instance: str) -> bool:
        """Whether it is for the instance of this name."""
        return self.instances is None or any(fnmatchcase(instance, pattern) for pattern in self.instances)

    def require(self, rights: frozenset[Right]) -> None:
        """Pass a caller who has one of `rights`; everybody where none is asked.

        Raises:
            Forbidden: it has none of them.
        """
        if rights and not rights & self.rights:
            wanted = " or ".join(sorted(right.value for right in rights))
            raise Forbidden(f"The key '{self.name}' lacks the right {wanted}")

    def require_instance(self, instance: str) -> None:
        """Pass a caller who is for this instance. Whether there is one is not told to others.

        Raises:
            Forbidden: it is not.
        """
        if not self.covers(instance):
            raise Forbidden(f"The key '{self.name}' is not for instance '{instance}'")


ANYBODY = Caller("", frozenset(Right))


@dataclass(frozen=True, slots=True)
class Certified:
    """The names in a verified certificate: attributes of the subject, `CN=indexer`, and alternative names, `DNS:x`."""

    subject: frozenset[str] = frozenset()
    sans: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CertificateRules:
    """Which certificates are let in, of those that the handshake verified. An empty list asks for nothing."""

    subjects: tuple[str, ...] = ()
    sans: tuple[str, ...] = ()

    @property
    def ask(self) -> bool:
        """Whether they ask for anything."""
        return bool(self.subjects or self.sans)

    def admit(self, certified: Certified) -> bool:
        """Whether one of `subjects` and one of `sans` fits.

        A subject fits when each of its attributes stands in the certificate's, whatever their order; `search` without a
        type is any attribute's value. A name fits that is equal, with its kind (`DNS:x`) or without (`x`).
        """
        subject_fits = not self.subjects or any(_stands_in(wanted, certified.subject) for wanted in self.subjects)
        return subject_fits and (not self.sans or any(_is_among(wanted, certified.sans) for wanted in self.sans))


@dataclass(frozen=True, slots=True)
class Key:
    """One API key: the hex SHA-256 of it, and what it is good for."""

    name: str
    sha256: str
    rights: tuple[str, ...]
    instances: tuple[str, ...] | None = None

    def caller(self) -> Caller:
        """Who calls with it."""
        return Caller(self.name, frozenset(map(Right, self.rights)), self.instances)


@dataclass(frozen=True, slots=True)
class Policy:
    """Whom the listeners let in, and to what. `keys` is None where no key is asked; with an empty table nobody calls.

    Where both are asked both are needed: the certificate says that the machine is one of ours, the key what it may do.
    """

    certificates: CertificateRules = CertificateRules()
    keys: tuple[Key, ...] | None = None
    is_certified: bool = False

    @property
    def is_open(self) -> bool:
        """Whether everybody may do everything."""
        return self.keys is None and not self.certificates.ask

    def caller(self, key: str | None) -> Caller | None:
        """Who calls with `key`; None for nobody we know.

        Every key is compared, each in a time that does not depend on where it differs.
        """
        if self.keys is None:
            return ANYBODY
        given = digest(key or "")
        found = [each for each in self.keys if hmac.compare_digest(given, each.sha256)]
        return found[0].caller() if found and key else None

    def to_json(self) -> str:
        """The policy as one line of JSON; there is no key in it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """The inverse."""
        told = json.loads(text)
        rules = CertificateRules(**{name: tuple(values) for name, values in told["certificates"].items()})
        keys = None if told["keys"] is None else tuple(map(_key, told["keys"]))
        return cls(rules, keys, told["is_certified"])


class PolicyInForce:
    """The policy of now: read at every request, replaced by whoever reads the configuration again."""

    def __init__(self, policy: Policy) -> None:
        self.now = policy
        self._listeners: list[Callable[[], None]] = []

    def swap(self, policy: Policy) -> None:
        """From now on `policy` holds; calls under way go on."""
        self.now = policy
        for listener in tuple(self._listeners):
            listener()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change; the result ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)


def new_key() -> str:
    """A key that nobody can guess."""
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest(key: str) -> str:
    """The SHA-256 of a key, in hex digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_in(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key in a request's headers: `Authorization: Bearer KEY`, else `x-api-key: KEY`."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return x_api_key.strip() if x_api_key else None


def attributes(subject: str) -> frozenset[str]:
    """The attributes of a subject as text: `O=Search, CN=indexer`, or as RFC 2253 has it, `CN=indexer,O=Search`."""
    found = (_unescaped(part.strip()) for part in _ATTRIBUTE.findall(subject))
    return frozenset(part for part in found if part)


def san(kind: str, value: str) -> str:
    """An alternative name with its kind, as the rules compare it."""
    return f"{_SAN_ALIASES.get(kind, kind)}:{value}"


def _stands_in(wanted: str, subject: frozenset[str]) -> bool:
    # First as it stands: a value may have a comma in it that nobody escaped.
    asked = {wanted.strip()} if wanted.strip() in subject else attributes(wanted)
    values = {attribute.partition("=")[2] for attribute in subject}
    return bool(asked) and all(part in (subject if "=" in part else values) for part in asked)


def _is_among(wanted: str, sans: frozenset[str]) -> bool:
    kind, _, value = wanted.partition(":")
    kind = _SAN_ALIASES.get(kind, kind)
    if kind in _SAN_KINDS:
        return f"{kind}:{value}" in sans
    return any(name.partition(":")[2] == wanted for name in sans)


def _unescaped(text: str) -> str:
    """Without the backslashes of RFC 2253, before a character or two hex digits of a byte."""

    def plain(match: re.Match[bytes]) -> bytes:
        return bytes.fromhex(match[1].decode()) if len(match[1]) == 2 else match[1]

    return _ESCAPED.sub(plain, text.encode()).decode("utf-8", "replace")


def _key(told: dict[str, Sequence[str]]) -> Key:
    instances = told["instances"]
    return Key(
        str(told["name"]), str(told["sha256"]), tuple(told["rights"]), None if instances is None else tuple(instances)
    )
