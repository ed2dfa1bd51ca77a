"""Malformed protobuf and Arrow in great number: calls that hypothesis wrote, changed by the mutator, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import grpc
import uvloop
from hypothesis import HealthCheck, Phase, given, seed, settings

from teimgr.wire.grpc_core.rpc import SERVICE
from tests.fuzz.mutation import Mutator
from tests.fuzz.rpc import ALLOWED, ANSWER_LIMIT_S, ARROW_SERVICES, TEI_SERVICES, Call, arrow_calls, calls
from tests.fuzz.surface import Report
from tests.fuzz.target import FLEET, SEED, Target

CORPUS = 400
_AT_ONCE = 64
# What grpc.aio's client makes of its own failure to send to a stream that has ended meanwhile.
_ENDED_EARLY = "Internal error from Core"


@cache
def corpus() -> list[Call]:
    """Calls of every method and port, whole and broken."""
    found: list[Call] = []
    strategy = calls(SERVICE) | calls(*TEI_SERVICES, *ARROW_SERVICES, named=True) | arrow_calls()

    @seed(SEED)
    @settings(
        max_examples=CORPUS,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(call: Call) -> None:
        if call.raw:
            found.append(call)

    keep()
    return found


def run(target: Target, cases: int, report: Report) -> None:
    uvloop.run(_run(target, cases, report))


async def _run(target: Target, cases: int, report: Report) -> None:
    known = corpus()
    mutator = Mutator(SEED + report.cases, [raw for call in known for raw in call.raw if raw])
    ports = {"": target.daemon.grpc_port, **target.ports}
    channels = {name: grpc.aio.insecure_channel(f"127.0.0.1:{port}") for name, port in ports.items()}
    remaining = iter(range(cases))

    async def caller() -> None:
        for number in remaining:
            call = mutator.random.choice(known)
            # The instances' own ports have the services of TEI alone.
            names = list(FLEET) if call.service.startswith("tei.v1") else [""]
            channel = channels[names[number % len(names)] if number % 2 else ""]
            sent = [mutator.case() if mutator.random.random() < 0.8 else raw for raw in call.raw]
            code, details = await _send(channel, call, sent)
            if details == _ENDED_EARLY and call.sends_many:
                report.count("ended while sending")
                continue
            report.count(code.name)
            if code not in ALLOWED:
                report.fail(f"{call.service}/{call.method} {code.name} {details}", b"|".join(sent))

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(caller())
    finally:
        for channel in channels.values():
            await channel.close()


async def _send(channel: Any, call: Call, sent: list[bytes]) -> tuple[grpc.StatusCode, str]:
    shape = f"{'stream' if call.sends_many else 'unary'}_{'stream' if call.answers_many else 'unary'}"
    ask = getattr(channel, shape)(f"/{call.service}/{call.method}")
    metadata = [("x-teimgr-instance", call.instance)] if call.instance else None
    try:
        message = _each(sent) if call.sends_many else sent[0]
        answer = ask(message, timeout=ANSWER_LIMIT_S, metadata=metadata)
        if call.answers_many:
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


async def _each(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
