"""A real mux process, and the daemon's end of its control socket."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from tests.support.daemon_process import free_ports
from tests.support.fork_server import fork_program

from teimgr.config.mux import MuxConfig
from teimgr.config.settings import Settings
from teimgr.spec import RouteEntry, RoutingSnapshot, State
from teimgr.wire.grpc_core.rpc import SERVICE
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

MAX_MESSAGE_BYTES = 2 * 1024 * 1024
WINDOW = 16


class MuxProcess:
    """`python -m teimgr.mux.process` with a config of its own; `stats` have its port."""

    def __init__(self, **overrides: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        values: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "control_socket": str(self.folder / "mux.sock"),
            "max_message_bytes": MAX_MESSAGE_BYTES,
            "max_parallel_streams": WINDOW,
            "run_dir": str(self.folder),
            "orphan_grace_s": 3600.0,  # tests of other files may run between two that share it
        }
        self.config = MuxConfig(**(values | overrides))
        path = self.folder / "mux.json"
        path.write_text(self.config.to_json())
        ours, theirs = os.pipe()
        self._output = os.fdopen(ours)
        self.process: Any = fork_program("teimgr.mux.process:main", [str(path)], theirs, self.folder, {})
        if self.process is None:
            self.process = subprocess.Popen([sys.executable, "-m", "teimgr.mux.process", path], stderr=theirs)
        os.close(theirs)
        self.log: list[str] = []
        self.wait_until_open()
        # A pipe that is not read would stop the process in the middle of a log line.
        self._emptying = threading.Thread(target=self._empty)
        self._emptying.start()

    def wait_until_open(self) -> None:
        """Read the log up to the line about the control socket."""
        for line in self._lines():
            if "mux waits for its first snapshot" in line:
                return
        status = self.process.wait()
        self._clean_up()
        raise RuntimeError("".join(self.log), status)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._emptying.join()
        self._clean_up()

    def _empty(self) -> None:
        for _ in self._lines():
            pass

    def _lines(self) -> Iterator[str]:
        for line in self._output:
            self.log.append(line)
            yield line

    def _clean_up(self) -> None:
        self._output.close()
        shutil.rmtree(self.folder)


@dataclass
class Control:
    """A daemon's connection to a mux."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(cls, mux: MuxProcess) -> Control:
        return cls(*await asyncio.open_unix_connection(mux.config.control_socket, limit=1 << 24))

    async def stats(self) -> dict[str, Any]:
        self.say({"stats": True})
        return dict(json.loads(await self.reader.readline()))

    async def push(self, *entries: RouteEntry) -> dict[str, Any]:
        """Send a snapshot and wait until it is taken."""
        self.say({"snapshot": json.loads(RoutingSnapshot(entries).to_json())})
        return await self.stats()

    def say(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def running(name: str, *workers: Any, model_id: str = "model") -> RouteEntry:
    """The entry of a running instance with these workers."""
    return RouteEntry(name, model_id, State.RUNNING, None, 1, tuple(worker.endpoint for worker in workers))


def client(stats: dict[str, object]) -> grpc.aio.Channel:
    """A channel of its own connection to the mux whose stats these are."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{stats['port']}", options=options)


def client_at(path: str | Path) -> grpc.aio.Channel:
    """A channel of its own connection to the mux at a Unix socket."""
    return grpc.aio.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)])


def stub(channel: grpc.aio.Channel, name: str, service: ServiceDescriptor = SERVICE) -> Any:
    """The real client's callable for a method, typed messages in and out; without `service` of the multiplexer."""
    method = service.methods_by_name[name]
    shape = (
        ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    )
    return getattr(channel, shape)(
        f"/{service.full_name}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )


def to(name: str) -> mux_pb2.Target:
    """A target by instance name."""
    return mux_pb2.Target(instance_name=name)


def embed(text: str, target: str | None = "a") -> mux_pb2.EmbedRequest:
    """An Embed request for the instance `target`, None for no target."""
    request = tei_pb2.EmbedRequest(inputs=text)
    return mux_pb2.EmbedRequest(target=None if target is None else to(target), request=request)


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp(prefix="t"))
    settings = Settings(state_file=folder / "state.toml", run_dir=folder, log_dir=folder, grpc_port=free_ports(1)[0])
    settings.prepare_folders()
    yield settings
    shutil.rmtree(folder)
