"""The life of a worker process: listen, load, prove, serve, drain.

It is forked from the nursery (or exec'd as `python -m teimgr.worker`) with a listening unix socket and one line of
JSON; from there on everything it hears and says goes over that socket, but for what the instance port serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from teimgr import hub, logs
from teimgr.engine.engine import Engine, EngineOptions
from teimgr.errors import Broken, Internal, OutOfDeviceMemory, PortConflict, Refused, TeimgrError
from teimgr.listening import bind, serving
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import Method
from teimgr.worker.desk import Desk
from teimgr.worker.instance_port import create_app
from teimgr.worker.links import Links
from teimgr.worker.service import Service

log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_PERMANENT = 3
EXIT_TRANSIENT = 4

_PROBE_TIMEOUT_S = 5.0
_DRAIN_ON_SIGNAL_S = 30.0
# Failures to load that the same files and flags will meet again, and those among them that may pass by themselves.
_LASTING = (Refused, Broken, OutOfDeviceMemory)
_PASSING = (PortConflict, Internal)


def main(listener_fd: int, incarnation: str, run_dir: str, spec_json: str) -> int:
    """Serve one model until told to stop; the result is the exit status."""
    spec = WorkerSpec.from_json(spec_json)
    logs.setup(spec.log_level, spec.log_format)
    listener = socket.socket(fileno=listener_fd)
    listener.setblocking(False)
    worker = Worker(spec, incarnation, Path(run_dir))
    return uvloop.run(worker.run(listener))


class Worker:
    """One process's worth of state. Everything happens on the loop's thread unless it says otherwise."""

    def __init__(self, spec: WorkerSpec, incarnation: str, run_dir: Path) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.run_dir = run_dir
        self._stop = asyncio.Event()
        self._grace_s = _DRAIN_ON_SIGNAL_S
        self._threads = spec.threads
        self._engine: Engine | None = None

    async def run(self, listener: socket.socket) -> int:
        """The whole life, in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        desk = Desk(self.spec)
        links = Links(desk, Service(desk), self._controls())
        links.announce(self._facts("loading"))
        server = await loop.create_unix_server(links.protocol, sock=listener)
        try:
            return await self._load_and_serve(desk, links)
        except TeimgrError as error:
            return self._give_up(links, error)
        except Exception as error:
            log.exception("worker failed", extra={"instance": self.spec.name})
            return self._give_up(links, Internal(f"{type(error).__name__}: {error}"))
        finally:
            server.close()
            links.close()
            desk.close()
            await asyncio.sleep(0)  # lets the last frames reach their sockets

    async def _load_and_serve(self, desk: Desk, links: Links) -> int:
        port = bind(self.spec.instance_host, self.spec.port)  # before the slow part: a taken port fails early
        engine = await self._load(desk)
        if engine is None:
            return EXIT_DONE
        desk.attach(engine)
        async with serving(create_app(desk), port):
            links.announce(self._facts("ready"))
            log.info("worker ready", extra={"instance": self.spec.name, **engine.info.to_dict()})
            await self._until_stopped(links)
            links.announce(self._facts("draining"))
            await desk.drained(self._grace_s)
        await asyncio.to_thread(engine.close, 1.0)
        return EXIT_DONE

    async def _load(self, desk: Desk) -> Engine | None:
        """The engine, or None when the worker was told to stop meanwhile."""
        loading = asyncio.ensure_future(asyncio.to_thread(self._load_blocking, desk))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return None  # the process ends; the loading thread ends with it
        stopping.cancel()
        self._engine = loading.result()
        return self._engine

    def _load_blocking(self, desk: Desk) -> Engine:
        spec = self.spec
        source = hub.resolve(spec.model_id, spec.revision)
        options = EngineOptions(
            path=source.path,
            model_id=spec.model_id,
            model_sha=source.sha,
            device="cuda" if spec.gpu else "cpu",
            dtype=spec.dtype,
            pooling=spec.pooling,
            threads=self._threads,
            max_batch_tokens=spec.max_batch_tokens,
            max_batch_requests=spec.max_batch_requests,
            max_queued_tokens=desk.max_bytes,  # the desk bounds what is inside; a token has a byte or more
            default_prompt_name=spec.default_prompt_name,
            default_prompt=spec.default_prompt,
        )
        return Engine.load(options, desk.deliver)

    async def _until_stopped(self, links: Links) -> None:
        """Wait for a word to stop, or for the daemon to stay away for too long."""
        while not self._stop.is_set():
            if links.is_watched:
                await self._first_of(self._stop, links.unwatched, None)
            elif not await self._first_of(self._stop, links.watched, self.spec.orphan_grace_s):
                log.warning(
                    "no daemon for %g s: stopping", self.spec.orphan_grace_s, extra={"instance": self.spec.name}
                )
                return

    async def _first_of(self, one: asyncio.Event, other: asyncio.Event, timeout_s: float | None) -> bool:
        """Whether either event came within the time."""
        waits = {asyncio.ensure_future(one.wait()), asyncio.ensure_future(other.wait())}
        done, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        return bool(done)

    def _give_up(self, links: Links, error: TeimgrError) -> int:
        """Say why to whoever watches and to whoever looks later."""
        permanent = isinstance(error, _LASTING) and not isinstance(error, _PASSING)
        facts = self._facts("failed") | {"reason": error.message, "code": int(error.code), "permanent": permanent}
        log.error("worker failed: %s", error.message, extra={"instance": self.spec.name, "code": error.code.name})
        with contextlib.suppress(OSError):
            (self.run_dir / f"{self.incarnation}.exit").write_text(json.dumps(facts))
        links.announce(facts)
        return EXIT_PERMANENT if permanent else EXIT_TRANSIENT

    def _facts(self, state: str) -> dict[str, Any]:
        """What a watcher is told."""
        return {
            "state": state,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "spec_hash": self.spec.hash,
            "model": self._engine.info.to_dict() if self._engine else None,
            "reason": None,
            "code": None,
            "permanent": False,
            "threads": self._threads,
        }

    # What the daemon may ask of a worker.

    def _controls(self) -> dict[Method, Any]:
        return {
            Method.PROBE: self._probe,
            Method.STATS: self._stats,
            Method.THREADS: self._set_threads,
            Method.DRAIN: self._drain,
        }

    async def _probe(self, _: bytes) -> bytes:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.prove, _PROBE_TIMEOUT_S)
        return b""

    async def _stats(self, _: bytes) -> bytes:
        return json.dumps(asdict(self._engine.stats()) if self._engine else {}).encode()

    async def _set_threads(self, payload: bytes) -> bytes:
        self._threads = max(1, int(json.loads(payload)["threads"]))
        if self._engine is not None:
            self._engine.set_threads(self._threads)
        return b""

    async def _drain(self, payload: bytes) -> bytes:
        self._grace_s = float(json.loads(payload)["grace_s"])
        self._stop.set()
        return b""
