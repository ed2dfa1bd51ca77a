"""A real worker process on a model of its own, and the other end of its links."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa
from tests.support.daemon_process import free_ports
from tests.support.fork_server import ForkedProcess, fork_server

from teimgr.errors import TeimgrError
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import (
    HEADER,
    Flag,
    FrameProtocol,
    FrameType,
    Header,
    Method,
    Received,
    Timings,
    split_timings,
    unpack_error,
)
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

LIMIT_S = 60.0
EXEC = ("-m", "teimgr.worker.process")
# As the nursery's children end: without the interpreter's own clean-up.
FORKED = ("-c", "import os, sys, teimgr.worker.process as p; os._exit(p.main(int(sys.argv[1]), *sys.argv[2:]))")


class Answer(NamedTuple):
    """A REPLY or an ERROR."""

    header: Header
    payload: bytes

    @property
    def error(self) -> TeimgrError:
        assert self.header.type == FrameType.ERROR, self
        return unpack_error(self.payload)

    @property
    def reply(self) -> bytes:
        """The payload of a REPLY, without its timings."""
        assert self.header.type == FrameType.REPLY, self.error
        return split_timings(self.payload)[1] if self.header.flags & Flag.TIMINGS else self.payload

    @property
    def timings(self) -> Timings:
        assert self.header.flags & Flag.TIMINGS
        return split_timings(self.payload)[0]

    @property
    def json(self) -> Any:
        return json.loads(self.reply)

    @property
    def vector(self) -> list[float]:
        """What an EMBED was answered with."""
        return list(tei_pb2.EmbedResponse.FromString(self.reply).embeddings)


class WorkerLink(FrameProtocol):
    """A front's or a daemon's end of a link. Up to 15 frames posted without an await between leave in one write."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.lost = asyncio.Event()
        self.arrived: list[int] = []
        self._answers: defaultdict[int, asyncio.Queue[Answer]] = defaultdict(asyncio.Queue)
        self._last_id = 0

    def frame_received(self, header: Header, payload: Received) -> None:
        self.arrived.append(header.id)
        self._answers[header.id].put_nowait(Answer(header, payload))

    def link_lost(self, error: Exception | None) -> None:
        self.lost.set()

    def post(self, method: int, payload: bytes = b"", *, flags: int = 0, deadline_ms: int = 0) -> int:
        """Send a request and return its id."""
        self._last_id += 1
        self.send(FrameType.REQUEST, method, self._last_id, payload, flags=flags, deadline_ms=deadline_ms)
        return self._last_id

    def embed(self, text: str = "fog", *, flags: int = 0, deadline_ms: int = 0) -> int:
        """Post an EMBED."""
        return self.post(Method.EMBED, embed_request(text), flags=flags, deadline_ms=deadline_ms)

    def cancel(self, id: int) -> None:
        self.send(FrameType.CANCEL, 0, id)

    async def answer(self, id: int) -> Answer:
        """The next answer to the request `id`."""
        async with asyncio.timeout(LIMIT_S):
            return await self._answers[id].get()

    async def answers(self, ids: list[int]) -> list[Answer]:
        return [await self.answer(id) for id in ids]

    async def ask(self, method: int, payload: bytes = b"", *, flags: int = 0) -> Answer:
        return await self.answer(self.post(method, payload, flags=flags))

    async def state(self, watch: int, *wanted: str) -> dict[str, Any]:
        """The first announcement of the WATCH `watch` with one of the states `wanted`."""
        while True:
            facts: dict[str, Any] = (await self.answer(watch)).json
            if facts["state"] in wanted:
                return facts

    async def calls(self) -> int:
        """Calls that are unanswered in the worker."""
        return int((await self.ask(Method.STATS)).json["calls"])

    async def emptied(self) -> None:
        """Return when no call is in the worker any more."""
        async with asyncio.timeout(LIMIT_S):
            while await self.calls():
                pass

    async def closed(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.lost.wait()

    def send_header_of(self, length: int) -> None:
        """Announce a frame of `length` bytes and send none of them."""
        assert self._transport is not None
        self._transport.write(HEADER.pack(length, FrameType.REQUEST, Method.EMBED, 0, 999, 0, 0))

    def read(self, wanted: bool) -> None:
        """Take what the worker sends, or leave it in the socket."""
        assert self._transport is not None
        (self._transport.resume_reading if wanted else self._transport.pause_reading)()  # type: ignore[attr-defined]


OFFLINE = {"HF_HUB_OFFLINE": "1"}


class WorkerProcess:
    """A worker with a listening socket, as the daemon hands it over.

    It is forked from the test process's fork server, or, where `how` or `environ` is given, a new interpreter.
    """

    def __init__(
        self,
        model: Path | str,
        how: tuple[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        incarnation: str = "inc-1",
        **spec: Any,
    ) -> None:
        self.incarnation = incarnation
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        self.socket = str(self.folder / "w.sock")
        values: Mapping[str, Any] = {"dtype": "float32", "port": free_ports(1)[0], "log_level": "debug"}
        self.spec = WorkerSpec(**{"name": "mine", "model_id": str(model), **values, **spec})
        self._log = self.folder / "log"
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as output:
            listener.bind(self.socket)
            listener.listen()
            spec_json = self.spec.to_json()
            self.process: subprocess.Popen[bytes] | ForkedProcess
            if how is None and environ is None:
                self.process = fork_server().fork(
                    listener.fileno(), output.fileno(), incarnation, str(self.folder), spec_json
                )
                return
            arguments = [str(listener.fileno()), incarnation, str(self.folder), spec_json]
            self.process = subprocess.Popen(
                [sys.executable, *(how or EXEC), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | dict(environ or OFFLINE),
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.spec.port}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def last_words(self) -> dict[str, Any]:
        """The file that a worker leaves that could not serve."""
        return dict(json.loads((self.folder / f"{self.incarnation}.exit").read_text()))

    async def link(self) -> WorkerLink:
        """A new link; it can be used before the worker has come up."""
        _, link = await asyncio.get_running_loop().create_unix_connection(WorkerLink, self.socket)
        return link

    async def watcher(self, *wanted: str) -> tuple[WorkerLink, int]:
        """A new link with a WATCH that has reported one of the states `wanted`."""
        link = await self.link()
        watch = link.post(Method.WATCH)
        await link.state(watch, *wanted)
        return link, watch

    async def exit(self) -> int:
        """The exit status, once there is one."""
        return await asyncio.to_thread(self.process.wait, LIMIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log)
        self.close()


def embed_request(text: str, **options: Any) -> bytes:
    return tei_pb2.EmbedRequest(inputs=text, **options).SerializeToString()


def arrow(texts: list[str | None], **options: object) -> bytes:
    """The payload of an EMBED_ARROW."""
    sink = pa.BufferOutputStream()
    table = pa.record_batch({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_batch(table)
    request = multiplexer_pb2.EmbedArrowRequest(arrow_ipc=sink.getvalue().to_pybytes(), **options)
    return request.SerializeToString()


def table(payload: bytes) -> pa.Table:
    ipc = multiplexer_pb2.EmbedArrowResponse.FromString(payload).arrow_ipc
    return pa.ipc.open_stream(ipc).read_all()


Connect = Callable[[WorkerProcess], Awaitable[WorkerLink]]
