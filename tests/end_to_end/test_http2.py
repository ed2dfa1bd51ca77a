"""HTTP/2 in clear text on port 9000 and on an instance's port: the answers of HTTP/1.1, streams that go on."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import h2.events
from tests.support.daemon_process import DaemonProcess
from tests.support.http_peers import LIMIT_S, connecting, request

JSON = {"content-type": "application/json"}
EMBEDDINGS = {"model": "exact", "input": ["rain on the harbour", "fog"]}


def over_http1(url: str, body: Any) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as reply:
        return json.loads(reply.read())


async def test_both_ports_answer_as_over_http1(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        port = client.get("exact").port
    for number, path, body in (
        (daemon.api_port, "/v1/embeddings", EMBEDDINGS),
        (port, "/embed", {"inputs": ["rain on the harbour"] * 3}),
        (port, "/embed", {"inputs": "rain " * 20_000, "truncate": True}),  # too large for a direct answer
    ):
        async with connecting("127.0.0.1", number) as connect:
            peer = await connect()
            whole = json.dumps(body).encode()
            stream = peer.open(request(path, "POST", **JSON))
            sent = 0
            while sent < len(whole):
                sent += peer.send(stream, whole[sent:])
                if sent < len(whole):
                    await peer.take()
            peer.h2.end_stream(stream)
            peer.flush()
            status, _, answer = await peer.response(stream)

            assert status == 200
            assert json.loads(answer) == await asyncio.to_thread(over_http1, f"http://127.0.0.1:{number}{path}", body)


async def test_many_requests_share_a_connection(daemon: DaemonProcess) -> None:
    body = json.dumps(EMBEDDINGS).encode()
    async with connecting("127.0.0.1", daemon.api_port) as connect:
        peer = await connect()
        peer.h2.increment_flow_control_window(1 << 24)  # as `response` reads one stream after the other
        streams = [peer.open(request("/v1/embeddings", "POST", **JSON)) for _ in range(20)]
        for stream in streams:
            peer.h2.send_data(stream, body, end_stream=True)
        peer.flush()
        answers = [json.loads((await peer.response(stream))[2]) for stream in streams]

    assert len({json.dumps(answer["data"]) for answer in answers}) == 1


async def test_events_are_followed_beside_other_requests(daemon: DaemonProcess) -> None:
    async with connecting("127.0.0.1", daemon.api_port) as connect:
        peer = await connect()
        stream = peer.open(request("/instances/exact/logs?follow=true&start=0"), end=True)
        first = await peer.until(h2.events.DataReceived)
        assert first.stream_id == stream
        assert first.data.startswith(b"id: ") or b"data: " in first.data
        assert (await peer.ask(request("/health")))[0] == 200
        peer.h2.reset_stream(stream, 8)
        assert (await peer.ask(request("/health")))[0] == 200
