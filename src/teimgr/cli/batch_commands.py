"""`teimgr batch`: OpenAI's batches, files of requests that the daemon computes with low priority."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.failures import ExitStatus
from teimgr.cli.output import leaves, say, spinner
from teimgr.client.blocking_http import download, upload
from teimgr.client.rest_client import RestClient
from teimgr.errors import Refused

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_ENDED = ("completed", "failed", "expired", "cancelled")

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch.", show_default=False)]
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Return when it has ended; Ctrl-C leaves it running.")]


def submit(
    server: DaemonOptions,
    output: CommandOutput,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests, JSON lines.", show_default=False)],
    endpoint: Annotated[str, typer.Option(metavar="PATH", help="The `url` of every request.")] = "/v1/embeddings",
    window: Annotated[str, typer.Option(metavar="TIME", help="Time until it expires, at most 7d.")] = "24h",
    wait: Wait = False,
) -> int:
    """Upload a file of requests and make a batch of it."""
    body: dict[str, Any] = {"endpoint": endpoint, "completion_window": window}
    with spinner(f"sending {file}"):
        body["input_file_id"] = upload(server.connection.http_channel(), file, server.timeout_s)["id"]
    return _shown(server, output, server.rest.request("POST", "/v1/batches", body=body), wait=wait)


def list_batches(
    server: DaemonOptions,
    output: CommandOutput,
    last: Annotated[int, typer.Option("--last", "-n", help="Number of batches, newest first.", min=1, max=100)] = 20,
) -> None:
    """List the batches of this API key."""
    batches = server.rest.request("GET", "/v1/batches", query={"limit": last})["data"]
    if output.as_json:
        output.value(batches)
        return
    rows = [
        (each["id"], each["status"], _progress(each), each["endpoint"], datetime.fromtimestamp(each["created_at"], UTC))
        for each in batches
    ]
    output.table(("id", "status", "requests", "endpoint", "created"), rows)


def get(
    server: DaemonOptions,
    output: CommandOutput,
    batch_id: Id,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the results here, JSON lines.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    wait: Wait = False,
) -> int:
    """Show a batch, or download its results.

    Requests that failed have their reasons in OUTPUT.failed.jsonl, and the exit status is 8.
    """
    failed = out and out.with_name(f"{out.name}.failed.jsonl")
    for path in (out, failed):
        if path is not None and path.exists() and not overwrite:
            raise Refused(f"{path} exists; --overwrite replaces it, -o names another")
    batch = server.rest.request("GET", _path(batch_id))
    if out is None or failed is None:
        return _shown(server, output, batch, wait=wait)
    batch = _ended(server.rest, output, batch) if wait else batch
    files = {target: batch[key] for target, key in ((out, "output_file_id"), (failed, "error_file_id")) if batch[key]}
    if not files:
        do = "" if batch["status"] in _ENDED else "; --wait waits for them"
        raise Refused(f"batch {batch_id} has no results: it is {_state(batch)}{do}")
    for target, file_id in files.items():
        download(server.connection.http_channel(), file_id, target, server.timeout_s)
    if failed not in files:  # left from replaced results
        failed.unlink(missing_ok=True)
    if output.as_json:
        output.value({**batch, "files": [str(each) for each in files]})
    else:
        say("\n".join(map(str, files)))
    return _status(batch)


def cancel(server: DaemonOptions, output: CommandOutput, batch_id: Id) -> int:
    """Cancel a batch; results so far are kept."""
    return _shown(server, output, server.rest.request("POST", f"{_path(batch_id)}/cancel"), wait=False)


def _path(batch_id: str) -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}"


def _shown(server: DaemonOptions, output: CommandOutput, batch: Mapping[str, Any], *, wait: bool) -> int:
    """Print a batch, with `wait` when it has ended; the exit status."""
    batch = _ended(server.rest, output, batch) if wait else batch
    if output.as_json:
        output.value(batch)
    else:
        output.table(("key", "value"), leaves(batch))
    return _status(batch) if wait else ExitStatus.OK


def _ended(rest: RestClient, output: CommandOutput, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch once it has ended, which it does when its window closes at the latest."""
    noted, pause_s = "", _FIRST_PAUSE_S
    with spinner(f"{batch['id']}: {_state(batch)}") as update:
        while True:
            if batch["status"] != noted:
                noted = batch["status"]
                output.note(f"{batch['id']}: {_state(batch)}")
            if noted in _ENDED:
                return batch
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            batch = rest.request("GET", _path(batch["id"]))
            update(f"{batch['id']}: {_state(batch)}")


def _status(batch: Mapping[str, Any]) -> ExitStatus:
    if batch["status"] == "completed" and not batch["request_counts"]["failed"]:
        return ExitStatus.OK
    return ExitStatus.FAILED if batch["status"] == "failed" else ExitStatus.INCOMPLETE


def _state(batch: Mapping[str, Any]) -> str:
    """Its status, with how far it is or why it failed."""
    first = next(iter((batch["errors"] or {}).get("data") or ()), None)
    why = first and (f"line {first['line']}: " if first["line"] else "") + first["message"]
    return f"{batch['status']}, {why or _progress(batch) + ' requests'}"


def _progress(batch: Mapping[str, Any]) -> str:
    counts = batch["request_counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['completed'] + counts['failed']}/{counts['total']}{failed}"
