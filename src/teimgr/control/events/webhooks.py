"""Webhooks: POSTs fleet events to the URLs in the configuration, in order, with retries and exponential backoff.

Each webhook is one task that follows the event log. Events that leave the ring before delivery are logged as missed;
the fleet never waits for a receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import AsyncIterator, Sequence

import aiohttp
import orjson

from teimgr import __version__
from teimgr.config.settings import Webhook
from teimgr.control.events.fleet_events import EventLog, FleetEvent

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_RETRIED_4XX = (408, 425, 429)
# Scheme and host only: user info, path and query may contain secrets.
_ORIGIN = re.compile(r"(https?://)(?:[^/?#]*@)?([^/?#]*)")


class NotAccepted(Exception):
    """The receiver's status was not 2xx; `is_final` if a retry is useless."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status}")
        self.is_final = 400 <= status < 500 and status not in _RETRIED_4XX


class Webhooks:
    """The tasks of all webhooks. `pause_s` is the pause before the second attempt and doubles with each further one."""

    def __init__(self, events: EventLog, pause_s: float = FIRST_PAUSE_S) -> None:
        self._events = events
        self._pause_s = pause_s
        self._run_id = uuid.uuid4().hex[:12]
        self._tasks: dict[Webhook, asyncio.Task[None]] = {}
        self._failing: dict[Webhook, str] = {}
        self._http: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def running(self, webhooks: Sequence[Webhook]) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(headers={"User-Agent": f"teimgr/{__version__}"}) as self._http:
            try:
                self.configure(webhooks)
                yield
            finally:
                tasks = list(self._tasks.values())
                self.configure(())
                await asyncio.gather(*tasks, return_exceptions=True)

    def configure(self, webhooks: Sequence[Webhook]) -> None:
        """Deliver to these from now on; unchanged webhooks continue where they are."""
        for removed in self._tasks.keys() - set(webhooks):
            self._tasks.pop(removed).cancel()
            self._failing.pop(removed, None)
        for webhook in webhooks:
            if webhook not in self._tasks:
                name = f"webhook {public_url(webhook.url)}"
                self._tasks[webhook] = asyncio.create_task(self._follow(webhook), name=name)

    def alarms(self) -> list[str]:
        return [f"webhook {public_url(webhook.url)}: {reason}" for webhook, reason in self._failing.items()]

    async def _follow(self, webhook: Webhook) -> None:
        async for event, missed in self._events.follow(self._events.latest):
            if missed:
                log.error("webhook missed events", extra={"url": public_url(webhook.url), "missed": missed})
            if not webhook.events or event.event in webhook.events:
                await self._deliver(webhook, event)

    async def _deliver(self, webhook: Webhook, event: FleetEvent) -> None:
        pause_s = self._pause_s
        for attempt in range(1, webhook.max_attempts + 1):
            try:
                await self._post(webhook, event)
            except (aiohttp.ClientError, TimeoutError, NotAccepted) as error:
                final, url = isinstance(error, NotAccepted) and error.is_final, public_url(webhook.url)
                reason = f"{type(error).__name__}: {error}".replace(webhook.url, url).removeprefix("NotAccepted: ")
                fields = {"url": url, "event_id": event.id, "attempt": attempt, "reason": reason}
                log.warning("webhook failed", extra=fields)
                self._failing[webhook] = f"event {event.id} was not delivered: {reason}"
                if final or attempt == webhook.max_attempts:
                    return
            else:
                self._failing.pop(webhook, None)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    async def _post(self, webhook: Webhook, event: FleetEvent) -> None:
        assert self._http is not None
        body = orjson.dumps(event)
        headers = {
            "Content-Type": "application/json",
            "X-Teimgr-Event": event.event,
            "X-Teimgr-Delivery": f"{self._run_id}-{event.id}",
        }
        if webhook.secret:
            headers["X-Teimgr-Signature"] = signature(webhook.secret, body)
        timeout = aiohttp.ClientTimeout(total=webhook.timeout_secs)
        async with self._http.post(
            webhook.url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as reply:
            if not 200 <= reply.status < 300:
                raise NotAccepted(reply.status)


def public_url(url: str) -> str:
    """Scheme and host of a webhook's URL: what logs, alarms and `GET /config` may show."""
    found = _ORIGIN.match(url)
    return found[1] + found[2] if found else "(invalid URL)"


def signature(secret: str, body: bytes) -> str:
    """The header `X-Teimgr-Signature`: HMAC-SHA-256 of the body."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"
