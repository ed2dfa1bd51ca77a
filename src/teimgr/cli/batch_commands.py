"""`teimgr batch`: files of requests that the daemon works off behind all interactive calls, in OpenAI's form."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.failures import ExitStatus, UsageError
from teimgr.cli.output import leaves, say, spinner
from teimgr.client.file_transfer import download, upload
from teimgr.client.rest_client import RestClient
from teimgr.errors import InvalidConfig, Refused

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LINE_BYTES = 16 * 2**20  # the most that `max_line_kb` may allow
_ENDED = {
    "completed": ExitStatus.OK,
    "failed": ExitStatus.FAILED,
    "expired": ExitStatus.INCOMPLETE,
    "cancelled": ExitStatus.INCOMPLETE,
}
"""The states in which a batch stays, and the exit status of a command that waited for it."""

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch.", show_default=False)]
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Return when it has ended; Ctrl-C leaves it running.")]


def submit(
    server: DaemonOptions,
    output: CommandOutput,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests, JSON lines.", show_default=False)],
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Such as /v1/embeddings.  [default: `url` of the first line]"),
    ] = None,
    window: Annotated[str, typer.Option(metavar="TIME", help="It expires after so long, 7d at most.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the batch; several.")
    ] = None,
    wait: Wait = False,
) -> int:
    """Upload a file of requests and make a batch of it."""
    pairs = [each.partition("=") for each in metadata or ()]
    if wrong := [name for name, equals, _ in pairs if not equals or not name]:
        raise UsageError(f"--metadata {wrong[0]}: must be KEY=VALUE")
    body: dict[str, Any] = {"endpoint": endpoint or _first_url(file), "completion_window": window}
    body |= {"metadata": {name: value for name, _, value in pairs}} if pairs else {}
    with spinner(f"sending {file}"):
        body["input_file_id"] = upload(server.connection.http_channel(), file, server.timeout_s)["id"]
    batch = server.rest.request("POST", "/v1/batches", body=body)
    return _shown(server, output, batch, wait=wait)


def list_batches(
    server: DaemonOptions,
    output: CommandOutput,
    last: Annotated[int, typer.Option("--last", "-n", help="How many, the newest first.", min=1, max=100)] = 20,
) -> None:
    """List the batches of this API key."""
    batches = server.rest.request("GET", "/v1/batches", query={"limit": last})["data"]
    if output.as_json:
        output.value(batches)
        return
    rows = [(each["id"], each["status"], _progress(each), each["endpoint"], _moment(each)) for each in batches]
    output.table(("id", "status", "requests", "endpoint", "created"), rows)


def get(
    server: DaemonOptions,
    output: CommandOutput,
    batch_id: Id,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the results here, JSON lines.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    wait: Wait = False,
) -> int:
    """Show a batch, or download its results.

    Requests that failed have their reasons in OUTPUT.failed.jsonl, and the exit status is 8.
    """
    if out is not None and out.exists() and not overwrite:
        raise Refused(f"{out} exists; --overwrite replaces it, -o names another")
    batch = server.rest.request("GET", _path(batch_id))
    if out is None:
        return _shown(server, output, batch, wait=wait)
    if wait:
        batch = _ended(server.rest, output, batch)
    files = {out: batch["output_file_id"], out.with_name(f"{out.name}.failed.jsonl"): batch["error_file_id"]}
    if not any(files.values()):
        do = "" if batch["status"] in _ENDED else "; --wait waits for them"
        raise Refused(f"batch {batch_id} has no results: it is {_state(batch)}{do}")
    channel = server.connection.http_channel()
    written = {target: file_id for target, file_id in files.items() if file_id}
    for target, file_id in written.items():
        download(channel, file_id, target, server.timeout_s)
    if output.as_json:
        output.value({**batch, "files": [str(each) for each in written]})
    else:
        say("\n".join(map(str, written)))
    return _status(batch)


def cancel(server: DaemonOptions, output: CommandOutput, batch_id: Id) -> int:
    """Cancel a batch; results so far are kept."""
    return _shown(server, output, server.rest.request("POST", f"{_path(batch_id)}/cancel"), wait=False)


def _path(batch_id: str) -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}"


def _first_url(file: Path) -> str:
    """The `url` of the first request.

    Raises:
        InvalidConfig: The file cannot be read, or its first line is not a request.
    """
    try:
        with file.open("rb") as lines:
            url = json.loads(lines.readline(_LINE_BYTES))["url"]
    except OSError as error:
        raise InvalidConfig(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        example = '{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {…}}'
        raise InvalidConfig(f"{file}: the first line is not a request such as {example}") from error
    return str(url)


def _shown(server: DaemonOptions, output: CommandOutput, batch: Mapping[str, Any], *, wait: bool) -> int:
    """Print a batch, with `wait` when it has ended; the exit status."""
    if wait:
        batch = _ended(server.rest, output, batch)
    if output.as_json:
        output.value(batch)
    elif output.is_terminal:
        output.table(("key", "value"), leaves(batch))
    else:
        say("\n".join(f"{key}\t{value}" for key, value in leaves(batch)))
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
    status = _ENDED.get(batch["status"], ExitStatus.INCOMPLETE)
    return ExitStatus.INCOMPLETE if status is ExitStatus.OK and batch["request_counts"]["failed"] else status


def _state(batch: Mapping[str, Any]) -> str:
    """Its status, with how far it is or why it failed."""
    faults = (batch["errors"] or {}).get("data") or ()
    why = "; ".join(
        f"line {each['line']}: {each['message']}" if each["line"] else each["message"] for each in faults[:3]
    )
    return f"{batch['status']}, {why or _progress(batch) + ' requests'}"


def _progress(batch: Mapping[str, Any]) -> str:
    counts = batch["request_counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['completed'] + counts['failed']}/{counts['total']}{failed}"


def _moment(batch: Mapping[str, Any]) -> str:
    return datetime.fromtimestamp(batch["created_at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
