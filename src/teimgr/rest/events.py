"""GET /events: what happens to the instances, as a list of the latest or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from teimgr.events.fleet_events import KEPT, EventLog, Happening
from teimgr.rest.json_http import answer
from teimgr.rest.sse import Event, event_stream, is_wanted

router = APIRouter(tags=["fleet"])

DEFAULT_LAST = 100

Instances = Annotated[list[str] | None, Query(alias="instance", description="only of these")]
Kinds = Annotated[list[str] | None, Query(alias="event", description="only of these kinds")]
Last = Annotated[int, Query(ge=0, le=KEPT, description="so many of the latest come first")]


class FleetEvent(BaseModel):
    """One event. `id` counts from 1 in the life of a daemon; `status` and `reason` are those of the instance then."""

    id: int
    timestamp: str
    event: str
    instance: str
    model_id: str
    status: str
    reason: str | None
    tags: dict[str, str] = Field(default_factory=dict)


@router.get(
    "/events",
    response_model=list[FleetEvent],
    responses={200: {"content": {"text/event-stream": {}}, "description": "a list; a stream where that is accepted"}},
)
async def events(
    request: Request, instances: Instances = None, kinds: Kinds = None, last: Last = DEFAULT_LAST
) -> Response:
    """The latest events, oldest first. With `Accept: text/event-stream` those, and then each as it happens.

    A stream that was cut goes on after the event that `Last-Event-ID` names.
    """
    happenings: EventLog = request.app.state.happenings
    wanted = _Wanted(instances, kinds)
    latest = [each for each in happenings.since(0) if wanted.has(each)]
    if not is_wanted(request):
        return answer([each.to_dict() for each in latest[-last:] if last])
    seen = _seen(request, happenings.latest)
    first = latest[-last:] if last and seen is None else []
    after = seen if seen is not None else happenings.latest
    return event_stream(_stream(happenings, first, after, wanted))


class _Wanted:
    """What a reader asked for; nothing asked for is everything."""

    def __init__(self, instances: list[str] | None, kinds: list[str] | None) -> None:
        self._instances, self._kinds = set(instances or ()), set(kinds or ())

    def has(self, each: Happening) -> bool:
        """Whether the reader wants this one."""
        return (not self._instances or each.instance in self._instances) and (
            not self._kinds or each.kind in self._kinds
        )


async def _stream(
    happenings: EventLog, first: Iterable[Happening], after: int, wanted: _Wanted
) -> AsyncGenerator[Event]:
    for each in first:
        yield _event(each)
    number = after
    async for each in happenings.follow(after):
        if each.number > number + 1:  # the ring turned faster than the reader read
            yield Event("missed", {"missed": each.number - number - 1})
        number = each.number
        if wanted.has(each):
            yield _event(each)


def _event(each: Happening) -> Event:
    return Event(each.kind, each.to_dict(), each.number)


def _seen(request: Request, latest: int) -> int | None:
    """The number that `Last-Event-ID` says; None without one, and where it is of another daemon's life."""
    text = request.headers.get("last-event-id", "")
    return int(text) if text.isdecimal() and len(text) < 20 and int(text) <= latest else None
