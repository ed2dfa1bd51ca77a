"""Crash reports: one file for each worker or mux that ended unexpectedly or was killed as hung.

They are JSON files in `crashes/` beside the logs, readable only by their owner: `<instance>-<replica>-<time>.json`; for
muxes `_mux-<number>-<time>.json`, or `_mux-<host>-<number>-<time>.json` on another host. Their size and number are
bounded; the oldest are removed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from teimgr import __version__
from teimgr.control.launch.launcher import EndedWorker
from teimgr.control.supervision.lifecycle import SIGNALS, explain
from teimgr.files import write_atomically
from teimgr.observability.logs import LogLines, LogSpan
from teimgr.spec import Incident, WorkerSpec, rfc3339

KEPT_PER_INSTANCE = 20
KEPT = 1000
"""Maximum number of reports of all instances, including deleted ones."""
LOG_LINES = 50
MUX = "_mux"
"""Stands for the instance in the report of a mux, followed by `-HOST` on another host. No instance name starts so."""
_STACK_LINES = 300
_LINE_CHARS = 1000
_READ_BYTES = 256 << 10
_NAME = re.compile(r"(.+)-\d+-(\d{8}T\d{6}\.\d{6}Z)\.json")
_STACK_HEAD = re.compile(
    r"Fatal Python error: |(Current t|T)hread 0x|Stack \(most recent call first\)|Traceback \(most recent call last\)"
)
_PACKAGES = ("torch", "transformers", "tokenizers")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The end of one process. `status` is that of `Exit`, `started_at` seconds since the epoch.

    For a mux, `instance` begins with `MUX`, `replica` is its number, and `spec` None. `events` are the instance's last
    events as shown to users.
    """

    instance: str
    replica: int
    pid: int
    started_at: float
    status: int | None
    reason: str
    log: LogSpan | LogLines | None = None
    spec: WorkerSpec | None = None
    events: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def unseen(cls, ended: EndedWorker) -> Self:
        """Make the record of a worker that ended while no daemon ran."""
        return cls(
            instance=ended.instance,
            replica=ended.spec.replica if ended.spec else 0,
            pid=ended.pid,
            started_at=ended.started_at,
            status=None,
            reason=f"while no daemon ran {explain(ended.exit).message}",
            log=ended.exit.log,
            spec=ended.spec,
        )


class CrashReports:
    """Writes reports to `folder`, and removes the oldest beyond the limit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._one_write = threading.Lock()

    def report(self, crash: Crash) -> tuple[Incident, Coroutine[Any, Any, None]]:
        """Log the end of a process; return the incident for its instance's events, and the coroutine that writes the
        report.

        The caller runs the coroutine, which writes on a thread.
        """
        now = datetime.now(UTC)
        name = report_name(crash.instance, crash.replica, now)
        facts = {"instance": crash.instance, "replica": crash.replica, "pid": crash.pid, "crash_report": name}
        log.error("%s crashed: %s", "mux" if crash.instance.startswith(MUX) else "worker", crash.reason, extra=facts)
        incident = Incident(event="crashed", reason=crash.reason, at=rfc3339(now), crash_report=name)
        return incident, asyncio.to_thread(self.write, crash, now, name)

    def write(self, crash: Crash, now: datetime, name: str) -> None:
        """Write the report `name`, from `report_name`. Blocking; a disk that refuses is logged, not raised."""
        try:
            with self._one_write:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                text = json.dumps(_facts(crash, now), indent=1, default=str)
                write_atomically(self._folder / name, text.encode(), mode=0o600)
                self._remove_surplus(crash.instance)
        except OSError as error:
            log.error("crash report not written", extra={"crash_report": name, "reason": str(error)})

    def _remove_surplus(self, instance: str) -> None:
        found = [match for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        found.sort(key=lambda match: match[2])
        surplus = found[:-KEPT] + [match for match in found if match[1] == instance][:-KEPT_PER_INSTANCE]
        for match in surplus:
            (self._folder / match[0]).unlink(missing_ok=True)


def report_name(instance: str, replica: int, now: datetime) -> str:
    return f"{instance}-{replica}-{now:%Y%m%dT%H%M%S.%fZ}.json"


def stacks(lines: Sequence[str]) -> list[str]:
    """Return the Python stacks in a log: dumps by faulthandler, and tracebacks with their last line."""
    found, inside = [], False
    for line in lines:
        if _STACK_HEAD.match(line):
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            if not line.startswith("{"):
                found.append(line)
        if inside:
            found.append(line)
    return found[-_STACK_LINES:]


def _facts(crash: Crash, now: datetime) -> dict[str, Any]:
    lines = [line[:_LINE_CHARS] for line in crash.log.read(_READ_BYTES)] if crash.log else []
    spec, status = crash.spec, crash.status
    model = {} if spec is None else {key: getattr(spec, key) for key in ("model_id", "revision", "dtype", "gpu")}
    return {
        "instance": crash.instance,
        "replica": crash.replica,
        "pid": crash.pid,
        **model,
        "reason": crash.reason,
        "exit_status": status if status is None or status >= 0 else None,
        "signal": SIGNALS.get(-status, str(-status)) if status is not None and status < 0 else None,
        "started_at": rfc3339(datetime.fromtimestamp(crash.started_at, UTC)),
        "ended_at": rfc3339(now),
        "ran_secs": round(max(0.0, now.timestamp() - crash.started_at), 3),
        "versions": _versions(),
        "stacks": stacks(lines),
        "log": lines[-LOG_LINES:],
        "events": [*crash.events],
    }


@cache
def _versions() -> dict[str, str]:
    """Read the versions of teimgr, Python and the workers' packages from their metadata, since the daemon has no
    torch."""
    found = {"teimgr": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
