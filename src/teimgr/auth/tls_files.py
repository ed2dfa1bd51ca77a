"""The PEM files of a TLS listener: read and proved together, and looked at again while the listener runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from teimgr.errors import InvalidConfig

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

# Modification time, size and inode of each file: what tells that one was replaced.
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Pems:
    """What the files of one moment say; `ca` is None where clients show no certificate."""

    cert: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the server's certificate chain, its private key, and the authorities of its clients."""

    cert: Path
    key: Path
    ca: Path | None = None

    def paths(self) -> tuple[Path, ...]:
        """Those that there are."""
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)

    def stamp(self) -> Stamp:
        """Another value whenever a file was replaced or written; OSError where one is missing."""
        found = [path.stat() for path in self.paths()]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)

    def pems(self) -> Pems:
        """The bytes of the files, after `context` found them good.

        Raises:
            InvalidConfig: as `context`.
        """
        self.context()
        cert, key, *ca = map(_read, self.paths())
        return Pems(cert, key, ca[0] if ca else None)

    def context(self) -> ssl.SSLContext:
        """What a listener of Python's own TLS is given; with `ca`, clients must show a certificate of it.

        Raises:
            InvalidConfig: a file cannot be read, is no PEM of its kind, or the key is not that of the certificate.
        """
        for path in self.paths():
            _read(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Asked for the password of an encrypted key, OpenSSL would wait for somebody at a terminal.
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # an ssl.SSLError, or the file of a moment ago is gone
            raise InvalidConfig(f"{self.cert} and {self.key}: {_reason(error)}") from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except OSError as error:
                raise InvalidConfig(f"{self.ca}: {_reason(error)}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class TlsWatch:
    """Looks at the files now and then, and hands them on when they have changed and are good.

    Files are replaced one after the other, so a change counts once nothing has changed for one look. `take` is called
    with the files; what it raises as InvalidConfig, or anything that is wrong with the files, becomes the `alarm`, and
    whoever took the last good ones keeps them.
    """

    def __init__(
        self, files: TlsFiles, take: Callable[[TlsFiles], Awaitable[None]], look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self.alarm: str | None = None
        self._files = files
        self._take = take
        self._look_every_s = look_every_s
        self._taken = self._seen = _stamp(files)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._look_every_s)
            await self.look()

    async def look(self) -> None:
        """One look."""
        stamp = _stamp(self._files)
        settled, self._seen = stamp == self._seen, stamp
        if not settled or stamp == self._taken:
            return
        self._taken = stamp
        try:
            await self._take(self._files)
        except InvalidConfig as error:
            self.alarm = f"the TLS files have changed and cannot be used, the former ones serve on: {error.message}"
            log.error(self.alarm)
        else:
            self.alarm = None
            log.info("the TLS files have changed, new connections use them", extra={"cert": str(self._files.cert)})


def _stamp(files: TlsFiles) -> Stamp | None:
    try:
        return files.stamp()
    except OSError:
        return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted; give one without a password, readable by this user alone")


def _reason(error: Exception) -> str:
    """OpenSSL's words without its place in the source."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    return _MEANINGS.get(error.reason, error.reason.replace("_", " ").lower() if error.reason else _NO_PEM)


_NO_PEM = "this is no PEM of a certificate or key"
_MEANINGS = {
    "KEY_VALUES_MISMATCH": "the private key is not that of the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "there is no certificate in it",
    "NO_START_LINE": _NO_PEM,
    "PEM_LIB": _NO_PEM,
}
