"""Pages of PDF documents are rendered some at a time; a call that is gone keeps its turn until its page has ended."""

from __future__ import annotations

import asyncio
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
