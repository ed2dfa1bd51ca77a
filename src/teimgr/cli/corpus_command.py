"""`teimgr embed FILE -o OUTPUT`: progress as a bar on a terminal, otherwise as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.failures import ExitStatus
from teimgr.cli.output import duration, say
from teimgr.errors import Forbidden
from teimgr.spec import Kind

_LINE_S = 10.0
_IDLE_S = 300.0  # without a reply on the stream


def embed_corpus(
    server: DaemonOptions,
    output: CommandOutput,
    source: Path,
    target: Path,
    instance: str,
    options: dict[str, Any],
    expect_fingerprint: str | None = None,
) -> int:
    from teimgr.client.corpus import embed_file

    # A wrong address or name fails at once; later failures are retried.
    per_token = False
    with suppress(Forbidden):
        per_token = server.rest.get(instance).kind == Kind.MULTI_VECTOR
    given = {key: value for key, value in options.items() if value is not None} | {"per_token": per_token}
    began = time.monotonic()
    connecting = server.connection.client(max(server.timeout_s, _IDLE_S), expect_fingerprint)
    with connecting as client, _shown(source.name, output) as progress:
        client.connect()
        try:
            done = embed_file(client, source, target, progress=progress, instance=instance, **given)
        except KeyboardInterrupt:
            output.note(f"interrupted; run the same command to resume ({target}.partial)")
            return ExitStatus.INTERRUPTED
    taken_s = time.monotonic() - began
    if output.as_json:
        output.value(
            {
                **{"output": str(done.output), "rows": done.rows, "failed": done.failed, "dimension": done.dimension},
                **{"resumed_at": done.resumed_at, "failures": str(done.failures) if done.failures else None},
                **{"fingerprint": done.fingerprint or None, "seconds": round(taken_s, 3)},
            }
        )
    else:
        rate = (done.rows - done.resumed_at) / taken_s
        resumed = f", resumed at row {done.resumed_at:,}" if done.resumed_at else ""
        of = f"{'vectors of ' if per_token else ''}{done.dimension} values"
        say(f"{done.output}: {done.rows:,} rows of {of}, {rate:,.0f} rows/s{resumed}")
        if done.failures:
            output.note(f"{done.failed:,} rows failed: {done.failures}")
    return ExitStatus.INCOMPLETE if done.failed else ExitStatus.OK


@contextmanager
def _shown(title: str, output: CommandOutput) -> Iterator[Callable[[Any], None]]:
    """A function for the progress of the work."""
    if output.as_json and not sys.stderr.isatty():
        yield lambda progress: None
    elif not sys.stderr.isatty():
        yield _lines(title)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (
            *(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()),
            TextColumn("{task.fields[state]}"),
        )
        with Progress(*columns, console=Console(stderr=True), speed_estimate_period=60) as bar:
            task = bar.add_task(title, total=None, state="")
            meter = _Meter()

            def update(progress: Any) -> None:
                total = progress.total if progress.total is not None else 1.0
                done = progress.rows if progress.total is not None else progress.share or 0.0
                bar.update(task, total=max(total, done), completed=done, state=meter.line(progress))

            yield update


class _Meter:
    """Rows per second of this run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: int | None = None
        self._start: tuple[float, float] | None = None

    def rate(self, rows: int) -> float:
        if self._first is None:
            self._first, self._began = rows, time.monotonic()
        return (rows - self._first) / max(time.monotonic() - self._began, 1e-9)

    def left_s(self, progress: Any) -> float | None:
        """Seconds to the end at the rate of this run; None while that is not known."""
        share = progress.rows / progress.total if progress.total else progress.share or 0.0
        if progress.rows == self._first:
            return None  # a resumed file is not read yet
        now = time.monotonic()
        if self._start is None:
            self._start = now, share
        began, first = self._start
        return (now - began) * (1.0 - share) / (share - first) if share > first else None

    def line(self, progress: Any) -> str:
        """Rows, rate and remaining time."""
        left = self.left_s(progress)
        return self.text(progress) + (f", {duration(left)} left" if left else "")

    def text(self, progress: Any) -> str:
        failed = f", {progress.failed:,} failed" if progress.failed else ""
        waiting = f", waiting: {progress.waiting}" if progress.waiting else ""
        return f"{progress.rows:,} rows, {self.rate(progress.rows):,.0f}/s{failed}{waiting}"


def _lines(title: str) -> Callable[[Any], None]:
    """A line every ten seconds and at each pause."""
    meter, printed, reason = _Meter(), time.monotonic(), None

    def update(progress: Any) -> None:
        nonlocal printed, reason
        line = meter.line(progress)
        if progress.waiting in (None, reason) and time.monotonic() - printed < _LINE_S:
            return
        printed, reason = time.monotonic(), progress.waiting
        say(f"{title}: {line}", file=sys.stderr, flush=True)

    return update
