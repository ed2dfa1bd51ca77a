"""Control client of one mux process: pushes the directory and the auth policy, polls its counters.

Lines of JSON over the mux's unix socket: `{"policy": …, "snapshot": …}` needs no answer, `{"stats": true}` is answered
with the counters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from teimgr.auth.policy import PolicyInForce
from teimgr.directory import Directory

_LINE_LIMIT_BYTES = 1 << 20
_CONNECT_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class MuxTimeouts:
    """Limits in seconds: until the socket accepts, until a late answer raises an alarm, until it counts as lost; and
    the interval of the polls."""

    connect_limit_s: float = 20.0
    alarm_after_s: float = 2.0
    answer_limit_s: float = 10.0
    interval_s: float = 5.0


class MuxLost(Exception):
    """The mux cannot be reached or does not answer; the text is the reason."""


async def serve_mux(
    path: str,
    directory: Directory,
    policy: PolicyInForce,
    timeouts: MuxTimeouts,
    on_stats: Callable[[dict[str, Any]], None],
    on_late: Callable[[], None],
) -> None:
    """Push every change of `policy` and `directory`, and poll the counters after each and at intervals.

    The mux answers in order, so an answer also acknowledges the snapshot before it. `on_late` is called when one takes
    longer than `alarm_after_s`.

    Raises:
        MuxLost: always, at the end.
    """
    try:
        reader, writer = await _connect(path, timeouts.connect_limit_s)
    except OSError as error:
        raise MuxLost(f"its control socket cannot be reached: {error or 'it does not come up'}") from error
    changed = asyncio.Event()
    unsubscribe = (directory.subscribe(lambda _: changed.set()), policy.subscribe(changed.set))
    try:
        while True:
            if changed.is_set():
                changed.clear()
                update = f'{{"policy": {policy.now.to_json()}, "snapshot": {directory.snapshot().to_json()}}}\n'
                writer.write(update.encode())
            late = asyncio.get_running_loop().call_later(timeouts.alarm_after_s, on_late)
            try:
                stats = await _poll(reader, writer, timeouts.answer_limit_s)
            finally:
                late.cancel()
            on_stats(stats)
            with suppress(TimeoutError):
                async with asyncio.timeout(timeouts.interval_s):
                    await changed.wait()
    finally:
        for leave in unsubscribe:
            leave()
        writer.close()


async def _connect(path: str, limit_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the control socket, which appears once the gRPC port is bound."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=_LINE_LIMIT_BYTES)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_CONNECT_RETRY_S)


async def _poll(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float) -> dict[str, Any]:
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
        stats = json.loads(line)
    except ValueError as error:
        raise MuxLost(f"its answer cannot be read: {error}") from error
    if not isinstance(stats, dict):
        raise MuxLost("its answer is no JSON object")
    return stats
