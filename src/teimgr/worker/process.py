"""The worker process: listens, loads the model, serves, drains.

It is forked from the nursery, or is a new interpreter if the nursery had several threads (`exec_afresh` of
`control/launch/nursery.py`). It gets a listening unix socket and its spec as one line of JSON. That socket takes all
control commands; inference also arrives at the instance port. Workers of an instance share the listening sockets of its
ports: each gets those of an earlier worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from teimgr.engine.engine import Engine, EngineOptions
from teimgr.errors import (
    Broken,
    Code,
    Internal,
    ModelDownloadFailed,
    OutOfDeviceMemory,
    PortConflict,
    Refused,
    TeimgrError,
)
from teimgr.files import code_id
from teimgr.http.server import Listener, bind, serving
from teimgr.models import hub
from teimgr.models.neighbours import FleetNeighbours
from teimgr.models.own_code import code_repositories_of
from teimgr.observability import logs
from teimgr.observability.exposition import pack
from teimgr.observability.loop_watchdog import LoopWatchdog
from teimgr.observability.memory import MemoryReturn, PrivateMemory, collect_garbage_rarely, resident_bytes
from teimgr.spec import LINK_LISTENER, TRIAL_NAME, CpuThreads, WorkerSpec, worker_file
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.frames import CALLS_AND_MEMORY, Method
from teimgr.wire.tenants.table import FILE as TENANTS_FILE
from teimgr.worker import body_validation
from teimgr.worker.connection_queue import ConnectionQueue
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.grpc_port import GrpcPort
from teimgr.worker.http_port import InstancePort, create_app, metrics_app
from teimgr.worker.link_server import Control, LinkServer
from teimgr.worker.worker_metrics import engine_page, process_page

if TYPE_CHECKING:
    from teimgr.worker.link_server import RemoteLinkListener

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

EXIT_DONE = 0
EXIT_PERMANENT = 3
EXIT_TRANSIENT = 4

# Interval of state announcements during a download.
_DOWNLOAD_REPORT_S = 5.0
_DRAIN_ON_SIGNAL_S = 30.0
_ENGINE_CLOSE_S = 1.0
_LINKS_CLOSE_S = 5.0
_LEFT_POLL_S = 0.05
_HANG_CHECK_S = 0.5
# In the run directory, which the workers of a daemon share.
_CORE_LOAD_FILE, _REFERENCES_FOLDER, _SPACES_FOLDER = "cores", "references", "spaces"
_MAX_REASON_CHARS = 4096  # a status is one frame of the control link, whose size is limited
# Load failures that the same files and flags would repeat, and subclasses of them that may not recur.
_PERMANENT = (Refused, Broken, OutOfDeviceMemory)
_TRANSIENT = (PortConflict, Internal, ModelDownloadFailed)


def main(listener_fd: int, incarnation: str, run_dir: str, spec_json: str, ports: str = "{}") -> int:
    """Serve one model until stopped; return the exit status.

    `ports` is a JSON object: port number → descriptor of its listening socket, bound by another worker of the instance;
    -1 and -2 stand for the ends of the connection queue, -3 for the socket on which it listens for other hosts. The
    process must exit immediately afterwards: a thread may still be loading a model.
    """
    spec = WorkerSpec.from_json(spec_json)
    logs.setup(spec.log_level, spec.log_format, fields={"node": spec.host} if spec.host else None)
    sys.stderr = sys.stdout  # both are the log; descriptor 2 is for C libraries, and silenced while sounds are decoded
    logs.write_stacks(sys.stdout)
    listener = socket.socket(fileno=listener_fd)
    listener.setblocking(False)
    shared = {int(number): socket.socket(fileno=descriptor) for number, descriptor in json.loads(ports).items()}

    async def run() -> int:
        return await Worker(spec, incarnation, Path(run_dir), shared).run(listener)

    return uvloop.run(run())


class Worker:
    """State and life of the worker process, on the loop's thread unless stated otherwise.

    `run` is its lifetime; the stages follow in order, then the control commands of the daemon.
    """

    def __init__(self, spec: WorkerSpec, incarnation: str, run_dir: Path, shared: Mapping[int, socket.socket]) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.run_dir = run_dir
        self._link_listener = shared.get(LINK_LISTENER)
        self._shared = {name: sock for name, sock in shared.items() if name != LINK_LISTENER}
        self._dispatcher = Dispatcher(spec, run_dir / TENANTS_FILE)
        self._links = LinkServer(self._dispatcher, self._controls())
        self._stop = asyncio.Event()
        self._force_stop = asyncio.Event()
        self._left_ports = asyncio.Event()
        self._signalled = False
        self._handover = False  # whether another worker of the instance takes over
        self._grace_s = _DRAIN_ON_SIGNAL_S
        self._threads = CpuThreads(spec.threads, spec.threads)
        self._state = "loading"
        self._engine: Engine | None = None
        self._watchdog: LoopWatchdog | None = None
        self._memory = PrivateMemory()
        self._remote: RemoteLinkListener | None = None
        self._log_fields = {"instance": spec.name}

    async def run(self, listener: socket.socket) -> int:
        """Listen, load and serve until stopped; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._announce("loading")
        server = await loop.create_unix_server(self._links.protocol, sock=listener)
        try:
            if self.spec.link_address:
                self._listen_for_other_hosts(self.spec.link_address)
            status = await self._load_and_serve()
            worker_file(self.run_dir, self.incarnation, "json").unlink(missing_ok=True)  # an orderly exit, no crash
            return status
        except TeimgrError as error:
            return self._give_up(error)
        except Exception as error:
            log.exception("worker failed", extra=self._log_fields)
            return self._give_up(Internal(f"{type(error).__name__}: {error}"))
        finally:
            server.close()
            if self._remote is not None:
                await self._remote.close()
            self._dispatcher.close()
            await self._links.close(0.0 if self._force_stop.is_set() else _LINKS_CLOSE_S)

    def _listen_for_other_hosts(self, address: str) -> None:
        """Raises PortConflict, InvalidConfig: a worker without a launcher cannot bind the address."""
        from teimgr.worker.link_server import RemoteLinkListener  # here: most fleets have one host

        listener = self._link_listener
        if listener is None:
            listener = bind(address, 0, "link_address")
            listener.listen()
        identity = FleetIdentity(Path(self.spec.identity_dir or ""), self.spec.host)
        self._remote = RemoteLinkListener(self._links, identity, self.incarnation, listener)
        self._remote.start()
        self._announce(self._state)

    async def _load_and_serve(self) -> int:
        spec = self.spec
        async with AsyncExitStack() as listening:
            # Binds the ports before the slow load, so that a conflict shows early.
            port = listening.enter_context(closing(self._bind(spec.port)))
            metrics_ports = [
                listening.enter_context(closing(self._bind(number))) for number in filter(None, (spec.prometheus_port,))
            ]
            queue = listening.enter_context(closing(ConnectionQueue(self._shared)))
            self._links.share(queue.ends)
            engine = await self._load()
            if engine is None:
                return EXIT_DONE
            metrics = metrics_app(self._dispatcher.metrics)
            listeners = {
                sock.getsockname()[1]: await listening.enter_async_context(serving(metrics, sock))
                for sock in metrics_ports
            }
            grpc = GrpcPort(self._dispatcher)
            number = port.getsockname()[1]
            http = InstancePort(self._dispatcher)
            app = create_app(http)
            async with serving(app, port, grpc.protocol, http.direct) as listeners[number]:
                queue.serve(partial(self._take, listeners))
                MemoryReturn()
                self._watchdog = LoopWatchdog(f"the worker of '{self.spec.name}'")  # from now on calls wait for it
                self._announce("ready")
                log.info("worker ready", extra=self._log_fields | engine.info.to_dict())
                hang_detection = asyncio.create_task(_detect_hangs(engine))
                await self._until_stopped()
                hang_detection.cancel()
                await self._leave_ports(listeners, queue)
                grpc.stop()
                await self._drain_calls()
        await asyncio.to_thread(engine.close, _ENGINE_CLOSE_S)
        return EXIT_DONE

    def _bind(self, number: int) -> socket.socket:
        """Return the listening socket of a port: the one that the instance's workers share, or a new one."""
        sock = self._shared.get(number) or bind(self.spec.port_host or self.spec.instance_host, number)
        self._links.ports[sock.getsockname()[1]] = sock
        return sock

    async def _load(self) -> Engine | None:
        """Load the engine; None if the worker was stopped meanwhile. A download, which may take hours, is reported."""
        spec, began, neighbours = self.spec, time.monotonic(), self._neighbours()
        fetching = in_background("fetching", lambda: fetched(spec, neighbours))
        while not fetching.done():
            if await _any_of(self._stop.wait(), asyncio.shield(fetching), limit_s=_DOWNLOAD_REPORT_S):
                break
            self._report_download(round(time.monotonic() - began), neighbours)
        if not fetching.done():
            return None
        if self._state == "downloading":
            self._announce("loading")
        loop = asyncio.get_running_loop()
        on_fault = partial(_call_in_loop, loop, self._engine_failed)
        loading = in_background("loading", lambda: self._load_blocking(*fetching.result(), on_fault))
        await _any_of(self._stop.wait(), loading)
        if loading.cancelled():
            return None
        self._engine = loading.result()
        self._engine.set_threads(self._threads)  # it may have changed during the load
        self._dispatcher.attach(self._engine)
        collect_garbage_rarely()
        return self._engine

    def _neighbours(self) -> FleetNeighbours | None:
        """Return access to the other hosts of a fleet, which may have the model."""
        if not self.spec.agent_socket:
            return None
        identity = FleetIdentity(Path(self.spec.identity_dir or ""), self.spec.host)
        return FleetNeighbours(Path(self.spec.agent_socket), identity)

    def _report_download(self, waited_s: int, neighbours: FleetNeighbours | None) -> None:
        reason = f"downloading the model for {waited_s} s"
        if neighbours is not None and (host := neighbours.progress.host):
            done, total = neighbours.progress.bytes_done, neighbours.progress.bytes_total
            reason += f" from host '{host}': {done:,} of {total:,} bytes"
        log.info("%s", reason, extra=self._log_fields)
        self._announce("downloading", reason=reason)

    def _load_blocking(self, source: hub.ModelSource, code: Sequence[str], on_fault: Callable[[str], None]) -> Engine:
        spec = self.spec
        body_validation.check_token_inputs(spec)
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
            code_revision=spec.code_revision,
            code=tuple(code),
            strict_model_files=spec.strict_model_files,
            safetensors_only=spec.safetensors_only,
            threads=self._threads.own,
            core_load=None if spec.gpu else self.run_dir / _CORE_LOAD_FILE,
            references=None if spec.gpu else self.run_dir / _REFERENCES_FOLDER,
            spaces=self.run_dir / _SPACES_FOLDER,
            max_batch_tokens=spec.max_batch_tokens,
            cuts_texts=spec.auto_truncate if spec.auto_truncate_given else None,
            max_batch_requests=spec.max_batch_requests,
            lane_limit_tokens=self._dispatcher.max_bytes,  # never reached: a token has at least a byte
            cache_bytes=spec.cache_bytes,
            default_prompt_name=spec.default_prompt_name,
            default_prompt=spec.default_prompt,
        )
        return Engine.load(options, self._dispatcher.deliver, on_fault)

    def _engine_failed(self, reason: str) -> None:
        """Announce at once that the loaded engine is unhealthy, so that the daemon replaces the worker. Until then, and
        without a daemon, calls and `/health` are answered UNAVAILABLE.
        """
        if self._engine is not None:  # `_give_up` reports a failed load
            self._announce("failed", reason=reason, code=int(Code.INFERENCE_FAILED))

    async def _until_stopped(self) -> None:
        """Wait for a signal or DRAIN, or until no daemon has been connected for `orphan_grace_s`."""
        while not self._stop.is_set():
            if self._links.is_watched:
                await _any_of(self._stop.wait(), self._links.unwatched.wait())
            elif not await _any_of(self._stop.wait(), self._links.watched.wait(), limit_s=self.spec.orphan_grace_s):
                log.warning("no daemon for %g s: stopping", self.spec.orphan_grace_s, extra=self._log_fields)
                return

    def _take(self, listeners: Mapping[int, Listener], port: int, connection: socket.socket) -> None:
        """Serve a connection that a worker passed on; close it if the instance no longer has its port."""
        if port not in listeners:
            connection.close()
            return
        listeners[port].take(connection)

    async def _leave_ports(self, listeners: Mapping[int, Listener], queue: ConnectionQueue) -> None:
        """Close the listening sockets if other workers listen on them; on a handover, wait until clients have moved.

        Routers then close their links. On a handover open HTTP connections are passed on, otherwise they end with their
        next reply; gRPC clients make their next call elsewhere. Half of the grace period is for this, the other half
        for the calls of clients that stay.
        """
        self._links.ports.clear()
        queue.leave()
        if self._handover or self._shared or self._links.has_shared_ports:
            for number, listener in listeners.items():
                listener.leave(partial(queue.pass_on, number) if self._handover else None)
        self._left_ports.set()
        if self._handover:
            await _any_of(self._all_left(listeners.values(), queue), self._force_stop.wait(), limit_s=self._grace_s / 2)

    async def _all_left(self, listeners: Collection[Listener], queue: ConnectionQueue) -> None:
        while (  # noqa: ASYNC110
            self._links.has_callers or queue.is_sending or any(each.connections for each in listeners)
        ):
            await asyncio.sleep(_LEFT_POLL_S)

    async def _drain_calls(self) -> None:
        """Refuse new calls and finish the others, until the grace period ends or a second signal comes."""
        self._dispatcher.stop_accepting()
        self._announce("draining")
        await _any_of(self._dispatcher.drained(self._grace_s), self._force_stop.wait())

    def _on_signal(self) -> None:
        """Start an orderly stop at the first signal; end its waiting at the second."""
        if self._signalled:
            self._force_stop.set()
        self._signalled = True
        self._stop.set()

    def _give_up(self, error: TeimgrError) -> int:
        """Report a failure to the watchers and in the exit file; return the exit status."""
        permanent = isinstance(error, _PERMANENT) and not isinstance(error, _TRANSIENT)
        log.error("worker failed: %s", error.message, extra=self._log_fields | {"code": error.code.name})
        facts = self._announce("failed", reason=error.message, code=int(error.code), permanent=permanent)
        with suppress(OSError):
            worker_file(self.run_dir, self.incarnation, "exit").write_text(json.dumps(facts))
        return EXIT_PERMANENT if permanent else EXIT_TRANSIENT

    def _announce(self, state: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
        """Send the status to every watcher. It has no labels, of which a model may have any number."""
        self._state = state
        model = self._engine.info.to_dict() | {"labels": []} if self._engine else None
        facts = {
            "state": state,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "spec_hash": self.spec.hash,
            "model": model,
            "reason": reason and reason[:_MAX_REASON_CHARS],
            "code": None,
            "permanent": False,
            "threads": self._threads.own,
            "build": code_id(),
            **more,
        }
        if self._remote is not None:
            facts |= {"node": self.spec.host, "address": self._remote.address}
        self._links.announce(facts)
        return facts

    def _controls(self) -> dict[Method, Control]:
        controls: dict[Method, Control] = {
            Method.PROBE: self._probe,
            Method.STATS: self._stats,
            Method.METRICS: self._metrics,
            Method.THREADS: self._set_threads,
            Method.DRAIN: self._drain,
            Method.HELLO: self._hello,
        }
        return controls | {Method.COMPARE: self._compare} if self.spec.name == TRIAL_NAME else controls

    async def _hello(self, payload: bytes, limit_s: float) -> bytes:
        """The greeting of a mux here that charges by TENANT frames: it shows that this worker knows them."""
        return b""

    async def _compare(self, payload: bytes, limit_s: float) -> bytes:
        """Compare the model with its reference library; a thread that takes longer than the limit is left running."""
        from teimgr.engine.library_comparison import compare_with_library  # here: it loads a second copy of the model

        engine, room = self._dispatcher.engine, json.loads(payload)["room_bytes"]
        threads = self._threads.own
        found = await in_background("comparing", lambda: compare_with_library(engine, threads, room, limit_s))
        return json.dumps(found.to_dict()).encode()

    async def _probe(self, payload: bytes, limit_s: float) -> bytes:
        engine = self._dispatcher.engine
        known = json.loads(payload)["batches"] if payload else None
        if known is None or engine.stats().batches <= known:
            await asyncio.to_thread(engine.self_test, limit_s)
        alarms = self._watchdog.alarms() if self._watchdog else ()
        stats = engine.stats()
        answer = {"batches": stats.batches, "alarm": next(iter(alarms), None), **await self._sizes()}
        return json.dumps(answer).encode() if payload else b""

    async def _stats(self, payload: bytes, limit_s: float) -> bytes:
        sizes, counts = await self._sizes(), {}  # before the counts: calls arrive during the wait
        if payload != CALLS_AND_MEMORY and self._engine is not None:
            counts = self._dispatcher.metrics.counts() | asdict(self._engine.stats())
        calls = {"calls": self._dispatcher.calls, "taken": self._dispatcher.taken}
        return json.dumps({**calls, **sizes, **counts}).encode()

    async def _sizes(self) -> dict[str, int | None]:
        """Return the memory of this process, in bytes."""
        private = await asyncio.to_thread(self._memory.read, self._dispatcher.taken)
        device = self._engine.stats().device_bytes if self._engine is not None else 0
        return {"resident_bytes": resident_bytes(), "private_bytes": private, "device_bytes": device}

    async def _metrics(self, _: bytes, limit_s: float) -> bytes:
        page = self._dispatcher.metrics.page() | await asyncio.to_thread(
            process_page, self._memory, self._dispatcher.calls, self._watchdog.held if self._watchdog else 0
        )
        if self._engine is not None:
            page |= engine_page(self._engine.stats())
        return json.dumps(pack(page)).encode()

    async def _set_threads(self, payload: bytes, limit_s: float) -> bytes:
        message, cores = json.loads(payload), os.cpu_count() or 1
        own = min(max(1, int(message["threads"])), cores)
        self._threads = CpuThreads(own, min(max(own, int(message["most"])), cores))
        if self._engine is not None:
            self._engine.set_threads(self._threads)
        self._announce(self._state)
        return b""

    async def _drain(self, payload: bytes, limit_s: float) -> bytes:
        message = json.loads(payload)
        self._grace_s = float(message["grace_s"])
        self._handover = bool(message.get("handover"))
        self._stop.set()
        if self._handover:  # the reply confirms that this worker has left the ports
            await _any_of(self._left_ports.wait(), limit_s=limit_s)
        else:
            self._dispatcher.stop_accepting()  # before the reply, which confirms it
        return b""


async def _any_of(*waits: Awaitable[object], limit_s: float | None = None) -> bool:
    """Wait for the first of `waits` and cancel the others; return False after `limit_s`."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    try:
        done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return bool(done)


async def _detect_hangs(engine: Engine) -> None:
    while True:
        await asyncio.sleep(_HANG_CHECK_S)
        engine.detect_hang(_HANG_CHECK_S)


def _call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[str], None], reason: str) -> None:
    with suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(callback, reason)


def in_background(name: str, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Run `work` on a daemon thread; the future gets its result or error.

    Unlike `asyncio.to_thread`, whose threads the loop joins at its end: `work` may take minutes.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, work())
        except BaseException as error:
            settle = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


_MAX_CODE_FILES = 32  # names in the log


def fetched(spec: WorkerSpec, neighbours: hub.Neighbours | None) -> tuple[hub.ModelSource, list[str]]:
    """Return the model's directory, and the code that the instance trusts: its own and that of other repositories,
    which is fetched too, each named as in `LoadedModel.code`.
    """
    source = hub.resolve(spec.model_id, spec.revision, neighbours, spec.model_roots)
    if not spec.trust_remote_code:
        return source, []
    code = [code_of(source.path, spec.model_id, source.sha)]
    for repository in code_repositories_of(source.path):
        found = hub.resolve_code(repository, spec.code_revision)
        code.append(code_of(found.path, repository, found.sha))
    return source, [each for each in code if each]


def code_of(folder: Path, name: str, commit: str | None) -> str:
    """Name a repository with its commit and its code files; "" if it has none."""
    files = sorted(path.relative_to(folder).as_posix() for path in (*folder.glob("*.py"), *folder.glob("*/*.py")))
    shown = files[:_MAX_CODE_FILES] + (["…"] if len(files) > _MAX_CODE_FILES else [])
    at = "" if commit is None else f"@{commit}"
    return f"{name}{at}: {', '.join(shown)}" if files else ""


if __name__ == "__main__":  # LISTENER_FD INCARNATION RUN_DIR SPEC_JSON: a worker without a nursery, for tests
    status = main(int(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as in the nursery: a thread that is loading a model must not block the exit
