"""The page over an in-memory fleet, on a real listener."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.memory_fleet import Fleet
from tests.support.rest_listener import Front, listening

from teimgr.config.settings import Settings
from teimgr.events.fleet_events import EventLog
from teimgr.page.page import Page
from teimgr.placement.planner import GpuInventory, Inventory
from teimgr.rest.probes import Scraper
from teimgr.routing.router import Directory

Serving = Callable[..., AbstractAsyncContextManager[Front]]


def parts(settings: Settings) -> Callable[[Fleet], dict[str, Any]]:
    """What `create_app` takes beside the fleet: the page and an event log."""

    def make(fleet: Fleet) -> dict[str, Any]:
        events = EventLog()
        events.note([])
        fleet.on_views_changed = events.note
        gpus = GpuInventory({}, lambda: Inventory(reason="none in this test"))
        page = Page(settings, fleet, Scraper(Directory()), gpus)  # type: ignore[arg-type]
        return {"page": page.routes(), "event_log": events}

    return make


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def serve(**more: Any) -> AsyncIterator[Front]:
        settings = replace(Settings(state_file=tmp_path / "state.toml"), **more)
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address
        async with (
            listening(settings, parts=parts(settings)) as front,
            aiohttp.ClientSession(front.url, cookie_jar=jar) as front.http,
        ):
            yield front

    return serve
