"""`python -m bench.steady TASK`: small calls at a steady rate in a process of its own, whatever the server answers.

    {"take": null}   → {"calls": [[name, due, latency_ms, outcome], ...], "waiting": [[name, due], ...],
                        "late": [[at, ms], ...]}: what ended since the last `take`, and what has not

A call begins when its schedule names it, answered earlier ones or not, so its latency begins there too. Times are
those of CLOCK_MONOTONIC, which all processes of a machine share. `outcome` is OK, an HTTP status, the name of a gRPC
status or of an exception. `late` has the moments in which this process itself did not run for `ms`: what it measured
then is its own lateness, not the server's. The first line it writes, when it runs, is {}. TASK has the fields of
`SteadyTask`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

OK = "OK"
_HEARTBEAT_S = 0.01
_LATE_S = 0.02


@dataclass(frozen=True)
class SteadyCall:
    """One kind of call, `rate` times a second. `kind` is http or grpc; `path` a route, or the path of an RPC.

    `body` is base64, of HTTP it may be empty for a GET. `fresh` opens a connection for each call of HTTP.
    """

    name: str
    kind: str
    port: int
    path: str
    body: str = ""
    rate: float = 10.0
    key: str = ""
    fresh: bool = False
    tls: bool = False


@dataclass(frozen=True)
class SteadyTask:
    """The calls, the limit of each, and the certificate authority of a server with TLS."""

    calls: Sequence[SteadyCall]
    limit_s: float = 60.0
    ca: str = ""


class HttpCalls:
    """Calls over HTTP/1.1, each on a connection that is idle, or on a new one."""

    def __init__(self, call: SteadyCall, trust: ssl.SSLContext | None) -> None:
        body = base64.b64decode(call.body)
        head = [f"{'POST' if body else 'GET'} {call.path} HTTP/1.1", f"host: 127.0.0.1:{call.port}"]
        head += [f"content-length: {len(body)}", "content-type: application/json"] if body else []
        head += [f"authorization: Bearer {call.key}"] if call.key else []
        head += ["connection: close"] if call.fresh else []
        self._request = "\r\n".join(head).encode() + b"\r\n\r\n" + body
        self._call, self._trust = call, trust if call.tls else None
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self) -> str:
        """The status of one call, OK for 200."""
        reader, writer = self._open() or await asyncio.open_connection("127.0.0.1", self._call.port, ssl=self._trust)
        kept = False
        try:
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            await reader.readexactly(int(fields[b"content-length"]))
            kept = not self._call.fresh and fields.get(b"connection") != b"close"
        finally:
            if kept:
                self._idle.append((reader, writer))
            else:
                writer.close()
        status = head.split(b" ", 2)[1].decode()
        return OK if status == "200" else status

    def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The connection used last that the server has not closed since."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None


class GrpcCalls:
    """Unary calls over one channel."""

    def __init__(self, call: SteadyCall, trust: grpc.ChannelCredentials | None) -> None:
        address = f"127.0.0.1:{call.port}"
        channel = grpc.aio.secure_channel(address, trust) if call.tls else grpc.aio.insecure_channel(address)
        self._ask = channel.unary_unary(call.path)
        self._body = base64.b64decode(call.body)
        self._metadata = (("authorization", f"Bearer {call.key}"),) if call.key else None

    async def __call__(self) -> str:
        """The name of the status of one call."""
        try:
            await self._ask(self._body, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return OK


class Steady:
    """The schedule, and what became of every call."""

    def __init__(self, task: SteadyTask) -> None:
        self._task = task
        self._done: list[tuple[str, float, float, str]] = []
        self._waiting: set[tuple[str, float]] = set()
        self._late: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Call until it is cancelled."""
        trust = ssl.create_default_context(cafile=self._task.ca) if self._task.ca else None
        with open(self._task.ca or "/dev/null", "rb") as file:  # noqa: PTH123, ASYNC230  once, before anything else runs
            channel_trust = grpc.ssl_channel_credentials(file.read() or None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeat())
            for number, call in enumerate(self._task.calls):
                ask = HttpCalls(call, trust) if call.kind == "http" else GrpcCalls(call, channel_trust)
                offset_s = number / len(self._task.calls) / call.rate
                tasks.create_task(self._paced(call, ask, time.monotonic() + offset_s, tasks))

    def taken(self) -> dict[str, Any]:
        """What ended since the last time, as the module's text says."""
        done, self._done = self._done, []
        late, self._late = self._late, []
        return {"calls": done, "waiting": sorted(self._waiting), "late": late}

    async def _paced(
        self, call: SteadyCall, ask: Callable[[], Awaitable[str]], due: float, tasks: asyncio.TaskGroup
    ) -> None:
        while True:
            due += 1 / call.rate
            await asyncio.sleep(due - time.monotonic())
            tasks.create_task(self._one(call.name, ask, due))

    async def _one(self, name: str, ask: Callable[[], Awaitable[str]], due: float) -> None:
        self._waiting.add((name, due))
        try:
            async with asyncio.timeout(self._task.limit_s):
                outcome = await ask()
        except Exception as error:  # whatever it is, it is what this call got
            outcome = type(error).__name__
        self._waiting.discard((name, due))
        self._done.append((name, due, (time.monotonic() - due) * 1e3, outcome))

    async def _heartbeat(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_HEARTBEAT_S)
            late_s = time.monotonic() - began - _HEARTBEAT_S
            if late_s > _LATE_S:
                self._late.append((began, late_s * 1e3))


async def _serve(task: SteadyTask) -> None:
    steady = Steady(task)
    running = asyncio.create_task(steady.run())
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print("{}", flush=True)
    while await commands.readline():
        if running.done():
            running.result()
        print(json.dumps(steady.taken()), flush=True)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


def main() -> None:
    """Call until stdin ends."""
    fields = json.loads(sys.argv[1])
    asyncio.run(_serve(SteadyTask(**fields | {"calls": [SteadyCall(**call) for call in fields["calls"]]})))


if __name__ == "__main__":
    main()
