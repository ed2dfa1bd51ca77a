"""The life of a worker process: listen, load, prove, serve, drain.

It is forked from the nursery (or exec'd as `python -m teimgr.worker`) with a listening unix socket and one line of
JSON; from there on everything it hears and says goes over that socket, but for what the instance port serves.
Workers of one instance share the sockets of its ports: each is given those of one that was there before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from teimgr import hub
from teimgr.engine.engine import Engine, EngineOptions
from teimgr.errors import Broken, Internal, OutOfDeviceMemory, PortConflict, Refused, TeimgrError
from teimgr.http_server import Listener, bind, serving
from teimgr.observability import logs
from teimgr.observability.exposition import pack
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import Method
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.http_port import create_app, metrics_app
from teimgr.worker.link_server import Control, Links
from teimgr.worker.metrics import engine_page, process_page

if TYPE_CHECKING:
    from teimgr.worker.grpc_port.port import GrpcPort


ResultT = TypeVar("ResultT")


def in_background(name: str, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Start `work` on a thread of its own; the future has what it returned or raised.

    `asyncio.to_thread` would not do for what may take minutes: the loop's end joins its threads.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def finish(result: ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # of `work`, where there is no error

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # a thread has nobody else to tell
            error = raised
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_PERMANENT = 3
EXIT_TRANSIENT = 4

_DOWNLOADING_NEWS_S = 5.0
_DRAIN_ON_SIGNAL_S = 30.0
_ENGINE_CLOSE_S = 1.0
_LINKS_CLOSE_S = 5.0
# Routers hear in milliseconds that another worker took over; until then they may still open links to this one.
_NEWS_TRAVEL_S = 1.0
_LEFT_CHECK_S = 0.05
# Failures to load that the same files and flags will meet again, and those among them that may pass by themselves.
_LASTING = (Refused, Broken, OutOfDeviceMemory)
_PASSING = (PortConflict, Internal)


def main(listener_fd: int, incarnation: str, run_dir: str, spec_json: str, ports: str = "{}") -> int:
    """Serve one model until told to stop; the result is the exit status.

    `ports` is a JSON object: number of a port → descriptor of its socket, bound by another worker of the instance.
    The process has to end at once with it: a thread may still be loading a model that nobody wants any more.
    """
    spec = WorkerSpec.from_json(spec_json)
    logs.setup(spec.log_level, spec.log_format)
    listener = socket.socket(fileno=listener_fd)
    listener.setblocking(False)
    shared = {int(number): socket.socket(fileno=descriptor) for number, descriptor in json.loads(ports).items()}
    return uvloop.run(_live(spec, incarnation, Path(run_dir), listener, shared))


async def _live(
    spec: WorkerSpec, incarnation: str, run_dir: Path, listener: socket.socket, shared: Mapping[int, socket.socket]
) -> int:
    return await Worker(spec, incarnation, run_dir, shared).run(listener)


class Worker:
    """One process's worth of state. Everything happens on the loop's thread unless it says otherwise."""

    def __init__(self, spec: WorkerSpec, incarnation: str, run_dir: Path, shared: Mapping[int, socket.socket]) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.run_dir = run_dir
        self._shared = shared
        self._dispatcher = Dispatcher(spec)
        self._links = Links(self._dispatcher, self._controls())
        self._stop = asyncio.Event()
        self._others_serve = False
        self._signalled = False
        self._hurry = asyncio.Event()
        self._grace_s = _DRAIN_ON_SIGNAL_S
        self._threads = spec.threads
        self._state = "loading"
        self._engine: Engine | None = None

    async def run(self, listener: socket.socket) -> int:
        """The whole life, in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._announce("loading")
        server = await loop.create_unix_server(self._links.protocol, sock=listener)
        try:
            return await self._load_and_serve()
        except TeimgrError as error:
            return self._give_up(error)
        except Exception as error:
            log.exception("worker failed", extra=self._named)
            return self._give_up(Internal(f"{type(error).__name__}: {error}"))
        finally:
            server.close()
            self._dispatcher.close()
            await self._links.close(0.0 if self._hurry.is_set() else _LINKS_CLOSE_S)

    async def _load_and_serve(self) -> int:
        spec = self.spec
        async with contextlib.AsyncExitStack() as listening:
            # The ports are taken before the slow part: a conflict shows early.
            port = listening.enter_context(contextlib.closing(self._bound(spec.port)))
            scraped = [
                listening.enter_context(contextlib.closing(self._bound(number)))
                for number in filter(None, (spec.prometheus_port,))
            ]
            engine = await self._load()
            if engine is None:
                return EXIT_DONE
            metrics = metrics_app(self._dispatcher.metrics)
            listeners = [await listening.enter_async_context(serving(metrics, sock)) for sock in scraped]
            grpc = self._grpc_port()
            async with serving(create_app(self._dispatcher), port, grpc.protocol) as instance_port:
                self._announce("ready")
                log.info("worker ready", extra=self._named | engine.info.to_dict())
                await self._until_stopped()
                await self._leave_ports([instance_port, *listeners])
                grpc.stop()
                await self._drain_calls()
        await asyncio.to_thread(engine.close, _ENGINE_CLOSE_S)
        return EXIT_DONE

    def _bound(self, number: int) -> socket.socket:
        """The socket of a port: the one that all workers of the instance share, or the first of them."""
        sock = self._shared.get(number) or bind(self.spec.instance_host, number)
        self._links.ports[sock.getsockname()[1]] = sock
        return sock

    def _grpc_port(self) -> GrpcPort:
        """Imported here, so that the nursery does without it."""
        from teimgr.worker.grpc_port.port import GrpcPort

        return GrpcPort(self._dispatcher)

    async def _load(self) -> Engine | None:
        """The engine, or None when the worker was told to stop meanwhile."""
        fetching = in_background("fetching", lambda: hub.resolve(self.spec.model_id, self.spec.revision))
        if not await self._fetched(fetching):
            return None
        if self._state == "downloading":
            self._announce("loading")
        loading = in_background("loading", lambda: self._load_blocking(fetching.result()))
        await _any_of(self._stop.wait(), loading)
        if loading.cancelled():
            return None
        self._engine = loading.result()
        self._engine.set_threads(self._threads)  # it may have been told another number since
        self._dispatcher.attach(self._engine)
        return self._engine

    async def _fetched(self, fetching: asyncio.Future[hub.ModelSource]) -> bool:
        """Whether the files came before a word to stop. A download may take hours; watchers hear that it gets on."""
        began = time.monotonic()
        while not fetching.done():
            if await _any_of(self._stop.wait(), asyncio.shield(fetching), limit_s=_DOWNLOADING_NEWS_S):
                break
            waited_s = round(time.monotonic() - began)
            self._announce("downloading", reason=f"fetching the model's files for {waited_s} s")
        return fetching.done()

    def _load_blocking(self, source: hub.ModelSource) -> Engine:
        spec = self.spec
        options = EngineOptions(
            path=source.path,
            model_id=spec.model_id,
            model_sha=spec.revision,
            commit=source.sha,
            device="cuda" if spec.gpu else "cpu",
            dtype=spec.dtype,
            pooling=spec.pooling,
            kind=spec.kind,
            trust_remote_code=spec.trust_remote_code,
            threads=self._threads,
            max_batch_tokens=spec.max_batch_tokens,
            max_batch_requests=spec.max_batch_requests,
            max_queued_tokens=self._dispatcher.max_bytes,  # the dispatcher is the bound: a token has a byte or more
            default_prompt_name=spec.default_prompt_name,
            default_prompt=spec.default_prompt,
        )
        return Engine.load(options, self._dispatcher.deliver)

    async def _until_stopped(self) -> None:
        """Wait for a word to stop, or for the daemon to stay away for too long."""
        while not self._stop.is_set():
            if self._links.is_watched:
                await _any_of(self._stop.wait(), self._links.unwatched.wait())
            elif not await _any_of(self._stop.wait(), self._links.watched.wait(), limit_s=self.spec.orphan_grace_s):
                log.warning("no daemon for %g s: stopping", self.spec.orphan_grace_s, extra=self._named)
                return

    async def _leave_ports(self, listeners: Sequence[Listener]) -> None:
        """Accept nothing more where others do, and go on for those who have not heard yet that others serve now.

        Routers close their links once they have; clients of the ports are told with their next answer. Half of the
        grace is for this, the other half for finishing the calls of those who stay.
        """
        self._links.ports.clear()
        if self._shared or self._links.has_shared_ports:
            for listener in listeners:
                listener.leave()
        if self._others_serve:
            await _any_of(self._all_left(listeners), self._hurry.wait(), limit_s=self._grace_s / 2)

    async def _all_left(self, listeners: Sequence[Listener]) -> None:
        await asyncio.sleep(_NEWS_TRAVEL_S)
        while self._links.has_callers or any(listener.connections for listener in listeners):  # noqa: ASYNC110
            await asyncio.sleep(_LEFT_CHECK_S)

    async def _drain_calls(self) -> None:
        """Refuse new calls, finish those that came, at most for the grace, or until somebody insists."""
        self._dispatcher.stop_accepting()
        self._announce("draining")
        await _any_of(self._dispatcher.drained(self._grace_s), self._hurry.wait())

    def _on_signal(self) -> None:
        """The first signal asks for an orderly end, a second one ends the waiting."""
        if self._signalled:
            self._hurry.set()
        self._signalled = True
        self._stop.set()

    def _give_up(self, error: TeimgrError) -> int:
        """Say why to whoever watches and to whoever looks later."""
        permanent = isinstance(error, _LASTING) and not isinstance(error, _PASSING)
        log.error("worker failed: %s", error.message, extra=self._named | {"code": error.code.name})
        facts = self._announce("failed", reason=error.message, code=int(error.code), permanent=permanent)
        with contextlib.suppress(OSError):
            (self.run_dir / f"{self.incarnation}.exit").write_text(json.dumps(facts))
        return EXIT_PERMANENT if permanent else EXIT_TRANSIENT

    def _announce(self, state: str, **more: Any) -> dict[str, Any]:
        """Tell the watchers how things stand; the result is what they are told."""
        self._state = state
        facts = {
            "state": state,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "spec_hash": self.spec.hash,
            "model": self._engine.info.to_dict() if self._engine else None,
            "reason": None,
            "code": None,
            "permanent": False,
            "threads": self._threads,
            **more,
        }
        self._links.announce(facts)
        return facts

    @property
    def _named(self) -> dict[str, Any]:
        """For log lines."""
        return {"instance": self.spec.name}

    # What the daemon may ask of a worker.

    def _controls(self) -> dict[Method, Control]:
        return {
            Method.PROBE: self._probe,
            Method.STATS: self._stats,
            Method.METRICS: self._metrics,
            Method.THREADS: self._set_threads,
            Method.DRAIN: self._drain,
        }

    async def _probe(self, _: bytes, limit_s: float) -> bytes:
        await asyncio.to_thread(self._dispatcher.engine.self_test, limit_s)
        return b""

    async def _stats(self, _: bytes, limit_s: float) -> bytes:
        figures = asdict(self._engine.stats()) if self._engine else {}
        return json.dumps({"calls": self._dispatcher.calls, **figures}).encode()

    async def _metrics(self, _: bytes, limit_s: float) -> bytes:
        page = self._dispatcher.metrics.page() | await asyncio.to_thread(process_page, self._dispatcher.calls)
        if self._engine is not None:
            page |= engine_page(self._engine.stats())
        return json.dumps(pack(page)).encode()

    async def _set_threads(self, payload: bytes, limit_s: float) -> bytes:
        self._threads = min(max(1, int(json.loads(payload)["threads"])), os.cpu_count() or 1)
        if self._engine is not None:
            self._engine.set_threads(self._threads)
        self._announce(self._state)
        return b""

    async def _drain(self, payload: bytes, limit_s: float) -> bytes:
        asked = json.loads(payload)
        self._grace_s = float(asked["grace_s"])
        self._others_serve = bool(asked.get("handover"))
        if not self._others_serve:
            self._dispatcher.stop_accepting()  # before the answer: who has it knows that nothing more is let in
        self._stop.set()
        return b""


async def _any_of(*waits: Awaitable[object], limit_s: float | None = None) -> bool:
    """Wait for the first of `waits`, the others are cancelled; False when the time was over before."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    try:
        done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return bool(done)
