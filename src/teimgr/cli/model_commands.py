"""`teimgr models …`: the model registry of a running daemon, from the command line.

Results go to stdout, everything else to stderr. The exit status is 0 on success, of `check` if the model passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from teimgr.client import AsyncClient, Tls
from teimgr.client.rest import LoadOptions
from teimgr.errors import TeimgrError

_INTERRUPTED = 130
_TIMEOUT_S = 3600.0

Command = Callable[[AsyncClient, argparse.Namespace], Coroutine[Any, Any, int]]


def run(options: argparse.Namespace) -> int:
    """Run `options.command` against the daemon at `options.url`; returns the exit status."""

    async def with_client() -> int:
        tls = Tls(ca=options.ca, cert=options.cert, key=options.key)
        async with AsyncClient(options.url, tls=tls, timeout_s=_TIMEOUT_S) as client:
            return await COMMANDS[options.command](client, options)

    try:
        return asyncio.run(with_client())
    except TeimgrError as error:
        print(f"teimgr: {error.message}", file=sys.stderr)
    except KeyboardInterrupt:
        print("teimgr: interrupted; the daemon finishes what it has begun", file=sys.stderr)
        return _INTERRUPTED
    return 1


async def list_models(client: AsyncClient, options: argparse.Namespace) -> int:
    models = await client.models()
    if options.json:
        print(json.dumps(models, indent=2))
        return 0
    table = Table("model", "status", "size", "used by", box=None, pad_edge=False)
    for model in models:
        size = decimal(model["cache_size_bytes"]) if "cache_size_bytes" in model else ""
        table.add_row(model["model_id"], model["status"], size, ", ".join(model["used_by"]))
    Console().print(table)
    return 0


async def pull(client: AsyncClient, options: argparse.Namespace) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(options.model, total=None)
        async for event in client.download_model(options.model, revision=options.revision, update=options.update):
            data = event.data
            if event.event == "progress":
                bar.update(task, completed=data["bytes_done"], total=data.get("bytes_total"))
            elif event.event == "done":
                bar.update(task, completed=data.get("cache_size_bytes"), total=data.get("cache_size_bytes"))
                bar.stop()
                print(data["cache_path"])
    return 0


async def check(client: AsyncClient, options: argparse.Namespace) -> int:
    trial: LoadOptions = {"device": "cpu"} if options.cpu else {}
    if options.gpu_id is not None:
        trial["gpu_id"] = options.gpu_id
    if options.dtype is not None:
        trial["dtype"] = options.dtype
    with Console(stderr=True).status(f"loading {options.model} in a worker of its own"):
        await client.add_model(options.model)  # it may be a directory that is new to the daemon
        model = await client.try_model(options.model, **trial)
    if options.json:
        print(json.dumps(model, indent=2))
    elif model["status"] == "verified":
        Console().print(_measurements(model["verification"]))
    if model["status"] != "verified":
        print(f"teimgr: {options.model}: {model.get('verification_error', model['status'])}", file=sys.stderr)
        return 1
    return 0


async def remove(client: AsyncClient, options: argparse.Namespace) -> int:
    model = await client.delete_model(options.model)
    print(f"deleted {model['model_id']}: {decimal(model.get('cache_size_bytes', 0))}")
    return 0


COMMANDS: Mapping[str, Command] = {"list": list_models, "pull": pull, "check": check, "rm": remove}


def _measurements(trial: Mapping[str, Any]) -> Table:
    where = trial["device"] if "gpu_id" not in trial else f"{trial['device']} (gpu {trial['gpu_id']})"
    sizes = (("peak_rss_bytes", "resident"), ("private_bytes", "its own"), ("device_bytes", "on the GPU"))
    rows = {
        "kind": f"{trial['kind']}, dimension {trial['dimension']}, up to {trial['max_input_length']} tokens",
        "runs on": f"{where}, {trial['dtype']}, {trial['batching']}",
        "ready after": f"{trial['start_s']:.2f} s, of which loading {trial['load_s']:.2f} s",
        "speed": f"{trial['texts_per_s']:,.0f} texts/s, {trial['tokens_per_s']:,.0f} tokens/s",
        "peak memory": ", ".join(f"{decimal(trial[key])} {word}" for key, word in sizes if key in trial) or "not known",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(name, text)
    return table
