"""`[auth]`: authentication settings, their rules, and the resulting policy."""

# ruff: noqa: RUF009  `_key` is dataclasses.field with metadata; it makes a new field at every call

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import tomli_w

from teimgr.config.schema import ConfigFault
from teimgr.errors import InvalidConfig
from teimgr.http.auth.policy import DEFAULT_MAX_WORKERS, MIN_KEY_CHARS, CertificateRules, Key, Policy, digest, new_key
from teimgr.http.auth.tls_files import TlsFiles
from teimgr.spec import declared
from teimgr.spec import key as _key
from teimgr.wire.tenants.table import Limits, TenantKey

MTLS, API_KEYS = "mtls", "api_keys"
PROVIDERS = (MTLS, API_KEYS)

PRIORITIES = ("high", "normal", "low")
_BURST_S = 10
_MAX_TOKENS = 10**9
_MAX_DAILY_TOKENS = 10**12
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SOURCES = ("key", "key_sha256", "key_file", "key_env")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtls:
    """`[auth.mtls]`: PEM files of the two TLS listeners, and the clients they accept."""

    ca_cert: Path = field(metadata=declared("certificate authority of the clients"))
    server_cert: Path = field(metadata=declared("certificate of this server"))
    server_key: Path = field(metadata=declared("private key of this server"))
    allow_self_signed: bool = _key(False, "accepted and ignored: a client's chain to ca_cert is always verified")
    verify_subject: bool = _key(True, "accept only allowed_subjects, if that list is not empty")
    allowed_subjects: tuple[str, ...] = _key(
        (), "'CN=indexer', or several attributes; one entry must match the subject"
    )
    verify_san: bool = _key(False, "accept only allowed_sans, if that list is not empty")
    allowed_sans: tuple[str, ...] = _key((), "subject alternative names, 'indexer.local' or 'DNS:indexer.local'")

    def rules(self) -> CertificateRules:
        """The lists whose `verify_` key is on."""
        subjects = self.allowed_subjects if self.verify_subject else ()
        return CertificateRules(subjects, self.allowed_sans if self.verify_san else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """`[auth.tls]`: TLS of both listeners without client certificates, to encrypt API keys."""

    server_cert: Path = field(metadata=declared("certificate of this server"))
    server_key: Path = field(metadata=declared("private key of this server"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyEntry:
    """`[[auth.api_keys]]`: one key. A literal key is kept as its SHA-256 only."""

    name: str = field(metadata=declared("owner of the key; shown in logs and refusals"))
    key: str | None = _key(None, "the key itself, at least 16 characters", secret=True)
    key_sha256: str | None = _key(None, "its SHA-256 in hex, as 'teimgr key new' prints it", secret=True)
    key_file: Path | None = _key(None, "file that contains the key")
    key_env: str | None = _key(None, "environment variable that contains the key")
    rights: tuple[Literal["admin", "inference", "read"], ...] = field(
        metadata=declared("its rights; no right includes another")
    )
    instances: tuple[str, ...] | None = _key(None, "names or globs of its instances; default: all")
    max_workers: int = _key(
        DEFAULT_MAX_WORKERS, "maximum workers of all its instances, if it is restricted to some", 1, 65536
    )
    tokens_per_second: int | None = _key(None, "quota of tokens per second", 1, _MAX_TOKENS)
    burst_tokens: int | None = _key(
        None,
        "burst of tokens, which also limits a single call; default: 10 seconds of tokens",
        1,
        _MAX_TOKENS,
    )
    tokens_per_day: int | None = _key(None, "quota of tokens per day, from midnight UTC", 1, _MAX_DAILY_TOKENS)
    concurrent_tokens: int | None = _key(None, "quota of tokens in unanswered calls", 1, _MAX_TOKENS)
    weight: int = _key(1, "its share of a busy instance, relative to other keys", 1, 1000)
    priority: Literal["high", "normal", "low"] = _key(
        "normal", "its calls are computed before those of keys with a lower priority"
    )
    shadow: bool = _key(False, "count the calls that its quotas would refuse, without refusing them")

    def __post_init__(self) -> None:
        # The rules refuse a key that is too short or given twice.
        if self.key is not None and self.key_sha256 is None and len(self.key) >= MIN_KEY_CHARS:
            object.__setattr__(self, "key_sha256", digest(self.key))
            object.__setattr__(self, "key", None)

    def read(self, environ: Mapping[str, str] = os.environ) -> Key:
        """The key; file and variable are read at each call.

        Raises:
            InvalidConfig: It cannot be read, or is too short.
        """
        sha256, has_quota = (
            self.key_sha256 or digest(self._secret(environ)),
            any(self.tenant.limits) and not self.shadow,
        )
        return Key(self.name, sha256, self.rights, self.instances, self.max_workers, has_quota=has_quota)

    @property
    def tenant(self) -> TenantKey:
        """Its quotas and share, as they are written for the workers."""
        rate = self.tokens_per_second or 0
        burst = self.burst_tokens or min(rate * _BURST_S, _MAX_TOKENS)
        limits = Limits(rate, burst if rate else 0, self.tokens_per_day or 0, self.concurrent_tokens or 0)
        return TenantKey(self.name, limits, self.shadow, self.weight, PRIORITIES.index(self.priority))

    def _secret(self, environ: Mapping[str, str]) -> str:
        if self.key_file is not None:
            source = f"key_file: {self.key_file}"
            try:
                found = self.key_file.read_text("utf-8").strip()
            except OSError as error:
                raise InvalidConfig(f"{source} cannot be read: {error.strerror}") from error
            except ValueError as error:
                raise InvalidConfig(f"{source} is not text") from error
        elif self.key_env is not None:
            source, found = f"key_env: the environment variable {self.key_env}", environ.get(self.key_env, "").strip()
        else:
            source, found = "key", self.key or ""
        if len(found) < MIN_KEY_CHARS:
            raise InvalidConfig(f"{source} must have at least {MIN_KEY_CHARS} characters (has {len(found)})")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """`[auth]`: authentication of callers; off by default."""

    enabled: bool = _key(False, "verify callers with each of the providers")
    providers: tuple[str, ...] = _key((), "'mtls', 'api_keys' or both")
    require_cert_headers: bool = _key(False, "must stay false: a certificate in a header proves nothing")
    mtls: Mtls | None = _key(None, "the table of the provider mtls")
    tls: ServerTls | None = _key(None, "TLS without client certificates, if mtls is not a provider")
    api_keys: tuple[ApiKeyEntry, ...] = _key((), "the keys of the provider api_keys")

    def requires(self, provider: str) -> bool:
        return self.enabled and provider in self.providers

    def files(self) -> TlsFiles | None:
        """The files of the two listeners, None without TLS."""
        if self.mtls is not None and self.requires(MTLS):
            return TlsFiles(self.mtls.server_cert, self.mtls.server_key, self.mtls.ca_cert)
        if self.tls is not None and self.enabled:
            return TlsFiles(self.tls.server_cert, self.tls.server_key)
        return None

    def warnings(self) -> Iterator[str]:
        if self.mtls and self.mtls.allow_self_signed:
            yield "auth.mtls.allow_self_signed is ignored: clients must present a chain to ca_cert"
        if self.mtls and self.mtls.allowed_sans and not self.mtls.verify_san:
            yield "auth.mtls.allowed_sans is ignored: verify_san is false"
        if self.api_keys and not self.requires(API_KEYS):
            yield f"auth.api_keys are not required: auth.enabled must be true and {API_KEYS!r} one of auth.providers"
        if self.requires(API_KEYS):
            yield (
                "the instances' own ports do not use auth.api_keys: keep instance_host on this machine, or give "
                "instances their own key (extra_args --api-key)"
            )


def policy_of(auth: Auth | None, environ: Mapping[str, str] = os.environ) -> Policy:
    """The policy of the listeners. Key files and variables are read at each call.

    Raises:
        InvalidConfig: A key cannot be read.
    """
    if auth is None or not auth.enabled:
        return Policy()
    certified = auth.mtls if auth.requires(MTLS) else None
    keys = tuple(key.read(environ) for key in auth.api_keys) if auth.requires(API_KEYS) else None
    return Policy(certified.rules() if certified else CertificateRules(), keys, certified is not None)


def table_of_new_key(name: str, rights: Sequence[str], instances: Sequence[str] | None) -> tuple[str, str]:
    """A new random key, and its table as TOML, which has only the hash."""
    key = new_key()
    table: dict[str, Any] = {"name": name, "key_sha256": digest(key), "rights": list(rights)}
    if instances is not None:
        table["instances"] = list(instances)
    return key, "[[auth.api_keys]]\n" + tomli_w.dumps(table)


def faults(auth: Auth) -> Iterator[ConfigFault]:
    """Every rule of the table that is broken; none where it is not enabled."""
    if not auth.enabled:
        return
    if not auth.providers:
        yield ConfigFault("auth.providers", "Authentication is enabled but no providers are configured")
    for index, name in enumerate(auth.providers):
        if name not in PROVIDERS:
            yield ConfigFault(f"auth.providers[{index}]", f"unknown provider {name!r}; known: {', '.join(PROVIDERS)}")
    if auth.require_cert_headers:
        yield ConfigFault(
            "auth.require_cert_headers",
            "must be false: the certificate of the TLS connection itself is verified, "
            "a header, which any client can write, is not",
        )
    yield from _certificates(auth)
    if auth.requires(API_KEYS):
        yield from _api_keys(auth.api_keys)


def _certificates(auth: Auth) -> Iterator[ConfigFault]:
    if auth.requires(MTLS) and auth.mtls is None:
        yield ConfigFault("auth.mtls", "mTLS provider enabled but mtls config missing")
    if auth.requires(MTLS) and auth.tls is not None:
        yield ConfigFault("auth.tls", "must be absent if mtls is a provider: [auth.mtls] has the files")
    files = auth.files()
    if files is None:
        return
    table = "auth.tls" if files.ca is None else "auth.mtls"
    paths = {"ca_cert": ("CA certificate", files.ca), "server_cert": ("server certificate", files.cert)}
    for key, (noun, path) in (paths | {"server_key": ("server key", files.key)}).items():
        if path is not None and not path.is_file():
            yield ConfigFault(f"{table}.{key}", f"{'TLS' if files.ca is None else 'mTLS'} {noun} not found: {path}")


def _api_keys(keys: tuple[ApiKeyEntry, ...]) -> Iterator[ConfigFault]:
    if not keys:
        yield ConfigFault("auth.api_keys", "the provider api_keys is enabled and has no key: every call is refused")
    seen: dict[str, str] = {}
    for index, key in enumerate(keys):
        path = f"auth.api_keys[{index}]"
        wrong = list(_wrong_with(key, path))
        yield from wrong
        if any(other.name == key.name for other in keys[:index]):
            yield ConfigFault(f"{path}.name", f"Duplicate name of a key: {key.name!r}")
        if not wrong:
            first = seen.setdefault(key.read().sha256, key.name)
            if first != key.name:
                yield ConfigFault(path, f"is the same key as {first!r}")


def _wrong_with(key: ApiKeyEntry, path: str) -> Iterator[ConfigFault]:
    given = [source for source in _SOURCES if getattr(key, source) is not None]
    if not key.name:
        yield ConfigFault(f"{path}.name", "cannot be empty")
    if not key.rights:
        yield ConfigFault(f"{path}.rights", "cannot be empty: give some of admin, inference, read")
    if key.instances is not None and not all(chain(key.instances, (key.instances,))):
        yield ConfigFault(f"{path}.instances", "neither the list nor a name in it can be empty; absent: all instances")
    if key.burst_tokens is not None and key.tokens_per_second is None:
        yield ConfigFault(f"{path}.burst_tokens", "has no meaning without tokens_per_second")
    if len(given) != 1:
        yield ConfigFault(path, f"give one of {', '.join(_SOURCES)} (got {' and '.join(given) or 'none'})")
    elif key.key_sha256 is not None and not _SHA256.fullmatch(key.key_sha256):
        yield ConfigFault(f"{path}.key_sha256", "must be 64 hex digits in lower case, as 'teimgr key new' prints them")
    else:
        try:
            key.read()
        except InvalidConfig as error:
            yield ConfigFault(path, error.message)
