"""`bench guard`: ratios that must not fall below those of `bounds.json`, for the gate; never times.

Both sides of a ratio do the same work in turn, on one thread, and the processor time of the cheapest pass counts: what
else runs on the machine hardly changes it. What falls below its bound is measured once more.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from bench import corpus, weights
from bench.bare_server import bare_server
from bench.contest import child
from bench.encoders import Bare, SentenceTransformers, Task
from bench.fleet import Fleet, fleet
from bench.forward import forward, load, packed
from bench.front import Load, Target
from bench.load import LoadTask
from bench.machine import cpu_s, vendor
from bench.progress import limit_passed, say
from bench.report import markdown_table
from teimgr.engine.backbone import Batching
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.native_library import BFLOAT16_LEVEL, LEVELS, native_library
from teimgr.engine.text.tokenizer import TokenizeOptions

_BOUNDS = Path(__file__).with_name("bounds.json")
_TEXTS, _QUERIES = 24, 400
_CALLERS = 32
_LOAD_S = 1.0
# With fewer calls in a pass the machine is too busy to tell: what the processes do by themselves would be counted.
_MIN_CALLS = 400
_SHORT_CALLERS, _SHORT_PASSES, _SHORT_S = 64, 3, 1.5
# Of a call that is answered by a model: so many calls of a bare server, to have ratios near 1.
_BARE_CALLS = 10
_SERVED = {
    "/embed of a look-up table": "/embed",
    "/v1/embeddings of a look-up table": "/v1/embeddings",
    "Embed of a look-up table": "mux Embed",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rounds", type=int, default=2, help="passes of each path, in turn (2)")


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 where a ratio is below its bound twice."""
    bounds = bounds_here()
    texts = corpus.some(_QUERIES)
    found: dict[str, float] = {}
    missing = "not measured: this machine has no such instructions, or slow ones, or is too busy"
    try:
        for group in (_engine, _servers):
            ratios = group(texts, options.rounds)
            if below(ratios, bounds):
                say("below a bound; once more")
                again = group(texts, options.rounds)
                ratios = {name: max(ratio, again.get(name, ratio)) for name, ratio in ratios.items()}
            found |= ratios
    except KeyboardInterrupt:
        if not limit_passed():
            raise
        missing = "NOT MEASURED in time"  # a machine that is too slow for the rest is no regression
    worse = below(found, bounds)
    rows = [[name, ratio, bounds[name], "below" if name in worse else ""] for name, ratio in found.items()]
    rows += [[name, None, bound, missing] for name, bound in bounds.items() if name not in found]
    print(markdown_table(("ratio", "measured", "at least", ""), rows))
    for name in worse:
        print(f"BELOW ITS BOUND: {name}: {found[name]:.3f}, at least {bounds[name]:g}")
    return int(bool(worse))


def bounds_here() -> dict[str, float]:
    """The least ratios by name: those of any machine, and in their place those of this one's instruction set."""
    library, by_level = native_library(), json.loads(_BOUNDS.read_text())
    own = by_level.get(LEVELS[library.level], {}) if library is not None else {}
    return {**by_level["any"], **own}


def halves_bfloat16(level: str, vendor: str) -> bool:
    """Whether a CPU without tiles multiplies bfloat16 at half the rate of float32, as Intel's do: one unit has it."""
    return vendor == "GenuineIntel" and level != "amx"


def below(found: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """The names of those that are below their bounds."""
    return [name for name, ratio in found.items() if ratio < bounds[name]]


def cheapest_s(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The processor time of each way's cheapest pass, in seconds; they take turns, the first pass does not count."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.process_time()
            way()
            spent[name].append(time.process_time() - began)
    return {name: min(each[1:]) for name, each in spent.items()}


def _engine(texts: Sequence[str], rounds: int) -> dict[str, float]:
    """The engine in this process against sentence-transformers, and its native parts against what they replace."""
    say("the engine")
    model, bulk, queries = str(weights.minilm()), list(texts[:_TEXTS]), [_query(text) for text in texts]
    bare, peer = (
        Bare(Task("engine", model, threads=1)),
        SentenceTransformers(Task("sentence-transformers", model, batch_size=8)),
    )
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], object]] = {"engine": lambda: bare.encode(bulk), "peer": lambda: peer.encode(bulk)}
    pairs = {"engine against sentence-transformers, bulk": ("engine", "peer")}
    library = native_library()
    if library is not None:
        native, own = load("float32", 1, ""), load("float32", 1, "attention")
        options = TokenizeOptions()
        encoded = [each for each in native.tokenizer.encode(bulk, options) if isinstance(each, Encoded)]
        query = [each for each in native.tokenizer.encode(queries[:1], options) if isinstance(each, Encoded)]
        ways |= {
            "native": forward(native.model, packed(encoded)),
            "own": forward(own.model, packed(encoded), Batching.VARLEN),
            "native, one": _times(20, forward(native.model, packed(query))),
            "own, one": _times(20, forward(own.model, packed(query), Batching.VARLEN)),
            "wordpiece": _times(4, lambda: native.tokenizer.encode(queries, options)),
            "tokenizers": _times(4, lambda: own.tokenizer.encode(queries, options)),
        }
        pairs |= {
            "native forward against the model's own, bulk": ("native", "own"),
            "native forward against the model's own, one query": ("native, one", "own, one"),
            "native WordPiece against the tokenizers library": ("wordpiece", "tokenizers"),
        }
        if library.level >= BFLOAT16_LEVEL:
            ways["bfloat16"] = forward(load("bfloat16", 1, "").model, packed(encoded))
            if not halves_bfloat16(LEVELS[library.level], vendor()):
                pairs["bfloat16 against float32, bulk"] = ("bfloat16", "native")
        if library.byte_sum_bits(library.level):
            other, path = ("bfloat16", "bfloat16") if "bfloat16" in ways else ("float32", "native")
            ways["int8"] = forward(load("int8", 1, "").model, packed(encoded))
            pairs[f"int8 against {other}, bulk"] = ("int8", path)
        torch.set_num_threads(1)
    with torch.inference_mode():
        spent = cheapest_s(ways, rounds)
    bare.close()
    return {name: spent[theirs] / spent[ours] for name, (ours, theirs) in pairs.items()}


def _servers(texts: Sequence[str], rounds: int) -> dict[str, float]:
    """What serving adds to the engine in bulk, and what calls cost the servers beside those of a bare one."""
    say("the servers")
    model, bulk, queries = str(weights.minilm()), list(texts[: 2 * _TEXTS]), [_query(text) for text in texts]
    with ExitStack() as open_:
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory()))
        running = open_.enter_context(fleet())
        static = weights.random_static(folder / "static", weights.minilm())
        target = Target(open_, running, static, queries, len(queries), folder / "requests")
        port, pid = open_.enter_context(bare_server())
        caller = open_.enter_context(child(LoadTask("http", port, "/")))
        caller.ask("requests", str(target.requests("/v1/embeddings")))
        costs: dict[str, list[float]] = {}
        for _ in range(max(2, rounds // 2)):
            began = cpu_s(pid)
            calls = caller.ask("run", {"callers": _CALLERS, "seconds": _LOAD_S})["all_calls"]
            costs.setdefault("bare", []).append((cpu_s(pid) - began) / calls)
            for load_name in _SERVED.values():
                answer = target.measure(Load(load_name, _CALLERS), _LOAD_S)
                spent_s = sum(answer[f"{process}_cpu_s"] for process in ("daemon", "mux", "worker"))
                if answer["all_calls"] >= _MIN_CALLS:
                    costs.setdefault(load_name, []).append(spent_s / answer["all_calls"])
                else:
                    say(f"  {load_name}: only {answer['all_calls']:.0f} calls, which does not count")
        running.client.create("guard", model, dtype="float32", threads=1)
        running.client.wait_until_running("guard", deadline_s=120)
        engine = Bare(Task("engine", model, threads=1))

        served_s = []
        for _ in range(rounds + 1):
            began = running.cpu_s()
            running.client.embed_arrow(bulk, instance="guard").checked()
            served_s.append(running.cpu_s() - began)
        engine_s = cheapest_s({"engine": lambda: engine.encode(bulk)}, rounds)["engine"]
        short = _one_a_call(open_, running, target, engine, queries)
        engine.close()
    cheapest = {name: min(each) for name, each in costs.items()}
    against_bare = {
        f"{name} against {_BARE_CALLS} of a bare server": _BARE_CALLS * cheapest["bare"] / cheapest[load_name]
        for name, load_name in _SERVED.items()
        if load_name in cheapest
    }
    return against_bare | short | {"EmbedArrow against the engine, bulk": engine_s / min(served_s[1:])}


def _one_a_call(
    open_: ExitStack, running: Fleet, target: Target, engine: Bare, queries: Sequence[str]
) -> dict[str, float]:
    """What short texts cost the engine in batches, against one a call of many callers through the worker's port."""
    caller = open_.enter_context(child(LoadTask("http", running.client.get("guard").port, "/embed")))
    bodies = (json.dumps({"inputs": text}).encode() for text in queries)
    caller.ask("requests", str(target.texts([base64.b64encode(body).decode() for body in bodies])))
    batches = [list(queries[at : at + _SHORT_CALLERS]) for at in range(0, len(queries), _SHORT_CALLERS)]
    served: list[float] = []
    for _ in range(_SHORT_PASSES + 1):
        began = running.cpu_s()
        answer = caller.ask("run", {"callers": _SHORT_CALLERS, "seconds": _SHORT_S})
        served.append((running.cpu_s() - began) / answer["all_calls"])
    ways = {"engine": lambda: [engine.encode(batch) for batch in batches]}
    text_s = cheapest_s(ways, _SHORT_PASSES)["engine"] / len(queries)
    return {"one text a call, 64 callers, against the engine": text_s / min(served[1:])}


def _query(text: str) -> str:
    return " ".join(text.split()[:8])


def _times(count: int, way: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            way()

    return repeated
