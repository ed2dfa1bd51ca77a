"""Static files of the page: read and compressed once, cached by browsers until their digest changes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from functools import cache, partial
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # With no-referrer, forms would be sent with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FOR_EVER = "public, max-age=31536000, immutable"
# Static files are compressed once at the start, HTML at each view.
_STATIC_LEVEL, _HTML_LEVEL = 9, 4
# HTML that is compressed on the event loop: in some 5 ms.
_SMALL_BYTES = 2**18


class Asset(NamedTuple):
    """A static file, plain and compressed."""

    media_type: str
    plain: bytes
    gzipped: bytes


class Assets:
    """All files of `static/`; their paths contain one common digest."""

    def __init__(self) -> None:
        self._files: dict[str, Asset] = {}
        whole = hashlib.sha256()
        for path in sorted(files("teimgr.api.page").joinpath("static").iterdir(), key=lambda path: path.name):
            media_type = _TYPES.get("." + path.name.rpartition(".")[2])
            if media_type is None:
                continue
            plain = path.read_bytes()
            whole.update(path.name.encode() + b"\0" + plain)
            self._files[path.name] = Asset(media_type, plain, gzip.compress(plain, _STATIC_LEVEL, mtime=0))
        self.digest = whole.hexdigest()[:16]

    def path(self, name: str) -> str:
        """The path of a file in a URL.

        Raises:
            KeyError: there is no such file.
        """
        return f"/ui/static/{self.digest}/{self._files[name] and name}"

    def respond(self, request: Request) -> Response | None:
        """The answer to a request for a file, or None. An unknown version hash is served the current file."""
        asset = self._files.get(request.path_params["name"])
        if asset is None:
            return None
        is_current = request.path_params["digest"] == self.digest
        headers = SECURITY_HEADERS | {
            "Content-Type": asset.media_type,
            "Cache-Control": _FOR_EVER if is_current else "no-store",
            "Vary": "Accept-Encoding",
        }
        if accepts_gzip(request):
            return Response(asset.gzipped, headers=headers | {"Content-Encoding": "gzip"})
        return Response(asset.plain, headers=headers)


@cache
def assets() -> Assets:
    return Assets()


async def html_response(request: Request, text: str, status: int = 200) -> Response:
    """An HTML page with the headers that keep it to itself, compressed where the browser takes that."""
    headers = SECURITY_HEADERS | {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
    body = text.encode()
    if accepts_gzip(request):
        compress = partial(gzip.compress, body, _HTML_LEVEL, mtime=0)
        body = compress() if len(body) <= _SMALL_BYTES else await asyncio.to_thread(compress)
        headers["Content-Encoding"] = "gzip"
    return Response(body, status, headers | {"Vary": "Accept-Encoding"})


def accepts_gzip(request: Request) -> bool:
    offers = (offer.partition(";") for offer in request.headers.get("accept-encoding", "").split(","))
    return any(name.strip() == "gzip" and weight.replace(" ", "") not in ("q=0", "q=0.0") for name, _, weight in offers)
