"""Sessions of the web page: a cookie replaces the API key in a browser's requests.

A session stores the SHA-256 of its key and no rights. Each request is checked against the current policy, so a reload
that removes or changes a key also affects its sessions. Sessions are in memory and end with the daemon.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from teimgr.http.auth.policy import Scope, digest
from teimgr.http.bodies import path_prefix_of

LIFETIME_S = 12 * 3600.0
MAX_SESSIONS = 1024
MAX_SESSIONS_OF_KEY = 32
_TOKEN_BYTES = 32
# Longer headers are not parsed. Ours is below 100 bytes, but other servers of this host may have set cookies.
_MAX_COOKIE_BYTES = 16 * 1024


class _Session(NamedTuple):
    sha256: str
    ends_at: float


class Sessions:
    """The open sessions by the digest of their token; a new one may replace the oldest of its key, or of all.

    `port` is part of the cookie's name, since browsers send a cookie to every port of a host and two daemons must not
    overwrite each other's.
    """

    def __init__(
        self, port: int, *, lifetime_s: float = LIFETIME_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port = port
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._sessions: dict[str, _Session] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, sha256: str) -> str:
        """Begin a session of the key with this SHA-256, and return its token."""
        self._drop_ended()
        of_key = [token for token, session in self._sessions.items() if session.sha256 == sha256]
        if len(of_key) >= MAX_SESSIONS_OF_KEY:
            del self._sessions[of_key[0]]
        elif len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._sessions[digest(token)] = _Session(sha256, self._clock() + self._lifetime_s)
        return token

    def end(self, token: str) -> None:
        self._sessions.pop(digest(token), None)

    def key_of(self, token: str) -> str | None:
        """Return the SHA-256 of the session's key; None for an unknown or ended session."""
        session = self._sessions.get(digest(token))
        return session.sha256 if session is not None and session.ends_at > self._clock() else None

    def token_in(self, scope: Scope) -> str | None:
        """Return the session token in the cookies of an HTTP request."""
        raw: bytes = next((value for name, value in scope["headers"] if name == b"cookie"), b"")
        name = self._cookie_name(scope)
        if name.encode() not in raw or len(raw) > _MAX_COOKIE_BYTES:
            return None
        pairs = (pair.strip().partition("=") for pair in raw.decode("latin-1").split(";"))
        return next((value for key, _, value in pairs if key == name and value), None)

    def cookie(self, scope: Scope, token: str) -> str:
        """Return the value of Set-Cookie that begins a session; an empty token ends it."""
        name = self._cookie_name(scope)
        age_s = int(self._lifetime_s) if token else 0
        secure = "; Secure" if _is_tls(scope) else ""
        # Other servers below the same host must not get or replace this cookie.
        path = path_prefix_of(scope) or "/"
        return f"{name}={token}; Path={path}; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}"

    def _cookie_name(self, scope: Scope) -> str:
        # Browsers accept `__Host-` only over TLS, from this exact host, and for the path /.
        kind = "" if not _is_tls(scope) else "__Secure-" if path_prefix_of(scope) else "__Host-"
        return f"{kind}teimgr-session-{self._port}"

    def _drop_ended(self) -> None:
        now = self._clock()
        for token in [token for token, session in self._sessions.items() if session.ends_at <= now]:
            del self._sessions[token]


def is_same_origin(method_reads: bool, headers: Mapping[str, str]) -> bool:
    """True if a request with a session cookie comes from a page of the same origin, or from the address bar.

    SameSite keeps other sites out, but other ports of this host are the same site. So writes must carry an `Origin`
    equal to the Host, and cross-origin reads by scripts are rejected.
    """
    site = headers.get("sec-fetch-site")
    if method_reads:
        return site in (None, "same-origin", "none") or headers.get("sec-fetch-mode") == "navigate"
    origin = headers.get("origin", "").lower()
    return (
        bool(origin) and origin.partition("://")[2] == headers.get("host", "").lower() and site in (None, "same-origin")
    )


def _is_tls(scope: Scope) -> bool:
    return bool(scope.get("scheme") == "https")
