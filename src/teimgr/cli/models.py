"""`teimgr models …`: the model registry of a running daemon, from the command line.

What was asked for goes to stdout, all else to stderr. The exit status is 0 where it was done (and, of a check, passed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from yarl import URL

from teimgr.client.endpoints import Endpoint, Tls
from teimgr.client.failures import from_http
from teimgr.errors import TeimgrError, Unavailable

_INTERRUPTED = 130
_CONNECT_S = 10.0

Command = Callable[["Daemon", argparse.Namespace], Coroutine[Any, Any, int]]


def run(options: argparse.Namespace) -> int:
    """Carry out `options.command` against the daemon at `options.url`; the result is the exit status.

    Raises:
        InvalidConfig: the address or a certificate is wrong.
    """

    async def with_daemon() -> int:
        tls = Tls(ca=options.ca, cert=options.cert, key=options.key)
        async with Daemon.at(Endpoint.parse(options.url), tls) as daemon:
            return await COMMANDS[options.command](daemon, options)

    try:
        return asyncio.run(with_daemon())
    except (Unavailable, aiohttp.ClientError) as error:
        print(f"teimgr: {options.url}: {error}", file=sys.stderr)
    except TeimgrError as error:
        print(f"teimgr: {error.message}", file=sys.stderr)
    except KeyboardInterrupt:
        print("teimgr: interrupted; the daemon finishes what it has begun", file=sys.stderr)
        return _INTERRUPTED
    return 1


class Daemon:
    """A connection to a daemon's REST side."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    @classmethod
    @asynccontextmanager
    async def at(cls, endpoint: Endpoint, tls: Tls) -> AsyncIterator[Daemon]:
        """Open for as long as the block runs. Answers may take hours; only connecting is bounded."""
        connector = aiohttp.TCPConnector(ssl=tls.ssl_context() if endpoint.secure else True)
        limit = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as http:
            yield cls(http, endpoint.url)

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of the answer.

        Raises:
            TeimgrError: what the daemon answered instead.
        """
        async with self._http.request(method, self._at(path), json=body) as reply:
            text = await reply.read()
            if reply.status >= 400:
                raise from_http(reply.status, text)
            return json.loads(text)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[tuple[str, Any]]:
        """The server-sent events of a POST: names and data.

        Raises:
            TeimgrError: what the daemon answered instead.
        """
        headers = {"Accept": "text/event-stream"}
        async with self._http.post(self._at(path), json=body, headers=headers) as reply:
            if reply.status >= 400:
                raise from_http(reply.status, await reply.read())
            text = b""
            async for chunk in reply.content.iter_any():
                *blocks, text = (text + chunk).split(b"\n\n")
                for block in blocks:
                    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
                    if fields:
                        yield fields[b"event"].decode(), json.loads(fields[b"data"])

    def _at(self, path: str) -> URL:
        return URL(self._url + path, encoded=True)


async def list_models(daemon: Daemon, options: argparse.Namespace) -> int:
    """All models, as a table or as the daemon's JSON."""
    models = await daemon.call("GET", "/models")
    if options.json:
        print(json.dumps(models, indent=2))
        return 0
    table = Table("model", "status", "size", "used by", box=None, pad_edge=False)
    for model in models:
        size = decimal(model["cache_size_bytes"]) if "cache_size_bytes" in model else ""
        table.add_row(model["model_id"], model["status"], size, ", ".join(model["used_by"]))
    Console().print(table)
    return 0


async def pull(daemon: Daemon, options: argparse.Namespace) -> int:
    """Have the daemon download a model; a bar on stderr follows it. The folder goes to stdout."""
    body = {key: value for key in ("revision", "update") if (value := getattr(options, key))}
    with _bar() as bar:
        task = bar.add_task(options.model, total=None)
        async for name, data in daemon.events(_path(options.model, "/download"), body):
            if name == "progress":
                bar.update(task, completed=data["bytes_done"], total=data.get("bytes_total"))
            elif name == "failed":
                raise from_http(500, json.dumps(data).encode())
            elif name == "done":
                bar.update(task, completed=data.get("cache_size_bytes"), total=data.get("cache_size_bytes"))
                bar.stop()
                print(data["cache_path"])
                return 0
    raise Unavailable("the daemon ended the stream before the download was done")


async def check(daemon: Daemon, options: argparse.Namespace) -> int:
    """Have the daemon try a model, and say what it measured."""
    body: dict[str, Any] = {"device": "cpu"} if options.cpu else {}
    body |= {key: value for key in ("gpu_id", "dtype") if (value := getattr(options, key)) is not None}
    with Console(stderr=True).status(f"loading {options.model} in a worker of its own"):
        await daemon.call("POST", "/models", {"model_id": options.model})  # it may be a directory that is new to it
        model = await daemon.call("POST", _path(options.model, "/load"), body)
    if options.json:
        print(json.dumps(model, indent=2))
    elif model["status"] == "verified":
        Console().print(_measured(model["verification"]))
    if model["status"] != "verified":
        print(f"teimgr: {options.model}: {model.get('verification_error', model['status'])}", file=sys.stderr)
        return 1
    return 0


async def remove(daemon: Daemon, options: argparse.Namespace) -> int:
    """Have the daemon delete a model from the cache."""
    model = await daemon.call("DELETE", _path(options.model))
    print(f"deleted {model['model_id']}: {decimal(model.get('cache_size_bytes', 0))}")
    return 0


COMMANDS: Mapping[str, Command] = {"list": list_models, "pull": pull, "check": check, "rm": remove}


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


def _measured(found: Mapping[str, Any]) -> Table:
    where = found["device"] if "gpu_id" not in found else f"{found['device']} (gpu {found['gpu_id']})"
    rows = {
        "kind": f"{found['kind']}, dimension {found['dimension']}, up to {found['max_input_length']} tokens",
        "runs on": f"{where}, {found['dtype']}, {found['batching']}",
        "ready after": f"{found['start_s']:.2f} s, of which loading {found['load_s']:.2f} s",
        "speed": f"{found['texts_per_s']:,.0f} texts/s, {found['tokens_per_s']:,.0f} tokens/s",
        "peak memory": _memory(found),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _memory(found: Mapping[str, Any]) -> str:
    figures = (("peak_rss_bytes", "resident"), ("private_bytes", "its own"), ("device_bytes", "on the GPU"))
    return ", ".join(f"{decimal(found[key])} {word}" for key, word in figures if key in found) or "not known"


def _path(model_id: str, verb: str = "") -> str:
    return f"/models/{quote(model_id, safe='')}{verb}"
