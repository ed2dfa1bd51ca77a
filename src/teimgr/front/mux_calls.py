"""The mux without its transport: from the bytes of a message to the worker's answer.

Nothing here knows gRPC: another server can carry the same calls.
"""

from __future__ import annotations

from teimgr.errors import InvalidInput, TeimgrError, Unsupported
from teimgr.front.mux_counters import Note
from teimgr.route.links import Reply
from teimgr.route.router import Lease, Router, check_target
from teimgr.wire.arrow_limits import read_outline
from teimgr.wire.fields import Envelope, Slice, Target, read_envelope, read_target
from teimgr.wire.frames import Method
from teimgr.wire.rpc import ARROW_FIELD, Payload, Rpc


async def answer_one(rpc: Rpc, router: Router, message: bytes, timeout_s: float | None, note: Note) -> Reply:
    """The worker's answer to a unary message.

    Raises:
        TeimgrError: target, inner request, lookup and worker are checked in this order; the first that fails.
    """
    envelope = read_envelope(message, rpc.inner_field)
    target = target_of(envelope)
    payload = _payload(rpc, message, envelope)
    if payload is None:
        raise InvalidInput(rpc.missing)
    with lease_for(rpc, router, target, message) as lease:
        note.instance = lease.instance
        note.messages = 1
        return await lease.call(method_of(rpc), payload, flags=rpc.lane, timeout_s=timeout_s)


def refuse_stream(rpc: Rpc, router: Router, first: bytes | None, note: Note) -> Unsupported:
    """What a stream that no worker serves is told, once its first message (None = there was none) has a good target."""
    if first is None:
        raise InvalidInput("Empty stream")
    with router.lease(target_of(read_envelope(first, rpc.inner_field))) as lease:
        note.instance = lease.instance
    return _unsupported(rpc)


def lease_for(rpc: Rpc, router: Router, target: Target, message: bytes) -> Lease:
    """A lease for `message`. Where there is none to be had, bad Arrow is said first: no other target would help it.

    Raises:
        TeimgrError: as `Router.lease`.
        InvalidInput: as above.
    """
    try:
        return router.lease(target)
    except TeimgrError:
        if rpc.payload is Payload.WHOLE:
            _check_arrow(message)
        raise


def _check_arrow(message: bytes) -> None:
    try:
        outline = read_outline(read_envelope(message, ARROW_FIELD).inner or b"")
    except ValueError as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
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


def _payload(rpc: Rpc, message: bytes, envelope: Envelope) -> Slice | None:
    if rpc.payload is Payload.INNER:
        return envelope.inner
    return message if rpc.payload is Payload.WHOLE else b""


def method_of(rpc: Rpc) -> Method:
    """What the worker is asked.

    Raises:
        Unsupported: no frame exists for this RPC.
    """
    if rpc.method is None:
        raise _unsupported(rpc)
    return rpc.method


def _unsupported(rpc: Rpc) -> Unsupported:
    return Unsupported(f"{rpc.name} is not served by this version of teimgr")
