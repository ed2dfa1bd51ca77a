"""Moving the workers off hosts that are about to leave the fleet, or were removed from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from teimgr.control.supervision.instance import ManagedInstance

# Before another attempt to move workers that no other host took.
_MOVE_PAUSE_S = 3.0


class HostDepartures:
    """Moves the workers of `instances`, one instance after the other, once `booted` is set.

    `in_background` runs a coroutine under a name, and owns its task.
    """

    def __init__(
        self,
        instances: Mapping[str, ManagedInstance],
        booted: asyncio.Event,
        in_background: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._instances = instances
        self._booted = booted
        self._in_background = in_background
        self._hosts: set[str] = set()  # whose workers are being moved

    def begin(self, host: str, *, was_removed: bool = False) -> None:
        """Begin to move the workers of a host elsewhere; no effect while that goes on.

        Those that no other host takes serve on; of a host that `was_removed` they are ended.
        """
        if host not in self._hosts:
            self._hosts.add(host)
            moving = self._in_background(self._move_off(host, was_removed), f"moving workers off host {host}")
            moving.add_done_callback(lambda _: self._hosts.discard(host))

    async def _move_off(self, host: str, was_removed: bool) -> None:
        await self._booted.wait()
        for instance in tuple(self._instances.values()):
            if not await instance.move_off(host, was_removed) and not was_removed:
                await asyncio.sleep(_MOVE_PAUSE_S)
