"""The page over an in-memory fleet, as a part of the REST application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from teimgr.api.page.page import Page
from teimgr.api.rest.probes import Scraper
from teimgr.config.settings import Settings
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.events.fleet_events import EventLog
from teimgr.control.placement.hosts import Gpu, GpuInventory, Inventory
from teimgr.wire.routing.directory import Directory
from tests.support.rest_listener import Fleet


async def _no_worker(names: object) -> tuple[()]:
    return ()


def parts(settings: Settings, cards: tuple[Gpu, ...] = ()) -> Callable[[Fleet], dict[str, Any]]:
    """What `create_app` takes beside the fleet: the page and an event log."""

    def make(fleet: Fleet) -> dict[str, Any]:
        events = EventLog()
        events.note([])
        fleet.on_views_changed = events.note
        gpus = GpuInventory({}, lambda: Inventory(cards, reason="none in this test"))
        page = Page(settings, fleet, Scraper(Directory()), gpus)  # type: ignore[arg-type]
        return {"page": page.routes(), "event_log": events, "autoscaler": Autoscaler(fleet, _no_worker)}  # type: ignore[arg-type]

    return make
