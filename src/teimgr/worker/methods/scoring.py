"""The calls of `tei.v1.Predict` and `tei.v1.Rerank`: texts and pairs in, scores by label or by text out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from teimgr.engine.job import InferOptions, Input, Job, Pair
from teimgr.errors import EmptyInput, InvalidInput
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.teimgr.v1 import frames_pb2
from teimgr.wire.frames import Method
from teimgr.wire.replies import with_metadata
from teimgr.worker.calls import CallReply, Handler, MethodCall, WorkerCall, raise_first, within
from teimgr.worker.dispatcher import Dispatcher, Encode, Part, parts_of
from teimgr.worker.methods import messages
from teimgr.worker.scores import need_reranker_grpc, predictions, ranks


class ScoringCalls:
    """What a worker does with each of them; `handlers` is the table."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.handlers: dict[int, Handler] = {
            Method.PREDICT: self._predict,
            Method.PREDICT_PAIR: self._predict_pair,
            Method.RERANK: self._rerank,
            Method.RERANK_STREAM: self._rerank_stream,
        }

    def _predict(self, call: MethodCall) -> None:
        message = messages.parse(tei_pb2.PredictRequest, call.payload)
        self._classify(call, message.inputs, messages.score_options(message))

    def _predict_pair(self, call: MethodCall) -> None:
        message = messages.parse(tei_pb2.PredictPairRequest, call.payload)
        inputs = message.inputs
        if len(inputs) not in (1, 2):
            raise InvalidInput(f"`inputs` must have a single or two elements. Given: {len(inputs)}")
        self._classify(call, Pair(*inputs) if len(inputs) == 2 else inputs[0], messages.score_options(message))

    def _classify(self, call: MethodCall, item: Input, options: InferOptions) -> None:
        self._dispatcher.serve(call, [item], options, partial(_predictions, call, self._dispatcher.engine.info.labels))

    def _rerank(self, call: MethodCall) -> None:
        call.streamed = False  # it comes alone, and waits as TEI lets it, where other unary calls are refused at once
        call.may_wait = True
        message = messages.parse(tei_pb2.RerankRequest, call.payload)
        options = messages.score_options(message)
        if not message.texts:
            raise EmptyInput("`texts` cannot be empty")
        need_reranker_grpc(self._dispatcher.engine.info)
        pairs = [Pair(message.query, text) for text in message.texts]
        if len(pairs) > (limit := self._dispatcher.spec.max_client_batch_size):
            self._dispatcher.metrics.received(len(pairs))
            self._dispatcher.metrics.batch_too_large()
            call.fail(InvalidInput(f"batch size {len(pairs)} > maximum allowed batch size {limit}"))
            return
        self._dispatcher.serve(call, pairs, options, self._ranks(call, pairs, message.return_text))

    def _rerank_stream(self, call: MethodCall) -> None:
        need_reranker_grpc(self._dispatcher.engine.info)
        call.may_wait = call.streamed = True

        async def read_then_infer() -> None:
            parts, encode = await self._dispatcher.off_loop(self._read_stream, call)  # there may be 100,000 messages
            self._dispatcher.infer_parts(call, parts, encode)

        self._dispatcher.enter_async(call, read_then_infer)

    def _read_stream(self, call: MethodCall) -> tuple[list[Part], Encode]:
        """Each message has its own query and truncation; how scores are given is the first one's to say."""
        requests = messages.parse(frames_pb2.RerankPairs, call.payload).requests
        if not requests:
            raise InvalidInput("Missing rerank request")
        first = requests[0]
        options = [messages.score_options(message, raw_scores=first.raw_scores) for message in requests]
        pairs = [Pair(message.query, message.text) for message in requests]
        return parts_of(pairs, options), self._ranks(call, pairs, first.return_text)

    def _ranks(self, call: MethodCall, pairs: Sequence[Pair], return_text: bool) -> Encode:
        texts = [pair.second for pair in pairs] if return_text else None
        return partial(_ranks, call, texts, self._dispatcher.spec.max_message_bytes)


def _predictions(call: WorkerCall, labels: Sequence[str], job: Job) -> CallReply:
    raise_first(job)
    message = tei_pb2.PredictResponse()
    for score, label in predictions(job.scores[0], labels):
        message.predictions.add(score=score, label=label)
    timings = call.timings(job)
    return CallReply(with_metadata(message.SerializeToString(), timings), timings)


def _ranks(call: WorkerCall, texts: Sequence[str] | None, limit_bytes: int, job: Job) -> CallReply:
    raise_first(job)
    message = tei_pb2.RerankResponse()
    for row, score in ranks(job.scores):
        message.ranks.add(index=row, score=score, text=None if texts is None else texts[row])
    timings = call.timings(job)
    return CallReply(within(with_metadata(message.SerializeToString(), timings), limit_bytes), timings)
