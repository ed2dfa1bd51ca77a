"""The mux without its transport: from the bytes of a message to the worker's answer.

Nothing here knows gRPC: another server can carry the same calls.
"""

from __future__ import annotations

from teimgr.errors import AmbiguousInstance, InvalidInput, TeimgrError, Unsupported
from teimgr.front.mux_counters import Note
from teimgr.route.links import Reply
from teimgr.route.router import Lease, check_target
from teimgr.route.seen import Seen
from teimgr.wire.arrow_limits import read_outline
from teimgr.wire.fields import Envelope, Target, read_envelope, read_target
from teimgr.wire.frames import Method
from teimgr.wire.rpc import SERVICE, Payload, Rpc

# Metadata that names the instance of a call whose messages have no target.
INSTANCE_KEY = "x-teimgr-instance"


async def answer_one(
    rpc: Rpc, router: Seen, message: bytes, named: Target | None, timeout_s: float | None, note: Note
) -> Reply:
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


def named_target(rpc: Rpc, router: Seen, name: str | None) -> Target | None:
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
    if rpc.payload is Payload.INNER:
        return envelope
    return Envelope(envelope.target, message if rpc.payload is Payload.WHOLE else b"")


def lease_for(rpc: Rpc, router: Seen, target: Target, message: bytes) -> Lease:
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
