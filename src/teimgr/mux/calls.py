"""The mux without its transport: from the bytes of a message to the worker's answer.

Nothing here knows gRPC: another server can carry the same calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from teimgr.errors import AmbiguousInstance, DeadlineExceeded, InvalidInput, TeimgrError, Unsupported
from teimgr.mux.counters import CallRecord
from teimgr.routing.links import WorkerReply
from teimgr.routing.router import Lease, RouterView, check_target
from teimgr.wire.arrow_limits import read_outline
from teimgr.wire.frames import Method
from teimgr.wire.protobuf import Envelope, Target, read_envelope, read_target
from teimgr.wire.rerank_stream import PairCollector
from teimgr.wire.rpc import SERVICE, PayloadSource, Rpc

# Metadata that names the instance of a call whose messages have no target.
INSTANCE_KEY = "x-teimgr-instance"


async def answer_one(
    rpc: Rpc, router: RouterView, message: bytes, named: Target | None, timeout_s: float | None, note: CallRecord
) -> WorkerReply:
    """The worker's answer to a unary message; `named` is whom it is for where it does not say so itself.

    Raises:
        TeimgrError: target, inner request, lookup and worker are checked in this order; the first that fails.
    """
    envelope = open_message(rpc, message)
    target = target_of(envelope) if named is None else named
    if envelope.inner is None:
        raise InvalidInput(rpc.missing)
    with lease_for(rpc, router, target, message) as lease:
        note.instance = lease.instance
        note.messages = 1
        return await lease.call(method_of(rpc), envelope.inner, flags=rpc.lane, timeout_s=timeout_s)


def named_target(rpc: Rpc, router: RouterView, name: str | None) -> Target | None:
    """Whom a call is for by its metadata, in which `name` stands under `INSTANCE_KEY`; None where its messages say it.

    Raises:
        InvalidInput: the name is empty.
        AmbiguousInstance: there is no name, and not exactly one instance runs.
    """
    if rpc.has_target:
        return None
    if name is None:
        try:
            return router.only_running()
        except AmbiguousInstance as error:
            raise AmbiguousInstance(f"Name an instance in the metadata `{INSTANCE_KEY}`: {error.message}") from None
    target = Target(instance_name=name)
    check_target(target)
    return target


def open_message(rpc: Rpc, message: bytes) -> Envelope:
    """The message's target, and what of it the worker gets: None where that is missing.

    Raises:
        InvalidInput: the bytes are no protobuf message.
    """
    if not rpc.has_target:
        return Envelope(None, message)
    envelope = read_envelope(message, rpc.inner_field)
    if rpc.payload is PayloadSource.INNER:
        return envelope
    return Envelope(envelope.target, message if rpc.payload is PayloadSource.WHOLE else b"")


def lease_for(rpc: Rpc, router: RouterView, target: Target, message: bytes) -> Lease:
    """A lease for `message`. Where there is none to be had, bad Arrow is said first: no other target would help it.

    Raises:
        TeimgrError: as `Router.lease`.
        InvalidInput: as above.
    """
    try:
        return router.lease(target)
    except TeimgrError:
        if rpc.arrow_field:
            _check_arrow(rpc, message)
        raise


def _check_arrow(rpc: Rpc, message: bytes) -> None:
    try:
        outline = read_outline(read_envelope(message, rpc.arrow_field).inner or b"")
    except ValueError as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
    if rpc.service != SERVICE.full_name:
        return  # which columns it must have depends on its other fields
    if not outline.has_text:
        raise InvalidInput("No string column: expected `text` (a StringArray is needed)")
    if not outline.has_batch:
        raise InvalidInput("No RecordBatch in stream")


def target_of(envelope: Envelope) -> Target:
    """Whom the message is for.

    Raises:
        InvalidInput: it does not say.
    """
    if envelope.target is None:
        raise InvalidInput("Missing target")
    target = read_target(envelope.target)
    check_target(target)
    return target


def method_of(rpc: Rpc) -> Method:
    """What the worker is asked.

    Raises:
        Unsupported: no frame exists for this RPC.
    """
    if rpc.method is None:
        raise Unsupported(f"{rpc.name} is not served by this version of teimgr")
    return rpc.method


class Collection:
    """The messages of one stream on their way to be one request.

    The first message decides the target. All together have at most the router's message limit, and the next one must
    come within `pause_s` (None = whenever it likes): what was said before lies in memory meanwhile.
    """

    def __init__(
        self, rpc: Rpc, router: RouterView, named: Target | None, pause_s: float | None, note: CallRecord
    ) -> None:
        self._rpc = rpc
        self._router = router
        self._target = named
        self._pause_s = pause_s
        self._note = note
        self._pairs = PairCollector(router.limits.max_message_bytes)

    async def answer(self, messages: AsyncIterator[bytes], timeout_s: float | None) -> WorkerReply:
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
