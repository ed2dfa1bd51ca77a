"""Headers of trusted proxies: the client's address and scheme, and the path prefix that the proxy has stripped."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from teimgr.api.rest.error_answers import error_response
from teimgr.config.settings import Settings
from teimgr.errors import InvalidConfig, ValidationError
from teimgr.http.bodies import PATH_PREFIX
from teimgr.spec import path_prefix

_HEADER = b"x-forwarded-prefix"
# With a cookie the prefix counts too, which may be the configuration's.
_OF_CALLERS = frozenset((b"x-forwarded-for", b"x-forwarded-proto", _HEADER, b"cookie"))
_UNIX = "unix"
_LINKS = (b"location", b"link")


class TrustedProxies:
    """Believes `X-Forwarded-For`, `-Proto` and `-Prefix` of `trusted_proxies`, and no others."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._trust(settings().trusted_proxies)

    def _trust(self, proxies: Sequence[str]) -> None:
        self._proxies = proxies
        self._addresses = ProxyHeadersMiddleware(_nothing, _with_mapped(proxies))

    def concerns(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether `read` may change the client, the scheme or the path prefix of a request with these headers."""
        return not _OF_CALLERS.isdisjoint(headers)

    async def read(self, scope: MutableMapping[str, Any]) -> str:
        """Put the client, the scheme and the path prefix (`path_prefix_of`) into the scope; the result is the prefix.

        The prefix is that of a proxy, else `root_path`. Proxies in a row append theirs: `/ai, /teimgr` is `/ai/teimgr`.

        Raises:
            ValidationError: the prefix is not valid.
        """
        settings = self._settings()
        if settings.trusted_proxies != self._proxies:
            self._trust(settings.trusted_proxies)
        if scope.get("client") is None and (scope.get("server") or ("", 0))[1] is None:
            scope["client"] = (_UNIX, 0)
        prefix = settings.root_path
        given = [value for name, value in scope["headers"] if name == _HEADER]
        if given and self._is_trusted(scope):
            parts = b",".join(given).decode("latin-1").split(",")
            prefix = "".join(part.strip().removesuffix("/") for part in parts)
        try:
            scope[PATH_PREFIX] = prefix = path_prefix(prefix)
        except InvalidConfig as error:
            raise ValidationError(f"X-Forwarded-Prefix: {error.message}") from None
        await self._addresses(scope, _nothing, _nothing)  # type: ignore[arg-type]
        return prefix

    def _is_trusted(self, scope: MutableMapping[str, Any]) -> bool:
        client = scope.get("client")
        return (client[0] if client else None) in self._addresses.trusted_hosts


async def _nothing(*_: Any) -> None:
    pass


class ProxyHeaders:
    """Middleware that has the scope changed by `proxies`; headers of replies that lead to a path get the prefix."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            prefix = await self._proxies.read(scope)
        except ValidationError as error:
            return await error_response(error)(scope, receive, send)

        async def send_with_prefix(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [_prefixed(name, value, prefix.encode()) for name, value in message.get("headers", ())]
                message = {**message, "headers": headers}
            await send(message)

        return await self._app(scope, receive, send_with_prefix if prefix else send)


def _prefixed(name: bytes, value: bytes, prefix: bytes) -> tuple[bytes, bytes]:
    """A header of a reply, whose URL begins with `prefix` if it is a path of this server."""
    if name.lower() not in _LINKS:
        return name, value
    start = value.startswith(b"<")  # of Link; Location has the URL alone
    is_path = value[start : start + 1] == b"/" and value[start + 1 : start + 2] != b"/"
    return name, value[:start] + prefix + value[start:] if is_path else value


def _with_mapped(proxies: Sequence[str]) -> list[str] | str:
    """In uvicorn's form; IPv4 also as IPv6 sockets show it, `::ffff:10.0.0.1`."""
    if "*" in proxies:
        return "*"
    networks = [ipaddress.ip_network(entry) for entry in proxies if entry != _UNIX]
    mapped = (f"::ffff:{each.network_address}/{96 + each.prefixlen}" for each in networks if each.version == 4)
    return [*proxies, *mapped]
