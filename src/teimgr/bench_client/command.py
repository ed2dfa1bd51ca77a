"""bench-client: command line, texts, unary and Arrow load; the result is JSON on stdout, all else goes to stderr."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from teimgr.client.checks import check_text
from teimgr.client.grpc_channel import GrpcChannel
from teimgr.client.payloads import (
    ArrowOptions,
    arrow_request,
    embed_request,
    pack_texts,
    slices,
    unpack_vectors,
    vector,
)
from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import Internal, InvalidConfig, TeimgrError

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
        instance, size, timeout_s = arguments.instance, arguments.batch_size, arguments.timeout_secs
        with _progress(len(texts), f"{arguments.mode} {instance}") as progress:
            if arguments.mode == "standard":
                outcome = await standard(channel, instance, texts, size, timeout_s, progress)
            else:
                options: ArrowOptions = {"instance": instance, "noop": arguments.noop}
                outcome = await arrow(channel, options, texts, size, timeout_s, progress)
    finally:
        await channel.close()
    print(json.dumps(_result(arguments, len(texts), outcome), indent=2))
    for reason, times in outcome.reasons.most_common(_NAMED_REASONS):
        print(f"bench-client: {times} × {' '.join(reason.split())}", file=sys.stderr)
    return 1 if outcome.failed else 0


def _result(arguments: argparse.Namespace, texts: int, outcome: Outcome) -> dict[str, Any]:
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
def _progress(total: int, title: str) -> Iterator[Progress]:
    """A progress bar on a terminal, else a line per tenth; on stderr."""
    if not sys.stderr.isatty():
        yield _lines(total, title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def _lines(total: int, title: str) -> Progress:
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


_SENTENCES = (
    "An embedding turns a sentence into a point, and close points mean much the same thing.",
    "Semantic search finds the passage you had in mind even when it shares no word with your question.",
    "The quick brown fox jumps over the lazy dog while a pangram counts every letter.",
    "Attention lets each token look at every other token before it decides what it stands for.",
    "A neural network learns by nudging millions of weights towards smaller mistakes.",
    "Nearest neighbours in a vector index are found in milliseconds when the graph is well connected.",
    "Cosine similarity compares directions and forgets how long the vectors are.",
    "Retrieval gives a language model fresh facts instead of asking it to remember them all.",
    "Mean pooling averages the token vectors of a text into the one vector that is stored.",
    "Good tokenizers cut rare words into familiar pieces, so nothing is ever quite unknown.",
)
_CLAUSE = ", and this one goes on for a little longer so that the lengths within a batch differ"


def made_texts(count: int) -> list[str]:
    """`count` distinct English texts of 15 to 30 words, the same in every run."""
    return [
        f"{_SENTENCES[index % len(_SENTENCES)]} - sample {index + 1}{'' if index % 3 else _CLAUSE}"
        for index in range(count)
    ]


def file_texts(path: Path, count: int | None) -> list[str]:
    """The non-empty lines of a UTF-8 file, `.lz4` decompressed; repeated or cut to `count` where that is given.

    Raises:
        InvalidConfig: the file cannot be read, or has no text in it.
    """
    try:
        opened = lz4.frame.open(path, "rt", encoding="utf-8") if path.suffix == ".lz4" else path.open(encoding="utf-8")
        with opened as file:
            lines = [text for line in file if (text := line.strip())]
    except (OSError, EOFError, RuntimeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise InvalidConfig(f"{path}: no texts in it")
    return lines if count is None else list(itertools.islice(itertools.cycle(lines), count))


Progress = Callable[[int], None]  # called with the number of texts finished since the last call


@dataclass(slots=True)
class Outcome:
    """Counts of succeeded and failed texts, latencies of answered requests (ms), and failure messages."""

    requests: int = 0
    successful: int = 0
    failed: int = 0
    duration_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


async def standard(
    channel: GrpcChannel, instance: str, texts: Sequence[str], concurrency: int, timeout_s: float, progress: Progress
) -> Outcome:
    """One unary `Embed` per text over one connection, `concurrency` of them at a time."""
    outcome = Outcome(requests=len(texts))
    waiting = iter(texts)

    async def work() -> None:
        for text in waiting:
            request = embed_request(text, {"instance": instance})
            began = time.perf_counter()
            try:
                vector(await channel.unary("Embed", request, timeout_s))
            except TeimgrError as error:
                outcome.failed += 1
                outcome.reasons[error.message] += 1
            else:
                outcome.latencies_ms.append((time.perf_counter() - began) * 1e3)
                outcome.successful += 1
            progress(1)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(texts))):
            group.create_task(work())
    outcome.duration_s = time.perf_counter() - began
    return outcome


async def arrow(
    channel: GrpcChannel,
    options: ArrowOptions,
    texts: Sequence[str],
    batch_rows: int,
    timeout_s: float,
    progress: Progress,
) -> Outcome:
    """`EmbedArrow` of `batch_rows` texts, LZ4 in the request, one call after the other.

    Raises:
        Internal: a reply is no Arrow stream of vectors.
    """
    outcome = Outcome()
    began = time.perf_counter()
    for piece in slices(texts, batch_rows):
        request = arrow_request(pack_texts(piece, "lz4"), options)
        outcome.requests += 1
        sent = time.perf_counter()
        try:
            reply = await channel.unary("EmbedArrow", request, timeout_s)
        except TeimgrError as error:
            outcome.failed += len(piece)
            outcome.reasons[error.message] += 1
        else:
            outcome.latencies_ms.append((time.perf_counter() - sent) * 1e3)
            _count(outcome, reply, len(piece))
        progress(len(piece))
    outcome.duration_s = time.perf_counter() - began
    return outcome


def _count(outcome: Outcome, reply: bytes, rows: int) -> None:
    """Rows with a vector succeeded; rows with a reason, and rows that did not come back, failed."""
    embedded = unpack_vectors(reply)
    if len(embedded.vectors) > rows:
        raise Internal(f"the server answered {len(embedded.vectors)} rows for {rows} texts")
    successful = len(embedded.vectors) - len(embedded.errors)
    outcome.successful += successful
    outcome.failed += rows - successful
    outcome.reasons.update(embedded.errors.values())
    outcome.reasons.update({"no row in the reply": rows - len(embedded.vectors)})
    outcome.reasons += Counter()  # drops what was counted zero times
