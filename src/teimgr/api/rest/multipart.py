"""A form with one file, `multipart/form-data`, read as it comes: the file in parts, the fields as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request

from teimgr.errors import TeimgrError, ValidationError

# No part of an upload may take longer than the first to come, nor the whole longer than the second.
_PART_S, _WHOLE_S = 30.0, 3600.0
_MAX_FIELDS, _MAX_FIELD_BYTES = 32, 4096
# Parameters of a Content-Type or Content-Disposition: the library takes microseconds for each, on the event loop.
_MAX_PARAMETERS = 64
# After refusing a form, drain up to this many bytes, so that a client that still sends reads the error.
_MAX_DISCARDED_BYTES = 64 * 2**20

Write = Callable[[bytes], Awaitable[None]]


class FileForm:
    """A form as far as it is read. `fields` has the texts by name, `filename` the file's name once it has begun."""

    def __init__(self, boundary: bytes, file_field: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._file_field = file_field
        self._count = 0
        self._header: list[bytes] = [b"", b""]
        self._disposition = b""
        self._name = ""
        self._in_file = False
        self._text = bytearray()
        self._data: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": lambda data, start, end: self._add_data(data[start:end]),
                "on_part_end": self._end,
                "on_end": self._complete,
            },
        )

    def feed(self, chunk: bytes) -> bytes:
        """Parse the next bytes of the body; the result is what they have of the file.

        Raises:
            ValidationError: the form is malformed, or a field is too long.
        """
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise ValidationError(f"the form cannot be parsed: {error}") from error
        data, self._data = self._data, []
        return b"".join(data)

    def _begin(self) -> None:
        self._count += 1
        if self._count > _MAX_FIELDS:
            raise ValidationError(f"the form has more than {_MAX_FIELDS} fields")
        self._disposition = b""
        self._header = [b"", b""]
        self._text.clear()

    def _add_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = [b"", b""]

    def _end_headers(self) -> None:
        _, options = _with_parameters("Content-Disposition", self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._name == self._file_field
        if self._in_file:
            if self.filename is not None:
                raise ValidationError(f"{self._file_field}: the form has more than one")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _add_data(self, data: bytes) -> None:
        if self._in_file:
            self._data.append(data)
            return
        self._text += data
        if len(self._text) > _MAX_FIELD_BYTES:
            raise ValidationError(f"{self._name[:80]}: longer than {_MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _complete(self) -> None:
        self.is_complete = True


async def read_file_form(request: Request, file_field: str, write: Write) -> FileForm:
    """Read the form, passing the file on to `write` in parts; memory holds one part at a time.

    Raises:
        ValidationError: the form is malformed, has a header of too many parameters, or lacks the file.
        HTTPException: 415 for another content type, 408 where it does not come in time.
        TeimgrError: as `write` does; the rest of the form is thrown away.
        ClientDisconnect: the client went away.
    """
    kind, options = _with_parameters("Content-Type", request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise HTTPException(415, "Expected request with `Content-Type: multipart/form-data; boundary=…`")
    body = request.stream()
    try:
        async with asyncio.timeout(_WHOLE_S):
            try:
                form = FileForm(boundary, file_field)
                while not form.is_complete and (chunk := await _next(body)):
                    if data := form.feed(chunk):
                        await write(data)
            except TeimgrError:
                await _discard(body)
                raise
            await _discard(body)  # what follows the last boundary
    except TimeoutError:
        raise HTTPException(408, "The form did not come in time") from None
    if not form.is_complete:
        raise ValidationError("the form ends before its last boundary")
    if form.filename is None:
        raise ValidationError(f"{file_field}: is missing in the form")
    return form


def _with_parameters(name: str, value: str | bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """The value of a header and its parameters. Raises ValidationError where it has too many of these."""
    separators = value.count(b";") if isinstance(value, bytes) else value.count(";")
    if separators > _MAX_PARAMETERS:
        raise ValidationError(f"{name}: has more than {_MAX_PARAMETERS} parameters")
    kind, options = parse_options_header(value)
    return kind, options


async def _next(body: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(_PART_S):
        return await anext(body, b"")


async def _discard(body: AsyncIterator[bytes]) -> None:
    size = 0
    while size <= _MAX_DISCARDED_BYTES and (chunk := await _next(body)):
        size += len(chunk)
