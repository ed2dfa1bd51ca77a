"""Keeps one mux process: whatever becomes of it, there is soon one again, and somebody is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr import __version__
from teimgr.auth.policy import Policy, PolicyInForce
from teimgr.config.mux import MuxConfig, MuxTls
from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.files import write_atomically
from teimgr.http_server import bind
from teimgr.launch.process_handle import MuxProcess, MuxRunFile
from teimgr.observability.metrics import Metrics
from teimgr.observability.telemetry import exporting

_LINE_LIMIT_BYTES = 1 << 20
_CONNECT_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class MuxTimeouts:
    """How long a mux may take, in seconds: to come up, to answer before there is an alarm, to answer at all; and the
    time between two questions."""

    connect_limit_s: float = 20.0
    alarm_after_s: float = 2.0
    answer_limit_s: float = 10.0
    interval_s: float = 5.0


class MuxLost(Exception):
    """There is no talking to the mux; the sentence says why."""


async def talk(
    path: str,
    directory: Directory,
    policy: PolicyInForce,
    patience: MuxTimeouts,
    on_figures: Callable[[dict[str, Any]], None],
    on_missed: Callable[[], None],
) -> None:
    """Push every change of `policy` and `directory`, fetch figures after each and now and then, until the mux is lost.

    Figures answer only what came before them, so they also say that the snapshot was taken. `on_missed` is called
    when they take longer than `alarm_after_s`.

    Raises:
        MuxLost: always, sooner or later.
    """
    try:
        reader, writer = await _connect(path, patience.connect_limit_s)
    except OSError as error:
        raise MuxLost(f"its control socket cannot be reached: {error or 'it does not come up'}") from error
    news = asyncio.Event()
    unsubscribe = (directory.subscribe(lambda _: news.set()), policy.subscribe(news.set))
    try:
        while True:
            if news.is_set():
                news.clear()
                told = f'{{"policy": {policy.now.to_json()}, "snapshot": {directory.snapshot().to_json()}}}\n'
                writer.write(told.encode())
            with _unless_over(patience.alarm_after_s, on_missed):
                figures = await _figures(reader, writer, patience.answer_limit_s)
            on_figures(figures)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience.interval_s):
                    await news.wait()
    finally:
        for leave in unsubscribe:
            leave()
        writer.close()


@contextlib.contextmanager
def _unless_over(after_s: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` when the body takes longer than `after_s`; the body goes on."""
    timer = asyncio.get_running_loop().call_later(after_s, action)
    try:
        yield
    finally:
        timer.cancel()


async def _connect(path: str, limit_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the control socket, which appears once the gRPC port is bound."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=_LINE_LIMIT_BYTES)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_CONNECT_RETRY_S)


async def _figures(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(limit_s):
            writer.write(b'{"stats": true}\n')
            await writer.drain()
            line = await reader.readline()
    except TimeoutError as error:
        raise MuxLost(f"it gave no answer for {limit_s:g} s") from error
    except (OSError, ValueError) as error:  # a ValueError is a line without an end
        raise MuxLost(f"its control connection broke: {error}") from error
    if not line:
        raise MuxLost("it closed its control connection")
    try:
        figures = json.loads(line)
    except ValueError as error:
        raise MuxLost(f"its answer cannot be read: {error}") from error
    if not isinstance(figures, dict):
        raise MuxLost("its answer is no JSON object")
    return figures


log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "teimgr.mux.process")
_KILL_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before a mux that ended is started again: doubled up to a bound while it never lives `settled_s`."""

    first_s: float = 0.2
    max_s: float = 10.0
    settled_s: float = 10.0


class MuxSupervisor:
    """Keeps one mux process. `run` is the task; everything else informs."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        directory: Directory,
        metrics: Metrics,
        policy: PolicyInForce | None = None,
        command: Sequence[str] = _COMMAND,
        patience: MuxTimeouts | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.name = f"mux-{number}"
        self.config = mux_config(number, settings)
        self.alarm: str | None = None
        self._directory = directory
        self._policy = policy or PolicyInForce(Policy())
        self._metrics = metrics
        self._command = command
        self._patience = patience or MuxTimeouts()
        self._backoff = backoff or Backoff()
        self._told = f"{__version__}:{self.config.hash}"  # another version may speak otherwise
        self._log_path = settings.log_dir / f"_{self.name}.log"  # no instance's name starts so
        self._run_file = settings.run_dir / f"{self.name}.run"
        self._process: MuxProcess | None = None

    async def adopt(self) -> bool:
        """Take over the live mux of an earlier daemon; one that was told something else is ended."""
        found = MuxRunFile.read(self._run_file)
        self._process = MuxProcess.adopt(found) if found else None
        if found is None or self._process is None:
            return False
        if found.config_hash == self._told:
            log.info("adopted a running mux", extra={"mux": self.name, "pid": found.pid})
            return True
        log.info("replacing a mux that was told something else", extra={"mux": self.name, "pid": found.pid})
        await self.stop(grace_s=1)
        return False

    async def run(self) -> None:
        """Until cancelled: a live mux that knows the latest snapshot."""
        wait_s = self._backoff.first_s
        while True:
            began = time.monotonic()
            reason = await self._life()
            status = await self._bury()
            self.alarm = f"{self.name} is being started again: {reason}{status}; see {self._log_path.name}"
            self._metrics.mux_gone(self.name)
            if time.monotonic() - began >= self._backoff.settled_s:
                wait_s = self._backoff.first_s
            log.error("mux lost: %s%s", reason, status, extra={"mux": self.name, "again_in_s": wait_s})
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, self._backoff.max_s)

    async def stop(self, grace_s: float) -> None:
        """Let the mux finish its calls, at most `grace_s`, then end it. Call after `run` was cancelled."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)
            await self._process.gone_within(grace_s + 1)
            await self._bury()
        for path in (self._run_file, Path(self.config.control_socket), self._config_path):
            path.unlink(missing_ok=True)

    def hurry(self) -> None:
        """End a stop under way without waiting for calls: a second signal says so to the mux."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)

    @property
    def _config_path(self) -> Path:
        return self._run_file.with_suffix(".config")

    async def _life(self) -> str:
        """Launch the mux unless it was adopted, and feed it; the result is why that is over."""
        try:
            process = self._process or self._launch()
            return await self._feed_until_lost(process)
        except (MuxLost, OSError) as error:
            return str(error)
        except Exception as error:  # a defect of ours: the fleet must not go without a mux for it
            log.exception("keeping a mux failed", extra={"mux": self.name})
            return repr(error)

    def _launch(self) -> MuxProcess:
        Path(self.config.control_socket).unlink(missing_ok=True)
        write_atomically(self._config_path, self.config.to_json().encode())
        self._process = MuxProcess.launch([*self._command, str(self._config_path)], self._log_path)
        if found := self._process.run_file(self._told):
            found.write(self._run_file)
        log.info("mux launched", extra={"mux": self.name, "pid": self._process.pid})
        return self._process

    async def _feed_until_lost(self, process: MuxProcess) -> str:
        ended = asyncio.ensure_future(process.ended())
        feeding = asyncio.ensure_future(
            talk(
                self.config.control_socket,
                self._directory,
                self._policy,
                self._patience,
                self._take_figures,
                self._miss_answer,
            )
        )
        try:
            await asyncio.wait({ended, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await feeding
            return "it ended"
        finally:
            for task in (ended, feeding):
                task.cancel()
            await asyncio.gather(ended, feeding, return_exceptions=True)

    def _take_figures(self, figures: dict[str, Any]) -> None:
        wrong = figures.get("alarm")
        self.alarm = f"{self.name}: {wrong}" if wrong else None
        self._metrics.mux_stats(self.name, figures)

    def _miss_answer(self) -> None:
        self.alarm = f"{self.name} has given no answer for {self._patience.alarm_after_s:g} s"
        log.warning("mux is late with an answer", extra={"mux": self.name})

    async def _bury(self) -> str:
        """See that the process is gone; the result tells its exit status, where there is one to tell."""
        if self._process is None:
            return ""
        self._process.signal(signal.SIGKILL)  # changes nothing for one that has ended
        if not await self._process.gone_within(_KILL_LIMIT_S):
            log.error("mux is still there after SIGKILL", extra={"mux": self.name, "pid": self._process.pid})
        process, self._process = self._process, None
        status = process.close()
        return "" if status is None else f" (exit status {status})"


def mux_config(number: int, settings: Settings) -> MuxConfig:
    """What the mux of this number is told."""
    files = settings.tls_files
    return MuxConfig(
        host=settings.grpc_host,
        port=settings.grpc_port,
        control_socket=str(settings.run_dir / f"mux-{number}.sock"),
        max_message_bytes=settings.grpc_max_message_bytes,
        max_parallel_streams=settings.grpc_max_parallel_streams,
        request_timeout_s=float(settings.grpc_request_timeout_secs),
        orphan_grace_s=float(settings.orphan_grace_secs),
        run_dir=str(settings.run_dir),
        tls=MuxTls.of(files) if files else None,
        otel=exporting(settings, f"mux-{number}"),
        reuse_port=settings.mux_processes > 1,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )


_RUN_FILE = re.compile(r"mux-(\d+)\.run")


class Muxes:
    """As many mux processes as the settings want. `running` keeps them, `stop` ends them."""

    def __init__(
        self, settings: Settings, directory: Directory, metrics: Metrics, policy: PolicyInForce | None = None
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._metrics = metrics
        self._policy = policy
        wanted = settings.mux_processes if settings.grpc_enabled else 0
        self._keepers = [self._keeper(number) for number in range(wanted)]

    def alarms(self) -> list[str]:
        """What is wrong with them now."""
        return [keeper.alarm for keeper in self._keepers if keeper.alarm]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """They are kept while the body runs, and go on by themselves after it.

        Raises:
            PortConflict: a stranger listens on the gRPC port.
        """
        await self._end_leftovers()
        await self._adopt()
        tasks = [asyncio.create_task(keeper.run(), name=keeper.name) for keeper in self._keepers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, grace_s: float) -> None:
        """Let each finish its calls, at most `grace_s`, then end it. Call after `running`."""
        results = await asyncio.gather(*(keeper.stop(grace_s) for keeper in self._keepers), return_exceptions=True)
        for keeper, result in zip(self._keepers, results, strict=True):
            if isinstance(result, Exception):
                log.error("mux could not be stopped", extra={"mux": keeper.name}, exc_info=result)

    def hurry(self) -> None:
        """End a stop under way without waiting for calls."""
        for keeper in self._keepers:
            keeper.hurry()

    async def _adopt(self) -> None:
        adopted = [await keeper.adopt() for keeper in self._keepers]
        if self._keepers and not any(adopted):  # where one of ours listens, the others may join it
            bind(self._settings.grpc_host, self._settings.grpc_port).close()

    async def _end_leftovers(self) -> None:
        """A mux that nobody feeds would go on sending calls to instances that have long been elsewhere."""
        found = [_RUN_FILE.fullmatch(path.name) for path in self._settings.run_dir.glob("mux-*.run")]
        numbers = {int(match[1]) for match in found if match}
        leftovers = [self._keeper(number) for number in sorted(numbers) if number >= len(self._keepers)]
        for keeper in leftovers:
            await keeper.adopt()
            await keeper.stop(grace_s=1)

    def _keeper(self, number: int) -> MuxSupervisor:
        return MuxSupervisor(number, self._settings, self._directory, self._metrics, self._policy)
