"""Why a server cannot be reached: wrong port, no TLS or TLS needed, unknown authority, wrong name, client certificate.

`reason_of` describes the exception of a failed attempt. `diagnose` makes another attempt, which also finds causes that
a closed connection does not show.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from contextlib import suppress
from typing import NamedTuple

from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import InvalidConfig
from teimgr.observability.shown_text import one_line

_LIMIT_S = 3.0
_SILENCE_S = 0.5  # an HTTP server that sends nothing for this long after the handshake waits for a request
_HEAD_BYTES = 64
_HTTP2_SETTINGS, _HTTP2_HEAD = 4, 9
_TLS_ALERT = b"\x15\x03"
_NOT_YET, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
_ALERTS_ABOUT_A_CLIENT = ("CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_EXPIRED")
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH")


class Cause(NamedTuple):
    """The fault of a connection, its reason, and the remedy."""

    what: str
    why: str
    do: str


def reason_of(error: BaseException) -> str:
    """Describe a failed attempt, without control characters."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
        line = str(error.args[0])
        if _is_http2(line.encode("latin-1", "replace")):
            return "the server speaks HTTP/2 alone, as a gRPC port does"
        return f"the reply is not HTTP: {one_line(line[:_HEAD_BYTES])!r}"
    return one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def diagnose(address: ServerAddress, tls: Tls, *, grpc: bool = False) -> Cause | None:
    """Find the cause of a failed connection by another attempt of at most 3 s; None if it finds no fault.

    `grpc`: the address was taken for that of gRPC, rather than REST.
    """
    limit = time.monotonic() + _LIMIT_S
    try:
        with _connected(address, limit) as sock:
            of = _of_tls(address, tls, sock, limit) if address.secure else _of_plain(address, sock, limit)
        return _of_protocol(address, of, grpc=grpc) if isinstance(of, bytes) else of
    except TimeoutError:
        return Cause(
            f"{address.url} does not answer",
            f"no reply within {_LIMIT_S:g} s: a firewall, a host that is down, or a server that is no HTTP server",
            "check host and port; `teimgr doctor` on the daemon's host judges it",
        )
    except socket.gaierror:
        why = f"this host knows no address of the name {address.host!r}"
        return Cause(f"no daemon at {address.url}", why, "check the spelling, or give an IP address")
    except (OSError, InvalidConfig):
        return None


def _connected(address: ServerAddress, limit: float) -> socket.socket:
    if not address.path:
        return socket.create_connection((address.host, address.port), timeout=_left(limit))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_left(limit))
        sock.connect(address.path)
    except BaseException:
        sock.close()
        raise
    return sock


def _left(limit: float) -> float:
    return max(limit - time.monotonic(), 0.01)


def _of_plain(address: ServerAddress, sock: socket.socket, limit: float) -> Cause | bytes:
    """Return the cause without TLS, or how the server's answer to a request begins."""
    begins = _answer(address, sock, limit)
    if begins.startswith(_TLS_ALERT) or (not begins and _speaks_tls(address, limit)):
        secure = ("https+" + address.url) if address.path else address.url.replace("http://", "https://", 1)
        do = f"use {secure}; --ca FILE names the authority of its certificate"
        return Cause(f"{address.url} needs https", "the server speaks TLS, and the address asks for none", do)
    return begins


def _of_tls(address: ServerAddress, tls: Tls, sock: socket.socket, limit: float) -> Cause | bytes:
    """Return the cause with TLS, in the handshake or after it; or how the server's answer to a request begins."""
    name = tls.server_name or address.host
    sock.settimeout(_left(limit))
    try:
        with tls.ssl_context().wrap_socket(sock, server_hostname=name) as secured:
            first, ended = _first_words(secured)
            if ended is not None:
                return _of_client(address, tls, ended)
            return first or _answer(address, secured, limit)
    except ssl.SSLCertVerificationError as error:
        return _of_certificate(address, tls, name, error)
    except TimeoutError:
        raise
    except (ssl.SSLError, ConnectionError) as error:
        words = (getattr(error, "reason", None) or "").upper()
        if any(each in words for each in _ALERTS_ABOUT_A_CLIENT):
            return _of_client(address, tls, words)
        if any(each in words for each in _NO_TLS) or not _speaks_tls(address, limit):
            plain = address.url.removeprefix("https+").replace("https://", "http://", 1)
            return Cause(f"{address.url} speaks no TLS", "the server answers without TLS", f"use {plain}")
        return Cause(
            f"TLS with {address.url} failed", reason_of(error), "compare the TLS settings of both sides: docs/mtls.md"
        )


def _of_certificate(address: ServerAddress, tls: Tls, name: str, error: ssl.SSLCertVerificationError) -> Cause:
    """Return the cause if this side does not accept the server's certificate."""
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return Cause(
            f"the certificate of {address.url} is for another name than {name!r}",
            error.verify_message.rstrip("."),
            "use the name in the certificate as the host, or give it with --server-name NAME",
        )
    if error.verify_code in (_NOT_YET, _EXPIRED):
        state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        do = "renew it on the daemon's host, and check the clocks of both hosts"
        return Cause(f"the certificate of {address.url} {state}", error.verify_message, do)
    by = f"the file {tls.ca} lacks that authority" if tls.ca else "no --ca was given, and the system does not know it"
    return Cause(
        f"the certificate of {address.url} is of an unknown authority",
        f"{error.verify_message}; {by}",
        "--ca FILE (or TEIMGR_CA) names the PEM file of the authority that signed the daemon's certificate",
    )


def _of_client(address: ServerAddress, tls: Tls, found: str) -> Cause:
    """Return the cause if the server ends the connection after the handshake: then it judges our certificate."""
    alert = f" ({found.replace('_', ' ').lower()})" if found else ""
    if tls.cert is None:
        why = f"the server ended the connection after the TLS handshake{alert}, and no certificate was given"
        do = "--cert FILE --key FILE (or TEIMGR_CERT, TEIMGR_KEY) name yours: docs/mtls.md"
        return Cause(f"{address.url} wants a client certificate", why, do)
    return Cause(
        f"{address.url} does not accept the client certificate {tls.cert}",
        f"the server ended the connection after the TLS handshake{alert}",
        "it must be signed by `ca_cert` of the daemon's [auth.mtls], be valid today, and be of an allowed subject",
    )


def _of_protocol(address: ServerAddress, begins: bytes, *, grpc: bool) -> Cause | None:
    """Return the cause by the server's answer to a request of HTTP/1.1; None if the server speaks the expected
    protocol."""
    if begins.startswith(b"HTTP/1"):
        if not grpc:
            return None
        why = "the server speaks HTTP/1.1, which a gRPC port does not"
        return Cause(
            f"{address.url} does not speak gRPC", why, "give the port of gRPC, by default 9001, with --grpc-url"
        )
    if _is_http2(begins):
        if grpc:
            return None
        return Cause(
            f"{address.url} is a gRPC port, not REST",
            "the server speaks HTTP/2 alone",
            "give the port of REST, by default 9000; gRPC has by default 9001, and goes with --grpc-url",
        )
    found = f"its answer begins with {one_line(begins.decode('latin-1'))!r}" if begins else "it ends the connection"
    return Cause(
        f"{address.url} does not belong to a daemon",
        f"another program listens there: {found}",
        "check the port of the daemon",
    )


def _answer(address: ServerAddress, sock: socket.socket, limit: float) -> bytes:
    """Return the first bytes that the server sends after a request; empty if it ends the connection."""
    with suppress(ConnectionError, ssl.SSLError):
        sock.settimeout(_left(limit))
        sock.sendall(f"GET /livez HTTP/1.1\r\nHost: {address.authority}\r\nConnection: close\r\n\r\n".encode())
        return sock.recv(_HEAD_BYTES)
    return b""


def _first_words(secured: ssl.SSLSocket) -> tuple[bytes, str | None]:
    """Return the bytes that the server sends before any request; if it ends the connection, the reason, maybe empty."""
    secured.settimeout(_SILENCE_S)
    try:
        first = secured.recv(_HEAD_BYTES)
        return first, None if first else ""
    except TimeoutError:
        return b"", None
    except ssl.SSLError as error:
        return b"", error.reason or ""
    except ConnectionError:
        return b"", ""


def _speaks_tls(address: ServerAddress, limit: float) -> bool:
    """True if a server accepts a TLS handshake; its identity does not matter here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connected(address, limit) as sock:
            sock.settimeout(_left(limit))
            with context.wrap_socket(sock):
                return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _is_http2(begins: bytes) -> bool:
    """True if the bytes begin with the frame SETTINGS, the first of a server of HTTP/2."""
    return len(begins) >= _HTTP2_HEAD and begins[3] == _HTTP2_SETTINGS and begins[5:9] == bytes(4)
