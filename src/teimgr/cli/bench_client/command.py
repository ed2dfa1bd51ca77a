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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import uvloop
from google.protobuf.message import DecodeError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from teimgr.cli.output import say
from teimgr.client.checks import check_text
from teimgr.client.connection import ConnectionValues, DaemonConnection
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
from teimgr.errors import Internal, InvalidConfig, Overloaded, TeimgrError
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

_CONNECT_S = 20.0
_DEFAULT_TEXTS = 10_000
_NAMED_REASONS = 5
_QUERY = "How does semantic search find a passage?"


@dataclass(frozen=True, slots=True)
class Load:
    """Load for `instance`: `count` texts (None: all of the file, or 10,000 generated ones), `timeout_s` per call."""

    instance: str
    mode: str = "standard"
    count: int | None = None
    batch_size: int = 100
    file: Path | None = None
    noop: bool = False
    normalize: bool = True
    max_message_bytes: int = 100 * 1024 * 1024
    timeout_s: float = 120.0
    tried_first: bool = False  # send the first text alone, and stop if it fails


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 0 if every text got its vector, 1 after any failure, 2 for wrong arguments."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    name = "localhost" if arguments.insecure else None
    flags = ConnectionValues(
        grpc_url=arguments.endpoint,
        api_key=arguments.api_key,
        api_key_file=arguments.api_key_file,
        **{key: str(path) for key in ("ca", "cert", "key") if (path := getattr(arguments, key)) is not None},
    )
    load = Load(
        arguments.instance,
        arguments.mode,
        arguments.num_texts,
        arguments.batch_size,
        arguments.texts,
        arguments.noop,
        not arguments.no_normalize,
        arguments.max_message_size_mb * 1024 * 1024,
        arguments.timeout_secs,
    )
    try:
        connection = DaemonConnection.resolve(flags, context=arguments.context)
        named = (
            ("-e/--endpoint (or TEIMGR_URL, or a context)", not connection.is_default),
            ("-i/--instance", load.instance is not None),
        )
        if missing := [name for name, given in named if not given]:
            parser.error(f"the following arguments are required: {', '.join(missing)}")
        tls = replace(connection.tls, server_name=name or connection.tls.server_name)
        return run_load(load, connection.grpc(), tls, connection.api_key)
    except TeimgrError as error:
        say(f"bench-client: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("bench-client: interrupted", file=sys.stderr)
        return 130


def run_load(load: Load, endpoint: str, tls: Tls, api_key: str | None = None) -> int:
    """Put the load on the mux at `endpoint` and print the result; the exit status is that of `main`.

    Raises:
        TeimgrError: no connection, or the first text alone, sent before the others, fails.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(load, endpoint, tls, api_key))


async def _run(load: Load, endpoint: str, tls: Tls, api_key: str | None) -> int:
    check_text("instance", load.instance)
    if load.noop and load.mode != "arrow":
        print(f"bench-client: --noop has no effect in {load.mode} mode: the model runs", file=sys.stderr)
    texts = file_texts(load.file, load.count) if load.file else made_texts(load.count or _DEFAULT_TEXTS)
    channel = GrpcChannel(ServerAddress.parse(endpoint), tls, load.max_message_bytes, api_key)
    await channel.open()
    try:
        await channel.connect(_CONNECT_S)
        if load.tried_first:
            tried = await _MODES[load.mode](channel, load, texts[:1], lambda count: None)
            if tried.error is not None and not isinstance(tried.error, Overloaded):  # all others would fail too
                raise tried.error
        with _progress(len(texts), f"{load.mode} {load.instance}") as progress:
            outcome = await _MODES[load.mode](channel, load, texts, progress)
    finally:
        await channel.close()
    print(json.dumps(_result(load, len(texts), outcome), indent=2))
    for reason, times in outcome.reasons.most_common(_NAMED_REASONS):
        say(f"bench-client: {times} × {' '.join(reason.split())}", file=sys.stderr)
    return 1 if outcome.failed else 0


def _result(load: Load, texts: int, outcome: Outcome) -> dict[str, Any]:
    return {
        "mode": load.mode,
        "instance_name": load.instance,
        "num_texts": texts,
        "batch_size": load.batch_size,
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
    add(
        "-e",
        "--endpoint",
        metavar="URL",
        help="http://host:port, https:// for TLS, or unix:/path; else TEIMGR_URL or a context",
    )
    add("-i", "--instance", metavar="NAME", help="the instance to load")
    modes = "unary Embed calls, EmbedArrow, or Rerank of batches"
    add("-m", "--mode", choices=("standard", "arrow", "rerank"), default="standard", help=modes)
    add("-n", "--num-texts", type=_positive, metavar="N", help="texts to send (10000; with --texts: all its lines)")
    add(
        "-b", "--batch-size", type=_positive, default=100, metavar="N", help="calls in flight, or texts per batch (100)"
    )
    add(
        "--texts",
        type=Path,
        metavar="FILE",
        help="send the lines of this file, plain or .lz4, instead of generated texts",
    )
    add("--cert", type=Path, metavar="PATH", help="client certificate, PEM")
    add("--key", type=Path, metavar="PATH", help="its private key, PEM")
    add("--ca", type=Path, metavar="PATH", help="certificate authority of the server, PEM")
    add("--api-key", metavar="KEY", help="API key; TEIMGR_API_KEY and --api-key-file keep it out of the process list")
    add("--api-key-file", metavar="PATH", help="file of the API key")
    add("--context", metavar="NAME", help="named connection of `teimgr context`")
    add(
        "--insecure",
        action="store_true",
        help="expect the server's certificate to name localhost; it is still verified",
    )
    add("--noop", action="store_true", help="arrow mode: replies of zeros, without running the model")
    add("--no-normalize", action="store_true", help="unnormalized vectors, for models without normalization")
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
    error: TeimgrError | None = None  # of the last failed call

    def fail(self, texts: int, error: TeimgrError) -> None:
        """Count the texts of a call that failed."""
        self.failed += texts
        self.reasons[error.message] += 1
        self.error = error


async def standard(channel: GrpcChannel, load: Load, texts: Sequence[str], progress: Progress) -> Outcome:
    """One unary `Embed` per text over one connection, `load.batch_size` of them at a time."""
    outcome = Outcome(requests=len(texts))
    waiting = iter(texts)

    async def work() -> None:
        for text in waiting:
            request = embed_request(text, {"instance": load.instance, "normalize": load.normalize})
            began = time.perf_counter()
            try:
                vector(await channel.unary("Embed", request, load.timeout_s))
            except TeimgrError as error:
                outcome.fail(1, error)
            else:
                outcome.latencies_ms.append((time.perf_counter() - began) * 1e3)
                outcome.successful += 1
            progress(1)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.batch_size, len(texts))):
            group.create_task(work())
    outcome.duration_s = time.perf_counter() - began
    return outcome


async def arrow(channel: GrpcChannel, load: Load, texts: Sequence[str], progress: Progress) -> Outcome:
    """`EmbedArrow` of `load.batch_size` texts, LZ4 in the request, one call after the other.

    Raises:
        Internal: a reply is no Arrow stream of vectors.
    """
    options: ArrowOptions = {"instance": load.instance, "noop": load.noop, "normalize": load.normalize}

    def request(piece: Any) -> bytes:
        return arrow_request(pack_texts(piece, "lz4"), options)

    return await _batches(channel, "EmbedArrow", load, texts, request, _count, progress)


async def rerank(channel: GrpcChannel, load: Load, texts: Sequence[str], progress: Progress) -> Outcome:
    """`Rerank` of `load.batch_size` texts for one query, one call after the other.

    Raises:
        Internal: a reply is not a list of ranks.
    """

    def request(piece: Any) -> bytes:
        inner = tei_pb2.RerankRequest(query=_QUERY, texts=piece, truncate=True)
        target = mux_pb2.Target(instance_name=load.instance)
        return mux_pb2.RerankRequest(target=target, request=inner).SerializeToString()

    return await _batches(channel, "Rerank", load, texts, request, _count_ranks, progress)


_MODES: dict[str, Callable[[GrpcChannel, Load, Sequence[str], Progress], Coroutine[Any, Any, Outcome]]] = {
    "standard": standard,
    "arrow": arrow,
    "rerank": rerank,
}


async def _batches(
    channel: GrpcChannel,
    method: str,
    load: Load,
    texts: Sequence[str],
    request: Callable[[Any], bytes],
    count: Callable[[Outcome, bytes, int], None],
    progress: Progress,
) -> Outcome:
    """One unary call per batch, one after the other; `count` adds a reply to the outcome."""
    outcome = Outcome()
    began = time.perf_counter()
    for piece in slices(texts, load.batch_size):
        message = request(piece)
        outcome.requests += 1
        sent = time.perf_counter()
        try:
            reply = await channel.unary(method, message, load.timeout_s)
        except TeimgrError as error:
            outcome.fail(len(piece), error)
        else:
            outcome.latencies_ms.append((time.perf_counter() - sent) * 1e3)
            count(outcome, reply, len(piece))
        progress(len(piece))
    outcome.duration_s = time.perf_counter() - began
    return outcome


def _count_ranks(outcome: Outcome, reply: bytes, rows: int) -> None:
    try:
        ranked = len(tei_pb2.RerankResponse.FromString(reply).ranks)
    except DecodeError as error:
        raise Internal(f"the reply is not a list of ranks: {error}") from error
    outcome.successful += min(ranked, rows)
    outcome.failed += rows - min(ranked, rows)
    outcome.reasons.update({"no rank in the reply": rows - min(ranked, rows)})
    outcome.reasons += Counter()


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
