"""The daemon's hold on its mux processes: launch or adopt, feed with snapshots, start again when one dies.

A mux outlives a daemon that crashes and goes on serving the last snapshot it was given. The next daemon finds its
run file, checks that the process is the one it names and was told the same, and goes on feeding it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from teimgr.directory import Directory, Snapshot
from teimgr.front.mux_config import MuxConfig, MuxTls
from teimgr.launch.processes import Process, boot_id, look_up, open_pidfd
from teimgr.listening import bind
from teimgr.metrics import Metrics
from teimgr.settings import Settings

log = logging.getLogger(__name__)

_CONNECT_LIMIT_S = 20.0
_CONNECT_RETRY_S = 0.02
_STATS_INTERVAL_S = 5.0
_BACKOFF_S, _BACKOFF_MAX_S = 0.2, 10.0
_KILL_LIMIT_S = 5.0
_LINE_LIMIT_BYTES = 1 << 20

# glibc gives every buffer of some megabytes back to the kernel and faults it in again: raised thresholds make Arrow
# calls of 10,000 texts 2.5 to 3.5 times as fast through a mux (DESIGN.md, decisions).
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass(frozen=True, slots=True)
class MuxRunFile:
    """Which process a mux is, and the hash of what it was told."""

    pid: int
    start_time: int
    boot_id: str
    config_hash: str

    @classmethod
    def read(cls, path: Path) -> MuxRunFile | None:
        """What the file says; None when it says nothing that can be used."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


class MuxKeeper:
    """Keeps one mux process. `run` is the task; everything else informs."""

    def __init__(self, number: int, settings: Settings, directory: Directory, metrics: Metrics) -> None:
        self.name = f"mux-{number}"
        self.config = mux_config(number, settings)
        self.alarm: str | None = None
        self._directory = directory
        self._metrics = metrics
        self._log_path = settings.log_dir / f"_{self.name}.log"  # no instance's name starts so
        self._run_file = settings.run_dir / f"{self.name}.run"
        self._child: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None
        self._pidfd: int | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Adopt the mux of an earlier daemon, or see that the port is free for a new one.

        Raises:
            PortConflict: a stranger listens on the gRPC port.
        """
        if not await self._adopt():
            bind(self.config.host, self.config.port).close()

    async def run(self) -> None:
        """Until cancelled: a live mux that knows the latest snapshot."""
        backoff_s = _BACKOFF_S
        while True:
            if self._pidfd is None:
                self._launch()
            connected = await self._feed_until_it_ends()
            self._forget()
            self.alarm = f"{self.name} ended and is being started again; see {self._log_path.name}"
            self._metrics.mux_gone(self.name)
            log.error("mux ended; starting it again", extra={"mux": self.name, "in_s": backoff_s})
            await asyncio.sleep(backoff_s)
            backoff_s = _BACKOFF_S if connected else min(backoff_s * 2, _BACKOFF_MAX_S)

    async def stop(self, grace_s: float) -> None:
        """Let the mux finish its calls, at most `grace_s`, then end it. Call after `run` was cancelled."""
        if self._process is None or self._pidfd is None:
            return
        self._signal(signal.SIGTERM)
        if not await self._gone(grace_s + 1):
            self._signal(signal.SIGKILL)
            await self._gone(_KILL_LIMIT_S)
        self._forget()
        self._run_file.unlink(missing_ok=True)
        Path(self.config.control_socket).unlink(missing_ok=True)
        self._config_path.unlink(missing_ok=True)

    def hurry(self) -> None:
        """End a stop under way without waiting for calls: a second signal says so to the mux."""
        if self._pidfd is not None:
            self._signal(signal.SIGTERM)

    @property
    def _config_path(self) -> Path:
        return self._run_file.with_suffix(".config")

    async def _adopt(self) -> bool:
        """Take over a live mux; one that was told something else is ended first."""
        found = MuxRunFile.read(self._run_file)
        if found is None or found.boot_id != boot_id():
            return False
        process = Process(found.pid, found.start_time)
        self._pidfd = open_pidfd(process)
        if self._pidfd is None:
            return False
        self._process = process
        if found.config_hash == self.config.hash:
            log.info("adopted a running mux", extra={"mux": self.name, "pid": found.pid})
            return True
        log.info("replacing a mux that was told something else", extra={"mux": self.name, "pid": found.pid})
        await self.stop(grace_s=1)
        return False

    def _launch(self) -> None:
        Path(self.config.control_socket).unlink(missing_ok=True)
        self._config_path.write_text(self.config.to_json())
        with self._log_path.open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "teimgr.front.mux", str(self._config_path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | _MALLOC,
                start_new_session=True,
            )
        self._child = child
        self._process = look_up(child.pid)
        self._pidfd = os.pidfd_open(child.pid)
        if self._process is not None:
            facts = MuxRunFile(child.pid, self._process.start_time, boot_id(), self.config.hash)
            temporary = self._run_file.with_suffix(".tmp")
            temporary.write_text(json.dumps(asdict(facts)))
            temporary.replace(self._run_file)
        log.info("mux launched", extra={"mux": self.name, "pid": child.pid})

    async def _feed_until_it_ends(self) -> bool:
        """Send every snapshot while the process lives; the result says whether it was ever reached."""
        ended = asyncio.ensure_future(self._ended())
        feeding = asyncio.ensure_future(self._feed())
        try:
            await asyncio.wait({ended, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():  # alive and not to be talked to
                self._signal(signal.SIGKILL)
                await ended
            return feeding.done() and not feeding.cancelled() and feeding.exception() is None and feeding.result()
        finally:
            for task in (ended, feeding):
                task.cancel()
            await asyncio.gather(ended, feeding, return_exceptions=True)

    async def _feed(self) -> bool:
        """Push snapshots and fetch figures until the connection breaks; False when there never was one."""
        try:
            reader, writer = await self._connect()
        except TimeoutError:
            log.error("mux does not answer", extra={"mux": self.name})
            return False
        self.alarm = None
        changed = asyncio.Event()
        latest = self._directory.snapshot()

        def on_change(snapshot: Snapshot) -> None:
            nonlocal latest
            latest = snapshot
            changed.set()

        unsubscribe = self._directory.subscribe(on_change)
        replies = asyncio.ensure_future(self._read_figures(reader))
        try:
            while not replies.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STATS_INTERVAL_S):
                        await changed.wait()
                line = f'{{"snapshot": {latest.to_json()}}}\n' if changed.is_set() else '{"stats": true}\n'
                changed.clear()
                writer.write(line.encode())
                await writer.drain()
        except OSError as error:
            log.warning("connection to the mux broke: %s", error, extra={"mux": self.name})
        finally:
            unsubscribe()
            replies.cancel()
            writer.close()
        return True

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the control socket, which appears once the gRPC port serves."""
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            while True:
                try:
                    return await asyncio.open_unix_connection(self.config.control_socket, limit=_LINE_LIMIT_BYTES)
                except (FileNotFoundError, ConnectionRefusedError):
                    await asyncio.sleep(_CONNECT_RETRY_S)

    async def _read_figures(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            figures = json.loads(line)
            if isinstance(figures, dict):
                self._metrics.mux_stats(self.name, figures)

    async def _ended(self) -> None:
        """Return when the process is gone."""
        assert self._pidfd is not None
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._pidfd)

    async def _gone(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._ended()
        except TimeoutError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        assert self._pidfd is not None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _forget(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        if self._child is not None:
            self._child.wait()
        self._pidfd, self._process, self._child = None, None, None


def mux_config(number: int, settings: Settings) -> MuxConfig:
    """What the mux of this number is told."""
    mtls = settings.mtls
    return MuxConfig(
        host=settings.grpc_host,
        port=settings.grpc_port,
        control_socket=str(settings.run_dir / f"mux-{number}.sock"),
        max_message_bytes=settings.grpc_max_message_bytes,
        max_parallel_streams=settings.grpc_max_parallel_streams,
        request_timeout_s=float(settings.grpc_request_timeout_secs),
        orphan_grace_s=float(settings.orphan_grace_secs),
        run_dir=str(settings.run_dir),
        tls=MuxTls(cert=str(mtls.server_cert), key=str(mtls.server_key), ca=str(mtls.ca_cert)) if mtls else None,
        reuse_port=settings.mux_processes > 1,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
