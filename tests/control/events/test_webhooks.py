"""Webhooks against a real HTTP receiver: order, signature, retries, reload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from aiohttp import web
from tests.support.polling import eventually

from teimgr.config.settings import Webhook
from teimgr.control.events.fleet_events import EventLog
from teimgr.control.events.webhooks import Webhooks, signature
from teimgr.spec import InstanceSpec, InstanceView, State

VIEW = InstanceView(spec=InstanceSpec(name="a", model_id="m", tags={"team": "x"}), state=State.STARTING)
LIMIT_S = 10.0


def began(*views: InstanceView) -> EventLog:
    events = EventLog()
    events.note(views)
    return events


class Receiver:
    """A real HTTP server that answers with the given statuses, then 204."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.calls: list[tuple[dict[str, str], bytes]] = []
        self.more = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.calls.append((dict(request.headers), await request.read()))
        self.more.set()
        return web.Response(status=self.statuses.pop(0) if self.statuses else 204)

    async def heard(self, number: int) -> list[dict[str, Any]]:
        """The bodies, once there are so many."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.calls) < number:
                self.more.clear()
                await self.more.wait()
        return [orjson.loads(body) for _, body in self.calls]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield receiver
    await runner.cleanup()


@pytest.mark.clause("N-webhooks")
async def test_a_webhook_is_told_in_order_and_signed(receiver: Receiver) -> None:
    events = began()
    webhook = Webhook(url=receiver.url, secret="hush")
    async with Webhooks(events).running([webhook]):
        await asyncio.sleep(0)  # it follows from here
        events.note([VIEW])
        events.note([replace(VIEW, state=State.RUNNING)])
        bodies = await receiver.heard(3)
    assert [body["event"] for body in bodies] == ["created", "starting", "running"]
    headers, raw = receiver.calls[0]
    assert headers["X-Teimgr-Signature"] == signature("hush", raw)
    assert headers["X-Teimgr-Signature"].startswith("sha256=")
    assert headers["X-Teimgr-Event"] == "created"
    assert len({headers["X-Teimgr-Delivery"] for headers, _ in receiver.calls}) == 3


async def test_a_webhook_hears_only_of_what_it_asked_for(receiver: Receiver) -> None:
    events = began()
    async with Webhooks(events).running([Webhook(url=receiver.url, events=("running", "deleted"))]):
        await asyncio.sleep(0)
        events.note([VIEW])
        events.note([replace(VIEW, state=State.RUNNING)])
        events.note([])
        bodies = await receiver.heard(2)
    assert [body["event"] for body in bodies] == ["running", "deleted"]
    assert "X-Teimgr-Signature" not in receiver.calls[0][0]


@pytest.mark.clause("N-webhooks")
async def test_a_failed_delivery_is_tried_again_and_holds_nobody_up(receiver: Receiver) -> None:
    events, receiver.statuses = began(), [503, 500, 429]
    webhooks = Webhooks(events, pause_s=0.01)
    async with webhooks.running([Webhook(url=receiver.url, events=("created", "deleted"))]):
        await asyncio.sleep(0)
        events.note([VIEW])
        events.note([])
        bodies = await receiver.heard(5)
    assert [body["event"] for body in bodies] == ["created"] * 4 + ["deleted"]


async def test_what_is_refused_or_fails_too_often_is_given_up_and_told(receiver: Receiver) -> None:
    events, receiver.statuses = began(), [410, 500, 500]
    webhooks = Webhooks(events, pause_s=0.01)
    async with webhooks.running([Webhook(url=receiver.url, max_attempts=2, events=("created", "deleted"))]):
        await asyncio.sleep(0)
        events.note([VIEW])
        await receiver.heard(1)
        events.note([])
        await receiver.heard(3)
        await eventually(lambda: "event 3" in "".join(webhooks.alarms()))
        events.note([VIEW])
        bodies = await receiver.heard(4)
        await eventually(lambda: not webhooks.alarms())
    assert [body["event"] for body in bodies] == ["created", "deleted", "deleted", "created"]


async def test_what_may_be_a_secret_in_an_address_is_not_told(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    events, receiver.statuses = began(), [500]
    webhooks = Webhooks(events)
    secret = receiver.url.replace("http://", "http://user:hush@") + "?token=hush"
    nobody = "http://127.0.0.1:9/hush"
    async with webhooks.running([Webhook(url=url, events=("created",), max_attempts=1) for url in (secret, nobody)]):
        await asyncio.sleep(0)
        events.note([VIEW])
        await eventually(lambda: len(webhooks.alarms()) == 2)
        told = "".join(webhooks.alarms())
    assert f"{receiver.url.removesuffix('/hook')}: event" in told
    assert "hush" not in told + "".join(str(record.__dict__) for record in caplog.records if "webhook" in record.msg)


async def test_a_reload_ends_what_is_gone_and_leaves_the_rest(receiver: Receiver) -> None:
    events = began()
    stays, goes = Webhook(url=receiver.url, events=("deleted",)), Webhook(url="http://127.0.0.1:9/", max_attempts=1)
    webhooks = Webhooks(events, pause_s=0.01)
    async with webhooks.running([stays, goes]):
        await asyncio.sleep(0)
        events.note([VIEW])
        await eventually(webhooks.alarms)
        webhooks.configure([stays])
        assert webhooks.alarms() == []
        events.note([])
        await receiver.heard(1)
