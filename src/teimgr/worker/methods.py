"""Methods of a worker: a table of functions `(dispatcher, call) -> None`, and those of `tei.v1` and HTTP frames.

Replies with arrays are encoded by hand, with the same bytes as protobuf: for 384 floats, a message takes some 58 µs to
build and serialise, joining the bytes a quarter of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from teimgr import __version__
from teimgr.engine.job import InferOptions, Input, Job, Output, Pair
from teimgr.errors import Code, EmptyInput, Internal, InvalidInput, Refused, TeimgrError, error_from_code
from teimgr.http.turns import TURNS_OF
from teimgr.observability.request_context import CURRENT
from teimgr.spec import Kind
from teimgr.wire.error_bodies import failure
from teimgr.wire.frames import HttpReply, HttpRequest, Method, Timings, read_request, reply_head
from teimgr.wire.gil import free
from teimgr.wire.grpc_core.streams import MAX_PAIRS
from teimgr.wire.json_pieces import joined
from teimgr.wire.json_scan import Steps
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import MAX_FIELDS, scan, varint
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.worker import arrow_calls
from teimgr.worker.calls import (
    CallReply,
    DeferredReply,
    Encode,
    MethodCall,
    Part,
    WorkerCall,
    counted,
    optional,
    over_limit,
    parsed,
    parts_of,
    raise_first,
    request_options,
    within,
)
from teimgr.worker.dialects import ROUTES
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.http_inference import BadRequest, HttpInference
from teimgr.worker.scores import need_reranker_grpc, output_per_token, predictions, ranks

if TYPE_CHECKING:  # importing the tokenizer imports torch
    from teimgr.engine.text.tokenizer import TokenSpan

# TEI's types of scoring models; it calls any other model an embedding model.
_MODEL_TYPES: Mapping[str, tei_pb2.ModelType] = {
    Kind.CLASSIFIER: tei_pb2.MODEL_TYPE_CLASSIFIER,
    Kind.RERANKER: tei_pb2.MODEL_TYPE_RERANKER,
}
# Limit on the fields of a rerank request; each text is one field.
_MAX_RERANK_FIELDS = 2**16
# Limit on the bytes, at least one per id, of a decode request, since protobuf holds the GIL while parsing it.
_MAX_DECODE_BYTES = 2**18
# Larger messages are parsed on a codec thread: Python takes a microsecond per field, and 10 ms for 8 MiB of text.
_LARGE_MESSAGE_BYTES = 256 * 1024
# Tokens of a `Tokenize` reply serialised in one call, which holds the GIL for some milliseconds.
_TOKENS_AT_ONCE = 10_000
# Bytes of a `Rerank` reply serialised in one call: 2 ms. A whole reply of 40 MB would hold the GIL for 105 ms.
_RANKED_BYTES = 2**20
_RANK_BYTES = 20  # of a rank without its text
# A codec thread encodes replies with more ranks; each takes a microsecond or two.
_MANY_RANKS = 1024
ScoringRequest = tei_pb2.PredictRequest | tei_pb2.PredictPairRequest | tei_pb2.RerankRequest


def handle(dispatcher: Dispatcher, call: MethodCall) -> None:
    """Answer `call` by its method, exactly once, now or later."""
    # Tasks that a method starts inherit this context.
    context, turns = CURRENT.set(call.context), TURNS_OF.set(call.turns_of)
    try:
        method = METHODS.get(call.method)
        if method is None:
            raise Internal(f"No method has the number {call.method}")
        if len(call.payload) <= _LARGE_MESSAGE_BYTES:
            method(dispatcher, call)
        elif call.method in _MESSAGES:
            _admit_then_parse(dispatcher, call, method)
        elif call.method == Method.HTTP and not dispatcher.is_admitted(call):
            call.price(1, dispatcher.max_length)
            dispatcher.admit(call, partial(handle, dispatcher, call))
        else:
            method(dispatcher, call)
    except Exception as error:
        known = error if isinstance(error, TeimgrError) else masked(error)
        dispatcher.metrics.failed(known)
        dispatcher.refuse(call, known)
    finally:
        CURRENT.reset(context)
        TURNS_OF.reset(turns)


def _admit_then_parse(
    dispatcher: Dispatcher, call: MethodCall, method: Callable[[Dispatcher, MethodCall], None]
) -> None:
    """Answer a call whose message takes so long to parse that a codec thread does it.

    It is admitted first, since a message that waits for a thread takes memory too.
    """

    async def parse_then_answer() -> None:
        await dispatcher.read_off_loop(call, call.parse, *_MESSAGES[call.method])
        method(dispatcher, call)

    if call.method == Method.TOKENIZE:
        call.allow_to_wait()
    else:
        call.price(1, dispatcher.max_length)  # as one text: the number is unknown before parsing
    dispatcher.admit_async(call, parse_then_answer, computes=False)


def _serve(
    dispatcher: Dispatcher, call: MethodCall, read: Callable[[], Input], options: InferOptions, encode: Encode
) -> None:
    """Serve a call with the one input that `read` takes from its message. If it may be long, `read` runs on a codec
    thread: protobuf decodes a text at each access, 8 MiB in 10 ms."""
    if len(call.payload) <= _LARGE_MESSAGE_BYTES:
        dispatcher.serve(call, [read()], options, encode)
        return

    async def read_then_serve() -> None:
        dispatcher.serve(call, [await dispatcher.read_off_loop(call, read)], options, encode)

    dispatcher.admit_async(call, read_then_serve, computes=False)


def embed(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`Embed`; an absent `normalize` means true, an absent `truncate` false."""
    message = call.message(tei_pb2.EmbedRequest)
    options = request_options(
        message,
        Output.DENSE,
        prompt_name=optional(message, "prompt_name"),
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=optional(message, "dimensions"),
    )

    def encode(job: Job) -> CallReply:
        raise_first(job)
        timings = call.timings(job)
        return CallReply(embed_response(job.vectors[0], timings), timings)

    _serve(dispatcher, call, lambda: message.inputs, options, encode)


def embed_sparse(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`EmbedSparse`; an absent `truncate` means false."""
    message = call.message(tei_pb2.EmbedSparseRequest)
    options = request_options(message, Output.SPARSE, prompt_name=optional(message, "prompt_name"))

    def encode(job: Job) -> CallReply:
        raise_first(job)
        vector, timings = job.sparse[0], call.timings(job)
        assert vector is not None  # only failed rows are None
        payload = embed_sparse_response(vector.indices, vector.values, timings)
        return CallReply(within(payload, dispatcher.spec.max_message_bytes), timings)

    _serve(dispatcher, call, lambda: message.inputs, options, encode)


def embed_all(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`EmbedAll`; an absent `truncate` means false."""
    message = call.message(tei_pb2.EmbedAllRequest)
    output = output_per_token(dispatcher.engine.info)
    options = request_options(message, output, prompt_name=optional(message, "prompt_name"))

    def encode(job: Job) -> CallReply:
        raise_first(job)
        vectors = (job.multi_vectors if output is Output.MULTI_VECTOR else job.tokens_of)[0]
        assert vectors is not None  # only failed rows are None
        timings = call.timings(job)
        return CallReply(within(embed_all_response(vectors, timings), dispatcher.spec.max_message_bytes), timings)

    _serve(dispatcher, call, lambda: message.inputs, options, encode)


def predict(dispatcher: Dispatcher, call: MethodCall) -> None:
    message = call.message(tei_pb2.PredictRequest)
    _classify(dispatcher, call, lambda: message.inputs, _score_options(message))


def predict_pair(dispatcher: Dispatcher, call: MethodCall) -> None:
    message = call.message(tei_pb2.PredictPairRequest)
    if (count := len(message.inputs)) not in (1, 2):
        raise InvalidInput(f"`inputs` must have a single or two elements. Given: {count}")

    def read() -> Input:
        texts = [message.inputs[place] for place in range(count)]
        return Pair(*texts) if count == 2 else texts[0]

    _classify(dispatcher, call, read, _score_options(message))


def _classify(dispatcher: Dispatcher, call: MethodCall, read: Callable[[], Input], options: InferOptions) -> None:
    labels = dispatcher.engine.info.labels

    def encode(job: Job) -> CallReply:
        raise_first(job)
        message = tei_pb2.PredictResponse()
        for score, label in predictions(job.scores[0], labels):
            message.predictions.add(score=score, label=label)
        timings = call.timings(job)
        return CallReply(with_metadata(timings, message.SerializeToString()), timings)

    _serve(dispatcher, call, read, options, encode)


def rerank(dispatcher: Dispatcher, call: MethodCall) -> None:
    message = call.message(tei_pb2.RerankRequest, _MAX_RERANK_FIELDS)
    options = _score_options(message, listed=True)
    if not message.texts:
        raise EmptyInput("`texts` cannot be empty")
    need_reranker_grpc(dispatcher.engine.info)
    if (refusal := over_limit(len(message.texts), dispatcher.spec.max_client_batch_size)) is not None:
        dispatcher.metrics.batch_too_large(len(message.texts))
        dispatcher.refuse(call, InvalidInput(refusal))
        return

    def read() -> tuple[list[Pair], Encode]:
        query = message.query  # each access decodes it
        pairs = [Pair(query, text) for text in message.texts]
        return pairs, _rank_encoder(dispatcher, call, pairs, message.return_text)

    def read_counted() -> tuple[Part, Encode]:
        pairs, encode = read()
        return counted(pairs, options), encode

    if len(call.payload) <= _LARGE_MESSAGE_BYTES:
        pairs, encode = read()
        dispatcher.serve(call, pairs, options, encode)
        return

    async def read_then_submit() -> None:
        part, encode = await dispatcher.read_off_loop(call, read_counted)
        dispatcher.submit(call, (part,), encode)

    dispatcher.metrics.received(len(message.texts))
    call.price(len(message.texts), dispatcher.max_length)
    dispatcher.admit_async(call, read_then_submit)


def rerank_stream(dispatcher: Dispatcher, call: MethodCall) -> None:
    """Serve `RerankStream`, collected into one payload of up to 100,000 messages, which a codec thread parses.

    Each message has its own query and truncation; the first message sets `raw_scores` and `return_text`.
    """
    need_reranker_grpc(dispatcher.engine.info)

    def read() -> tuple[list[Part], Encode]:
        # Parsed singly: protobuf would hold the GIL for all of them.
        requests = [
            parsed(tei_pb2.RerankStreamRequest, call.payload[start:end])
            for _, _, start, end in scan(call.payload, MAX_PAIRS)
        ]
        if not requests:
            raise InvalidInput("Missing rerank request")
        first = requests[0]
        options = [
            request_options(message, Output.SCORES, raw_scores=first.raw_scores, listed=True) for message in requests
        ]
        pairs = [Pair(message.query, message.text) for message in requests]
        return parts_of(pairs, options), _rank_encoder(dispatcher, call, pairs, first.return_text)

    async def read_then_submit() -> None:
        parts, encode = await dispatcher.read_off_loop(call, read)
        dispatcher.submit(call, parts, encode)

    dispatcher.admit_async(call, read_then_submit)


def _score_options(message: ScoringRequest, *, listed: bool = False) -> InferOptions:
    return request_options(message, Output.SCORES, raw_scores=message.raw_scores, listed=listed)


def _rank_encoder(dispatcher: Dispatcher, call: WorkerCall, pairs: Sequence[Pair], return_text: bool) -> Encode:
    def encode(job: Job) -> CallReply:
        raise_first(job)
        timings = call.timings(job)
        payload = joined([*_ranked(job, pairs if return_text else None), with_metadata(timings)])
        return CallReply(within(payload, dispatcher.spec.max_message_bytes), timings)

    def encode_off_finisher(job: Job) -> CallReply | DeferredReply:
        is_long = len(pairs) > _MANY_RANKS or (return_text and call.size_bytes > _LARGE_MESSAGE_BYTES)
        return DeferredReply(partial(encode, job)) if is_long else encode(job)

    return encode_off_finisher


def _ranked(job: Job, pairs: Sequence[Pair] | None) -> Iterator[bytes]:
    """The ranks of a `tei.v1.RerankResponse`, with the texts of `pairs`, in parts of `_RANKED_BYTES`."""
    message, size = tei_pb2.RerankResponse(), 0
    for row, score in ranks(job.scores):
        text = None if pairs is None else pairs[row].second
        message.ranks.add(index=row, score=score, text=text)
        size += _RANK_BYTES if text is None else _RANK_BYTES + len(text)
        if size > _RANKED_BYTES:
            yield message.SerializeToString()
            message, size = tei_pb2.RerankResponse(), 0
    yield message.SerializeToString()


def info(dispatcher: Dispatcher, call: MethodCall) -> None:
    model, spec = dispatcher.engine.info, dispatcher.spec
    response = tei_pb2.InfoResponse(
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
    )
    ours = arrow_pb2.InfoAddition(modalities=model.modalities, fused=model.fused)
    call.reply(CallReply(response.SerializeToString() + ours.SerializeToString()))


def tokenize(dispatcher: Dispatcher, call: MethodCall) -> None:
    """Serve `Tokenize`; absent flags are false, unlike over HTTP. Special tokens have no offsets."""
    message = call.message(tei_pb2.EncodeRequest)
    prompt_name = optional(message, "prompt_name")

    def encoded() -> Steps[bytes]:
        tokens = yield from dispatcher.engine.tokenized(message.inputs, message.add_special_tokens, prompt_name)
        try:
            parts = []
            for at in range(0, len(tokens), _TOKENS_AT_ONCE):
                parts.append(_encoded_tokens(tokens[at : at + _TOKENS_AT_ONCE]))
                yield
            return joined(parts)
        finally:
            free(tokens)

    _answer_off_loop(dispatcher, call, encoded())


def _encoded_tokens(tokens: Sequence[TokenSpan]) -> bytes:
    response = tei_pb2.EncodeResponse()
    for token in tokens:
        response.tokens.add(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
    return response.SerializeToString()


def decode(dispatcher: Dispatcher, call: MethodCall) -> None:
    if len(call.payload) > _MAX_DECODE_BYTES:
        raise InvalidInput(f"`ids` have {len(call.payload)} bytes, more than {_MAX_DECODE_BYTES}")
    message = call.message(tei_pb2.DecodeRequest, _MAX_DECODE_BYTES)

    def decoded() -> Steps[bytes]:
        yield
        text = dispatcher.engine.tokenizer.decode(list(message.ids), message.skip_special_tokens)
        return tei_pb2.DecodeResponse(text=text).SerializeToString()

    _answer_off_loop(dispatcher, call, decoded())


def _answer_off_loop(dispatcher: Dispatcher, call: MethodCall, steps: Steps[bytes]) -> None:
    """Answer with the result of tokenizing `steps`; never refused as OVERLOADED, since TEI counts no permit for it."""
    call.allow_to_wait()

    async def answer() -> None:
        payload = await dispatcher.in_tokenizer_turns(steps)
        dispatcher.answer(call, CallReply(within(payload, dispatcher.spec.max_message_bytes)))

    dispatcher.admit_async(call, answer, computes=False)


def forwarded_http(dispatcher: Dispatcher, call: MethodCall) -> None:
    """Answer with the reply of the dialect's route, or its refusal; the gateway writes the body of other errors."""
    try:
        request = read_request(call.payload)
    except ValueError as error:
        raise InvalidInput(f"malformed HTTP frame: {error}") from error
    dispatcher.run(call, _answer_http(HttpInference(dispatcher, call.fixed_lane, call.deadline, call), call, request))


async def _answer_http(inference: HttpInference, call: MethodCall, request: HttpRequest) -> None:
    try:
        route = ROUTES.get(request.dialect, {}).get((request.method, request.path))
        if route is None:
            raise error_from_code(Code.UNIMPLEMENTED, f"{request.method} {request.path} is not a route of a worker")
        try:
            inference.dispatcher.check_space(request.headers.get(EXPECT_KEY))
            reply = await route(inference, request)
        except BadRequest as error:
            reply = error.reply(request.dialect)
        call.reply(_framed(reply._replace(headers={**reply.headers, **inference.dispatcher.space_headers})))
    except Refused as error:  # an error frame would lose its type
        call.reply(_framed(failure(request.dialect, error)))
    except TeimgrError as error:
        call.fail(error)
    except Exception as error:
        call.fail(masked(error))


def _framed(reply: HttpReply) -> CallReply:
    return CallReply(reply.body, head=reply_head(reply))


METHODS: Mapping[int, Callable[[Dispatcher, MethodCall], None]] = {
    Method.EMBED: embed,
    Method.EMBED_SPARSE: embed_sparse,
    Method.EMBED_ALL: embed_all,
    Method.PREDICT: predict,
    Method.PREDICT_PAIR: predict_pair,
    Method.RERANK: rerank,
    Method.RERANK_STREAM: rerank_stream,
    Method.INFO: info,
    Method.TOKENIZE: tokenize,
    Method.DECODE: decode,
    Method.EMBED_ARROW: arrow_calls.embed_arrow,
    Method.EMBED_SPARSE_ARROW: arrow_calls.embed_sparse_arrow,
    Method.INFER_ARROW: arrow_calls.infer_arrow,
    Method.HTTP: forwarded_http,
}


# The arguments of `MethodCall.parse` by method, for large messages. Methods with Arrow tables parse none.
_MESSAGES: Mapping[int, tuple[type[Message], int]] = {
    Method.EMBED: (tei_pb2.EmbedRequest, MAX_FIELDS),
    Method.EMBED_SPARSE: (tei_pb2.EmbedSparseRequest, MAX_FIELDS),
    Method.EMBED_ALL: (tei_pb2.EmbedAllRequest, MAX_FIELDS),
    Method.PREDICT: (tei_pb2.PredictRequest, MAX_FIELDS),
    Method.PREDICT_PAIR: (tei_pb2.PredictPairRequest, MAX_FIELDS),
    Method.RERANK: (tei_pb2.RerankRequest, _MAX_RERANK_FIELDS),
    Method.TOKENIZE: (tei_pb2.EncodeRequest, MAX_FIELDS),
}


_LENGTH_DELIMITED_1 = b"\x0a"  # field 1, wire type 2
_LENGTH_DELIMITED_2 = b"\x12"  # field 2, wire type 2
# An entry of a sparse vector: tag and length, tag of the index, its varint, tag of the value, four bytes.
_SPARSE_WIDTH = 2 + 1 + 5 + 1 + 4
_VARINT_1 = 0x08  # field 1, wire type 0
_FIXED32_2 = 0x15  # field 2, wire type 5


def metadata(timings: Timings) -> bytes:
    """Serialise `tei.v1.Metadata`: fields 1 to 6 in order, zeros omitted as in proto3."""
    return b"".join(bytes((field << 3,)) + varint(value) for field, value in enumerate(timings, 1) if value)


def with_metadata(timings: Timings, *body: bytes) -> bytes:
    """Join a reply from field 1, serialised in the parts of `body`, and its metadata, which is always field 2."""
    meta = metadata(timings)
    return b"".join((*body, _LENGTH_DELIMITED_2, varint(len(meta)), meta))


def embed_response(vector: NDArray[np.float32], timings: Timings) -> bytes:
    """Serialise `tei.v1.EmbedResponse` of one vector (shape `[dim]`, float32, contiguous)."""
    floats = vector.astype("<f4", copy=False).tobytes()
    return with_metadata(timings, *((_LENGTH_DELIMITED_1, varint(len(floats)), floats) if floats else ()))


def embed_sparse_response(indices: NDArray[np.uint32], values: NDArray[np.float32], timings: Timings) -> bytes:
    """Serialise `tei.v1.EmbedSparseResponse` of K entries: uint32 [K], float32 [K].

    Every entry is laid out at full width; then a mask selects the bytes to send: the bytes that the index needs, and no
    field that is zero.
    """
    floats = np.ascontiguousarray(values, "<f4")
    rows = np.empty((len(indices), _SPARSE_WIDTH), np.uint8)
    sent = np.ones(rows.shape, np.bool_)
    rows[:, 0] = _LENGTH_DELIMITED_1[0]
    rows[:, 2] = _VARINT_1
    rows[:, 3:8], sent[:, 3:8] = _varints(indices)
    sent[:, 2] = sent[:, 3]
    rows[:, 8] = _FIXED32_2
    rows[:, 9:] = floats.view(np.uint8).reshape(-1, 4)
    sent[:, 8:] = (floats.view("<u4") != 0)[:, None]  # compares bits: -0.0 is sent
    rows[:, 1] = sent[:, 2:].sum(axis=1)
    return with_metadata(timings, rows[sent].tobytes())


def _varints(numbers: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the varint of each number, uint8 [K, 5], and a mask of the bytes that it needs: none for zero."""
    groups = numbers.astype(np.uint64)[:, None] >> np.arange(0, 35, 7, dtype=np.uint64)
    needed = groups != 0
    follows = np.zeros_like(needed)
    follows[:, :-1] = needed[:, 1:]
    return (groups & np.uint64(0x7F)).astype(np.uint8) | follows.astype(np.uint8) << np.uint8(7), needed


def embed_all_response(vectors: NDArray[np.float32], timings: Timings) -> memoryview:
    """Serialise `tei.v1.EmbedAllResponse` of vectors per token, float32 [tokens, width]."""
    tokens, width = vectors.shape
    floats = np.ascontiguousarray(vectors, "<f4").view(np.uint8).reshape(tokens, 4 * width)
    inner = _LENGTH_DELIMITED_1 + varint(4 * width) if width else b""
    head = np.frombuffer(_LENGTH_DELIMITED_1 + varint(len(inner) + 4 * width) + inner, np.uint8)
    end = np.frombuffer(with_metadata(timings), np.uint8)
    whole = np.empty(tokens * (len(head) + 4 * width) + len(end), np.uint8)
    rows = whole[: len(whole) - len(end)].reshape(tokens, len(head) + 4 * width)
    rows[:, : len(head)], rows[:, len(head) :] = head, floats  # numpy copies without the GIL
    whole[len(whole) - len(end) :] = end
    return whole.data
