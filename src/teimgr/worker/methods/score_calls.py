"""The methods of `tei.v1.Predict` and `tei.v1.Rerank`: texts and pairs in, scores by label or by text out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from teimgr.engine.job import InferOptions, Input, Job, Output, Pair
from teimgr.errors import EmptyInput, InvalidInput
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.teimgr.v1 import frames_pb2
from teimgr.wire.replies import with_metadata
from teimgr.worker.calls import CallReply, MethodCall, WorkerCall, raise_first, truncates_left, within
from teimgr.worker.dispatcher import Dispatcher, Encode, Part, parts_of
from teimgr.worker.limits import over_limit
from teimgr.worker.scores import need_reranker_grpc, predictions, ranks

ScoringRequest = (
    tei_pb2.PredictRequest | tei_pb2.PredictPairRequest | tei_pb2.RerankRequest | tei_pb2.RerankStreamRequest
)


def predict(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`Predict`: the labels of a text."""
    message = call.message(tei_pb2.PredictRequest)
    _classify(dispatcher, call, message.inputs, _options(message, message.raw_scores))


def predict_pair(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`PredictPair`: the labels of a text or of two."""
    message = call.message(tei_pb2.PredictPairRequest)
    inputs = message.inputs
    if len(inputs) not in (1, 2):
        raise InvalidInput(f"`inputs` must have a single or two elements. Given: {len(inputs)}")
    item = Pair(*inputs) if len(inputs) == 2 else inputs[0]
    _classify(dispatcher, call, item, _options(message, message.raw_scores))


def rerank(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`Rerank`. A unary call that may wait, as in TEI, where other unary calls are refused at once."""
    call.streamed = False
    call.may_wait = True
    message = call.message(tei_pb2.RerankRequest)
    options = _options(message, message.raw_scores)
    if not message.texts:
        raise EmptyInput("`texts` cannot be empty")
    need_reranker_grpc(dispatcher.engine.info)
    pairs = [Pair(message.query, text) for text in message.texts]
    if (refusal := over_limit(len(pairs), dispatcher.spec.max_client_batch_size)) is not None:
        dispatcher.metrics.received(len(pairs))
        dispatcher.metrics.batch_too_large()
        call.fail(InvalidInput(refusal))
        return
    dispatcher.serve(call, pairs, options, _rank_encoder(dispatcher, call, pairs, message.return_text))


def rerank_stream(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`RerankStream`, collected into one payload of up to 100,000 messages, which is parsed on a codec thread.

    Each message has its own query and truncation; `raw_scores` and `return_text` are those of the first one.
    """
    need_reranker_grpc(dispatcher.engine.info)
    call.may_wait = call.streamed = True

    def read() -> tuple[list[Part], Encode]:
        requests = call.message(frames_pb2.RerankPairs).requests
        if not requests:
            raise InvalidInput("Missing rerank request")
        first = requests[0]
        options = [_options(message, first.raw_scores) for message in requests]
        pairs = [Pair(message.query, message.text) for message in requests]
        return parts_of(pairs, options), _rank_encoder(dispatcher, call, pairs, first.return_text)

    async def read_then_submit() -> None:
        parts, encode = await dispatcher.off_loop(read)
        dispatcher.submit(call, parts, encode)

    dispatcher.admit_async(call, read_then_submit)


def _options(message: ScoringRequest, raw_scores: bool) -> InferOptions:
    return InferOptions(
        outputs=frozenset({Output.SCORES}),
        truncate=message.truncate,
        truncation_left=truncates_left(message.truncation_direction),
        raw_scores=raw_scores,
    )


def _classify(dispatcher: Dispatcher, call: MethodCall, item: Input, options: InferOptions) -> None:
    dispatcher.serve(call, [item], options, partial(_labels_reply, call, dispatcher.engine.info.labels))


def _labels_reply(call: WorkerCall, labels: Sequence[str], job: Job) -> CallReply:
    raise_first(job)
    message = tei_pb2.PredictResponse()
    for score, label in predictions(job.scores[0], labels):
        message.predictions.add(score=score, label=label)
    timings = call.timings(job)
    return CallReply(with_metadata(message.SerializeToString(), timings), timings)


def _rank_encoder(dispatcher: Dispatcher, call: WorkerCall, pairs: Sequence[Pair], return_text: bool) -> Encode:
    texts = [pair.second for pair in pairs] if return_text else None
    return partial(_ranks_reply, call, texts, dispatcher.spec.max_message_bytes)


def _ranks_reply(call: WorkerCall, texts: Sequence[str] | None, limit_bytes: int, job: Job) -> CallReply:
    raise_first(job)
    message = tei_pb2.RerankResponse()
    for row, score in ranks(job.scores):
        message.ranks.add(index=row, score=score, text=None if texts is None else texts[row])
    timings = call.timings(job)
    return CallReply(within(with_metadata(message.SerializeToString(), timings), limit_bytes), timings)
