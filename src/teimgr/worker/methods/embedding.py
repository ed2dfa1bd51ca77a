"""The calls of `tei.v1.Embed`: a text in; a vector, a sparse vector or a vector per token out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from teimgr.engine.job import Job, Output
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.wire.frames import Method
from teimgr.wire.replies import embed_all_response, embed_response, embed_sparse_response
from teimgr.worker.calls import CallReply, Handler, MethodCall, WorkerCall, raise_first, within
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.methods import messages
from teimgr.worker.scores import output_per_token


class EmbeddingCalls:
    """What a worker does with each of them; `handlers` is the table."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.handlers: dict[int, Handler] = {
            Method.EMBED: self._embed,
            Method.EMBED_SPARSE: self._embed_sparse,
            Method.EMBED_ALL: self._embed_all,
        }

    def _embed(self, call: MethodCall) -> None:
        message = messages.parse(tei_pb2.EmbedRequest, call.payload)
        self._dispatcher.serve(call, [message.inputs], messages.embed_options(message), partial(_dense, call))

    def _embed_sparse(self, call: MethodCall) -> None:
        message = messages.parse(tei_pb2.EmbedSparseRequest, call.payload)
        options = messages.text_options(message, Output.SPARSE)
        self._dispatcher.serve(
            call, [message.inputs], options, partial(_sparse, call, self._dispatcher.spec.max_message_bytes)
        )

    def _embed_all(self, call: MethodCall) -> None:
        message = messages.parse(tei_pb2.EmbedAllRequest, call.payload)
        output = output_per_token(self._dispatcher.engine.info)
        options = messages.text_options(message, output)
        encode = partial(_per_token, call, output, self._dispatcher.spec.max_message_bytes)
        self._dispatcher.serve(call, [message.inputs], options, encode)


def _dense(call: WorkerCall, job: Job) -> CallReply:
    raise_first(job)
    timings = call.timings(job)
    return CallReply(embed_response(job.vectors[0], timings), timings)


def _sparse(call: WorkerCall, limit_bytes: int, job: Job) -> CallReply:
    raise_first(job)
    vector, timings = job.sparse[0], call.timings(job)
    assert vector is not None  # or there were an error
    return CallReply(within(embed_sparse_response(vector.indices, vector.values, timings), limit_bytes), timings)


def _per_token(call: WorkerCall, output: Output, limit_bytes: int, job: Job) -> CallReply:
    raise_first(job)
    vectors = (job.multi_vectors if output is Output.MULTI_VECTOR else job.tokens_of)[0]
    assert vectors is not None  # or there were an error
    timings = call.timings(job)
    return CallReply(within(embed_all_response(vectors, timings), limit_bytes), timings)


class PlainCalls:
    """What a worker does with each of them; `handlers` is the table."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.handlers: dict[int, Handler] = {
            Method.INFO: self._info,
            Method.TOKENIZE: self._tokenize,
            Method.DECODE: self._decode,
        }

    def _info(self, call: MethodCall) -> None:
        call.reply(CallReply(messages.info_response(self._dispatcher.engine.info, self._dispatcher.spec)))

    def _tokenize(self, call: MethodCall) -> None:
        """Absent flags are false here, unlike over HTTP."""
        message = messages.parse(tei_pb2.EncodeRequest, call.payload)
        prompt_name = message.prompt_name if message.HasField("prompt_name") else None

        def work() -> bytes:
            tokens = self._dispatcher.engine.tokenize(message.inputs, message.add_special_tokens, prompt_name)
            return messages.encode_response(tokens)

        self._aside(call, work)

    def _decode(self, call: MethodCall) -> None:
        message = messages.parse(tei_pb2.DecodeRequest, call.payload)

        def work() -> bytes:
            text = self._dispatcher.engine.decode(list(message.ids), message.skip_special_tokens)
            return tei_pb2.DecodeResponse(text=text).SerializeToString()

        self._aside(call, work)

    def _aside(self, call: MethodCall, work: Callable[[], bytes]) -> None:
        """Work of the tokenizer: it takes no permit in TEI and is never refused for being too much, so it waits."""
        call.may_wait = True

        async def run() -> None:
            payload = await self._dispatcher.off_loop(work)
            self._dispatcher.answer(call, CallReply(within(payload, self._dispatcher.spec.max_message_bytes)))

        self._dispatcher.enter_async(call, run)
