"""What every kind of call has in common: one connection, one bound on waiting, several questions at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from teimgr.client.calls import Calls
from teimgr.client.checks import check_limit, check_sequence, check_text
from teimgr.client.failures import first_of

ItemT = TypeVar("ItemT")
MessageT = TypeVar("MessageT", bound=Message)
ResultT = TypeVar("ResultT")


class Asking:
    """The base of the classes whose methods are calls. Every method raises the `TeimgrError` that the server meant.

    `instance=` or `model=` says who answers. Calls end after the client's `timeout_s`; streams when a reply is
    owed for that long.
    """

    _calls: Calls
    _timeout_s: float

    async def _ask(self, method: str, request: Message, reply: type[MessageT]) -> MessageT:
        return reply.FromString(await self._calls.unary(method, request.SerializeToString(), self._timeout_s))

    async def _each_text(
        self, texts: str | Sequence[str], in_flight: int, ask: Callable[[str], Coroutine[Any, Any, ResultT]]
    ) -> list[ResultT]:
        """As `_each`, for texts; one text is a sequence of one.

        Raises:
            ValidationError: they are none, or one of them is no text.
        """
        wanted = [texts] if isinstance(texts, str) else texts
        check_sequence("texts", wanted)

        async def ask_one(position: int, text: str) -> ResultT:
            check_text(f"texts[{position}]", text)
            return await ask(text)

        return await self._each(wanted, in_flight, ask_one)

    async def _each(
        self, items: Sequence[ItemT], in_flight: int, ask: Callable[[int, ItemT], Coroutine[Any, Any, ResultT]]
    ) -> list[ResultT]:
        """What `ask` gives for every item and its position, in order, `in_flight` at a time.

        The first failure ends the rest.

        Raises:
            ValidationError: `in_flight` is below 1.
        """
        check_limit("in_flight", in_flight)
        results: dict[int, ResultT] = {}
        waiting = iter(enumerate(items))

        async def work() -> None:
            for position, item in waiting:
                results[position] = await ask(position, item)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(in_flight, len(items))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            first_of(failures)
        return [results[position] for position in range(len(items))]
