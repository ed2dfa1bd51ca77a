"""OpenAI's `/v1/embeddings`: https://platform.openai.com/docs/api-reference/embeddings.

Other services extend this route by fields that change the vectors, and their clients would not notice an ignored one.
So the fields of Voyage, Jina and vLLM are honoured too, and unsupported ones are refused by name. Fields that change
nothing are ignored, because OpenAI's clients send some.

vLLM's `encoding_format: bytes` and `bytes_only` write the vectors of all inputs one after another, without JSON. With
`bytes` the header `metadata` has a JSON object with `id`, `created`, `model`, `usage` and, per input, `index`,
`embed_dtype`, `endianness`, `start`, `end` (bytes in the body) and `shape`. `bytes_only` omits this header.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from typing_extensions import TypeAliasType

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.engine.job import Input as EngineInput
from teimgr.spec import LoadedModel
from teimgr.wire.error_bodies import VLLM
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.wire.quantisation import Precision, converted
from teimgr.worker import http_inference as http
from teimgr.worker import images, input_checks
from teimgr.worker.calls import raise_first
from teimgr.worker.dialects.tokens import Side, Tokens, fitted

EmbedDtype = Annotated[
    Literal["float32", "float16"], Field(description="element type of encoding_format bytes and base64")
]
Endianness = Annotated[Literal["native", "little", "big"], Field(description="of encoding_format bytes and base64")]
BINARY_FORMATS = ("bytes", "bytes_only")

# Inputs in the header `metadata`, since clients limit a header to some kilobytes.
MAX_DESCRIBED = 64


def binary_reply(
    rows: Sequence[NDArray[np.float32]],
    head: dict[str, Any],
    encoding_format: str,
    embed_dtype: EmbedDtype = "float32",
    endianness: Endianness = "native",
) -> HttpReply:
    """The reply with `rows`, float32 of any shape; `head` is what the metadata begins with. Blocking.

    Raises:
        BadRequest: `bytes` with more than `MAX_DESCRIBED` rows.
    """
    if encoding_format == "bytes" and len(rows) > MAX_DESCRIBED:
        message = f"encoding_format: bytes describes at most {MAX_DESCRIBED} inputs in a header; use bytes_only"
        raise http.BadRequest(400, message, "encoding_format")
    precision = Precision(embed_dtype)
    dtype = precision.dtype.newbyteorder(endianness)
    written = [converted(row, precision).astype(dtype, copy=False) for row in rows]
    body = b"".join(row.tobytes() for row in written)
    headers = {"content-type": "application/octet-stream"}
    if encoding_format == "bytes":
        shown = sys.byteorder if endianness == "native" else endianness
        ends = np.cumsum([row.nbytes for row in written]).tolist()
        data = [
            {
                "index": index,
                "embed_dtype": embed_dtype,
                "endianness": shown,
                "start": end - row.nbytes,
                "end": end,
                "shape": row.shape,
            }
            for index, (row, end) in enumerate(zip(written, ends, strict=True))
        ]
        headers["metadata"] = http.to_json(head | {"data": data}).decode()
    return HttpReply(200, headers, body)


# Inputs per request, as in the official service, whose clients split their batches by it.
BATCH_LIMIT = 2048
_SHOWN_NAME = 64
_OBJECT_WEIGHT = 8  # of an embedding object without its numbers, in the unit of `json_pieces`

EncodingFormat = TypeAliasType("EncodingFormat", Literal["float", "base64"])
AnyEncoding = Literal["float", "base64", "bytes", "bytes_only"]
ElementType = Literal["float", "int8", "uint8", "binary", "ubinary"]

# Names of prompts for an `input_type` or `task` of Voyage, Cohere, NVIDIA and Jina, in order of preference.
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("query", "search_query", "retrieval.query"), http.QUERY_PROMPTS),
    **dict.fromkeys(("document", "passage", "search_document", "retrieval.passage"), http.DOCUMENT_PROMPTS),
}
# Tasks of Jina's models. If a model lacks a prompt for one, the default prompt applies.
_TASKS = {*_PROMPTS, "retrieval", "text-matching", "separation", "classification", "clustering"}
_TASKS |= {"code", "code.query", "code.passage"}
_WITH_WEIGHTS = "text-matching"  # only models with weights by task have this prompt
_NOT_SERVED = {
    "messages": "contradict `input`; send one of the two",
    "late_chunking": "is not supported",
    "return_multivector": "is not supported; /pooling has vectors per token",
    "embedding_types": "is Cohere's, of /v1/embed and /v2/embed; use output_dtype",
    "chunk_size": "is not supported",
}

_NOT_BESIDE_IMAGES = ("mm_processor_kwargs", "media_io_kwargs", "chat_template", "chat_template_kwargs")


Padding = Annotated[
    Literal["max_length", "do_not_pad"] | None,
    Field(description="vLLM's; refused if it differs from the model's training"),
]


def check_padding(inference: http.HttpInference, padding: str | None) -> None:
    """Raises BadRequest for a padding of texts that changes what the model was trained to read."""
    if padding == "max_length" and inference.served.model.fused:
        raise http.BadRequest(400, "padding: max_length is not supported: the model reads no padding", "padding")
    if padding == "do_not_pad" and inference.dispatcher.engine.tokenizer.pads_texts:
        message = "padding: do_not_pad is not supported: the model was trained with padded texts"
        raise http.BadRequest(400, message, "padding")


class MediaOptions(http.LenientBody):
    """vLLM's fields that change how images and chats are read; refused in requests with these."""

    mm_processor_kwargs: Annotated[Any, Field(description="not supported with images")] = None
    media_io_kwargs: Annotated[Any, Field(description="not supported with images")] = None
    chat_template: Annotated[Any, Field(description="not supported with images")] = None
    chat_template_kwargs: Annotated[Any, Field(description="not supported with images")] = None

    def refuse_beside_images(self) -> None:
        """Raises BadRequest for a field that would change what the model reads."""
        for name in _NOT_BESIDE_IMAGES:
            if getattr(self, name):
                message = f"{name}: is not supported: the model's files define how images and chats are prepared"
                raise http.BadRequest(400, message, name)


class ChatRequest(MediaOptions):
    """vLLM's `messages` in place of an input, and its fields about chats."""

    messages: Any = None
    padding: Padding = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    instruction: Any = None

    def refuse_beside_images(self) -> None:
        super().refuse_beside_images()
        if self.instruction:
            message = "instruction: is not supported; send it as a system message before the user's"
            raise http.BadRequest(400, message, "instruction")

    async def chats(self, inference: http.HttpInference, given: Any, limit: int) -> list[images.SentItem]:
        """The item of each conversation; `given` is the input beside them.

        Raises:
            TooManyInputs: there are more than `limit`.
            BadRequest: there is an input, a field is not supported, or what `images.item_of_conversation` raises.
        """
        if given is not None:
            raise http.BadRequest(400, f"messages: {_NOT_SERVED['messages']}", "messages")
        self.refuse_beside_images()
        check_padding(inference, self.padding)
        end = images.ChatEnd(self.add_generation_prompt, self.continue_final_message)
        if not inference.served.model.fused:  # without a chat, so without an end
            end = images.ChatEnd()
        read = partial(images.item_of_conversation, end=end)
        if images.is_conversations(self.messages):
            return await images.built(inference, self.messages, "messages", read, limit)
        return [read(self.messages, "messages")]


class OpenAIEmbeddingsRequest(http.LenientBody):
    """The inputs to embed: a text, texts, token ids, or lists of token ids."""

    model: http.ModelName = None
    input: http.Input
    encoding_format: AnyEncoding | None = "float"
    dimensions: Annotated[http.U32 | None, Field(description="leading dimensions to keep")] = None
    user: Annotated[str | None, Field(description="not used")] = None
    # Voyage
    output_dimension: Annotated[http.U32 | None, Field(description="Voyage's `dimensions`")] = None
    output_dtype: Annotated[ElementType | None, Field(description="Voyage's element type of the vectors")] = None
    input_type: Annotated[
        str | None, Field(description="query or document, or the name of one of the model's prompts")
    ] = None
    truncation: Annotated[bool | None, Field(description="false refuses inputs that are too long")] = None
    # Jina
    embedding_type: Annotated[
        Literal["float", "base64", "int8", "uint8", "binary", "ubinary"] | None, Field(description="Jina's encoding")
    ] = None
    task: Annotated[str | None, Field(description="Jina's `input_type`, such as retrieval.query")] = None
    truncate: Annotated[bool | Literal["NONE", "START", "END"] | None, Field(description="Jina's and NVIDIA's")] = None
    normalized: Annotated[bool | None, Field(description="false keeps the vectors' length")] = None
    late_chunking: Annotated[bool | None, Field(description="not supported")] = None
    return_multivector: Annotated[bool | None, Field(description="not supported")] = None
    # vLLM
    normalize: Annotated[bool | None, Field(description="vLLM's `normalized`")] = None
    use_activation: Annotated[bool | None, Field(description="vLLM's `normalized`")] = None
    add_special_tokens: Annotated[bool | None, Field(description="false only for token ids")] = None
    truncate_prompt_tokens: Tokens = None
    truncation_side: Side = None
    embed_dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"
    padding: Padding = None
    messages: Annotated[
        Any,
        Field(description="in place of `input`: one or several conversations, of texts or images"),
    ] = None
    # Infinity
    modality: Annotated[
        Literal["text", "image", "audio"],
        Field(description="type of `input`; images and sounds are data URIs or base64"),
    ] = "text"
    embedding_types: Annotated[Any, Field(description="not supported")] = None
    chunk_size: Annotated[Any, Field(description="not supported")] = None

    @property
    def scales(self) -> bool:
        return False not in (self.normalized, self.normalize, self.use_activation)

    @property
    def left(self) -> bool:
        return self.truncation_side == "left" or self.truncate == "START"

    def refuse_unsupported(self) -> None:
        """Raises BadRequest for a field that is not supported, and for two that contradict each other."""
        for name, why in _NOT_SERVED.items():
            if getattr(self, name):
                raise http.BadRequest(400, f"{name}: {why}", name)
        if None not in (self.dimensions, self.output_dimension) and self.dimensions != self.output_dimension:
            raise http.BadRequest(400, "output_dimension: contradicts dimensions", "output_dimension")
        if self.embedding_type not in (None, "base64") and self.output_dtype not in (None, self.embedding_type):
            raise http.BadRequest(400, "embedding_type: contradicts output_dtype", "embedding_type")
        element = "embedding_type" if self.output_dtype in (None, "float") else "output_dtype"
        in_bytes, named = self.encoding_format in BINARY_FORMATS, self._element
        if in_bytes and (named or self.embedding_type == "base64"):
            message = f"{element}: is not for encoding_format {self.encoding_format}; use `embed_dtype`"
            raise http.BadRequest(400, message, element)
        if named and self.embed_dtype != "float32":
            raise http.BadRequest(400, f"embed_dtype: contradicts {element}", "embed_dtype")
        if self.precision.needs_unit_vectors and not self.scales:
            message = f"{element}: {named} is for vectors of length 1, and these keep their own"
            raise http.BadRequest(400, message, element)

    @property
    def _element(self) -> str | None:
        """Voyage's or Jina's element type; None for floats."""
        named = self.output_dtype or self.embedding_type
        return None if named in ("float", "base64") else named

    @property
    def precision(self) -> Precision:
        return Precision(self._element or (self.embed_dtype if self.in_base64 else "float32"))

    @property
    def in_base64(self) -> bool:
        return self.encoding_format == "base64" or self.embedding_type == "base64"

    def options(self, served: http.ServedModel, truncate_by_default: bool) -> InferOptions:
        """Dense vectors of length 1 unless asked otherwise."""
        given = [one for one in (self.truncation, self.truncate) if one is not None]
        truncate = all(one not in (False, "NONE") for one in given) if given else truncate_by_default
        dimensions = self.dimensions if self.output_dimension is None else self.output_dimension
        return InferOptions(
            outputs=frozenset({Output.DENSE}),
            truncate=truncate or self.truncate_prompt_tokens is not None,
            truncation_left=self.left,
            names_side=self.truncation_side is not None or self.truncate in ("START", "END"),
            prompt_name=_prompt_of_input_type(self.input_type, served.model) or _task(self.task, served.model),
            normalize=self.scales,
            dimensions=dimensions,
        )

    @field_validator("input", mode="before")
    @classmethod
    def _texts_of_objects(cls, value: Any) -> Any:
        return texts_of_objects(value)

    def job(self, inputs: list[EngineInput], dialect: str, served: http.ServedModel) -> http.JobSpec:
        if type(self) is not OpenAIItemsRequest:  # images have no characters
            input_checks.need_inputs(inputs, "`input` cannot be an empty string or an empty array")
        how = self.in_base64, self.precision
        if self.input is not None or not served.model.fused:  # a chat has its own special tokens
            input_checks.need_special_tokens(inputs, self.add_special_tokens)
        encode = partial(embedding_list, self.model or served.name, *how, big=self.endianness == "big")
        truncates = dialect != VLLM and served.spec.auto_truncate
        return http.JobSpec(inputs, self.options(served, truncates), encode, BATCH_LIMIT)


class OpenAIItemsRequest(ChatRequest, OpenAIEmbeddingsRequest):
    """A request with images: Jina's objects, vLLM's messages, or Infinity's modality."""

    input: Any = None

    @field_validator("input", mode="before")
    @classmethod
    def _texts_of_objects(cls, value: Any) -> Any:
        return value

    async def items(self, inference: http.HttpInference) -> list[images.SentItem]:
        """Texts and images; raises TooManyInputs, BadRequest: something is neither, or the input is missing."""
        if self.messages is not None:
            return await self.chats(inference, self.input, BATCH_LIMIT)
        self.refuse_beside_images()
        check_padding(inference, self.padding)
        given = self.input if isinstance(self.input, list) else [self.input]
        return await images.built(inference, given, "input", self._item, BATCH_LIMIT)

    def _item(self, one: Any, place: str) -> images.SentItem:
        if isinstance(one, str):
            return one if self.modality == "text" else images.SentImage(one, place, self.modality)
        if isinstance(one, dict):
            return images.item_of_object(one, place)
        raise http.BadRequest(400, f"{place}: must be a text or an object with `text` or `image`", "input")


def texts_of_objects(value: Any) -> Any:
    """An `input` of Jina's with its objects `{"text": "…"}` replaced by their texts; anything else unchanged.

    Raises:
        HasImages: an object has an image.
        BadRequest: an object has something else than a text.
    """
    if isinstance(value, dict):
        if "image" in value:
            raise images.HasImages
        return text_of_object(value, "input")
    if not isinstance(value, list) or not any(type(one) is dict for one in value):
        return value
    if any("image" in one for one in value if isinstance(one, dict)):
        raise images.HasImages
    return [text_of_object(one, f"input.{place}") if isinstance(one, dict) else one for place, one in enumerate(value)]


def text_of_object(given: dict[str, Any], place: str) -> str:
    """The text of `{"text": "…"}`; raises BadRequest for another object, naming what it has, such as an image."""
    text = given.get("text")
    if not isinstance(text, str) or len(given) > 1:
        other = next((name for name in given if name != "text"), "")
        what = f"`{other[:_SHOWN_NAME]}` is not supported" if other else "`text` must be a string"
        message = f"{place}: {what}; send a text or an object with `text` alone"
        raise http.BadRequest(400, message, place.partition(".")[0])
    return text


def _prompt(name: str | None, model: LoadedModel) -> str | None:
    """The model's prompt for a role or task; None, the default prompt, if it has none for this one."""
    return http.prompt_among(model, (name, *_PROMPTS.get(name, ()))) if name else None


def _prompt_of_input_type(name: str | None, model: LoadedModel) -> str | None:
    """The same for `input_type`, which names a prompt unless it is a role.

    Raises:
        BadRequest: the model has prompts, and none of this name.
    """
    found = _prompt(name, model)
    if found is None and name and name not in _PROMPTS and model.prompts:
        raise no_prompt("input_type", name, model)
    return found


def no_prompt(field: str, name: str, model: LoadedModel, what: str = "prompt") -> http.BadRequest:
    """The refusal of a role or task that the model knows nothing of."""
    known = ", ".join(model.prompts)
    return http.BadRequest(
        400, f"{field}: the model has no {what} for {name[:_SHOWN_NAME]!r}; there are: {known}", field
    )


def _task(name: str | None, model: LoadedModel) -> str | None:
    """The same for Jina's `task`, which has its own weights in jina-embeddings-v3.

    Raises:
        BadRequest: the model has weights by task or prompts, and none for this task, which Jina does not have either.
    """
    found = _prompt(name, model)
    if found is None and name and _WITH_WEIGHTS in model.prompts:
        raise no_prompt("task", name, model, "weights")
    if found is None and name and name not in _TASKS and model.prompts:
        raise no_prompt("task", name, model)
    return found


def embedding_list(
    model: str,
    in_base64: bool,
    precision: Precision,
    job: Job,
    usage: Mapping[str, int] | None = None,
    *,
    big: bool = False,
) -> bytes:
    rows = converted(job.vectors, precision)
    data = embedding_objects(rows.byteswap() if big and in_base64 else rows, in_base64)
    weight = rows.size + len(data) * _OBJECT_WEIGHT  # an upper bound: base64 weighs less
    return http.to_json(
        {"object": "list", "data": data, "model": model, "usage": usage or http.usage(job.tokens)}, weight
    )


def embedding_objects(rows: Iterable[Any], in_base64: bool) -> list[dict[str, Any]]:
    return [
        {"object": "embedding", "embedding": row, "index": index}
        for index, row in enumerate(http.encoded_rows(rows, in_base64))
    ]


async def embeddings(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    """The handler of the route. What is too long is cut as the instance is set, and refused in vLLM's dialect."""
    try:
        body = await inference.read(request, OpenAIEmbeddingsRequest)
    except images.HasImages:
        return await _embed_items(inference, request)
    except http.BadRequest:
        if await inference.mentions(request, b'"messages"'):
            return await _embed_items(inference, request)
        raise
    if body.modality != "text":
        return await _embed_items(inference, request)
    check_padding(inference, body.padding)
    body.refuse_unsupported()
    return await _embed(inference, request, body, inference.inputs(body.input, BATCH_LIMIT))


async def _embed_items(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    """Texts and images."""
    body = await inference.read(request, OpenAIItemsRequest)
    inputs = await images.read_all(inference, await body.items(inference))
    checked = body.model_copy(update={"messages": None})
    checked.refuse_unsupported()
    if body.truncate_prompt_tokens is not None:
        raise http.BadRequest(400, "truncate_prompt_tokens: is not for requests with images", "truncate_prompt_tokens")
    return await _embed(inference, request, checked, inputs)


async def _embed(
    inference: http.HttpInference, request: HttpRequest, body: OpenAIEmbeddingsRequest, inputs: list[EngineInput]
) -> HttpReply:
    if body.truncate_prompt_tokens is not None:
        inputs = await fitted(inference, inputs, body.truncate_prompt_tokens, left=body.left)
    if body.encoding_format not in BINARY_FORMATS:
        return await inference.respond(partial(body.job, inputs, request.dialect))
    [job] = await inference.jobs([partial(body.job, inputs, request.dialect)])
    raise_first(job)
    head = {"id": http.new_id("embd"), "created": http.unix_time(), "model": body.model or inference.served.name}
    head["usage"] = http.usage(job.tokens)
    how = (str(body.encoding_format), body.embed_dtype, body.endianness)
    return await inference.dispatcher.off_loop(binary_reply, list(job.vectors), head, *how)


ROUTES: http.RouteTable = {("POST", "/v1/embeddings"): embeddings}
