"""The mux without its transport: from the bytes of a message to the worker's answer.

Nothing here knows gRPC: another server can carry the same calls.
"""

from __future__ import annotations

from teimgr.errors import InvalidInput, Unsupported
from teimgr.front.mux_counters import Note
from teimgr.route.links import Reply
from teimgr.route.router import Router, check_target
from teimgr.wire.fields import Envelope, Slice, Target, read_envelope, read_target
from teimgr.wire.frames import Method
from teimgr.wire.rpc import Payload, Rpc


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
    with router.lease(target) as lease:
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
