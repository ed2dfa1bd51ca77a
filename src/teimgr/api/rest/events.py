"""Server-sent events; GET /events and /instances/{name}/events: a list or a stream of fleet events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Annotated, NamedTuple

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from teimgr.api.rest.instances import ManagerDep
from teimgr.api.rest.schemas import ANY_FAILURE, StrictQueryRoute, answer
from teimgr.config.schema import unknown_word
from teimgr.control.events.fleet_events import KEPT, KEPT_PER_INSTANCE, EventLog, FleetEvent, known_to
from teimgr.errors import ValidationError
from teimgr.http.auth.policy import caller_of
from teimgr.spec import EVENTS

router = APIRouter(tags=["fleet"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

DEFAULT_LAST = 100
EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_S = 15.0
_SHOWN_CHARS = 40
# In OpenAPI 3.1 the schema of a stream is that of each event.
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
# `fastapi.sse` sends keep-alives only for generator endpoints; these may also return a list.
_COMMENT = b": still here\n\n"

Instances = Annotated[list[str] | None, Query(alias="instance", description="only of these")]
Kinds = Annotated[list[str] | None, Query(alias="event", description="only of these kinds")]
InstanceLast = Annotated[int, Query(ge=0, le=KEPT_PER_INSTANCE, description="how many past events come first")]
Last = Annotated[int, Query(ge=0, le=KEPT, description="how many past events come first")]


class Event(NamedTuple):
    """One event; `data` is any JSON value. A client that reconnects sends the last `id` as Last-Event-ID."""

    name: str
    data: object
    id: int | None = None

    def encode(self) -> bytes:
        """The event on the wire; orjson writes no line ends, so one `data` line suffices."""
        id = b"" if self.id is None else b"id: %d\n" % self.id
        return b"%bevent: %b\ndata: %b\n\n" % (id, self.name.encode(), orjson.dumps(self.data))


def wants_events(request: Request) -> bool:
    """True if the caller prefers events to one answer."""
    return EVENT_STREAM in request.headers.get("accept", "")


def event_stream(events: AsyncGenerator[Event], keep_alive_s: float = KEEP_ALIVE_S) -> StreamingResponse:
    """A response that sends `events`, and a comment after each `keep_alive_s` without one.

    The comments keep proxies from closing an idle stream, and detect that the client is gone.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_encoded(events, keep_alive_s), media_type=EVENT_STREAM, headers=headers)


async def _encoded(events: AsyncGenerator[Event], keep_alive_s: float) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=keep_alive_s)
                if not done:
                    yield _COMMENT
                    continue
                event = coming.result()
                if event is None:
                    return
                yield event.encode()
                coming = asyncio.ensure_future(anext(events, None))
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming


@router.get(
    "/events",
    response_model=list[FleetEvent],
    responses={200: {"content": {"text/event-stream": {}}, "description": "a list; a stream where that is accepted"}},
)
async def events(
    request: Request, instances: Instances = None, kinds: Kinds = None, last: Last = DEFAULT_LAST
) -> Response:
    """The latest events, oldest first. With `Accept: text/event-stream` those, and then each new one.

    A stream resumes after the event in `Last-Event-ID`.
    """
    event_log: EventLog = request.app.state.events
    for kind in kinds or ():
        if kind not in EVENTS:
            raise ValidationError(f"event: {unknown_word(kind[:_SHOWN_CHARS], EVENTS)}")
    of_instances, of_kinds = frozenset(instances or ()), frozenset(kinds or ())

    def matches(event: FleetEvent) -> bool:
        return (not of_instances or event.instance in of_instances) and (not of_kinds or event.event in of_kinds)

    latest = [event for event in event_log.since(0) if matches(event)][-last:] if last else []
    return _answer(request, event_log, latest, matches)


@router.get(
    "/instances/{name}/events",
    response_model=list[FleetEvent],
    responses={200: {"content": {"text/event-stream": {}}, "description": "a list; a stream where that is accepted"}},
)
async def instance_events(
    request: Request, name: str, manager: ManagerDep, last: InstanceLast = DEFAULT_LAST
) -> Response:
    """What happened to one instance and why, oldest first, as long as it exists. A stream as that of /events."""
    manager.get(name)
    event_log: EventLog = request.app.state.events
    return _answer(
        request, event_log, event_log.history(name)[-last:] if last else [], lambda each: each.instance == name
    )


def _answer(
    request: Request, event_log: EventLog, latest: list[FleetEvent], matches: Callable[[FleetEvent], bool]
) -> Response:
    covers = caller_of(request.scope).covers
    latest = [known_to(event, covers) for event in latest]
    if not wants_events(request):
        return answer(latest)
    resumed = _last_event_id(request, event_log.latest)
    if resumed is not None:
        return event_stream(_stream(event_log, (), resumed, matches, covers))
    return event_stream(_stream(event_log, latest, event_log.latest, matches, covers))


async def _stream(
    event_log: EventLog,
    first: Iterable[FleetEvent],
    after: int,
    matches: Callable[[FleetEvent], bool],
    covers: Callable[[str], bool],
) -> AsyncGenerator[Event]:
    for event in first:
        yield Event(event.event, event, event.id)
    async for event, missed in event_log.follow(after):
        if missed:  # the reader was too slow for the ring
            yield Event("missed", {"missed": missed})
        if matches(event):
            yield Event(event.event, known_to(event, covers), event.id)


def _last_event_id(request: Request, latest: int) -> int | None:
    """The header `Last-Event-ID`; None without one, or where it is of another run of the daemon."""
    text = request.headers.get("last-event-id", "")
    return int(text) if text.isdecimal() and len(text) < 20 and int(text) <= latest else None
