"""Pages of PDF documents are rendered some at a time; a call that is gone keeps its turn until its page has ended."""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import suppress

import pytest

from teimgr.errors import Overloaded
from teimgr.wire import pdf_pages
from teimgr.worker import pdf_documents
from teimgr.worker.pdf_documents import PageRenderer


async def test_no_more_pages_than_allowed_are_rendered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def page(data: bytes, number: int | None) -> bytes:
        begun.release()
        may_end.wait(20)
        return data

    monkeypatch.setattr(pdf_pages, "page", page)
    monkeypatch.setattr(pdf_documents, "_WAIT_S", 0.05)
    renderer = PageRenderer()
    try:
        calls = [asyncio.create_task(renderer.page(b"%d" % at, 1)) for at in range(2)]
        for _ in calls:
            assert await asyncio.to_thread(begun.acquire, timeout=20)
        calls[0].cancel()
        with suppress(asyncio.CancelledError):
            await calls[0]
        with pytest.raises(Overloaded, match=r"2 at a time: none had ended after 0\.05 s"):
            await renderer.page(b"3", 1)
        may_end.set()
        assert await calls[1] == b"1"
        monkeypatch.setattr(pdf_documents, "_WAIT_S", 20.0)
        assert await renderer.page(b"4", 1) == b"4"
    finally:
        may_end.set()
        renderer.close()


async def test_tenants_whose_pages_wait_are_served_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: queue.Queue[tuple[bytes, threading.Event]] = queue.Queue()

    def page(data: bytes, number: int | None) -> bytes:
        may_end = threading.Event()
        begun.put((data, may_end))
        may_end.wait(20)
        return data

    monkeypatch.setattr(pdf_pages, "page", page)
    renderer = PageRenderer()
    sent = [(b"first", 1), (b"second", 1), (b"third", 1), (b"fourth", 1), (b"of another", 2)]
    calls = []
    for data, tenant in sent:
        calls.append(asyncio.create_task(renderer.page(data, 1, tenant)))
        await asyncio.sleep(0)
    order = []
    try:
        for _ in sent:
            data, may_end = await asyncio.to_thread(begun.get, timeout=20)
            order.append(data)
            may_end.set()
        assert await asyncio.gather(*calls) == [data for data, _ in sent]
    finally:
        renderer.close()
    assert order.index(b"of another") < order.index(b"fourth")
