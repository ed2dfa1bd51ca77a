"""OpenAI's `/v1/files` (https://platform.openai.com/docs/api-reference/files), and pagination of its lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from teimgr.api.batches import Batches
from teimgr.api.batches.files import BATCH
from teimgr.api.rest.schemas import CLIENT_FAILURE, StrictQueryRoute, answer
from teimgr.errors import TeimgrError, ValidationError
from teimgr.http.auth.policy import caller_of

_PART_S, _WHOLE_S = 30.0, 3600.0  # time limits of one part and of a whole upload
_MAX_FIELDS, _MAX_FIELD_BYTES = 32, 4096
_MAX_BOUNDARY_BYTES = 256  # of the library; RFC 2046 allows 70
_MAX_PARAMETERS = 64  # of a Content-Type or Content-Disposition, parsed on the event loop
# After refusing a form, drain up to this many bytes, so that a client that still sends reads the error.
_MAX_DISCARDED_BYTES = 64 * 2**20

Write = Callable[[bytes], Awaitable[None]]


class FileForm:
    """A form as far as it is read. `fields` are its texts by name; `filename` is set when the file begins."""

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
        if len(boundary) > _MAX_BOUNDARY_BYTES:
            raise ValidationError(f"the form's boundary is longer than {_MAX_BOUNDARY_BYTES} bytes")
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
            await _discard(body)  # reads the data after the last boundary
    except TimeoutError:
        raise HTTPException(408, "The form did not come in time") from None
    if not form.is_complete:
        raise ValidationError("the form has no closing boundary")
    if form.filename is None:
        raise ValidationError(f"{file_field}: missing in the form")
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


MIN_LIFETIME_S, LONGEST_LIFETIME_S = 3600, 30 * 86_400
_FILENAME_CHARS = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class FileObject(BaseModel):
    """A stored file. Times are seconds of the Unix epoch."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: str | None


class FilePage(BaseModel):
    """Files of the caller's API key."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: bool


_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSON lines, one per request"},
                        "purpose": {"const": BATCH},
                        _ANCHOR: {"const": "created_at"},
                        _SECONDS: {"type": "integer", "minimum": MIN_LIFETIME_S, "maximum": LONGEST_LIFETIME_S},
                    },
                }
            }
        },
    }
}

After = Annotated[str | None, Query(description="the id after which the page begins")]
Limit = Annotated[int, Query(ge=1, le=10_000, description="maximum number of files per page")]
Order = Annotated[Literal["asc", "desc"], Query(description="by time of creation")]
Purpose = Annotated[str | None, Query(description="only files of this purpose")]

router = APIRouter(
    prefix="/v1/files", tags=["files and batches"], responses=CLIENT_FAILURE, route_class=StrictQueryRoute
)


@router.post("", response_model=FileObject, openapi_extra=_FORM)
async def upload(request: Request) -> Response:
    """Keep a file of requests for a batch."""
    batches, owner = _batches(request), caller_of(request.scope).name
    async with batches.files.upload(owner) as file:
        form = await read_file_form(request, "file", file.write)
        if (purpose := form.fields.get("purpose")) != BATCH:
            raise ValidationError(f"purpose: must be '{BATCH}' (got {(purpose or '')[:80]!r})")
        filename = (form.filename or "")[:_FILENAME_CHARS]
        stored = await file.commit(filename, BATCH, _lifetime_s(form))
    return answer(stored.as_object())


@router.get("", response_model=FilePage)
async def files(
    request: Request, after: After = None, limit: Limit = 10_000, order: Order = "desc", purpose: Purpose = None
) -> Response:
    """The caller's files, results of its batches included."""
    found = _batches(request).files.of(caller_of(request.scope).name)
    if order == "desc":
        found.reverse()
    return answer(page_of([file for file in found if purpose in (None, file.purpose)], after, limit))


@router.get("/{id}", response_model=FileObject)
async def file(request: Request, id: str) -> Response:
    """One file."""
    return answer(_batches(request).files.get(caller_of(request.scope).name, id).as_object())


@router.get("/{id}/content", response_class=FileResponse)
async def content(request: Request, id: str) -> Response:
    """The bytes of a file."""
    store = _batches(request).files
    found = store.get(caller_of(request.scope).name, id)
    # A browser must not render it as a page of this server: any key's owner may have written it.
    headers = {"X-Content-Type-Options": "nosniff"}
    return FileResponse(store.path(id), media_type="application/octet-stream", filename=found.filename, headers=headers)


@router.delete("/{id}", response_model=DeletedFile)
async def delete(request: Request, id: str) -> Response:
    """Delete a file; the input of a batch that has not ended is refused."""
    found = await _batches(request).delete_file(caller_of(request.scope).name, id)
    return answer({"id": found.id, "object": "file", "deleted": True})


def _batches(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


def _lifetime_s(form: FileForm) -> int | None:
    """The seconds of `expires_after`; None if the form has none."""
    anchor, seconds = form.fields.get(_ANCHOR), form.fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ValidationError(f"{_ANCHOR}: must be 'created_at' (got {(anchor or '')[:80]!r})")
    if not (seconds or "").isdecimal() or not MIN_LIFETIME_S <= int(seconds or 0) <= LONGEST_LIFETIME_S:
        limits = f"a whole number from {MIN_LIFETIME_S} to {LONGEST_LIFETIME_S}"
        raise ValidationError(f"{_SECONDS}: must be {limits} (got {(seconds or '')[:80]!r})")
    return int(seconds or 0)


class Listed(Protocol):
    """A member of a list."""

    @property
    def id(self) -> str:
        """Unique in the list."""

    def as_object(self) -> dict[str, Any]:
        """Its object on the wire."""


def page_of(members: Sequence[Listed], after: str | None, limit: int) -> dict[str, Any]:
    """The page of at most `limit` members that follows the one whose id is `after`.

    Raises:
        ValidationError: no member has that id.
    """
    start = 0
    if after is not None:
        start = next((place for place, each in enumerate(members, 1) if each.id == after), -1)
        if start < 0:
            raise ValidationError(f"after: {after[:80]!r} is not in this list")
    page = members[start : start + limit]
    return {
        "object": "list",
        "data": [each.as_object() for each in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + limit < len(members),
    }
