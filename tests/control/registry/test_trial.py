"""Trials of models in throw-away workers: a real nursery, real processes, a scripted worker."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.fakes.worker import fake_id
from tests.support.fleet import RESIDENT, children, local_launcher, settings_for
from tests.support.models import build
from tests.support.polling import eventually

from teimgr.control.ledger.admission import Admission
from teimgr.control.ledger.footprints import Footprints
from teimgr.control.ledger.ledger import Ledger
from teimgr.control.placement.hosts import Gpu, GpuInventory, Inventory
from teimgr.control.registry.cache import HubCache
from teimgr.control.registry.records import ModelStatus, ModelView
from teimgr.control.registry.registry import Registry, TrialOptions
from teimgr.control.registry.trial import TrialFailed, _compared, _request
from teimgr.errors import (
    InvalidGpuId,
    ModelBusy,
    ModelInUse,
    ModelLoadFailed,
    ModelNotFound,
    OutOfDeviceMemory,
    Unavailable,
)
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import OWN_FORWARD, TRIAL_NAME, InstanceSpec, InstanceView, Kind, LoadedModel, State
from teimgr.wire.frames import Method

Make = Callable[..., Registry]
LOADED = LoadedModel(
    model_id="m",
    model_sha=None,
    dtype="float32",
    device="cpu",
    kind="embedding",
    pooling="mean",
    dimension=4,
    max_input_length=512,
    max_batch_tokens=16384,
    batching="packed",
)


@pytest.fixture
async def make(folder: Path) -> AsyncIterator[Make]:
    """A registry over a launcher of scripted workers; afterwards no worker is left."""
    launcher = local_launcher(folder)
    await launcher.start()
    made: list[Registry] = []

    def registry(
        instances: tuple[InstanceView, ...] = (),
        cards: tuple[Gpu, ...] = (),
        memory: Admission | None = None,
        **values: object,
    ) -> Registry:
        gpus = GpuInventory({}, lambda: Inventory(cards, "" if cards else "none in this test"))
        settings = settings_for(folder, **values)
        cache = HubCache(folder / "hub")
        made.append(Registry(settings, launcher, gpus, DaemonMetrics(), lambda: list(instances), cache, memory=memory))
        return made[-1]

    yield registry
    for each in made:
        await each.close()
    left = {path.name for path in (folder / "run").iterdir() if path.suffix != ".seen"}
    await launcher.close()
    assert left <= RESIDENT
    assert not children()


def model(folder: Path, flags: str = "") -> str:
    """A model directory whose name is the script of the worker."""
    path = folder / fake_id(flags)
    path.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (path / name).write_text("{}")
    return str(path)


async def tried(registry: Registry, model_id: str, options: TrialOptions | None = None) -> ModelView:
    await (await registry.try_out(model_id, options or TrialOptions())).finished()
    return await registry.get(model_id)


async def added(registry: Registry, model_id: str) -> str:
    await registry.add(model_id)
    return model_id


@pytest.mark.clause("M2.8-load")
async def test_a_model_that_works_is_verified_and_measured(make: Make, folder: Path) -> None:
    registry = make()
    view = await tried(registry, await added(registry, model(folder)))
    assert view.status is ModelStatus.VERIFIED
    shown = view.to_dict()
    assert shown["last_verified"]
    assert "verification_error" not in shown
    trial = shown["verification"]
    assert (trial["kind"], trial["dimension"], trial["dtype"], trial["device"]) == ("embedding", 4, "float32", "cpu")
    assert min(trial[key] for key in ("texts_per_s", "tokens_per_s", "peak_rss_bytes", "private_bytes", "start_s")) > 0
    assert trial["tokens_per_s"] == pytest.approx(2 * trial["texts_per_s"], rel=0.01)
    assert "gpu_id" not in trial
    assert "device_bytes" not in trial
    assert trial["compared_with"] == OWN_FORWARD
    assert trial["not_compared"]  # the scripted worker has no library


async def test_a_trial_has_its_memory_reserved_until_its_worker_is_gone(make: Make, folder: Path) -> None:
    """It ran beside the ledger: what it took was granted to others too."""
    ledger = Ledger(host_budget=2**40)
    registry = make(memory=Admission(ledger, Footprints(), nothing))
    task = await registry.try_out(await added(registry, model(folder)), TrialOptions())
    await eventually(lambda: ledger.held_by(TRIAL_NAME))
    assert ledger.reserved("") > 0
    await task.finished()
    assert ledger.reserved("") == 0


async def test_a_trial_that_does_not_fit_is_refused_and_says_nothing_of_the_model(make: Make, folder: Path) -> None:
    ledger = Ledger(host_budget=2**20)
    registry = make(memory=Admission(ledger, Footprints(), nothing))
    model_id = await added(registry, str(build("bert", folder / "small")))
    with pytest.raises(OutOfDeviceMemory, match=r"trial of '.*small' does not fit: it needs \d+ MiB of .*budget 1,"):
        await tried(registry, model_id)
    assert (await registry.get(model_id)).status is ModelStatus.DOWNLOADED
    assert ledger.reserved("") == 0


async def nothing() -> None:
    """A report of the system that changes no figure."""


class Answering:
    """A link to a worker that has compared its model."""

    def __init__(self, **found: object) -> None:
        self._found = {"compared_with": "sentence-transformers 6.2.0", "inputs": 7, "longest_tokens": 300} | found

    async def call(self, method: Method, payload: bytes, *, timeout_s: float) -> bytes:
        return json.dumps(self._found).encode()


async def test_a_model_that_differs_from_its_library_fails_its_trial() -> None:
    link: Any = Answering(min_cosine=0.31, score_difference=None, not_compared=None, agrees=False)
    with pytest.raises(TrialFailed, match=r"differ from sentence-transformers 6\.2\.0: lowest cosine 0\.3100000 on 7"):
        await _compared(link, LOADED, time.monotonic() + 60)
    link = Answering(min_cosine=None, score_difference=0.5, not_compared=None, agrees=False)
    with pytest.raises(TrialFailed, match=r"scores off by up to 5\.0e-01 on 7 known texts of up to 300 tokens"):
        await _compared(link, LOADED, time.monotonic() + 60)


async def test_a_trial_without_time_left_is_compared_with_nothing() -> None:
    link: Any = Answering(agrees=False)
    found = await _compared(link, LOADED, time.monotonic() - 1)
    assert found["compared_with"] == OWN_FORWARD


@pytest.mark.clause("M2.8-load")
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("fail-permanent=64", "scripted failure"),
        ("fail-transient=64", "scripted failure"),
        ("exit-at-once=7", "ended with status 7: leaving at once"),
        ("crash-after-ready=9", "ended with status 9"),
    ],
)
async def test_a_model_that_does_not_is_failed_with_the_reason(
    make: Make, folder: Path, flags: str, reason: str
) -> None:
    registry = make()
    view = await tried(registry, await added(registry, model(folder, flags)))
    assert view.status is ModelStatus.FAILED
    assert reason in view.to_dict()["verification_error"]
    assert "last_verified" not in view.to_dict()


async def test_a_model_of_an_unknown_kind_is_not_tried_as_another(make: Make, folder: Path) -> None:
    registry = make()
    view = await tried(registry, await added(registry, model(folder, "kind=oracle")))
    assert view.status is ModelStatus.FAILED
    assert view.to_dict()["verification_error"] == "trials do not support models of the kind 'oracle'"


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_model_is_tried_by_a_request_of_its_own(kind: Kind) -> None:
    method, request = _request(kind, "fog")
    assert [other for other in Kind if _request(other, "fog")[0] is method] == [kind]
    assert b"fog" in request


async def test_a_trial_that_takes_too_long_is_ended(make: Make, folder: Path) -> None:
    registry = make(startup_timeout_secs=1)
    view = await tried(registry, await added(registry, model(folder, "never-ready")))
    assert view.to_dict()["verification_error"] == "Timeout after 1s waiting for model to load"


@pytest.mark.clause("M2.8-pass")
async def test_a_pass_clears_the_failure_before_it(make: Make, folder: Path) -> None:
    registry = make()
    model_id = await added(registry, model(folder, "first-only,fail-permanent=64"))
    assert (await tried(registry, model_id)).status is ModelStatus.FAILED
    view = await tried(registry, model_id)
    assert view.status is ModelStatus.VERIFIED
    assert "verification_error" not in view.to_dict()


async def test_the_outcome_is_known_to_the_next_daemon(make: Make, folder: Path) -> None:
    registry = make()
    before = await tried(registry, await added(registry, model(folder)))
    again = make()
    await again.start()
    after = await again.get(before.model_id)
    assert after.status is ModelStatus.VERIFIED
    assert after.to_dict() == before.to_dict()


@pytest.mark.clause("M2.8-busy")
async def test_while_it_is_tried_it_is_loading_and_nothing_else_may_begin(make: Make, folder: Path) -> None:
    registry = make()
    model_id = await added(registry, model(folder, "never-ready"))
    work = await registry.try_out(model_id, TrialOptions())
    assert (await registry.get(model_id)).status is ModelStatus.LOADING
    with pytest.raises(ModelBusy, match="is already loading"):
        await registry.try_out(model_id, TrialOptions())
    with pytest.raises(ModelBusy, match="is already loading"):
        await registry.download(model_id)
    waiting = asyncio.create_task(work.finished())
    await eventually(lambda: len(list((folder / "run").glob("*.json"))) == 1)
    await registry.close()
    with pytest.raises(Unavailable):
        await waiting


async def test_a_trial_that_is_given_up_leaves_no_process(make: Make, folder: Path) -> None:
    registry = make()
    model_id = await added(registry, model(folder, "never-ready,ignore-term,grandchild"))
    await registry.try_out(model_id, TrialOptions())
    pid_file = folder / "run" / "grandchild"
    await eventually(lambda: pid_file.exists() and pid_file.read_text())
    await registry.close()
    pid = int(pid_file.read_text())
    await eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    pid_file.unlink()


@pytest.mark.clause("M2.8-load")
async def test_what_cannot_be_tried_is_refused(make: Make, folder: Path) -> None:
    registry = make()
    with pytest.raises(ModelNotFound, match="Model 'a/b' not found"):
        await registry.try_out("a/b", TrialOptions())
    await registry.add("a/b")
    with pytest.raises(ModelLoadFailed, match=r"failed to load: Model not downloaded\. Use POST /models/"):
        await registry.try_out("a/b", TrialOptions())
    with pytest.raises(InvalidGpuId, match="Invalid GPU ID 3: Available GPUs: \\[\\]"):
        await registry.try_out(await added(registry, model(folder)), TrialOptions(gpu_id=3))


async def test_a_model_that_instances_want_is_known_and_not_deleted(make: Make, folder: Path) -> None:
    views = tuple(
        InstanceView(spec=InstanceSpec(name=name, model_id="a/b"), state=State.STOPPED) for name in ("two", "one")
    )
    registry = make(views, models=("c/d",))
    assert [view.model_id for view in await registry.list()] == ["a/b", "c/d"]
    assert (await registry.get("a/b")).used_by == ("one", "two")
    with pytest.raises(ModelInUse, match="used by one, two"):
        await registry.delete("a/b")


@pytest.mark.parametrize(
    ("options", "gpu_id"), [(TrialOptions(), 1), (TrialOptions(gpu_id=0), 0), (TrialOptions(on_cpu=True), None)]
)
async def test_it_runs_on_the_card_that_is_asked_for_else_the_freest(
    make: Make, folder: Path, options: TrialOptions, gpu_id: int | None
) -> None:
    registry = make(cards=(Gpu(0, "GPU-a", 1 << 30), Gpu(1, "GPU-b", 8 << 30)))
    shown = (await tried(registry, await added(registry, model(folder)), options)).to_dict()
    assert shown["verification"].get("gpu_id") == gpu_id
    with pytest.raises(InvalidGpuId, match=r"Available GPUs: \[0, 1\]"):
        await registry.try_out(shown["model_id"], TrialOptions(gpu_id=2))


async def test_a_directory_whose_weights_are_cut_short_is_named_with_the_file(make: Make, folder: Path) -> None:
    path = Path(build("bert", folder / "cut"))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    registry = make()
    await registry.add(str(path))
    with pytest.raises(ModelLoadFailed, match=f"{weights} ends too soon$"):
        await registry.try_out(str(path), TrialOptions())
    shutil.rmtree(path)
    with pytest.raises(ModelLoadFailed, match="no such directory, or neither"):
        await registry.try_out(str(path), TrialOptions())
