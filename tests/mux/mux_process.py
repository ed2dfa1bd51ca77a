"""A real mux process, and the daemon's end of its control socket."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from teimgr.directory import Entry, Snapshot
from teimgr.front.mux_config import MuxConfig
from teimgr.spec import State

MAX_MESSAGE_BYTES = 2 * 1024 * 1024
WINDOW = 16


class MuxProcess:
    """`python -m teimgr.front.mux` with a config of its own; `port` is known once it serves."""

    def __init__(self, **overrides: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        values: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "control_socket": str(self.folder / "mux.sock"),
            "max_message_bytes": MAX_MESSAGE_BYTES,
            "max_parallel_streams": WINDOW,
            "run_dir": str(self.folder),
        }
        self.config = MuxConfig(**(values | overrides))
        path = self.folder / "mux.json"
        path.write_text(self.config.to_json())
        self.process = subprocess.Popen([sys.executable, "-m", "teimgr.front.mux", path], stderr=subprocess.PIPE)
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Read the log up to the line that says so."""
        assert self.process.stderr is not None
        seen = b""
        for line in self.process.stderr:
            seen += line
            if b"mux serves" in line:
                return
        raise RuntimeError(seen.decode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
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

    async def push(self, *entries: Entry) -> dict[str, Any]:
        """Send a snapshot and wait until it is taken."""
        self.say({"snapshot": json.loads(Snapshot(entries).to_json())})
        return await self.stats()

    def say(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def running(name: str, *workers: Any, model_id: str = "model") -> Entry:
    """The entry of a running instance with these workers."""
    return Entry(name, model_id, State.RUNNING, None, 1, tuple(worker.endpoint for worker in workers))


def client(stats: dict[str, object]) -> grpc.aio.Channel:
    """A channel of its own connection to the mux whose stats these are."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{stats['port']}", options=options)
