"""Supervision of the mux processes: launched or adopted, fed with the routes, restarted with backoff.

A mux that ends or does not answer is killed and started again, and raises an alarm until its successor answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from teimgr import __version__
from teimgr.auth.policy import Policy, PolicyInForce
from teimgr.config.mux import MuxConfig
from teimgr.config.settings import Settings
from teimgr.durable_files import write_atomically
from teimgr.errors import Unavailable
from teimgr.http_server import bind
from teimgr.launch.control_link import MuxLink, MuxLost, MuxStopping
from teimgr.launch.process_handle import LaunchFailed, ProcessHandle, RunFile
from teimgr.observability.logs import STACKS_SIGNAL, LogSpan, log_size, open_log, rotate_regularly
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.telemetry import exporting
from teimgr.routing.router import Directory
from teimgr.spec import RouteEntry
from teimgr.supervision.crash_reports import MUX, Crash, CrashReports
from teimgr.supervision.lifecycle import Backoff
from teimgr.unix_listener import check_free, remove_stale

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "teimgr.mux.process")
_RUN_FILE = re.compile(r"mux-(\d+)\.run")
# glibc gives every buffer of some megabytes back to the kernel and faults it in again: raised thresholds make Arrow
# calls of 10,000 texts 2.5 to 3.5 times as fast through a mux (DESIGN.md, decisions).
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_FORCED_S = 1.0


@dataclass(frozen=True, slots=True)
class MuxTimeouts:
    """Limits in seconds: until the socket accepts, until a late answer raises an alarm, until it counts as lost; and
    the interval of the polls."""

    connect_limit_s: float = 20.0
    alarm_after_s: float = 2.0
    answer_limit_s: float = 10.0
    interval_s: float = 5.0


@dataclass(frozen=True, slots=True)
class MuxRunFile(RunFile):
    """The run file of a mux, with the version and the hash of the configuration that it was started with."""

    config_hash: str


class MuxSupervisor:
    """Keeps one mux process alive while `run` runs; `alarm` is what is wrong with it now."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        directory: Directory,
        metrics: DaemonMetrics,
        policy: PolicyInForce | None = None,
        command: Sequence[str] = _COMMAND,
        timeouts: MuxTimeouts | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.name = f"mux-{number}"
        self.config = mux_config(number, settings)
        self.alarm: str | None = None
        self._directory = directory
        self._policy = policy or PolicyInForce(Policy())
        self._metrics = metrics
        self._command = command
        self._timeouts = timeouts or MuxTimeouts()
        self._backoff = backoff or Backoff(max_s=10.0, stable_after_s=10.0)
        self._config_hash = f"{__version__}:{self.config.hash}"  # the protocol may differ between versions
        self.log_path = settings.log_dir / f"_{self.name}.log"  # no instance's name starts so
        self._rotation = settings.log_max_bytes, settings.log_keep
        self._run_file = settings.run_dir / f"{self.name}.run"
        self._config_file = self._run_file.with_suffix(".config")
        self._process: ProcessHandle | None = None
        self._draining: dict[asyncio.Task[int | None], ProcessHandle] = {}
        self._forced: set[asyncio.Task[int | None]] = set()
        self._number = number
        self._started_at = 0.0
        self._log_start = 0
        self._crash_reports = CrashReports(settings.log_dir / "crashes")
        self._routes: int | None = None  # the version of the oldest that the process may use; None: it has none yet
        self._routes_changed = asyncio.Event()

    async def adopt(self) -> bool:
        """Take over the live mux of an earlier daemon; one with another configuration is stopped.

        Raises:
            Unavailable: its run file cannot be read now, as for lack of descriptors; the mux serves on.
        """
        try:
            found = MuxRunFile.read(self._run_file)
            self._process = ProcessHandle.adopt(found) if found else None
        except OSError as error:
            raise Unavailable(f"the mux of an earlier daemon cannot be looked for: {error}") from error
        if found is None or self._process is None:
            return False
        self._started_at = found.process.started_at
        if found.config_hash == self._config_hash:
            log.info("adopted a running mux", extra={"mux": self.name, "pid": found.pid})
            self._set_routes(0)
            return True
        log.info("replacing a mux with another configuration", extra={"mux": self.name, "pid": found.pid})
        await self.stop(grace_s=1)
        return False

    async def run(self) -> None:
        """Keep a live mux that has the latest snapshot, until cancelled."""
        failures = 0
        while True:
            began = time.monotonic()
            reason, process = await self._run_once(), self._process
            status = await self._end()
            reason += "" if status is None else f" (exit status {status})"
            was_stable = time.monotonic() - began >= self._backoff.stable_after_s
            failures = 1 if was_stable else failures + 1
            pause_s = self._backoff.delay_s(failures)
            self.alarm = f"{self.name} is being started again: {reason}; see {self.log_path.name}"
            self._metrics.mux_gone(self.name)
            if process is not None:
                _, writing = self._crash_reports.report(self._crash(process.pid, status, reason))
                await writing
            log.error("mux lost: %s", reason, extra={"mux": self.name, "again_in_s": pause_s})
            await asyncio.sleep(pause_s)

    async def routes_confirmed(self) -> None:
        """Return when no mux process uses older routes than those of now: it has confirmed them, or is gone, which one
        that does not answer is after some seconds.
        """
        wanted = self._directory.version
        while self._routes is not None and self._routes < wanted:
            await self._routes_changed.wait()

    def _set_routes(self, version: int | None) -> None:
        self._routes = version
        changed, self._routes_changed = self._routes_changed, asyncio.Event()
        changed.set()

    async def stop(self, grace_s: float) -> None:
        """Let the mux finish its calls, at most `grace_s`, then end it. Call after `run` was cancelled."""
        await asyncio.gather(self._end(grace_s + 1), *self._draining)
        for path in (self._run_file, Path(self.config.control_socket), self._config_file):
            path.unlink(missing_ok=True)

    def force_stop(self) -> None:
        for process in (self._process, *self._draining.values()):
            if process is not None:
                # At a second SIGTERM it exits without waiting for calls; one that hangs is killed.
                task = asyncio.create_task(self._end_process(process, _FORCED_S), name=f"forced end of {self.name}")
                self._forced.add(task)
                task.add_done_callback(self._forced.discard)

    def _crash(self, pid: int, status: int | None, reason: str) -> Crash:
        return Crash(
            instance=MUX,
            replica=self._number,
            pid=pid,
            started_at=self._started_at,
            status=status,
            reason=reason,
            log=LogSpan(self.log_path, self._log_start, log_size(self.log_path)),
        )

    async def _run_once(self) -> str:
        """Launch the mux unless one was adopted, and serve it until it is lost; the result is why."""
        try:
            process = self._process = self._process or self._launch()
            return await self._serve(process)
        except MuxStopping as error:  # its successor starts beside it
            process, self._process = self._process, None  # type: ignore[assignment]
            self._set_routes(None)  # it takes no new calls
            task = asyncio.create_task(self._end_process(process, error.grace_s + 1, sigterm=False))
            self._draining[task] = process
            task.add_done_callback(self._draining.pop)
            return str(error)
        except (MuxLost, OSError) as error:
            return str(error)
        except Exception as error:  # a defect of ours must not leave the fleet without a mux
            log.exception("supervision of a mux failed", extra={"mux": self.name})
            return repr(error)

    def _launch(self) -> ProcessHandle:
        Path(self.config.control_socket).unlink(missing_ok=True)
        write_atomically(self._config_file, self.config.to_json().encode())
        output = open_log(self.log_path, *self._rotation)
        self._log_start, self._started_at = os.fstat(output).st_size, time.time()
        try:
            process = ProcessHandle.spawn([*self._command, str(self._config_file)], output, os.environ | _MALLOC)
        finally:
            os.close(output)
        if run_file := MuxRunFile.of(process.pid, config_hash=self._config_hash):
            run_file.write(self._run_file)
        log.info("mux launched", extra={"mux": self.name, "pid": process.pid})
        return process

    async def _serve(self, process: ProcessHandle) -> str:
        ended = asyncio.ensure_future(process.wait())
        feeding = asyncio.ensure_future(self._feed())
        try:
            await asyncio.wait({ended, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await feeding
            return "it ended"
        finally:
            for task in (ended, feeding):
                task.cancel()
            await asyncio.gather(ended, feeding, return_exceptions=True)

    async def _feed(self) -> None:
        """Push every change of policy and directory to the mux; poll its counters after each and at intervals.

        One line of JSON per message, as `mux/process.py` has them. The mux answers in order, so an answer also
        acknowledges the snapshot before it.

        Raises:
            MuxLost: always, at the end.
        """
        limits = self._timeouts
        link = await MuxLink.open(self.config.control_socket, limits.connect_limit_s)
        changed = asyncio.Event()
        changes: list[tuple[str, RouteEntry | None]] = []

        def on_route(name: str, entry: RouteEntry | None) -> None:
            changes.append((name, entry))
            changed.set()

        unsubscribe = (self._directory.subscribe(on_route), self._policy.subscribe(changed.set))
        link.send(policy=self._policy.now.to_json(), snapshot=self._directory.snapshot().to_json())
        version = self._directory.version
        if self._routes is None:
            self._set_routes(version)
        request, problem = "stats", None
        try:
            while True:
                late = asyncio.get_running_loop().call_later(limits.alarm_after_s, self._on_late)
                try:
                    answer = await link.ask(request, limits.answer_limit_s)
                finally:
                    late.cancel()
                self._set_routes(version)
                if request == "stats":
                    problem = answer.get("alarm")
                    self._metrics.mux_stats(self.name, answer)
                self.alarm = f"{self.name}: {problem}" if problem else None
                request = "ack" if await link.wait(changed, limits.interval_s) else "stats"
                if request == "ack":
                    changed.clear()
                    sent = ", ".join(
                        f"[{json.dumps(name)}, {entry.to_json() if entry else 'null'}]" for name, entry in changes
                    )
                    changes.clear()
                    link.send(policy=self._policy.now.to_json(), changes=f"[{sent}]")
                    version = self._directory.version
        finally:
            for leave in unsubscribe:
                leave()
            link.close()

    def _on_late(self) -> None:
        self.alarm = f"{self.name} has given no answer for {self._timeouts.alarm_after_s:g} s"
        log.warning("mux is late with an answer", extra={"mux": self.name})
        if self._process is not None:
            self._process.send_signal(STACKS_SIGNAL)

    async def _end(self, grace_s: float = 0) -> int | None:
        """End the present process; the result is its exit status, where it is known."""
        status = await self._end_process(self._process, grace_s) if self._process is not None else None
        self._process = None
        self._set_routes(None)
        return status

    async def _end_process(self, process: ProcessHandle, grace_s: float, *, sigterm: bool = True) -> int | None:
        try:
            return (await process.stop(grace_s, sigterm=sigterm)).status
        except LaunchFailed as error:
            log.error("mux cannot be ended", extra={"mux": self.name, "reason": str(error)})
            return None


def mux_config(number: int, settings: Settings) -> MuxConfig:
    files = settings.tls_files
    return MuxConfig(
        host=settings.grpc_host,
        port=settings.grpc_port,
        control_socket=str(settings.run_dir / f"mux-{number}.sock"),
        max_message_bytes=settings.grpc_max_message_size_mb * 2**20,
        max_parallel_streams=settings.grpc_max_parallel_streams,
        request_timeout_s=float(settings.grpc_request_timeout_secs),
        orphan_grace_s=float(settings.orphan_grace_secs),
        run_dir=str(settings.run_dir),
        tls=files,
        otel=exporting(settings, f"mux-{number}"),
        reuse_port=settings.mux_processes > 1,
        socket=str(settings.grpc_socket.absolute()) if settings.grpc_socket and number == 0 else "",
        socket_mode=settings.socket_permissions,
        log_level=settings.log_level,
    )


class Muxes:
    """The mux processes of the settings: supervised within `running`, ended by `stop`."""

    def __init__(
        self, settings: Settings, directory: Directory, metrics: DaemonMetrics, policy: PolicyInForce | None = None
    ) -> None:
        self._settings = settings
        count = settings.mux_processes if settings.grpc_enabled else 0
        self._supervisor: Callable[[int], MuxSupervisor] = lambda number: MuxSupervisor(
            number, settings, directory, metrics, policy
        )
        self._supervisors = [self._supervisor(number) for number in range(count)]
        self._socket = settings.grpc_socket.absolute() if count and settings.grpc_socket else None

    def alarms(self) -> list[str]:
        return [each.alarm for each in self._supervisors if each.alarm]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Adopt or launch them, and supervise them while the body runs; the processes go on after it.

        Raises:
            PortConflict: another program listens on the gRPC port or on `grpc_socket`.
            InvalidConfig: nothing can listen on them.
        """
        await self._end_surplus()
        adopted = [await each.adopt() for each in self._supervisors]
        if self._supervisors and not any(adopted):  # beside an adopted mux the others can bind the same port
            bind(self._settings.grpc_host, self._settings.grpc_port, "grpc_port").close()
        if self._socket is not None and not adopted[0]:
            check_free(self._socket, "grpc_socket")
        tasks = [asyncio.create_task(each.run(), name=each.name) for each in self._supervisors]
        rotation = rotate_regularly(
            lambda: [each.log_path for each in self._supervisors], self._settings.log_max_bytes, self._settings.log_keep
        )
        tasks.append(asyncio.create_task(rotation, name="rotation of the muxes' logs"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def routes_confirmed(self) -> None:
        """Return when all route by the directory as it is now."""
        await asyncio.gather(*(each.routes_confirmed() for each in self._supervisors))

    async def stop(self, grace_s: float) -> None:
        """Let each finish its calls, at most `grace_s`, then end it. Call after `running`."""
        results = await asyncio.gather(*(each.stop(grace_s) for each in self._supervisors), return_exceptions=True)
        for each, result in zip(self._supervisors, results, strict=True):
            if isinstance(result, Exception):
                log.error("mux could not be stopped", extra={"mux": each.name}, exc_info=result)
        if self._socket is not None:
            remove_stale(self._socket)  # of a mux that was killed

    def force_stop(self) -> None:
        for each in self._supervisors:
            each.force_stop()

    async def _end_surplus(self) -> None:
        """End muxes of an earlier daemon with more of them: without updates they would send calls to dead workers."""
        found = [_RUN_FILE.fullmatch(path.name) for path in self._settings.run_dir.glob("mux-*.run")]
        for number in sorted({int(match[1]) for match in found if match}):
            if number >= len(self._supervisors):
                surplus = self._supervisor(number)
                await surplus.adopt()
                await surplus.stop(grace_s=1)
