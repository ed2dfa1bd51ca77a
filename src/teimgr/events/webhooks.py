"""Posts what happens to the instances to the addresses that the configuration names.

Each webhook is one task that follows the ring of happenings: in order, one POST each, tried again with growing pauses.
What it cannot keep up with falls out of the ring, which the log says; the fleet never waits for it.
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
from teimgr.events.fleet_events import EventLog, Happening

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_WORTH_ANOTHER_TRY = (408, 425, 429)


# Behind the host, and before it, many receivers have a secret.
_PLACE = re.compile(r"(https?://)(?:[^/?#]*@)?([^/?#]*)")


class NotAccepted(Exception):
    """The receiver answered with another status than one of success; one that `is_final` is not worth another try."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status}")
        self.is_final = 400 <= status < 500 and status not in _WORTH_ANOTHER_TRY


class Webhooks:
    """The tasks of all webhooks. `pause_s` is what comes before the second try; it doubles each time."""

    def __init__(self, happenings: EventLog, pause_s: float = FIRST_PAUSE_S) -> None:
        self._happenings = happenings
        self._pause_s = pause_s
        self._life = uuid.uuid4().hex[:12]
        self._tasks: dict[Webhook, asyncio.Task[None]] = {}
        self._failing: dict[Webhook, str] = {}
        self._http: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def running(self, webhooks: Sequence[Webhook]) -> AsyncIterator[None]:
        """They are told while the body runs."""
        async with aiohttp.ClientSession(headers={"User-Agent": f"teimgr/{__version__}"}) as self._http:
            try:
                self.configure(webhooks)
                yield
            finally:
                ended = list(self._tasks.values())
                self.configure(())
                await asyncio.gather(*ended, return_exceptions=True)

    def configure(self, webhooks: Sequence[Webhook]) -> None:
        """Tell these from now on; those that stay the same go on where they are."""
        for gone in self._tasks.keys() - set(webhooks):
            self._tasks.pop(gone).cancel()
            self._failing.pop(gone, None)
        for webhook in webhooks:
            if webhook not in self._tasks:
                self._tasks[webhook] = asyncio.create_task(self._tell(webhook), name=f"webhook {place(webhook.url)}")

    def alarms(self) -> list[str]:
        """A sentence for each webhook whose last event could not be delivered."""
        return [f"webhook {place(webhook.url)}: {reason}" for webhook, reason in self._failing.items()]

    async def _tell(self, webhook: Webhook) -> None:
        number = self._happenings.latest
        async for happening in self._happenings.follow(number):
            if happening.number > number + 1:
                facts = {"url": place(webhook.url), "missed": happening.number - number - 1}
                log.error("webhook missed events", extra=facts)
            number = happening.number
            if not webhook.events or happening.kind in webhook.events:
                await self._deliver(webhook, happening)

    async def _deliver(self, webhook: Webhook, happening: Happening) -> None:
        pause_s = self._pause_s
        for attempt in range(1, webhook.max_attempts + 1):
            try:
                await self._post(webhook, happening)
            except (aiohttp.ClientError, TimeoutError, NotAccepted) as error:
                final, where = isinstance(error, NotAccepted) and error.is_final, place(webhook.url)
                reason = f"{type(error).__name__}: {error}".replace(webhook.url, where).removeprefix("NotAccepted: ")
                facts = {"url": where, "event_id": happening.number, "attempt": attempt, "reason": reason}
                log.warning("webhook failed", extra=facts)
                self._failing[webhook] = f"event {happening.number} was not delivered: {reason}"
                if final or attempt == webhook.max_attempts:
                    return
            else:
                self._failing.pop(webhook, None)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    async def _post(self, webhook: Webhook, happening: Happening) -> None:
        assert self._http is not None
        body = orjson.dumps(happening.to_dict())
        headers = {
            "Content-Type": "application/json",
            "X-Teimgr-Event": happening.kind,
            "X-Teimgr-Delivery": f"{self._life}-{happening.number}",
        }
        if webhook.secret:
            headers["X-Teimgr-Signature"] = signature(webhook.secret, body)
        limit = aiohttp.ClientTimeout(total=webhook.timeout_secs)
        async with self._http.post(
            webhook.url, data=body, headers=headers, timeout=limit, allow_redirects=False
        ) as reply:
            if not 200 <= reply.status < 300:
                raise NotAccepted(reply.status)


def place(url: str) -> str:
    """As much of a webhook's address as may be said where more people read than those of the configuration."""
    found = _PLACE.match(url)
    return found[1] + found[2] if found else "of no address"


def signature(secret: str, body: bytes) -> str:
    """What `X-Teimgr-Signature` says of a body."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"
