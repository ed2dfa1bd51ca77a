"""Files to and from `/v1/files` in pieces, so that their size is not that of memory."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from teimgr.client.blocking_http import BlockingHttpChannel
from teimgr.client.http_replies import MAX_REPLY_BYTES, error_from_reply
from teimgr.errors import DeadlineExceeded, InvalidConfig, Unavailable
from teimgr.wire.status import CODE_KEY

_PIECE_BYTES = 2**18
_ERROR_BYTES = 65536


def upload(channel: BlockingHttpChannel, path: Path, timeout_s: float) -> Any:
    """Send a file for a batch; the file object of the reply. `timeout_s` bounds each step, not the whole.

    Raises:
        InvalidConfig: The file cannot be read.
        TeimgrError: The daemon refused it, or cannot be reached.
    """
    boundary = secrets.token_hex(16)
    name = "".join(each if each.isprintable() and each not in '"\\' else "_" for each in path.name)
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    ).encode()
    end = f"\r\n--{boundary}--\r\n".encode()
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(len(head) + size + len(end)),
            }
            payload = _form(path, file, size, head, end)
            with channel.reply("POST", "/v1/files", payload, None, headers, timeout_s) as (_, reply):
                body = reply.read(MAX_REPLY_BYTES)
                if reply.status >= 400:
                    raise error_from_reply(reply.status, body, reply.headers.get(CODE_KEY))
                return json.loads(body)
    except TimeoutError as error:
        raise DeadlineExceeded(f"POST /v1/files: nothing moved for {timeout_s:g} s") from error
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from error


def _form(path: Path, file: BinaryIO, size: int, head: bytes, end: bytes) -> Iterator[bytes]:
    yield head
    while size:
        try:
            piece = file.read(min(size, _PIECE_BYTES))
        except OSError as error:  # not one of the connection
            raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from error
        if not piece:
            raise InvalidConfig(f"{path}: became shorter while it was sent")
        size -= len(piece)
        yield piece
    yield end


def download(channel: BlockingHttpChannel, file_id: str, target: Path, timeout_s: float) -> None:
    """Write the bytes of a stored file to `target`, which appears when they are complete.

    Raises:
        InvalidConfig: `target` cannot be written.
        TeimgrError: The daemon has no such file, or cannot be reached.
    """
    path = f"/v1/files/{quote(file_id, safe='')}/content"
    partial = target.with_name(f"{target.name}.partial")
    try:
        with (
            partial.open("wb") as file,
            channel.reply("GET", path, None, None, {}, timeout_s) as (_, reply),
        ):
            if reply.status >= 400:
                raise error_from_reply(reply.status, reply.read(_ERROR_BYTES), reply.headers.get(CODE_KEY))
            left = int(reply.headers["Content-Length"])
            while piece := reply.read(min(left, _PIECE_BYTES)):
                left -= len(piece)
                _write(file, piece, target)
        if left:
            raise Unavailable(f"GET {path}: the reply ended {left} bytes early")
        partial.replace(target)
    except TimeoutError as error:
        raise DeadlineExceeded(f"GET {path}: nothing moved for {timeout_s:g} s") from error
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def _write(file: BinaryIO, piece: bytes, target: Path) -> None:
    try:
        file.write(piece)
    except OSError as error:  # not one of the connection
        raise _unwritable(target, error) from error


def _unwritable(target: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(f"{target}: cannot be written: {error.strerror}")
