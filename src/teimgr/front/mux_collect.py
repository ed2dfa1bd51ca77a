"""A stream of messages with one answer, without its transport: collected, then asked as one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from teimgr.errors import DeadlineExceeded, InvalidInput
from teimgr.front.mux_calls import lease_for, method_of, open_message, target_of
from teimgr.front.mux_counters import Note
from teimgr.route.links import Reply
from teimgr.route.seen import Seen
from teimgr.wire.fields import Target
from teimgr.wire.pairs import Pairs
from teimgr.wire.rpc import Rpc


class Collection:
    """The messages of one stream on their way to be one request.

    The first message decides the target. All together have at most the router's message limit, and the next one must
    come within `pause_s` (None = whenever it likes): what was said before lies in memory meanwhile.
    """

    def __init__(self, rpc: Rpc, router: Seen, named: Target | None, pause_s: float | None, note: Note) -> None:
        self._rpc = rpc
        self._router = router
        self._target = named
        self._pause_s = pause_s
        self._note = note
        self._pairs = Pairs(router.limits.max_message_bytes)

    async def answer(self, messages: AsyncIterator[bytes], timeout_s: float | None) -> Reply:
        """The worker's one answer to all of `messages`; `timeout_s` is what is left of the caller's time.

        Raises:
            InvalidInput: no messages, the first one has no target, or none has a request.
            TooLarge: they are over the limit; the text names both sizes.
            DeadlineExceeded: the caller's time is over, or the next message did not come.
            TeimgrError: as `Router.lease` and `Lease.call`.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._collect(messages)
                method, target = method_of(self._rpc), self._target
                if target is None:
                    raise InvalidInput("Empty stream")
                with self._router.lease(target) as lease:
                    self._note.instance = lease.instance
                    return await lease.call(method, self._pairs.payload(), flags=self._pairs.flags)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded from None

    async def _collect(self, messages: AsyncIterator[bytes]) -> None:
        while (message := await self._next(messages)) is not None:
            envelope = open_message(self._rpc, message)
            if not self._note.messages:
                self._target = self._target or target_of(envelope)
                lease_for(self._rpc, self._router, self._target, message)  # whoever is not there is said at once
            self._note.messages += 1
            if envelope.inner is not None:
                self._pairs.add(envelope.inner)
        if not self._note.messages:
            raise InvalidInput("Empty stream")

    async def _next(self, messages: AsyncIterator[bytes]) -> bytes | None:
        try:
            async with asyncio.timeout(self._pause_s) as pause:
                return await anext(messages, None)
        except TimeoutError:
            if not pause.expired():
                raise
            raise DeadlineExceeded(f"Request timeout: no further message within {self._pause_s:g} s") from None
