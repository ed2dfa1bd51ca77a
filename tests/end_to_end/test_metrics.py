"""Every number on /metrics moves in a test that makes it move: a table of scenarios that leaves none out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support import models
from tests.support.cluster import forwarding
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.polling import eventually, until
from tests.support.worker_process import WorkerLink

from teimgr.api.rest.app import RestTls
from teimgr.api.rest.hosts import GpuReport
from teimgr.client import Client
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.capacity.autoscaler import Figures as ScalingFigures
from teimgr.control.placement import hosts
from teimgr.control.placement.hosts import GpuInventory
from teimgr.control.sharing.tenants import TenantRegistry, UsageRow
from teimgr.daemon.watches import DiskWatch
from teimgr.engine.engine import EngineStats
from teimgr.errors import TeimgrError
from teimgr.observability import catalogue as c
from teimgr.observability.catalogue import FAMILIES, Family
from teimgr.observability.exposition import Page, Sample
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, InstanceView, State, WorkerView
from teimgr.worker.worker_metrics import engine_page

LIMIT_S = 100.0
ROOT = Path(__file__).parents[2]
WORDS = ["fog", "rain", "harbour", "light"]

Figures = dict[Family, set[tuple[str, tuple[tuple[str, str], ...], float]]]


def parts(items: c.ItemFamilies) -> list[Family]:
    return [items.count, items.success, *items.durations]


# What happens → the numbers that move by it.
TABLE: dict[str, list[Family]] = {
    "an instance is created": [
        *(c.CREATED, c.INSTANCES, c.BY_STATE, c.WORKER_START, c.WORKER_ANSWERS, c.REST_REQUESTS, c.DAEMON_MEMORY),
        *(c.MODEL_BYTES, c.RESIDENT, c.UNIQUE, c.OWN_TEXTS, c.OWN_TOKENS),
    ],
    "texts are embedded one by one": [
        *(c.MUX_CALLS, c.MUX_MESSAGES, c.MUX_SECONDS, c.MUX_MEMORY),
        *(c.LINK_REQUESTS, c.LINK_SENT, c.LINK_RECEIVED, c.LINK_CONNECTS),
        *(c.BATCHES, c.TEXTS, c.TOKENS, c.BUSY, c.CPU_SECONDS),
        *(c.REQUESTS, c.REQUEST_SUCCESS, *c.REQUEST_DURATIONS, *parts(c.EMBEDDINGS)),
        *(c.INPUT_LENGTH, c.BATCH_SIZE, c.BATCH_TOKENS),
    ],
    "texts are embedded over HTTP": [c.INFERENCE, c.INFERENCE_BYTES],
    "texts of many lengths are embedded together": [c.PADDING_SAVED],
    "a batch of requests is run": [c.BATCHES_BY_STATUS, c.BATCH_LINES, c.STORED_BYTES],
    "passages are reranked": parts(c.PREDICTIONS),
    "a text is empty": [c.REQUEST_FAILURE, c.FAILED_TEXTS],
    "much is asked at once": [c.QUEUED_TEXTS, c.QUEUED_TOKENS, c.RUNNING_TOKENS, c.WORKER_CALLS, c.QUEUE_SIZE],
    "time runs out in the queue": [c.EXPIRED_TEXTS],
    "a worker hangs": [
        *(c.MUX_IN_FLIGHT, c.LINK_IN_FLIGHT, c.LINK_IN_FLIGHT_BYTES, c.LINK_EXPIRED),
        *(c.PROBE_FAILURES, c.WORKER_ANSWERS),
    ],
    "a worker is killed": [c.RESTARTS, c.LINK_LOST],
    "an instance is deleted": [c.DELETED],
}
# The same, without a daemon: what this machine lacks, or what other tests take a hub for.
IN_PROCESS: dict[str, list[Family]] = {
    "a model is downloaded and tried": [c.DOWNLOADS, c.DOWNLOAD_BYTES, c.TRIALS],
    "something needs a person": [c.ALARMS],
    "an instance is awaited no more": [c.READY],
    "a disk fills": [c.DISK_USED],
    "a certificate is renewed": [c.CERTIFICATE_ENDS],
    "a worker grows beyond its limit": [c.MEMORY_REPLACEMENTS],
    "a port is forwarded to another host": [c.FORWARDED],
    "an engine falls sick and holds device memory": [c.HEALTHY, c.DEVICE_BYTES],
    "calls with a key are answered and refused": [c.KEY_TOKENS, c.KEY_CALLS, c.KEY_REFUSED],
    "work waits for an instance": [
        *(c.SCALING_QUEUED, c.SCALING_WAITING, c.SCALING_REFUSED, c.SCALING_REPLICAS, c.SCALING_WANTED),
    ],
    "the event loop of a process is held": [c.LOOP_HELD, c.MUX_LOOP_HELD, c.WORKER_LOOP_HELD],
    "a GPU works": [
        *(c.GPU_MEMORY_TOTAL, c.GPU_MEMORY_USED, c.GPU_UTILIZATION, c.GPU_TEMPERATURE, c.GPU_POWER),
        c.GPU_INSTANCE_MEMORY,
    ],
}


def test_no_number_is_left_out() -> None:
    told = {family.name for table in (TABLE, IN_PROCESS) for families in table.values() for family in families}
    assert told == set(FAMILIES)


def test_the_page_of_documentation_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == c.to_markdown()


def test_names_follow_the_conventions() -> None:
    for family in FAMILIES.values():
        if family.name.startswith(("te_", "tei_manager_")):
            continue  # not ours to choose
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert not family.help.endswith("."), family.name


# Without a daemon


async def test_downloads_and_trials_move() -> None:
    metrics = DaemonMetrics()

    def act() -> None:
        metrics.count(c.DOWNLOADS, "done")
        metrics.count(c.DOWNLOAD_BYTES, by=1000)
        metrics.count(c.TRIALS, "verified")

    await moves("a model is downloaded and tried", metrics.page, act)


async def test_replacements_for_memory_move() -> None:
    metrics = DaemonMetrics()
    await moves("a worker grows beyond its limit", metrics.page, lambda: metrics.count(c.MEMORY_REPLACEMENTS, "a"))


async def test_forwarded_connections_move(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        before = figures_of(await fleet.head.page())
        _, writer = await fleet.connect()
        await eventually(lambda: fleet.head.connections == 1)
        after = figures_of(await fleet.head.page())
        (family,) = IN_PROCESS["a port is forwarded to another host"]
        assert (before[family], after[family]) == (
            {("", (("instance", "a"),), 0)},
            {("", (("instance", "a"),), 1)},
        )
        writer.close()


async def test_figures_of_keys_move() -> None:
    class Usage:
        def __init__(self) -> None:
            self.rows = [UsageRow("search", "a", "m", 1, 1, 1, 0, 0)]

        def usage(self) -> list[UsageRow]:
            return self.rows

    usage = Usage()

    def act() -> None:
        usage.rows = [UsageRow("search", "a", "m", 5, 2, 2, 1, 0)]

    await moves("calls with a key are answered and refused", partial(TenantRegistry.page, cast("Any", usage)), act)


async def test_figures_of_scaling_move() -> None:
    class Load:
        def __init__(self) -> None:
            self.now = ScalingFigures(0, 0.0, 100.0, 0.0, 1, 0, 1, "")

        async def figures(self) -> dict[str, ScalingFigures]:
            return {"a": self.now}

    load = Load()

    def act() -> None:
        load.now = ScalingFigures(500, 5.0, 100.0, 4.0, 2, 0, 3, "")

    await moves("work waits for an instance", partial(Autoscaler.page, cast("Any", load)), act)


async def test_alarms_move() -> None:
    metrics = DaemonMetrics()
    await moves("something needs a person", metrics.page, lambda: metrics.set(c.ALARMS, 2))


async def test_readiness_moves() -> None:
    metrics = DaemonMetrics()
    await moves("an instance is awaited no more", metrics.page, lambda: metrics.set(c.READY, 1))


async def test_the_part_of_a_disk_in_use_moves(tmp_path: Path) -> None:
    used = [0.5]
    watch = DiskWatch({"state": tmp_path}, lambda folder: (1, used[-1], 1 << 30))
    watch.look()

    def act() -> None:
        used.append(0.9)
        watch.look()

    await moves("a disk fills", watch.page, act)


async def test_the_end_of_a_certificate_moves() -> None:
    ends = [1.8e9]
    tls = SimpleNamespace(_files=SimpleNamespace(cert=Path("server.pem"), ends=lambda: ends[-1]))
    await moves("a certificate is renewed", partial(RestTls.page, cast("Any", tls)), lambda: ends.append(1.9e9))


async def test_a_sick_engine_moves_its_numbers() -> None:
    usual: dict[str, Any] = {key: 0 for key in EngineStats.__dataclass_fields__ if key not in ("lanes", "healthy")}
    now = EngineStats(**usual, healthy=True)

    async def page() -> Page:
        return engine_page(now)

    def act() -> None:
        nonlocal now
        now = EngineStats(**usual | {"device_bytes": 2**30}, healthy=False)

    await moves("an engine falls sick and holds device memory", page, act)


class FakeNvml:
    """A driver that knows one card, with process 77 on it; `load` is how hard it works."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.load = 1
        self.knows_power = True

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlDeviceGetUUID(self, device: str) -> str:
        return "GPU-1"

    def nvmlDeviceGetName(self, device: str) -> str:
        return "Test Card"

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:
        return SimpleNamespace(total=80 * 2**30 + self.load, used=self.load * 2**30, free=40 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:
        return SimpleNamespace(gpu=10 * self.load)

    def nvmlDeviceGetTemperature(self, device: str, sensor: int) -> int:
        return 40 + self.load

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        if not self.knows_power:
            raise self.NVMLError("not supported")
        return 100_000 * self.load

    def nvmlDeviceGetCudaComputeCapability(self, device: str) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetComputeRunningProcesses(self, device: str) -> Any:
        return [SimpleNamespace(pid=77, usedGpuMemory=self.load * 2**29), SimpleNamespace(pid=78, usedGpuMemory=None)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    driver = FakeNvml()
    monkeypatch.setattr(hosts, "pynvml", driver)
    return driver


def board() -> GpuReport:
    """Of an instance with processes 77 and 78, one that has none yet, and one on another card."""

    def worker(pid: int | None, gpu: str = "GPU-1", replica: int = 0) -> WorkerView:
        return WorkerView(replica=replica, role="serving", state=State.RUNNING, gpu=gpu, pid=pid)

    crews = {"a": (worker(77), worker(78, replica=1)), "b": (worker(None),), "c": (worker(79, "GPU-2"),)}
    views = [
        InstanceView(spec=InstanceSpec(name=name, model_id="m"), state=State.RUNNING, pid=crew[0].pid, workers=crew)
        for name, crew in crews.items()
    ]
    return GpuReport(GpuInventory(environ={}), lambda: views)


@pytest.mark.clause("N-gpu-figures")
async def test_the_numbers_of_a_gpu_move(nvml: FakeNvml) -> None:
    def act() -> None:
        nvml.load = 2

    async def page() -> Page:
        return await board().page()  # a fresh one, which remembers nothing

    await moves("a GPU works", page, act)


async def test_a_figure_that_the_driver_does_not_tell_is_absent(nvml: FakeNvml) -> None:
    nvml.knows_power = False
    shown = await board().page()
    assert c.GPU_POWER not in shown
    assert shown[c.GPU_MEMORY_USED] == [Sample("", {"gpu": "0"}, 2**30)]
    (card,) = (await board().to_dict())["gpus"]
    assert (card["power_w"], card["temperature_c"], card["utilization"]) == (None, 41, 0.1)
    assert card["instances"] == [
        {"name": "a", "pid": 77, "memory_bytes": 2**29},
        {"name": "a", "pid": 78, "memory_bytes": None},
    ]
    assert shown[c.GPU_INSTANCE_MEMORY] == [Sample("", {"gpu": "0", "instance": "a"}, 2**29)]


async def moves(scenario: str, page: Callable[[], Any], act: Callable[[], None]) -> None:
    before = figures_of(await page())
    act()
    after = figures_of(await page())
    assert [family.name for family in IN_PROCESS[scenario] if before.get(family) == after.get(family)] == []


def figures_of(page: Page) -> Figures:
    return {family: {(s.suffix, tuple(s.labels.items()), s.value) for s in samples} for family, samples in page.items()}


# With a daemon


class Watched:
    """A daemon, and which of its numbers have moved since when."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon

    def figures(self) -> Figures:
        with urllib.request.urlopen(f"{self.daemon.api}/metrics?format=json", timeout=20) as reply:
            families = json.loads(reply.read())["families"]
        return {
            FAMILIES[family["name"]]: {
                (sample["name"], tuple(sorted(sample["labels"].items())), sample["value"])
                for sample in family["samples"]
            }
            for family in families
        }

    @contextmanager
    def moving(self, scenario: str) -> Iterator[threading.Thread]:
        """What the body does moves the numbers of the scenario, while it runs or soon after.

        The thread ends when all of them have moved.
        """
        before, waiting = self.figures(), set(TABLE[scenario])
        over = threading.Event()

        def look() -> None:
            limit = time.monotonic() + LIMIT_S
            while waiting and time.monotonic() < limit and not failed.is_set():
                now = self.figures()
                waiting.difference_update([family for family in waiting if now.get(family) != before.get(family)])
                over.wait(0.1)

        failed = threading.Event()
        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield looking
        except BaseException:
            failed.set()
            raise
        finally:
            looking.join()
        assert sorted(family.name for family in waiting) == [], scenario

    @contextmanager
    def pid(self, name: str, number: signal.Signals) -> Iterator[int]:
        """The worker of an instance, stopped while the body runs, or just signalled."""
        with self.daemon.client() as client:
            pid = client.get(name).details["pid"]
        os.kill(pid, number)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    settings = {"health_probe_timeout_secs": 1, "max_failures_before_restart": 1000, "grpc_request_timeout_secs": 8}
    with WarmDaemonProcess(**settings) as daemon:
        yield Watched(daemon)


@pytest.mark.clause("M2.9-metrics")
@pytest.mark.timeout(400)
def test_the_numbers_move_as_things_happen(watched: Watched, tmp_path: Path) -> None:
    daemon = watched.daemon
    bert, reranker = models.build("bert", tmp_path / "b"), models.build_cross_encoder("bert", tmp_path / "r")
    with daemon.client() as client:
        with watched.moving("an instance is created"):
            client.create("a", str(bert), dtype="float32", threads=1)
            client.wait_until_running("a", deadline_s=LIMIT_S)
        with watched.moving("texts are embedded one by one"):
            for word in WORDS:
                client.embed(word, instance="a")
        with watched.moving("texts are embedded over HTTP"):
            send(f"{daemon.api}/instances/a/embed", json.dumps({"inputs": WORDS}).encode())
        with watched.moving("texts of many lengths are embedded together"):
            client.embed_arrow([" ".join(WORDS * n) for n in range(1, 9)], instance="a", truncate=True)
        with watched.moving("a batch of requests is run"):
            run_batch(daemon.api)
        client.create("r", str(reranker), dtype="float32", threads=1)
        client.wait_until_running("r", deadline_s=LIMIT_S)
        with watched.moving("passages are reranked"):
            client.rerank("fog", WORDS, instance="r")
        client.delete("r")
        with watched.moving("a text is empty"), pytest.raises(TeimgrError):
            client.embed("", instance="a")
        with busy(daemon), watched.moving("much is asked at once"):
            pass
        with busy(daemon), watched.moving("time runs out in the queue"):
            asyncio.run(late(daemon))
        # Stopped right before the call: soon no call would be sent to it.
        with watched.moving("a worker hangs") as looking, watched.pid("a", signal.SIGSTOP):
            with pytest.raises(TeimgrError):
                client.embed("fog", instance="a")
            looking.join()
        until(lambda: answered(client), "the worker is back in the routes")
        with watched.moving("a worker is killed"), watched.pid("a", signal.SIGKILL):
            client.wait_until_running("a", deadline_s=LIMIT_S)
        with watched.moving("an instance is deleted"):
            client.delete("a")


def answered(client: Client) -> bool:
    try:
        client.embed("fog", instance="a")
    except TeimgrError:
        return False
    return True


BULK = """
import sys
from teimgr.client import Client
with Client(grpc=sys.argv[1]) as client:
    texts = ["fog rain harbour light " * 12] * 4000
    while True:
        client.embed_arrow(texts, instance="a", truncate=True)
"""


@contextmanager
def busy(daemon: DaemonProcess) -> Iterator[None]:
    """The worker of `a` has more to do than it can while the body runs."""
    child = subprocess.Popen([sys.executable, "-c", BULK, f"127.0.0.1:{daemon.grpc_port}"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


async def late(daemon: DaemonProcess) -> None:
    """Ask the worker itself for more than it computes in their time: nobody cancels these calls when it is over."""
    (path,) = [path for path in (daemon.folder / "run").glob("*.sock") if not path.name.startswith("mux-")]
    _, link = await asyncio.get_running_loop().create_unix_connection(WorkerLink, str(path))
    for _ in range(20):
        await link.answers([link.embed(f"{number} " + "fog " * 60, deadline_ms=10) for number in range(200)])
    link.close()
    await link.closed()


def run_batch(api: str) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "a", "input": "fog"}}
    parts = (("name=purpose", "batch"), ("name=file; filename=in.jsonl", json.dumps(line)))
    form = "".join(f"--x\r\nContent-Disposition: form-data; {what}\r\n\r\n{part}\r\n" for what, part in parts)
    file = send(f"{api}/v1/files", f"{form}--x--\r\n".encode(), "multipart/form-data; boundary=x")
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = send(f"{api}/v1/batches", json.dumps(wanted).encode())
    until(lambda: send(f"{api}/v1/batches/{batch['id']}")["status"] == "completed", "the batch is completed")


def send(url: str, body: bytes | None = None, content_type: str = "application/json") -> Any:
    """A POST where there is a body, else a GET; the reply's JSON."""
    request = urllib.request.Request(url, body, {"content-type": content_type})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())
