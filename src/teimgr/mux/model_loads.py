"""Models on demand at a mux: asks the daemon to load them, by the control link, and has calls wait for its answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from teimgr.errors import DeadlineExceeded, Unavailable, error_from_code
from teimgr.observability.request_context import current_tenant
from teimgr.wire.routing.on_demand import WaitingCalls, answer_call

Message = dict[str, Any]


class DaemonLoads:
    """Calls that wait for their model. `send` sends a message to every daemon that is connected; False without one.

    A daemon answers with `ready` once this mux has the routes to the model, or with `refused`; the first answer counts.
    """

    def __init__(self, send: Callable[[Message], bool], processes: int = 1) -> None:
        self._send = send
        self._limits = WaitingCalls("models to be loaded", processes)
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AsyncIterator[None]:
        """A block in which the model is loaded; entering it waits for the load.

        Raises:
            Overloaded: too many calls wait.
            DeadlineExceeded: `timeout_s` has passed.
            Unavailable: no daemon is connected.
            TeimgrError: the daemon refused.
        """
        call = next(self._numbers)
        try:
            with self._limits.one(instance, size_bytes):
                await self._answered(call, instance, timeout_s)
            yield
        finally:
            if self._answers.pop(call, None) is not None:
                self._send({"left": call})

    async def _answered(self, call: int, instance: str, timeout_s: float | None) -> None:
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        try:
            if not self._send({"load": [call, instance, timeout_s], "tenant": current_tenant()}):
                raise Unavailable(f"Instance '{instance}' is not loaded, and no daemon is here to load it")
            async with asyncio.timeout(timeout_s) as limit:
                await answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded from None
        finally:
            del answer  # it, its error and this frame would be a cycle, which keeps the caller's payload

    def take(self, message: Message) -> None:
        """Take an answer of a daemon, `ready` or `refused`."""
        if "ready" in message:
            answer_call(self._answers, message["ready"], None)
        if "refused" in message:
            call, code, text, retry_after_s = message["refused"]
            answer_call(self._answers, call, error_from_code(code, text, retry_after_s=retry_after_s))

    def lost(self) -> None:
        """The last daemon has gone: no call that waits gets an answer."""
        for call in tuple(self._answers):
            answer_call(self._answers, call, Unavailable("the daemon, which loads models, has ended"))
