"""Renders pages of PDF documents in requests, off the loop, some at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from teimgr.engine.batching.fair_share import TenantTurns
from teimgr.engine.job import Share
from teimgr.errors import Overloaded
from teimgr.wire import pdf_pages

_AT_ONCE = 2  # per worker: each has a process that reads untrusted data
_WAIT_S = 30.0


class _Waiting(NamedTuple):
    share: Share
    turn: asyncio.Future[None]


class PageRenderer:
    """Renders pages for the requests of one worker. For the loop's thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "pdf")
        self._free = _AT_ONCE
        self._waiting = TenantTurns[_Waiting]()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def page(self, data: bytes, number: int | None, tenant: int = 0) -> bytes:
        """Return the PNG file of a page, as `pdf_pages.page`. Tenants with waiting pages take turns.

        Raises:
            InvalidInput: as there. Overloaded: other pages take so long that its turn did not come.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._turn(tenant)
        except TimeoutError:
            raise Overloaded(
                f"PDF documents of other requests are being rendered, {_AT_ONCE} at a time: none had ended after "
                f"{_WAIT_S:g} s"
            ) from None
        done = self._threads.submit(pdf_pages.page, data, number)
        loop = asyncio.get_running_loop()
        # Also runs if the caller has gone: its page is rendered to the end.
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._give_turn))
        return await asyncio.wrap_future(done)

    async def _turn(self, tenant: int) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(Share(tenant), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same time
                self._give_turn()
            raise

    def _give_turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft().turn
            if not turn.done():  # else its caller has gone
                turn.set_result(None)
                return
        self._free += 1
