"""OpenAI's `/v1/batches`: https://platform.openai.com/docs/api-reference/batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from teimgr.api.batches import Batches
from teimgr.api.batches.service import BatchRequest
from teimgr.api.rest.files import LONGEST_LIFETIME_S, MIN_LIFETIME_S, After, page_of
from teimgr.api.rest.schemas import CLIENT_FAILURE, StrictQueryRoute, answer, json_body, read_json
from teimgr.http.auth.policy import caller_of

router = APIRouter(
    prefix="/v1/batches", tags=["files and batches"], responses=CLIENT_FAILURE, route_class=StrictQueryRoute
)

BODY_LIMIT_BYTES = 64 * 1024
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]
Limit = Annotated[int, Query(ge=1, le=100, description="maximum number of batches per page")]


class OutputExpiry(BaseModel):
    """When the results are deleted."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"] = Field(description="the time when the results were created")
    seconds: int = Field(ge=MIN_LIFETIME_S, le=LONGEST_LIFETIME_S)


class CreateBatch(BaseModel):
    """Body of POST /v1/batches."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={
            "examples": [{"input_file_id": "file-…", "endpoint": "/v1/embeddings", "completion_window": "24h"}]
        },
    )

    input_file_id: str = Field(description="a file of purpose batch", max_length=256)
    endpoint: str = Field(description="the `url` of every request, such as /v1/embeddings", max_length=256)
    completion_window: str = Field(description="24h, or another time up to 7d", max_length=16)
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=16)] | None = None
    output_expires_after: OutputExpiry | None = None


class RequestCounts(BaseModel):
    """Requests of a batch: all, completed and failed ones."""

    total: int
    completed: int
    failed: int


class CachedTokens(BaseModel):
    """Always 0."""

    cached_tokens: int


class ReasoningTokens(BaseModel):
    """Always 0."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Tokens of the inputs with a result."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchError(BaseModel):
    """An error in an input file."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(BaseModel):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[BatchError]


class BatchObject(BaseModel):
    """A batch. Times are seconds of the Unix epoch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None = Field(description="set if all requests name the same model")
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchPage(BaseModel):
    """Batches of the caller's API key, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post("", response_model=BatchObject, openapi_extra=json_body(CreateBatch, required=True))
async def create(request: Request) -> Response:
    """Begin a batch: its file is validated, then its requests are answered behind all interactive ones."""
    body = await read_json(request, CreateBatch, BODY_LIMIT_BYTES, misshapen_status=400)
    expiry = body.output_expires_after
    wanted = BatchRequest(
        body.input_file_id, body.endpoint, body.completion_window, body.metadata, expiry.seconds if expiry else None
    )
    return _shown(await _batches(request).create(caller_of(request.scope).name, wanted))


@router.get("", response_model=BatchPage)
async def batches(request: Request, after: After = None, limit: Limit = 20) -> Response:
    """The caller's batches."""
    return answer(page_of(_batches(request).of(caller_of(request.scope).name)[::-1], after, limit))


@router.get("/{id}", response_model=BatchObject)
async def batch(request: Request, id: str) -> Response:
    """One batch."""
    return _shown(_batches(request).get(caller_of(request.scope).name, id))


@router.post("/{id}/cancel", response_model=BatchObject)
async def cancel(request: Request, id: str) -> Response:
    """Cancel a batch: what is answered so far is kept."""
    return _shown(await _batches(request).cancel(caller_of(request.scope).name, id))


def _shown(batch: Any) -> Response:
    return answer(batch.as_object())


def _batches(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches
