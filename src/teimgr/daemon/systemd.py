"""Notifications to systemd (`sd_notify`, protocol of sd_notify(3)): readiness, reload, stop, watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator

# Where systemd listens, and the watchdog's interval.
_SOCKET, _WATCHDOG_USEC, _WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class Notifier:
    """Sends the state of this process to systemd; without a `NOTIFY_SOCKET` in the environment it does nothing.

    The variables are taken out of the environment, so that workers and muxes do not notify in the daemon's place.
    """

    def __init__(self) -> None:
        self._address = os.environ.pop(_SOCKET, "")
        timeout_us, pid = os.environ.pop(_WATCHDOG_USEC, ""), os.environ.pop(_WATCHDOG_PID, "")
        self.environ = {
            name: value for name, value in ((_SOCKET, self._address), (_WATCHDOG_USEC, timeout_us)) if value
        }
        """Return what a successor of this process needs to notify systemd."""
        is_ours = timeout_us.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog_s = int(timeout_us) / 1e6 if is_ours else None

    def send(self, *assignments: str) -> None:
        """Send assignments such as `READY=1`; never raises, for systemd may be gone."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(assignments).encode(), address)

    def reloading(self) -> None:
        """A reload has begun; `send("READY=1")` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def leave_to(self, pid: int) -> None:
        """The service goes on in another process, whose notifications alone count; this one sends nothing more."""
        self.send(f"MAINPID={pid}", "WATCHDOG=1")
        self._address = ""

    @contextlib.asynccontextmanager
    async def serving(self, status: str) -> AsyncIterator[None]:
        """Ready while the body runs, stopping after it; the event loop feeds the watchdog twice in its time."""
        self.send("READY=1", f"STATUS={status}")
        watchdog = asyncio.create_task(self._feed(self.watchdog_s / 2), name="watchdog") if self.watchdog_s else None
        try:
            yield
        finally:
            self.send("STOPPING=1")
            if watchdog is not None:
                watchdog.cancel()

    async def _feed(self, period_s: float) -> None:
        while True:
            self.send("WATCHDOG=1")
            await asyncio.sleep(period_s)
