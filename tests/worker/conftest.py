"""A tiny model, a worker that the asking tests share, and links to it that are closed again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.models import build
from tests.support.worker_process import Connect, WorkerLink, WorkerProcess

from teimgr.wire.frames import Method


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("bert", tmp_path_factory.mktemp("m"), prompts={"query": "query: "})


@pytest.fixture(scope="module")
def worker(tiny: Path) -> Iterator[WorkerProcess]:
    """A worker that only one running call, and four that wait for it, fit into."""
    limits = {"max_concurrent_requests": 1, "max_waiting": 4, "max_message_bytes": 1 << 20}
    with WorkerProcess(tiny, payload_limit_bytes=20_000, **limits) as one:
        yield one


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Make links that are closed after the test."""
    links: list[WorkerLink] = []

    async def one(worker: WorkerProcess) -> WorkerLink:
        link = await worker.link()
        links.append(link)
        return link

    yield one
    for link in links:
        link.close()
        await link.closed()


@pytest.fixture
async def link(worker: WorkerProcess, connect: Connect) -> WorkerLink:
    """A link to the shared worker, which is ready."""
    link = await connect(worker)
    await link.state(link.post(Method.WATCH), "ready")
    return link
