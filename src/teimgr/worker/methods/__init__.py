"""The methods a worker serves, as one table of plain functions `(dispatcher, call) -> None`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from teimgr.errors import Internal, TeimgrError
from teimgr.observability.request_context import CURRENT
from teimgr.wire.frames import Method
from teimgr.worker.calls import MethodCall
from teimgr.worker.dialects import handle_http
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.methods import arrow_calls, embed_calls, info_calls, score_calls

METHODS: Mapping[int, Callable[[Dispatcher, MethodCall], None]] = {
    Method.EMBED: embed_calls.embed,
    Method.EMBED_SPARSE: embed_calls.embed_sparse,
    Method.EMBED_ALL: embed_calls.embed_all,
    Method.PREDICT: score_calls.predict,
    Method.PREDICT_PAIR: score_calls.predict_pair,
    Method.RERANK: score_calls.rerank,
    Method.RERANK_STREAM: score_calls.rerank_stream,
    Method.INFO: info_calls.info,
    Method.TOKENIZE: info_calls.tokenize,
    Method.DECODE: info_calls.decode,
    Method.EMBED_ARROW: arrow_calls.embed_arrow,
    Method.EMBED_SPARSE_ARROW: arrow_calls.embed_sparse_arrow,
    Method.INFER_ARROW: arrow_calls.infer_arrow,
    Method.HTTP: handle_http,
}


def handle(dispatcher: Dispatcher, call: MethodCall) -> None:
    """Answer `call` by its method, now or later, exactly once."""
    token = CURRENT.set(call.context)  # inherited by the tasks that a method starts
    try:
        method = METHODS.get(call.method)
        if method is None:
            raise Internal(f"No method has the number {call.method}")
        method(dispatcher, call)
    except Exception as error:
        known = error if isinstance(error, TeimgrError) else masked(error)
        dispatcher.metrics.failed(known)
        call.fail(known)
    finally:
        CURRENT.reset(token)
