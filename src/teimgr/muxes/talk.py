"""The daemon's end of a mux's control socket: snapshots go there, figures come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from teimgr.access import PolicyInForce
from teimgr.directory import Directory

_LINE_LIMIT_BYTES = 1 << 20
_CONNECT_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a mux may take, in seconds: to come up, to answer before there is an alarm, to answer at all; and the
    time between two questions."""

    connect_limit_s: float = 20.0
    alarm_after_s: float = 2.0
    answer_limit_s: float = 10.0
    interval_s: float = 5.0


class MuxLost(Exception):
    """There is no talking to the mux; the sentence says why."""


async def talk(
    path: str,
    directory: Directory,
    policy: PolicyInForce,
    patience: Patience,
    on_figures: Callable[[dict[str, Any]], None],
    on_missed: Callable[[], None],
) -> None:
    """Push every change of `policy` and `directory`, fetch figures after each and now and then, until the mux is lost.

    Figures answer only what came before them, so they also say that the snapshot was taken. `on_missed` is called
    when they take longer than `alarm_after_s`.

    Raises:
        MuxLost: always, sooner or later.
    """
    try:
        reader, writer = await _connect(path, patience.connect_limit_s)
    except OSError as error:
        raise MuxLost(f"its control socket cannot be reached: {error or 'it does not come up'}") from error
    news = asyncio.Event()
    unsubscribe = (directory.subscribe(lambda _: news.set()), policy.subscribe(news.set))
    try:
        while True:
            if news.is_set():
                news.clear()
                told = f'{{"policy": {policy.now.to_json()}, "snapshot": {directory.snapshot().to_json()}}}\n'
                writer.write(told.encode())
            with _unless_over(patience.alarm_after_s, on_missed):
                figures = await _figures(reader, writer, patience.answer_limit_s)
            on_figures(figures)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience.interval_s):
                    await news.wait()
    finally:
        for leave in unsubscribe:
            leave()
        writer.close()


@contextlib.contextmanager
def _unless_over(after_s: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` when the body takes longer than `after_s`; the body goes on."""
    timer = asyncio.get_running_loop().call_later(after_s, action)
    try:
        yield
    finally:
        timer.cancel()


async def _connect(path: str, limit_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the control socket, which appears once the gRPC port is bound."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=_LINE_LIMIT_BYTES)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_CONNECT_RETRY_S)


async def _figures(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(limit_s):
            writer.write(b'{"stats": true}\n')
            await writer.drain()
            line = await reader.readline()
    except TimeoutError as error:
        raise MuxLost(f"it gave no answer for {limit_s:g} s") from error
    except (OSError, ValueError) as error:  # a ValueError is a line without an end
        raise MuxLost(f"its control connection broke: {error}") from error
    if not line:
        raise MuxLost("it closed its control connection")
    try:
        figures = json.loads(line)
    except ValueError as error:
        raise MuxLost(f"its answer cannot be read: {error}") from error
    if not isinstance(figures, dict):
        raise MuxLost("its answer is no JSON object")
    return figures
