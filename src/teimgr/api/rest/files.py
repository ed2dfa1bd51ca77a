"""OpenAI's `/v1/files`: https://platform.openai.com/docs/api-reference/files."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import FileResponse, Response

from teimgr.api.batches import Batches
from teimgr.api.batches.files import BATCH
from teimgr.api.rest.multipart import FileForm, read_file_form
from teimgr.api.rest.paging import page_of
from teimgr.api.rest.schemas import CLIENT_FAILURE, StrictQueryRoute, answer
from teimgr.errors import ValidationError
from teimgr.http.auth.policy import caller_of

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
    """The file is gone."""

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
                        "file": {"type": "string", "format": "binary", "description": "lines of JSON, one per request"},
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
Limit = Annotated[int, Query(ge=1, le=10_000, description="most files of the page")]
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
    # Never shown by a browser as a page of this server: anyone with a key may have written it.
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
