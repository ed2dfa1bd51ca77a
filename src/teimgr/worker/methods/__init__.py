"""What a worker does with each method: the tables of the modules beside this one, as one."""

from __future__ import annotations

from functools import partial

from teimgr.errors import Internal, TeimgrError
from teimgr.observability.request_context import CURRENT
from teimgr.wire.frames import Method
from teimgr.worker.calls import Handler, MethodCall
from teimgr.worker.dialects import handle_http
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.methods.arrow import ArrowCalls
from teimgr.worker.methods.embedding import EmbeddingCalls, PlainCalls
from teimgr.worker.methods.scoring import ScoringCalls


class Service:
    """Turns calls by method, of a link or of the instance port's gRPC, into work at the dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._handlers: dict[int, Handler] = {
            **PlainCalls(dispatcher).handlers,
            **EmbeddingCalls(dispatcher).handlers,
            **ScoringCalls(dispatcher).handlers,
            **ArrowCalls(dispatcher).handlers,
            Method.HTTP: partial(handle_http, dispatcher),
        }

    def handle(self, call: MethodCall) -> None:
        """Answer `call`, now or later, exactly once."""
        token = CURRENT.set(call.context)  # tasks that the handler starts go on working for it
        try:
            self._handlers.get(call.method, _unknown)(call)
        except TeimgrError as error:
            self._dispatcher.metrics.failed(error)
            call.fail(error)
        except Exception as error:
            defect = masked(error)
            self._dispatcher.metrics.failed(defect)
            call.fail(defect)
        finally:
            CURRENT.reset(token)


def _unknown(call: MethodCall) -> None:
    raise Internal(f"No method has the number {call.method}")
