"""PEM files of a TLS listener: loading, validation, and polling for changes."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from teimgr.errors import InvalidConfig

log = logging.getLogger(__name__)

POLL_S = 1.0

# Modification time, size and inode of each file.
Stamp = tuple[tuple[int, int, int], ...]

# The validity of an X.509 certificate in DER, as UTCTime or GeneralizedTime; the groups are the end.
_VALIDITY = re.compile(rb"\x30.(?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z", re.DOTALL)
_NO_PEM = "not a PEM file of a certificate or key"
_REASONS = {
    "KEY_VALUES_MISMATCH": "the private key does not match the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it contains no certificate",
    "NO_START_LINE": _NO_PEM,
    "PEM_LIB": _NO_PEM,
}


@dataclass(frozen=True, slots=True)
class Pems:
    """The content of the files; `ca` is None if clients need no certificate."""

    cert: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the server's certificate chain, its private key, and the clients' certificate authorities."""

    cert: Path
    key: Path
    ca: Path | None = None

    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)

    def stamp(self) -> Stamp | None:
        """Return a value that changes when a file is replaced or written; None if one is missing."""
        try:
            found = [path.stat() for path in self.paths()]
        except OSError:
            return None
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)

    def pems(self) -> Pems:
        """Return the content of the files, validated by `context`.

        Raises:
            InvalidConfig: see `context`.
        """
        self.context()
        cert, key, *ca = map(_read, self.paths())
        return Pems(cert, key, ca[0] if ca else None)

    def ends(self) -> float | None:
        """Return the Unix time at which the first certificate of the chain expires; None if that cannot be read.
        Blocking."""
        try:
            pem = _read(self.cert).decode("ascii", "replace")
            first = pem[pem.index(ssl.PEM_HEADER) : pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
            found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(first))
            if found is None:
                return None
            short, full = found.groups()
            # Two-digit years are 1950 to 2049 (RFC 5280).
            text = full or (b"19" if short[:1] >= b"5" else b"20") + short
            return datetime.strptime(f"{text.decode()}+0000", "%Y%m%d%H%M%S%z").timestamp()
        except (InvalidConfig, ValueError):
            return None

    def context(self) -> ssl.SSLContext:
        """Return the server's SSL context; with `ca`, clients must present a certificate signed by it.

        Raises:
            InvalidConfig: a file cannot be read, is not PEM of its kind, or the key does not belong to the certificate.
        """
        for path in self.paths():
            _read(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without this callback OpenSSL would prompt on the terminal for the password of an encrypted key.
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # an ssl.SSLError, or the file was just removed
            raise InvalidConfig(f"{self.cert} and {self.key}: {_reason(error)}") from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except OSError as error:
                raise InvalidConfig(f"{self.ca}: {_reason(error)}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class TlsWatch:
    """Polls the files and passes changed ones to `take`.

    Files are replaced one after another, so a change is taken after a poll without further changes. A failure of `take`
    sets `alarm` and keeps the last valid files; every poll tries again, since the cause may be temporary.
    """

    def __init__(self, files: TlsFiles, take: Callable[[TlsFiles], Awaitable[None]], poll_s: float = POLL_S) -> None:
        self.alarm: str | None = None
        self._files = files
        self._take = take
        self._poll_s = poll_s
        self._taken = self._seen = files.stamp()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()

    async def look(self) -> None:
        stamp = self._files.stamp()
        settled, self._seen = stamp == self._seen, stamp
        if stamp == self._taken:
            self.alarm = None
        if not settled or stamp == self._taken:
            return
        try:
            await self._take(self._files)
        except Exception as error:
            alarm = f"the TLS files have changed and cannot be used, the former ones serve on: {error}"
            if alarm != self.alarm:
                log.error(alarm, exc_info=not isinstance(error, InvalidConfig | OSError))
            self.alarm = alarm
        else:
            self._taken, self.alarm = stamp, None
            log.info("TLS files reloaded for new connections", extra={"cert": str(self._files.cert)})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted; use one without a password, readable only by this user")


def _reason(error: Exception) -> str:
    """Return OpenSSL's reason without its source location."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    return _REASONS.get(error.reason, error.reason.replace("_", " ").lower() if error.reason else _NO_PEM)
