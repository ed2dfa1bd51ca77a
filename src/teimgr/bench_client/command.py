"""Command line of bench-client; the result is JSON on stdout, everything else goes to stderr."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from teimgr.bench_client import load
from teimgr.bench_client.load import file_texts, made_texts
from teimgr.client.checks import check_text
from teimgr.client.grpc_channel import GrpcChannel
from teimgr.client.payloads import ArrowOptions
from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import TeimgrError

_CONNECT_S = 20.0
_DEFAULT_TEXTS = 10_000
_NAMED_REASONS = 5


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 0 if every text got its vector, 1 after any failure, 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(arguments))
    except TeimgrError as error:
        print(f"bench-client: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench-client: interrupted", file=sys.stderr)
        return 130


async def _run(arguments: argparse.Namespace) -> int:
    check_text("instance", arguments.instance)
    if arguments.noop and arguments.mode != "arrow":
        print(f"bench-client: --noop has no effect in {arguments.mode} mode: the model runs", file=sys.stderr)
    count: int | None = arguments.num_texts
    texts = file_texts(arguments.texts, count) if arguments.texts else made_texts(count or _DEFAULT_TEXTS)
    name = "localhost" if arguments.insecure else None
    tls = Tls(ca=arguments.ca, cert=arguments.cert, key=arguments.key, server_name=name)
    channel = GrpcChannel(ServerAddress.parse(arguments.endpoint), tls, arguments.max_message_size_mb * 1024 * 1024)
    await channel.open()
    try:
        await channel.connect(_CONNECT_S)
        outcome = await _load(channel, arguments, texts)
    finally:
        await channel.close()
    print(json.dumps(_result(arguments, len(texts), outcome), indent=2))
    for reason, times in outcome.reasons.most_common(_NAMED_REASONS):
        print(f"bench-client: {times} × {' '.join(reason.split())}", file=sys.stderr)
    return 1 if outcome.failed else 0


async def _load(channel: GrpcChannel, arguments: argparse.Namespace, texts: list[str]) -> load.Outcome:
    instance, size, timeout_s = arguments.instance, arguments.batch_size, arguments.timeout_secs
    with _progress(len(texts), f"{arguments.mode} {instance}") as progress:
        if arguments.mode == "standard":
            return await load.standard(channel, instance, texts, size, timeout_s, progress)
        options: ArrowOptions = {"instance": instance, "noop": arguments.noop}
        return await load.arrow(channel, options, texts, size, timeout_s, progress)


def _result(arguments: argparse.Namespace, texts: int, outcome: load.Outcome) -> dict[str, Any]:
    return {
        "mode": arguments.mode,
        "instance_name": arguments.instance,
        "num_texts": texts,
        "batch_size": arguments.batch_size,
        "num_requests": outcome.requests,
        "total_duration_secs": outcome.duration_s,
        "throughput_per_sec": outcome.successful / outcome.duration_s if outcome.duration_s else 0.0,
        "successful": outcome.successful,
        "failed": outcome.failed,
        "latency_ms": _latency(outcome.latencies_ms),
    }


def _latency(samples_ms: list[float]) -> dict[str, float] | None:
    if not samples_ms:
        return None
    p50, p90, p95, p99 = np.percentile(samples_ms, (50, 90, 95, 99))
    values = {"p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": max(samples_ms), "mean": np.mean(samples_ms)}
    return {key: round(float(value), 3) for key, value in values.items()}


@contextmanager
def _progress(total: int, title: str) -> Iterator[load.Progress]:
    """A progress bar on a terminal, else a line per tenth; on stderr."""
    if not sys.stderr.isatty():
        yield _lines(total, title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def _lines(total: int, title: str) -> load.Progress:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if done * 10 // total != before * 10 // total:
            print(f"{title}: {done}/{total} texts", file=sys.stderr, flush=True)

    return advance


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench-client",
        description="Load one instance through the multiplexer; the result is JSON on stdout.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-e", "--endpoint", required=True, metavar="URL", help="http://host:port, or https://host:port for TLS")
    add("-i", "--instance", required=True, metavar="NAME", help="the instance that answers")
    add("-m", "--mode", choices=("standard", "arrow"), default="standard", help="unary Embed calls, or EmbedArrow")
    add("-n", "--num-texts", type=_positive, metavar="N", help="texts to send (10000; with --texts: all its lines)")
    add(
        "-b", "--batch-size", type=_positive, default=100, metavar="N", help="calls in flight, or texts per batch (100)"
    )
    add("--texts", type=Path, metavar="FILE", help="send the lines of this file, plain or .lz4, instead of made texts")
    add("--cert", type=Path, metavar="PATH", help="client certificate, PEM")
    add("--key", type=Path, metavar="PATH", help="its private key, PEM")
    add("--ca", type=Path, metavar="PATH", help="certificate authority of the server, PEM")
    add(
        "--insecure",
        action="store_true",
        help="expect the server's certificate to name localhost; it is verified still",
    )
    add("--noop", action="store_true", help="arrow mode: replies of zeros, without running the model")
    add("--max-message-size-mb", type=_positive, default=100, metavar="N", help="largest message either way (100)")
    add("--timeout-secs", type=_seconds, default=120.0, metavar="S", help="limit of one call (120)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
