"""Pages of PDF documents in requests: rendered off the loop, some at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from teimgr.errors import Overloaded
from teimgr.wire import pdf_pages

_AT_ONCE = 2  # of a worker: each has a process that reads what a stranger sent
_WAIT_S = 30.0


class PageRenderer:
    """Renders pages for the requests of one worker. For the loop's thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "pdf")
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def page(self, data: bytes, number: int | None) -> bytes:
        """The PNG file of a page, as by `pdf_pages.page`.

        Raises:
            InvalidInput: as there. Overloaded: no turn came, since the pages of others take long.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise Overloaded(
                f"PDF documents of other requests are being rendered, {_AT_ONCE} at a time: none had ended after "
                f"{_WAIT_S:g} s"
            ) from None
        done = self._threads.submit(pdf_pages.page, data, number)
        loop = asyncio.get_running_loop()

        def give_turn(_: Future[bytes]) -> None:
            loop.call_soon_threadsafe(self._turns.release)

        done.add_done_callback(give_turn)  # also behind a caller that has gone: its page is rendered to the end
        return await asyncio.wrap_future(done)
