"""The REST application on a real listener of a random port, over an in-memory fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from tests.support.rest_listener import Front, listening

from teimgr.config.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_file=tmp_path / "state.toml", max_instances=10)


@pytest.fixture
async def front(settings: Settings) -> AsyncIterator[Front]:
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        yield front
