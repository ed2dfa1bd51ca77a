"""The only worker of an instance is killed: calls that come before its successor wait for it, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from tests.support.daemon_process import WarmDaemonProcess
from tests.support.models import build

from teimgr.errors import Unavailable

LIMIT_S = 120.0


@pytest.mark.timeout(2 * LIMIT_S)
async def test_calls_wait_for_the_successor_of_a_killed_worker(tmp_path: Path) -> None:
    build("bert", tmp_path)
    with WarmDaemonProcess(worker_wait_secs=LIMIT_S) as daemon:
        async with (
            daemon.async_client(timeout_s=LIMIT_S) as client,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as http,
        ):

            async def over_http() -> None:
                body = {"model": "a", "input": ["x"]}
                async with http.post(f"{daemon.api}/v1/embeddings", json=body) as reply:
                    if reply.status == 503:
                        raise Unavailable(await reply.text())
                    reply.raise_for_status()

            await client.create("a", str(tmp_path), dtype="float32")
            await client.wait_until_running("a", deadline_s=LIMIT_S)
            pid = (await client.get("a")).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            answered = 0
            while (await client.get("a")).pid in (pid, None):  # until another worker is there
                calls = (client.embed("x", instance="a"), over_http())
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(outcome, Unavailable):  # it was on the dying worker
                        assert "not running" not in outcome.message
                    else:
                        assert not isinstance(outcome, BaseException), outcome
                        answered += 1
            assert answered
