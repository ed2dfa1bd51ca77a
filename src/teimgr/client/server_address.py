"""Address and TLS files of a server: host and port, or a Unix socket."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlsplit

from teimgr.errors import InvalidConfig
from teimgr.spec import path_prefix

if TYPE_CHECKING:
    import ssl

    import grpc

_DEFAULT_PORT = {"http": 80, "https": 443}
_UNIX = re.compile(r"(https\+)?unix:(?://)?(/[^/\0][^\0]*)", re.IGNORECASE)
_UNIX_HOST = "localhost"
# The variables that gRPC reads, in its order.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")


class Proxy(NamedTuple):
    """An HTTP proxy, and the environment variable that names it."""

    url: str
    variable: str

    def __str__(self) -> str:
        """The proxy for messages, without user and password."""
        parts = urlsplit(self.url)
        return f"{parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()} of the variable {self.variable}"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a TLS connection.

    `ca` verifies the server (None: the system's authorities), `cert` and `key` authenticate the client and come
    together, `server_name` is the name expected in the server's certificate if it differs from the address. The
    server is always verified.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidConfig("a client certificate and its key must be given together")

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """Make the credentials of a gRPC channel.

        Raises:
            InvalidConfig: a file cannot be read.
        """
        import grpc  # not needed by clients of REST alone

        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    def ssl_context(self) -> ssl.SSLContext:
        """Make the context of an HTTP client.

        Raises:
            InvalidConfig: a file cannot be read, or is not PEM of its kind.
        """
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            given = [path for path in (self.ca, self.cert, self.key) if path is not None]
            named = next((path for path in given if not Path(path).is_file()), "TLS files")
            raise InvalidConfig(f"{named}: {error.strerror or error}") from error
        return context


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Host and port of a server, or the Unix socket at `path`; `secure` (the prefix `https`) selects TLS.

    The host at a Unix socket is localhost, which is also the name expected in the server's certificate.
    """

    host: str
    port: int
    secure: bool
    path: str = ""
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse `http://host:port`, `https://host:port`, `host:port`, `unix:/path` or `https+unix:/path`.

        An HTTP address with a scheme may have a path of plain segments, `https://host/teimgr`, which a proxy strips.

        The path of a socket is absolute, taken as it is written, and may follow `unix://`.

        Raises:
            InvalidConfig: it is not one of these.
        """
        if match := _UNIX.fullmatch(url):
            secure = match[1] is not None
            return cls(_UNIX_HOST, _DEFAULT_PORT["https" if secure else "http"], secure, match[2])
        has_scheme = "://" in url
        text = url if has_scheme else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise InvalidConfig(f"endpoint {url!r}: {error}") from error
        # Other parts are refused, since they would be ignored silently.
        path_alone = not has_scheme and parts.path.strip("/")
        more = path_alone or parts.query or parts.fragment or parts.username is not None
        if parts.scheme not in _DEFAULT_PORT or not parts.hostname or port == 0 or more:
            raise InvalidConfig(f"endpoint {url!r} is not http://host:port, https://host:port or unix:/path")
        try:
            prefix = path_prefix(parts.path)
        except InvalidConfig as error:
            raise InvalidConfig(f"endpoint {url!r}: the path {error.message}") from error
        return cls(parts.hostname, port or _DEFAULT_PORT[parts.scheme], parts.scheme == "https", prefix=prefix)

    @property
    def authority(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as `parse` takes it."""
        return f"{'https+' if self.secure else ''}unix:{self.path}" if self.path else self.http_base

    @property
    def http_base(self) -> str:
        """The URL that the path of an HTTP request is appended to."""
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.prefix}"

    @property
    def grpc_target(self) -> str:
        return f"unix:{quote(os.fsencode(self.path))}" if self.path else self.authority

    def grpc_proxy(self, environ: Mapping[str, str] = os.environ) -> Proxy | None:
        """The proxy of a gRPC connection by the variables that gRPC reads; None for a Unix socket or loopback.

        `no_grpc_proxy`, else `no_proxy`, lists suffixes of hosts, addresses and networks (`10.0.0.0/8`) that are
        connected to directly; `*` stands for all.
        """
        variable = next((name for name in _PROXY_VARIABLES if name in environ), None)
        if variable is None or not environ[variable] or self.path or _is_loopback(self.host):
            return None
        excluded = next((environ[name] for name in _NO_PROXY_VARIABLES if name in environ), "")
        if _is_excluded(self.host, [entry.strip() for entry in excluded.split(",")]):
            return None
        return Proxy(environ[variable], variable)


def _is_loopback(host: str) -> bool:
    name = host.rstrip(".").lower()
    address = _ip_address(host)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback or address.is_unspecified


def _is_excluded(host: str, entries: Sequence[str]) -> bool:
    """True if a host ends in one of the entries of `no_proxy`, or an address is in one of their networks."""
    if any(entry and (entry == "*" or host.lower().endswith(entry.lower())) for entry in entries):
        return True
    address = _ip_address(host)
    for network in entries if address is not None else ():
        try:
            if address in ipaddress.ip_network(network, strict=False):
                return True
        except ValueError:
            continue
    return False


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror}") from error
