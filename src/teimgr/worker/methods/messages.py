"""Messages of the contract to engine values and back."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from teimgr import __version__
from teimgr.engine.job import InferOptions, Output
from teimgr.engine.tokenizer import TokenSpan
from teimgr.errors import InvalidInput
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.spec import ModelInfo, WorkerSpec

MessageT = TypeVar("MessageT", bound=Message)

ScoreRequest = tei_pb2.PredictRequest | tei_pb2.PredictPairRequest | tei_pb2.RerankRequest | tei_pb2.RerankStreamRequest

# Every other kind is an embedding model to TEI.
_MODEL_TYPES = {"classifier": tei_pb2.MODEL_TYPE_CLASSIFIER, "reranker": tei_pb2.MODEL_TYPE_RERANKER}
_LEFT = tei_pb2.TRUNCATION_DIRECTION_LEFT


def parse(kind: type[MessageT], payload: bytes) -> MessageT:
    """A message of `kind` from its bytes.

    Raises:
        InvalidInput: they are no such message.
    """
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise InvalidInput(f"Malformed {kind.DESCRIPTOR.full_name}: {error}") from error


def embed_options(message: tei_pb2.EmbedRequest) -> InferOptions:
    """Options of one text; an absent `normalize` means true, an absent `truncate` false."""
    return InferOptions(
        truncate=message.truncate,
        truncation_left=is_left(message.truncation_direction),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
    )


def text_options(message: tei_pb2.EmbedSparseRequest | tei_pb2.EmbedAllRequest, output: Output) -> InferOptions:
    """Options of one text whose `output` is given as it is; an absent `truncate` means false."""
    return InferOptions(
        outputs=frozenset({output}),
        truncate=message.truncate,
        truncation_left=is_left(message.truncation_direction),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
    )


def score_options(message: ScoreRequest, raw_scores: bool | None = None) -> InferOptions:
    """Options of what is scored; `raw_scores` where it is not the message's own to say."""
    return InferOptions(
        outputs=frozenset({Output.SCORES}),
        truncate=message.truncate,
        truncation_left=is_left(message.truncation_direction),
        raw_scores=message.raw_scores if raw_scores is None else raw_scores,
    )


def info_response(model: ModelInfo, spec: WorkerSpec) -> bytes:
    """`tei.v1.InfoResponse` for a ready worker."""
    return tei_pb2.InfoResponse(
        version=__version__,
        model_id=model.model_id,
        model_sha=model.model_sha,
        model_dtype=model.dtype,
        model_type=_MODEL_TYPES.get(model.kind, tei_pb2.MODEL_TYPE_EMBEDDING),
        max_concurrent_requests=spec.max_concurrent_requests,
        max_input_length=model.max_input_length,
        max_batch_tokens=model.max_batch_tokens,
        max_batch_requests=spec.max_batch_requests,
        max_client_batch_size=spec.max_client_batch_size,
        tokenization_workers=model.tokenization_workers,
    ).SerializeToString()


def encode_response(tokens: list[TokenSpan]) -> bytes:
    """`tei.v1.EncodeResponse`; offsets are left out for special tokens."""
    message = tei_pb2.EncodeResponse()
    for token in tokens:
        message.tokens.add(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
    return message.SerializeToString()


def is_left(direction: int) -> bool:
    """Whether a text is cut at its beginning.

    Raises:
        InvalidInput: a number that is not in the enum.
    """
    if direction not in (tei_pb2.TRUNCATION_DIRECTION_RIGHT, _LEFT):
        raise InvalidInput(f"`truncation_direction` {direction} is unknown: 0 (right) or 1 (left)")
    return bool(direction == _LEFT)
