"""The page over an in-memory fleet, on a real listener."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.api.page_parts import parts
from tests.support.rest_listener import Front, listening

from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import Gpu

Serving = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def serve(cards: tuple[Gpu, ...] = (), **more: Any) -> AsyncIterator[Front]:
        settings = replace(Settings(state_file=tmp_path / "state.toml"), **more)
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address
        async with (
            listening(settings, parts=parts(settings, cards)) as front,
            aiohttp.ClientSession(front.url, cookie_jar=jar) as front.http,
        ):
            yield front

    return serve
