"""Files to and from `/v1/files` in pieces, so that their size is not that of memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from teimgr.client.blocking_http import BlockingHttpChannel
from teimgr.client.http_replies import Reply, Request, json_of
from teimgr.errors import InvalidConfig, Unavailable
from teimgr.wire.status import CODE_KEY

_PATH = "/v1/files"
_PIECE_BYTES, _JSON_BYTES = 2**18, 2**20


def upload(channel: BlockingHttpChannel, path: Path, timeout_s: float) -> Any:
    """Send a file for a batch; the file object of the reply. `timeout_s` bounds each step, not the whole.

    Raises InvalidConfig: the file cannot be read. TeimgrError: it is refused, or no daemon answers.
    """
    boundary = secrets.token_hex(16)
    name = "".join(each if each.isprintable() and each not in '"\\' else "_" for each in path.name)
    part = f"--{boundary}\r\nContent-Disposition: form-data; name="
    head = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"; filename="{name}"\r\n\r\n'.encode()
    end = f"\r\n--{boundary}--\r\n".encode()
    with _disk(path, "read"), path.open("rb") as file:
        size = path.stat().st_size
        kind, length = f"multipart/form-data; boundary={boundary}", len(head) + size + len(end)
        headers = {"Content-Type": kind, "Content-Length": str(length)}
        form = _form(path, file, size, head, end)
        with channel.reply(Request("POST", _PATH, form, None, headers, timeout_s)) as (_, reply):
            return _json(reply)


def _form(path: Path, file: BinaryIO, size: int, head: bytes, end: bytes) -> Iterator[bytes]:
    yield head
    while size:
        with _disk(path, "read"):
            piece = file.read(min(size, _PIECE_BYTES))
        if not piece:
            raise InvalidConfig(f"{path}: became shorter while it was sent")
        size -= len(piece)
        yield piece
    yield end


def download(channel: BlockingHttpChannel, file_id: str, target: Path, timeout_s: float) -> None:
    """Write the bytes of a stored file to `target`, which appears when they are complete.

    Raises InvalidConfig: `target` cannot be written. TeimgrError: there is no such file, or no daemon answers.
    """
    path, partial = f"{_PATH}/{quote(file_id, safe='')}/content", target.with_name(f"{target.name}.partial")
    with _disk(target, "written"):
        try:
            request = Request("GET", path, None, None, {}, timeout_s)
            with partial.open("wb") as file, channel.reply(request) as (_, reply):
                left = int(reply.headers["Content-Length"]) if reply.status == 200 else _json(reply)
                while piece := reply.read(min(left, _PIECE_BYTES)):
                    left -= len(piece)
                    with _disk(target, "written"):
                        file.write(piece)
            if left:
                raise Unavailable(f"GET {path}: the reply ended {left} bytes early")
            partial.replace(target)
        finally:
            with suppress(OSError):
                partial.unlink()


def _json(reply: HTTPResponse) -> Any:
    return json_of(_PATH, Reply(reply.status, reply.read(_JSON_BYTES), reply.headers.get(CODE_KEY)))


@contextmanager
def _disk(path: Path, what: str) -> Iterator[None]:
    """Name the path in the errors of a disk, inside a reply too, where others are those of the connection."""
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be {what}: {error.strerror}") from error
