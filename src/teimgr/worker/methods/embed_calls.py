"""The methods of `tei.v1.Embed`: a text in; a vector, a sparse vector or a vector per token out."""

from __future__ import annotations

from functools import partial

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.wire.replies import embed_all_response, embed_response, embed_sparse_response
from teimgr.worker.calls import CallReply, MethodCall, WorkerCall, raise_first, truncates_left, within
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.scores import output_per_token


def embed(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`Embed`; an absent `normalize` means true, an absent `truncate` false."""
    message = call.message(tei_pb2.EmbedRequest)
    options = InferOptions(
        truncate=message.truncate,
        truncation_left=truncates_left(message.truncation_direction),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
    )
    dispatcher.serve(call, [message.inputs], options, partial(_dense_reply, call))


def embed_sparse(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`EmbedSparse`; an absent `truncate` means false."""
    message = call.message(tei_pb2.EmbedSparseRequest)
    encode = partial(_sparse_reply, call, dispatcher.spec.max_message_bytes)
    dispatcher.serve(call, [message.inputs], _single_output(message, Output.SPARSE), encode)


def embed_all(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`EmbedAll`; an absent `truncate` means false."""
    message = call.message(tei_pb2.EmbedAllRequest)
    output = output_per_token(dispatcher.engine.info)
    encode = partial(_per_token_reply, call, output, dispatcher.spec.max_message_bytes)
    dispatcher.serve(call, [message.inputs], _single_output(message, output), encode)


def _single_output(message: tei_pb2.EmbedSparseRequest | tei_pb2.EmbedAllRequest, output: Output) -> InferOptions:
    return InferOptions(
        outputs=frozenset({output}),
        truncate=message.truncate,
        truncation_left=truncates_left(message.truncation_direction),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
    )


def _dense_reply(call: WorkerCall, job: Job) -> CallReply:
    raise_first(job)
    timings = call.timings(job)
    return CallReply(embed_response(job.vectors[0], timings), timings)


def _sparse_reply(call: WorkerCall, limit_bytes: int, job: Job) -> CallReply:
    raise_first(job)
    vector, timings = job.sparse[0], call.timings(job)
    assert vector is not None  # only a failed row has none
    return CallReply(within(embed_sparse_response(vector.indices, vector.values, timings), limit_bytes), timings)


def _per_token_reply(call: WorkerCall, output: Output, limit_bytes: int, job: Job) -> CallReply:
    raise_first(job)
    vectors = (job.multi_vectors if output is Output.MULTI_VECTOR else job.tokens_of)[0]
    assert vectors is not None  # only a failed row has none
    timings = call.timings(job)
    return CallReply(within(embed_all_response(vectors, timings), limit_bytes), timings)
