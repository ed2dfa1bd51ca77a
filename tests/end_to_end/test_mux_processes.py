"""Several mux processes behind one port: the kernel divides the connections, and the metrics have the calls of each."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import grpc
from tests.support import models
from tests.support.daemon_process import WarmDaemonProcess
from tests.support.polling import until

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

CONNECTIONS = 40  # that all of them reach one process has a chance of 2^-39
EMBED = "/tei_multiplexer.v1.TeiMultiplexer/Embed"


def calls_by_mux(api: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{api}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, int] = {}
    for line in lines:
        if line.startswith("teimgr_mux_calls_total{") and 'method="Embed"' in line:
            mux = line.split('mux="')[1].split('"')[0]
            found[mux] = found.get(mux, 0) + int(float(line.split()[-1]))
    return found


def test_connections_reach_every_process_and_no_call_is_lost_or_counted_twice(tmp_path: Path) -> None:
    inner = tei_pb2.EmbedRequest(inputs="fog")
    request = multiplexer_pb2.EmbedRequest(target={"instance_name": "a"}, request=inner).SerializeToString()
    with WarmDaemonProcess(mux_processes=2) as daemon, daemon.client() as client:
        client.create("a", str(models.build_static(tmp_path / "model")))
        client.wait_until_running("a", deadline_s=60)
        replies = set()
        for _ in range(CONNECTIONS):
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}", options) as channel:
                reply = channel.unary_unary(EMBED)(request, timeout=30, wait_for_ready=True)
                replies.add(tuple(tei_pb2.EmbedResponse.FromString(reply).embeddings))
        until(lambda: sum(calls_by_mux(daemon.api).values()) == CONNECTIONS, "all calls in the metrics", 30)

        assert len(replies) == 1
        assert sorted(calls_by_mux(daemon.api)) == ["mux-0", "mux-1"]
