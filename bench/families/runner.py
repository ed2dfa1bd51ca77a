"""Rows measured each in a process of its own, which a time limit ends."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from bench.families.row import Row
from bench.families.trial import Outcome

LIMIT_S = 600.0
"""Of one row."""


def measured(rows: Sequence[Row], dtype: str = "float32") -> Iterator[tuple[Row, Outcome]]:
    """The outcome of each row, in their order. A server imports the libraries once, and forks a process for each."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.families.trial", "bench.families.table", "sentence_transformers"])
    for row in rows:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_measure, args=(row.key, dtype, send), daemon=True)
        process.start()
        send.close()
        yield row, _result(receive, process)
        process.join()


def _result(receive: Connection, process: multiprocessing.process.BaseProcess) -> Outcome:
    try:
        if receive.poll(LIMIT_S):
            found: Outcome = receive.recv()
            return found
        return Outcome("failed", reason=f"no result within {LIMIT_S:g} s")
    except EOFError:
        return Outcome("failed", reason="the process ended without a result")
    finally:
        process.kill()


def _measure(key: str, dtype: str, send: Connection) -> None:
    from bench.families.table import ROWS
    from bench.families.trial import tried

    row = next(row for row in ROWS if row.key == key)
    with tempfile.TemporaryDirectory() as folder:
        send.send(tried(row, Path(folder) / "model", dtype))
