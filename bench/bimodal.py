"""`bench bimodal`: queries at a fixed rate beside a bulk job that saturates the instance; what each costs the other.

With `--tei PATH`, the program of text-embeddings-inference, both servers are measured over /v1/embeddings too, with the
same queries and bulk calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import orjson

from bench import corpus, weights
from bench.contest import Child, child
from bench.encoders import Task
from bench.fleet import fleet
from bench.front import INSTANCE as _INSTANCE
from bench.peer_servers import ONE, PEERS, launched, openai_body
from bench.progress import partial as kept_so_far
from bench.progress import rounds, say
from bench.report import publish
from teimgr.client import AsyncClient

HEADER = (
    *("checkout", "bulk texts/s alone", "beside queries", "bulk lost %", "least", "most"),
    *("idle p50 ms", "idle p99 ms", "beside p50 ms", "beside p99 ms", "p99 − 2 × idle p99 ms", "in bulk tokens"),
)
_JSON = {"content-type": "application/json"}
_WORDS = 130  # of a text in bulk at most, so that no server cuts one
# Until a query has come, bulk batches are large: the first second of a phase is no steady state.
_WARM_S = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rate", type=float, default=20.0, help="queries a second (20)")
    parser.add_argument("--idle", type=float, default=6.0, help="seconds of queries without bulk, in a round (6)")
    parser.add_argument("--texts", type=int, default=1000, help="of a bulk pass, of mixed lengths (1000)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of idle, alone and beside (4)")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, measured in turns")
    parser.add_argument("--tei", type=Path, metavar="PATH", help="the program text-embeddings-router, over HTTP")
    parser.add_argument("--tei-arguments", default="", metavar="'...'", help="further arguments of it")
    parser.add_argument("--start-seconds", type=float, default=120.0, help="until it has given vectors (120)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="another model than all-MiniLM-L6-v2")
    parser.add_argument("--dtype", help="of teimgr (its own choice)")


@dataclass
class Found:
    """Of one checkout: latencies in ms of all rounds, and of each round the rates of bulk in texts/s."""

    idle_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    texts, queries = [" ".join(text.split()[:_WORDS]) for text in corpus.corpus(options.texts)], corpus.queries(1000)
    tokens = weights.count_tokens(weights.minilm(), texts) / len(texts)
    checkouts = {"here": None} | ({"against": options.against} if options.against else {})
    with ExitStack() as open_:
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True)))
        file = folder / "texts.json"
        file.write_text(json.dumps(texts))
        targets: dict[str, Target] = {}
        for name, path in checkouts.items():
            targets |= open_.enter_context(_served(name, path, file, options))
        if options.tei:
            targets["tei, HTTP"] = open_.enter_context(_tei(folder, file, options))
        found = {name: Found() for name in targets}
        with kept_so_far():
            for number in rounds(options.rounds):
                for name, target in targets.items():
                    measure_round(target, queries, options, found[name], alone_first=number % 2 == 1)
                    say(f"  {name}: {found[name].alone[-1]:.0f} and {found[name].beside[-1]:.0f} texts/s")
    records = [_record(name, each, tokens) for name, each in found.items() if each.beside]
    facts = {
        "model": f"{options.model.name if options.model else 'all-MiniLM-L6-v2'}, one instance",
        "queries": f"{options.rate:g} a second, one unary Embed each, of 4 to 14 words "
        f"(digest {corpus.digest(queries)}); a latency begins when the schedule names it, answered earlier ones or not",
        "bulk": f"{options.texts} texts of mixed length, {_WORDS} words at most, by EmbedArrow from another process, "
        f"two batches in flight, {tokens:.0f} tokens each; over HTTP four callers, each with 32 texts in a call",
        "method": f"{options.rounds} rounds of three phases: queries for {options.idle:g} s, bulk alone, both; the "
        "rate lost is that of a round: median, least, most; latencies are of all rounds, less a phase's first second",
        "target": "the p99 beside bulk is at most 2 × the idle p99 + one batch, and bulk loses less than 5 %; the last "
        "column is the part of p99 above 2 × idle, as the bulk tokens that are computed in that time",
    }
    if options.tei:
        facts["over HTTP"] = "queries and bulk go to /v1/embeddings; of both servers one at a time has calls"
        facts["arguments of tei"] = " ".join((*PEERS["tei"].arguments, options.tei_arguments)).strip()
    rows = [[record[key] for key in _KEYS] for record in records]
    publish("bimodal", facts, HEADER, rows, {"rows": records})
    return 0


_KEYS = (
    *("checkout", "alone_texts_per_s", "beside_texts_per_s", "lost", "lost_least", "lost_most"),
    *("idle_p50_ms", "idle_p99_ms", "beside_p50_ms", "beside_p99_ms", "over_ms", "over_tokens"),
)


@dataclass(frozen=True)
class Target:
    """Where queries go, the gRPC address of a daemon or the URL of /v1/embeddings, and a bulk caller. `is_late`: the
    model has a vector for each token."""

    address: str
    bulk: Child
    is_late: bool = False


@contextmanager
def _served(name: str, checkout: Path | None, file: Path, options: argparse.Namespace) -> Iterator[dict[str, Target]]:
    """A daemon, by gRPC, and over HTTP too where it is compared with TEI."""
    with fleet(checkout) as running:
        dtype = {"dtype": options.dtype} if options.dtype else {}
        running.client.create(_INSTANCE, str(options.model or weights.minilm()), **dtype)
        running.client.wait_until_running(_INSTANCE, deadline_s=120)
        with ExitStack() as open_:
            bulk = open_.enter_context(child(Task("served", grpc=running.grpc, instance=_INSTANCE)))
            bulk.ask("texts", str(file))
            targets = {name: Target(running.grpc, bulk)}
            if options.tei:
                targets[f"{name}, HTTP"] = open_.enter_context(_over_http(running.api_port, file))
            yield targets


@contextmanager
def _tei(folder: Path, file: Path, options: argparse.Namespace) -> Iterator[Target]:
    """Raises NotStarted: TEI gives no vectors in time."""
    model, further = options.model or weights.minilm(), shlex.split(options.tei_arguments)
    with launched("tei", options.tei, further, model, folder, None) as ready:
        server = ready(corpus.queries(2), options.start_seconds)
        with _over_http(server.tasks[ONE].port, file) as target:
            yield target


@contextmanager
def _over_http(port: int, file: Path) -> Iterator[Target]:
    with child(Task("openai-bulk", http=f"127.0.0.1:{port}", instance=_INSTANCE)) as bulk:
        bulk.ask("texts", str(file))
        yield Target(f"http://127.0.0.1:{port}{ONE}", bulk)


def measure_round(
    target: Target, queries: list[str], options: argparse.Namespace, found: Found, alone_first: bool
) -> None:
    """Add to `found` a round of `options.idle` seconds of queries, `options.rate` a second, and a pass of
    `options.texts` inputs in bulk, alone and beside them.
    """
    end = time.perf_counter() + options.idle
    idle, _ = asyncio.run(_paced(target, queries, options.rate, lambda: time.perf_counter() > end))
    alone_s = float(target.bulk.ask("pass")["seconds"]) if alone_first else 0.0
    beside, beside_s = asyncio.run(_paced(target, queries, options.rate, target.bulk))
    alone_s = alone_s or float(target.bulk.ask("pass")["seconds"])
    found.idle_ms += idle
    found.beside_ms += beside
    found.alone.append(options.texts / alone_s)
    found.beside.append(options.texts / beside_s)


@asynccontextmanager
async def _queries(target: Target) -> AsyncIterator[Callable[[str], Awaitable[object]]]:
    """A function that embeds a query."""
    address = target.address
    if not address.endswith(ONE):
        async with AsyncClient(grpc=address) as client:
            late = partial(client.embed_all, instance=_INSTANCE, prompt_name="query")
            yield late if target.is_late else partial(client.embed, instance=_INSTANCE)
        return
    async with aiohttp.ClientSession() as session:

        async def embed(text: str) -> object:
            async with session.post(address, data=openai_body(text), headers=_JSON) as reply:
                reply.raise_for_status()
                return orjson.loads(await reply.read())

        yield embed


async def _paced(
    target: Target, texts: list[str], rate: float, until: Callable[[], bool] | Child
) -> tuple[list[float], float]:
    """Latencies in ms of `rate` queries a second, each from the moment it was due, less those of the first second;
    until the function is true, or for as long as a pass of the bulk caller takes, which is begun here. The seconds of
    that pass are the second result.
    """
    samples: list[tuple[float, float]] = []
    async with _queries(target) as embed, asyncio.TaskGroup() as group:
        await embed(texts[0])
        bulk = asyncio.create_task(asyncio.to_thread(until.ask, "pass")) if isinstance(until, Child) else None
        began = time.perf_counter()

        async def one(text: str, due: float) -> None:
            await embed(text)
            samples.append((due - began, (time.perf_counter() - due) * 1e3))

        number = 0
        while not (until() if callable(until) else bulk and bulk.done()):
            number += 1
            due = began + number / rate
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(one(texts[number % len(texts)], due))
    seconds = float((await bulk)["seconds"]) if bulk else 0.0
    return [latency for at, latency in samples if at > _WARM_S], seconds


def _record(name: str, found: Found, tokens: float) -> dict[str, Any]:
    alone, beside = median(found.alone), median(found.beside)
    lost = [100 * (1 - with_ / without) for without, with_ in zip(found.alone, found.beside, strict=True)]
    idle_p50, idle_p99 = np.percentile(found.idle_ms, (50, 99)).tolist()
    beside_p50, beside_p99 = np.percentile(found.beside_ms, (50, 99)).tolist()
    over_ms = beside_p99 - 2 * idle_p99
    return {
        "checkout": name,
        "alone_texts_per_s": alone,
        "beside_texts_per_s": beside,
        "lost": median(lost),
        "lost_least": min(lost),
        "lost_most": max(lost),
        "idle_p50_ms": idle_p50,
        "idle_p99_ms": idle_p99,
        "beside_p50_ms": beside_p50,
        "beside_p99_ms": beside_p99,
        "over_ms": over_ms,
        "over_tokens": over_ms / 1e3 * alone * tokens,
        "samples": vars(found),
    }
