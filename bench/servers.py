"""`bench servers`: the daemon beside the servers of its peers, same model and texts, over HTTP, taking turns.

A peer takes part when the path of its program is given. One that does not start, or ends, is left out and named in the
result, with the end of its log.
"""

from __future__ import annotations

import argparse
import base64
import json
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import corpus, weights
from bench.contest import Child, ChildFailed, child
from bench.fleet import fleet
from bench.front import INSTANCE, arrow_request, embed_request
from bench.machine import busy_s
from bench.peer_servers import (
    ARROW,
    BASE64,
    BATCH_TEXTS,
    FLOAT,
    MUX,
    ONE,
    PEERS,
    PROGRAMS,
    NotStarted,
    Server,
    cosines,
    launched,
    openai_body,
    own_server,
)
from bench.progress import partial, rounds, say
from bench.report import publish

HEADER = (
    *("load", "callers", "peer", "× median", "least", "most", "texts/s", "peer's", "p50 ms", "peer's"),
    *("p99 ms", "peer's", "CPU µs", "peer's", "lowest cosine", "foreign cores"),
)
OWN = "teimgr"
_BATCH_CALLERS = 8
_BATCHES = 16
_WORDS = 130  # of a text in bulk at most
_SAMPLE = 32  # texts of each kind for the cosines
_BULK = (FLOAT, BASE64, ARROW)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    for option, program in PROGRAMS.items():
        tried = "; not tried yet" if option == "vllm" else ""
        parser.add_argument(f"--{option}", type=Path, metavar="PATH", help=f"the program {program}{tried}")
        parser.add_argument(f"--{option}-arguments", default="", metavar="'...'", help="further arguments of it")
    parser.add_argument("--only", nargs="+", choices=tuple(PEERS), metavar="PEER", help="of: " + "; ".join(PEERS))
    parser.add_argument("--model", type=Path, metavar="DIR", help="another model than all-MiniLM-L6-v2")
    parser.add_argument("--dtype", help="of teimgr (its own choice)")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 64], help="of single texts (1 8 64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, with every load once in each (3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one load of single texts (2)")
    parser.add_argument("--bulk-seconds", type=float, default=3.0, help="of one load in bulk (3)")
    parser.add_argument("--start-seconds", type=float, default=120.0, help="until a peer has given vectors (120)")


@dataclass(frozen=True)
class Load:
    """One kind of call at one number of callers."""

    name: str
    callers: int

    @property
    def texts(self) -> int:
        return BATCH_TEXTS if self.name in _BULK else 1


@dataclass
class Found:
    """What was measured: passes by server and load and then by round, what failed, and peers that did not start."""

    passes: dict[tuple[str, Load], dict[int, dict[str, float]]] = field(default_factory=dict)
    failures: dict[tuple[str, Load], str] = field(default_factory=dict)
    not_started: dict[str, str] = field(default_factory=dict)
    cosine: dict[str, float] = field(default_factory=dict)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    peers = [name for name, peer in PEERS.items() if _value(options, peer.option) and name in (options.only or PEERS)]
    if not peers:
        say("the program of no peer is given, for example --infinity PATH")
        return 2
    model = options.model or weights.minilm()
    short, mixed = corpus.queries(2048), _mixed()
    singles = [Load(name, callers) for callers in options.callers for name in (ONE, MUX)]
    loads = [*singles, *(Load(name, _BATCH_CALLERS) for name in _BULK)]
    found = Found()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True)))
        running = stack.enter_context(fleet())
        running.client.create(INSTANCE, str(model), **({"dtype": options.dtype} if options.dtype else {}))
        running.client.wait_until_running(INSTANCE, deadline_s=120)
        sample = [*short[:_SAMPLE], *mixed[:_SAMPLE]]
        servers = {OWN: own_server(running, sample)}
        servers |= _started(peers, options, model, folder, sample, stack, found)
        dtype = running.client.get(INSTANCE).dtype
        found.cosine = {
            name: float(cosines(server.vectors, servers[OWN].vectors).min()) for name, server in servers.items()
        }
        wanted = [load for load in loads if any(_counterpart(load, servers[name]) for name in servers if name != OWN)]
        callers = _Callers(stack, servers, _bodies(folder, short, mixed))
        with partial():
            for number in rounds(options.rounds if wanted else 0):
                for load in wanted:
                    for name in (name for name, server in servers.items() if load.name in server.tasks):
                        seconds = options.bulk_seconds if load.name in _BULK else options.seconds
                        _measure(callers, name, load, seconds, number, found)
    records = list(_records(found, servers, wanted))
    if wanted and not records and not found.failures:
        raise KeyboardInterrupt
    facts = {
        "model": f"{options.model.name if options.model else 'all-MiniLM-L6-v2'}, one replica of teimgr in {dtype}; "
        "precision of peers as their arguments are",
        "texts": f"{len(short)} of 4 to 14 words (digest {corpus.digest(short)}), one a call; × 64: of mixed length, "
        f"{_WORDS} words and the model's longest input at most (digest {corpus.digest(mixed)})",
        "method": f"{options.rounds} rounds, each load {options.seconds:g} s (× 64: {options.bulk_seconds:g} s) and "
        "until the last reply at each server, in turn, all of them running; medians; × is the texts per second of "
        f"teimgr over the peer's in the same round: median, least, most; {ARROW} is compared with the peer's "
        "base64, or float, where it has no Arrow",
        "columns": "CPU µs are those of the server's whole process tree per text; the lowest cosine is that of the "
        f"peer's vectors of {2 * _SAMPLE} texts with teimgr's; foreign cores is what neither the server nor the load "
        "generator used, other servers in this comparison included; the load generator shares the cores",
    }
    facts |= {f"arguments of {name}": _arguments(name, options) for name in peers if name in servers}
    facts |= {f"{name} did not start": reason for name, reason in found.not_started.items()}
    if found.failures:
        failed = (f"{name}, {load.name}, {load.callers}: {why}" for (name, load), why in found.failures.items())
        facts["failed"] = "; ".join(failed)
    publish("servers", facts, HEADER, [record["line"] for record in records], {"rows": records})
    return int(bool(found.failures))


def _started(
    peers: Sequence[str],
    options: argparse.Namespace,
    model: Path,
    folder: Path,
    sample: Sequence[str],
    stack: ExitStack,
    found: Found,
) -> dict[str, Server]:
    """The servers that started, all at the same time; one that does not is ended."""
    waits, servers = {}, {}
    for name in peers:
        say(f"starting {name}")
        option = PEERS[name].option
        further = shlex.split(_value(options, f"{'tei' if option == 'tei-manager' else option}_arguments"))
        own = stack.enter_context(ExitStack())
        try:
            start = launched(name, _value(options, option), further, model, folder, options.tei)
            waits[name] = own, own.enter_context(start)
        except OSError as error:
            found.not_started[name] = f"{error.strerror or error}"
    for name, (own, ready) in waits.items():
        try:
            servers[name] = ready(sample, options.start_seconds)
        except NotStarted as error:
            own.close()
            found.not_started[name] = str(error)
    for name, reason in found.not_started.items():
        say(f"LEFT OUT, {name}: {reason}")
    return servers


class _Callers:
    """The load generators, one for each load of each server."""

    def __init__(self, stack: ExitStack, servers: dict[str, Server], bodies: dict[str, Path]) -> None:
        self._stack, self._servers, self._bodies = stack, servers, bodies
        self._children: dict[tuple[str, str], Child] = {}

    def run(self, name: str, load: Load, seconds: float) -> dict[str, float]:
        """One load at one server, with the CPU time of the server and of others."""
        key, server = (name, load.name), self._servers[name]
        if key not in self._children:
            self._children[key] = self._stack.enter_context(child(server.tasks[load.name]))
            self._children[key].ask("requests", str(self._bodies[load.name]))
        used_s, busy, began = server.cpu_s(), busy_s(), time.perf_counter()
        found = self._children[key].ask("run", {"callers": load.callers, "seconds": seconds, "whole": True})
        used_s, busy, wall_s = server.cpu_s() - used_s, busy_s() - busy, time.perf_counter() - began
        foreign_cores = max(0.0, busy - used_s - found["cpu_seconds"]) / wall_s
        return found | {"server_cpu_s": used_s, "foreign_cores": foreign_cores}


def _measure(callers: _Callers, name: str, load: Load, seconds: float, number: int, found: Found) -> None:
    """One load at one server; one that fails is not tried again."""
    if (name, load) in found.failures:
        return
    what = f"  {name}, {load.name}, {load.callers} callers"
    try:
        answer = callers.run(name, load, seconds)
    except (ChildFailed, OSError) as error:
        found.failures[name, load] = str(error)
        say(f"{what}: FAILED: {error}")
        return
    found.passes.setdefault((name, load), {})[number] = answer
    say(f"{what}: {_rate(answer, load):,.1f} texts/s")


def _records(found: Found, servers: dict[str, Server], loads: Sequence[Load]) -> Iterator[dict[str, Any]]:
    """A line for each load and each peer that was measured with it, or with its counterpart."""
    for load in loads:
        for peer in (name for name in servers if name != OWN):
            other = _counterpart(load, servers[peer])
            ours, theirs = found.passes.get((OWN, load)), other and found.passes.get((peer, other))
            if other and ours and theirs and ours.keys() & theirs.keys():
                yield _record(load, other, peer, ours, theirs, found.cosine[peer])


def _record(
    load: Load,
    other: Load,
    peer: str,
    ours: dict[int, dict[str, float]],
    theirs: dict[int, dict[str, float]],
    cosine: float,
) -> dict[str, Any]:
    """One load at teimgr and at one peer: its line of the table, and the passes."""
    both = sorted(ours.keys() & theirs.keys())  # an interrupted round has not all
    pairs = [(ours[number], theirs[number]) for number in both]
    times = [_rate(own, load) / _rate(their, other) for own, their in pairs]
    figures = [
        median(figure(one, load) for one in passes)
        for figure in (
            _rate,
            lambda each, _: each["p50_ms"],
            lambda each, _: each["p99_ms"],
            lambda each, load: each["server_cpu_s"] / each["all_calls"] / load.texts * 1e6,
        )
        for passes in zip(*pairs, strict=True)
    ]
    name = load.name if other.name == load.name else f"{load.name} ÷ {other.name}"
    foreign = median(each["foreign_cores"] for pair in pairs for each in pair)
    line = [name, load.callers, peer, median(times), min(times), max(times), *figures, f"{cosine:.5f}", foreign]
    own, their = ([pair[at] for pair in pairs] for at in (0, 1))
    summary = {"times": median(times), "least": min(times), "most": max(times), "lowest_cosine": cosine}
    return {"load": name, "callers": load.callers, "peer": peer, **summary, "line": line, "own": own, "theirs": their}


def _counterpart(load: Load, server: Server) -> Load | None:
    """The load of a peer that one of teimgr is compared with, None where the peer has none."""
    names = (ARROW, BASE64, FLOAT) if load.name == ARROW else (load.name,)
    return next((Load(name, load.callers) for name in names if name in server.tasks), None)


def _rate(found: dict[str, float], load: Load) -> float:
    return found["calls"] * load.texts / found["seconds"]


def _mixed() -> list[str]:
    """Texts of mixed length that MiniLM takes whole, so that no server cuts one or refuses it."""
    from tokenizers import Tokenizer

    texts = [" ".join(text.split()[:_WORDS]) for text in corpus.corpus(2 * _BATCHES * BATCH_TEXTS)]
    model = weights.minilm()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    longest = weights.longest_input(model)
    fitting = (text for text, row in zip(texts, tokenizer.encode_batch(texts), strict=True) if len(row.ids) <= longest)
    return [text for text, _ in zip(fitting, range(_BATCHES * BATCH_TEXTS), strict=False)]


def _bodies(folder: Path, short: Sequence[str], mixed: Sequence[str]) -> dict[str, Path]:
    """A file with the requests of every load, for `bench.load`."""
    batches = [mixed[start : start + BATCH_TEXTS] for start in range(0, len(mixed), BATCH_TEXTS)]
    bodies = {
        ONE: [openai_body(text) for text in short],
        MUX: [embed_request(text) for text in short],
        FLOAT: [openai_body(batch) for batch in batches],
        BASE64: [openai_body(batch, "base64") for batch in batches],
        ARROW: [arrow_request(batch) for batch in batches],
    }
    files = {}
    for at, (load, requests) in enumerate(bodies.items()):
        files[load] = folder / f"{at}.json"
        files[load].write_text(json.dumps([base64.b64encode(body).decode() for body in requests]))
    return files


def _arguments(peer: str, options: argparse.Namespace) -> str:
    return " ".join((*PEERS[peer].arguments, _value(options, f"{PEERS[peer].option}_arguments"))).strip()


def _value(options: argparse.Namespace, option: str) -> Any:
    return getattr(options, option.replace("-", "_"))
