"""`bench ledger`: what the memory ledger expects of every kind of model, against what a worker of it really takes."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.fidelity.cases import CASES, Case

from bench import weights
from bench.progress import partial, say
from bench.report import publish
from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import WorkerStatus
from teimgr.control.launch.launcher import LocalLauncher, LocalOptions, WorkerHandle
from teimgr.control.ledger.footprints import Footprints
from teimgr.control.ledger.ledger import Footprint
from teimgr.control.placement.planner import worker_spec
from teimgr.control.registry.trial import TrialLink, _kind_of, _request
from teimgr.observability.memory import private_bytes, proc_sizes
from teimgr.spec import InstanceSpec, LoadedModel

HEADER = ("kind: model", "dtype", "predicted MiB", "measured MiB", "times", "loading: predicted", "measured", "holds")
_DTYPES = ("float32", "bfloat16", "int8")
_MOST = 1.25
_READY_S = 300.0
_CALL_S = 300.0
_LOOK_S = 0.002
_MIB = 2**20


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this scenario."""
    parser.add_argument("--only", default="", help="only cases whose kind or name has this in it")
    parser.add_argument("--dtype", nargs="+", choices=_DTYPES, default=list(_DTYPES), help="precisions (all)")
    parser.add_argument(
        "--measured",
        type=Path,
        help="take what workers took from this result (JSON) of the same models, and predict it anew: seconds",
    )
    parser.add_argument("--large", action="store_true", help="real sizes besides: MiniLM and random weights of others")


@dataclass(frozen=True)
class Reading:
    """One kind in one precision. Bytes of memory of the worker's own, without what it shares with the fork server."""

    kind: str
    model: str
    dtype: str
    predicted: Footprint
    loading: int
    after: int
    working: int

    @property
    def measured(self) -> int:
        """The most that the loaded worker took: idle, or in its largest batch."""
        return max(self.after, self.working)

    @property
    def times(self) -> float:
        return self.predicted.host_bytes / self.measured

    @property
    def is_enough(self) -> bool:
        return self.times >= 1 and self.predicted.peak_bytes >= self.loading


def run(options: argparse.Namespace) -> int:
    """Load every kind as a worker does, print, write; 1 where a prediction is below what was measured."""
    before = json.loads(options.measured.read_text()) if options.measured else None
    found, refused = _predicted_anew(before, options) if before else asyncio.run(_measured(options))
    low = [each for each in found if not each.is_enough]
    close = sum(each.times <= _MOST for each in found)
    facts = {
        "predicted": "by the heads of the files, before the first load; the margin is in it",
        "measured": "memory of the worker's own (private and dirty): the most of idle, after and in a full batch "
        "of the longest texts",
        "at least what is measured": f"{len(found) - len(low)} of {len(found)}",
        f"at most {_MOST} times it": f"{close} of {len(found)}",
        "not served": ", ".join(f"{count} {why}" for why, count in Counter(refused).most_common(8)) or "none",
    }
    if before is not None:
        facts["measured before"] = (
            f"{before['date']}, {before['facts'].get('measured before', 'by loading each model')}"
        )
    cases = {"cases": [_record(each) for each in found], "refused": refused}
    publish("ledger", facts, HEADER, [_line(each) for each in found], cases)
    return 1 if low or not found else 0


def _line(one: Reading) -> Sequence[Any]:
    sizes = [f"{size / _MIB:.1f}" for size in (one.predicted.host_bytes, one.measured)]
    loading = [f"{size / _MIB:.1f}" for size in (one.predicted.peak_bytes, one.loading)]
    return (
        f"{one.kind}: {one.model}",
        one.dtype,
        *sizes,
        f"{one.times:.2f}",
        *loading,
        "yes" if one.is_enough else "NO",
    )


def _record(one: Reading) -> dict[str, Any]:
    return asdict(one) | {"measured": one.measured, "times": round(one.times, 3)}


def _predicted_anew(before: dict[str, Any], options: argparse.Namespace) -> tuple[list[Reading], list[str]]:
    """The predictions of today for what workers took in an earlier run."""
    found: list[Reading] = []
    with tempfile.TemporaryDirectory(prefix="tl") as place:
        for kind, name, model, spec in _models(options, Path(place)):
            for case in before["cases"]:
                if (case["kind"], case["model"]) == (kind, name):
                    worker = worker_spec(replace(spec, model_id=str(model), dtype=case["dtype"]), Settings())
                    predicted = asyncio.run(Footprints().of(worker))
                    taken = (case["loading"], case["after"], case["working"])
                    found.append(Reading(kind, name, case["dtype"], predicted, *taken))
    return found, before.get("refused") or ["in int8"] * 121


async def _measured(options: argparse.Namespace) -> tuple[list[Reading], list[str]]:
    found: list[Reading] = []
    refused: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tl") as place:
        folder = Path(place)
        launcher = LocalLauncher(LocalOptions(run_dir=folder / "run", log_dir=folder / "logs"))
        await launcher.start()
        try:
            with partial():
                for kind, name, model, spec in _models(options, folder):
                    for dtype in options.dtype:
                        try:
                            reading = await _reading(launcher, replace(spec, model_id=str(model), dtype=dtype))
                        except _Refused as error:
                            refused.append(f"in {dtype}")
                            say(f"{kind}: {name}: {dtype}: {error}")
                            continue
                        found.append(Reading(kind, name, dtype, *reading))
                        say(" | ".join(map(str, _line(found[-1]))))
        finally:
            await launcher.close()
    return found, refused


def _models(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, Path, InstanceSpec]]:
    for number, case in enumerate(each for each in CASES if options.only in f"{each.row}: {each.name}"):
        yield case.row, case.name, case.make(folder / f"model-{number}"), _spec(case)
    if options.large:
        yield "real weights", "all-MiniLM-L6-v2", weights.minilm(), InstanceSpec(name="one", model_id="")


def _spec(case: Case) -> InstanceSpec:
    known = InstanceSpec.__dataclass_fields__
    given = {key: value for key, value in case.engine_options.items() if key in known}
    return InstanceSpec(name="one", model_id="", **given)


class _Refused(Exception):
    """The model is not served so."""


async def _reading(launcher: LocalLauncher, instance: InstanceSpec) -> tuple[Footprint, int, int, int]:
    """What the ledger expects, and what a worker takes: while it loads, after its batches, and in them."""
    spec = worker_spec(instance, Settings())
    footprints = Footprints()
    predicted = await footprints.of(spec)
    handle = await launcher.launch(spec)
    statuses: asyncio.Queue[WorkerStatus] = asyncio.Queue()
    try:
        with _most(handle) as loading:
            link = await TrialLink.open(handle.socket, statuses.put_nowait, lambda: None)
            info = await _ready(statuses)
            shared = _shared_bytes(handle)
        with _most(handle) as working:
            kind = _kind_of(info)
            words = "fog " * 2 * info.max_input_length
            texts = -(-spec.max_batch_tokens // max(1, info.max_input_length)) + 1
            for _ in range(2):
                calls = [_request(kind, words) for _ in range(min(texts, 64))]
                await asyncio.gather(*(link.call(*each, timeout_s=_CALL_S) for each in calls))
        await asyncio.sleep(0.05)
        after = private_bytes(await asyncio.to_thread(proc_sizes, handle.pid, "smaps_rollup")) or 0
        link.close()
    finally:
        await handle.stop(0)
    return predicted, max(loading) - shared, after, max(working) - shared


async def _ready(statuses: asyncio.Queue[WorkerStatus]) -> LoadedModel:
    try:
        async with asyncio.timeout(_READY_S):
            while True:
                status = await statuses.get()
                if status.state == "failed":
                    raise _Refused(status.reason)
                if status.state == "ready" and status.model is not None:
                    return status.model
    except TimeoutError:
        raise _Refused("it does not get ready") from None


def _shared_bytes(handle: WorkerHandle) -> int:
    """The part of its anonymous memory that is still shared with the fork server."""
    private = private_bytes(proc_sizes(handle.pid, "smaps_rollup")) or 0
    return max(0, _anonymous(handle.pid) - private)


def _anonymous(pid: int) -> int:
    return proc_sizes(pid, "status").get("RssAnon", 0)


@contextmanager
def _most(handle: WorkerHandle) -> Iterator[list[int]]:
    """Within the block the anonymous memory of the process is looked at all the time."""
    found, ended = [_anonymous(handle.pid)], threading.Event()

    def look() -> None:
        while not ended.is_set():
            found[0] = max(found[0], _anonymous(handle.pid))
            time.sleep(_LOOK_S)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
