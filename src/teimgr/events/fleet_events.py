"""What happens to the instances, told apart by comparing views, and kept for those who want to hear of it.

The last `KEPT` happenings lie in a ring. A reader follows it at its own pace from any number on; one that is slower
than the ring misses some, and can tell by the numbers. So no reader holds anybody up, and none costs memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teimgr.clock import now_rfc3339
from teimgr.spec import InstanceSpec, InstanceView

KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One thing that happened. `number` counts from 1 within the life of a daemon; `kind` is one of `spec.EVENTS`.

    `status` and `reason` are those of the instance just then; `at` is RFC 3339 in UTC.
    """

    number: int
    at: str
    kind: str
    instance: str
    model_id: str
    status: str
    reason: str | None = None
    tags: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "id": self.number,
            "timestamp": self.at,
            "event": self.kind,
            "instance": self.instance,
            "model_id": self.model_id,
            "status": self.status,
            "reason": self.reason,
            "tags": self.tags,
        }


class EventLog:
    """The ring. `note` is told of every change of the fleet; the first telling is where everything begins."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[Happening] = deque(maxlen=kept)
        self._views: dict[str, InstanceView] | None = None
        self._latest = 0
        self._more = asyncio.Event()
        self._closed = False

    @property
    def latest(self) -> int:
        """The number of the last one; 0 before the first."""
        return self._latest

    def note(self, views: Sequence[InstanceView]) -> None:
        """These are all the instances there are now."""
        before, now = self._views, {view.spec.name: view for view in views}
        self._views = now
        if before is None:
            return
        for name, view in now.items():
            for kind in _kinds(before.get(name), view):
                self._add(kind, view)
        for name in before.keys() - now.keys():
            self._add("deleted", before[name])

    def since(self, number: int) -> Iterator[Happening]:
        """Those after `number` that are still kept, oldest first."""
        return iter([each for each in self._ring if each.number > number])

    async def follow(self, number: int) -> AsyncGenerator[Happening]:
        """Those after `number`, and each that comes; ends when the ring is closed."""
        while True:
            more = self._more
            for each in self.since(number):
                yield each
                number = each.number
            if self._closed:
                return
            await more.wait()

    def close(self) -> None:
        """There will be no more."""
        self._closed = True
        self._wake()

    def _add(self, kind: str, view: InstanceView) -> None:
        self._latest += 1
        self._ring.append(
            Happening(
                number=self._latest,
                at=now_rfc3339(),
                kind=kind,
                instance=view.spec.name,
                model_id=view.spec.model_id,
                status=view.state.value,
                reason=view.reason,
                tags=dict(view.spec.tags),
            )
        )
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


def _kinds(before: InstanceView | None, now: InstanceView) -> Iterator[str]:
    if before is None:
        yield "created"
    elif _described(before.spec) != _described(now.spec):
        yield "updated"
    if before is None or before.state is not now.state:
        yield now.state.value
    if now.health_check_failures and not (before and before.health_check_failures):
        yield "unhealthy"


def _described(spec: InstanceSpec) -> InstanceSpec:
    """The spec but for what a start, a stop and a reload note in it."""
    return replace(spec, wanted_running=True, seeded=False)
