"""The door to the models of this host: list, add, download, try, delete."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from teimgr.clock import now_rfc3339
from teimgr.config.settings import Settings
from teimgr.errors import ModelInUse, ModelLoadFailed, ModelNotFound, Unavailable, ValidationError
from teimgr.launch.launcher import Launcher
from teimgr.placement.gpus import GpuInventory
from teimgr.placement.planner import place, usable_cores, worker_spec
from teimgr.registry import cache as disk
from teimgr.registry.cache import HubCache, Snapshot
from teimgr.registry.download import Download, Fetched, Observable, Progress
from teimgr.registry.fetcher import Order
from teimgr.registry.model_view import ModelStatus, ModelView, OnDisk
from teimgr.registry.records import Remembered, facts_path
from teimgr.registry.tasks import ModelTask, ModelTasks
from teimgr.registry.trial import NAME as TRIAL_NAME
from teimgr.registry.trial import TrialFailed, run_trial
from teimgr.spec import InstanceSpec, InstanceView, State, WorkerSpec

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class Metrics(Protocol):
    """What the registry counts."""

    def model_fetched(self, outcome: str, size_bytes: int) -> None:
        """A download ended (`done` or `failed`); so many bytes came over the network."""

    def model_tried(self, outcome: str) -> None:
        """A trial ended: `verified` or `failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWish:
    """Where and how a trial shall run: on the CPU, on one GPU, or, without either, where an instance would."""

    gpu_id: int | None = None
    on_cpu: bool = False
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False


class Registry:
    """Which models there are is asked of the disk every time; what was done with them is remembered.

    No trial is begun before `booted`: the boot ends every worker that it does not know.
    """

    def __init__(
        self,
        settings: Settings,
        launcher: Launcher,
        gpus: GpuInventory,
        metrics: Metrics,
        instances: Callable[[], Sequence[InstanceView]],
        cache: HubCache | None = None,
        environ: Mapping[str, str] = os.environ,
        booted: asyncio.Event | None = None,
    ) -> None:
        self._settings = settings
        self._launcher = launcher
        self._gpus = gpus
        self._metrics = metrics
        self._instances = instances
        self._given_cache = cache
        self._environ = environ
        self._booted = booted
        self._remembered = Remembered(facts_path(settings.state_file))
        self._works = ModelTasks()
        self._started_at = now_rfc3339()
        self._slots = asyncio.Semaphore(settings.model_downloads)
        self._trying = asyncio.Lock()

    # The daemon's life

    async def start(self) -> None:
        """Read what is remembered. Never raises."""
        await self._remembered.load()
        known = await asyncio.to_thread(self._cache.model_ids)
        log.info("model registry", extra={"cache": str(self._cache.folder), "cached": len(known)})

    async def close(self) -> None:
        """Give up downloads and trials; what came of a download is kept. Whoever waits for one hears Unavailable."""
        await self._works.close()

    def alarms(self) -> Sequence[str]:
        """What people must know of the registry's file."""
        return self._remembered.alarms()

    # What users ask

    async def list(self) -> Sequence[ModelView]:
        """All models: those in the cache, those of the configuration and the instances, and those that users added."""
        cached = await asyncio.to_thread(self._cache.model_ids)
        wanted = [view.spec.model_id for view in self._instances()]
        return await self._views(sorted({*cached, *self._remembered, *self._settings.models, *wanted, *self._works}))

    async def get(self, model_id: str) -> ModelView:
        """One model as it is now.

        Raises:
            ModelNotFound: the registry does not know it.
        """
        if self._is_known(model_id) or await asyncio.to_thread(self._is_cached, model_id):
            [view] = await self._views([model_id])
            return view
        raise ModelNotFound(f"Model '{model_id}' not found")

    async def add(self, model_id: str, revision: str | None = None) -> tuple[ModelView, bool]:
        """Know a model from now on; whether that is new.

        Raises:
            ValidationError: it can be no model's id.
        """
        await asyncio.to_thread(_check_id, model_id)
        try:
            return await self.get(model_id), False
        except ModelNotFound:
            self._remembered.note(model_id, revision=revision)
            await self._remembered.save()
            return await self.get(model_id), True

    async def download(self, model_id: str, revision: str | None = None, *, update: bool = False) -> ModelTask:
        """Begin to fetch a model, unless it is here already; `update` asks the hub in any case.

        Raises:
            ValidationError: it can be no model's id.
            ModelBusy: it is being fetched or tried.
        """
        await asyncio.to_thread(_check_id, model_id)
        progress = Observable(Progress())
        return self._works.begin(
            model_id,
            ModelTask(ModelStatus.DOWNLOADING, progress),
            lambda: self._download(model_id, revision, update, progress),
        )

    async def try_out(self, model_id: str, wish: TrialWish) -> ModelTask:
        """Begin a trial of a model that is here. Its outcome is remembered, whichever it is.

        Raises:
            ModelNotFound: the registry does not know it.
            ModelBusy: it is being fetched or tried.
            ModelLoadFailed: its files are not here.
            InvalidGpuId: there is no such GPU.
        """
        await self.get(model_id)
        gpu = None if wish.on_cpu else place(_instance(model_id, wish), await self._gpus.read())
        snapshot = await asyncio.to_thread(self._find, model_id, self._revision_of(model_id, wish.revision))
        self._works.refuse_if_busy(model_id)
        if snapshot is None or not snapshot.complete:
            how = "Model not downloaded. Use POST /models/{model_id}/download first."
            raise ModelLoadFailed(f"Model '{model_id}' failed to load: {how}")
        spec = self._trial_spec(_instance(str(snapshot.path), wish), gpu.uuid if gpu else None)
        return self._works.begin(
            model_id,
            ModelTask(ModelStatus.LOADING),
            lambda: self._try_out(model_id, snapshot, spec, gpu.index if gpu else None),
        )

    async def delete(self, model_id: str) -> ModelView:
        """Remove a model from the cache and forget it; the result is how it was.

        Raises:
            ModelNotFound: the registry does not know it.
            ModelInUse: instances want it.
            ModelBusy: it is being fetched or tried.
            ValidationError: it is a directory of the user's.
        """
        view = await self.get(model_id)
        if users := self._users().get(model_id):
            raise ModelInUse(model_id, users)
        self._works.refuse_if_busy(model_id)
        if view.snapshot is not None and disk.is_directory(model_id):
            raise ValidationError(f"'{model_id}' is a directory: only what lies in the hub's cache is deleted")
        if await asyncio.to_thread(self._cache.has_folder, model_id):
            await self._works.begin(model_id, ModelTask(None), lambda: self._remove(model_id)).finished()
        self._remembered.forget(model_id)
        await self._remembered.save()
        return view

    def work(self, model_id: str) -> ModelTask | None:
        """What is being done with a model now."""
        return self._works.of(model_id)

    # Works

    async def _download(
        self, model_id: str, revision: str | None, update: bool, progress: Observable[Progress]
    ) -> None:
        is_new = model_id not in self._remembered
        self._remembered.note(model_id)
        try:
            await self._have(model_id, revision, update, progress)
        except ModelNotFound:  # most likely a slip of the pen, which need not be remembered
            if is_new:
                self._remembered.forget(model_id)
            raise
        finally:
            await self._remembered.save()

    async def _have(self, model_id: str, revision: str | None, update: bool, progress: Observable[Progress]) -> None:
        here = await asyncio.to_thread(self._find, model_id, self._revision_of(model_id, revision))
        if disk.is_directory(model_id):
            if here is None:
                raise ModelNotFound(f"Model directory '{model_id}' does not exist, or holds no model")
        elif here is None or not here.complete or update:
            await self._fetch(model_id, revision, progress)
        elif revision is not None:
            self._remembered.note(model_id, revision=revision)

    async def _fetch(self, model_id: str, revision: str | None, progress: Observable[Progress]) -> None:
        wanted = self._revision_of(model_id, revision)
        async with self._slots:
            download = Download(Order(model_id, wanted), self._cache.folder, progress, self._environ)
            outcome = "failed"
            try:
                fetched = await download.run()
                outcome = "done"
            finally:
                self._metrics.model_fetched(outcome, download.received_bytes)
        self._remembered.note(model_id, revision=wanted, gated=fetched.gated or None)
        log.info("model fetched", extra=_fetched_facts(model_id, fetched, download))

    async def _try_out(self, model_id: str, snapshot: Snapshot, spec: WorkerSpec, gpu_id: int | None) -> None:
        if self._booted is not None:
            await self._booted.wait()
        try:
            async with self._trying:
                trial = await run_trial(self._launcher, spec, gpu_id, self._settings.startup_timeout_secs)
        except TrialFailed as error:
            log.warning("model failed its trial", extra={"model": model_id, "reason": str(error)})
            change: dict[str, Any] = {"verification_error": str(error), "trial": {}}
        else:
            log.info("model passed its trial", extra={"model": model_id, **trial.to_dict()})
            change = {"verification_error": None, "last_verified": now_rfc3339(), "trial": trial.to_dict()}
        self._metrics.model_tried("failed" if change["verification_error"] else "verified")
        self._remembered.note(model_id, tried_commit=snapshot.commit, **change)
        await self._remembered.save()

    async def _remove(self, model_id: str) -> None:
        try:
            await asyncio.to_thread(self._cache.delete, model_id)
        except OSError as error:
            raise Unavailable(f"Model '{model_id}' cannot be deleted whole: {error}") from error

    def _trial_spec(self, instance: InstanceSpec, gpu_uuid: str | None) -> WorkerSpec:
        """Orders for a worker that nobody else reaches, with a fair share of the cores."""
        alive = sum(view.state in (State.STARTING, State.RUNNING) for view in self._instances())
        threads = max(1, usable_cores() // (alive + 1))
        return replace(worker_spec(instance, self._settings, gpu_uuid, threads), instance_host=LOOPBACK)

    # What there is

    @property
    def _cache(self) -> HubCache:
        if self._given_cache is None:
            self._given_cache = HubCache(disk.default_cache_folder())
        return self._given_cache

    def _is_known(self, model_id: str) -> bool:
        wanted = (view.spec.model_id for view in self._instances())
        return model_id in (*self._remembered, *self._works, *self._settings.models, *wanted)

    def _is_cached(self, model_id: str) -> bool:
        """A directory that nobody named is no model of ours, whatever lies in it."""
        return self._cache.has_folder(model_id) and not disk.is_directory(model_id)

    def _find(self, model_id: str, revision: str | None) -> Snapshot | None:
        """What a worker would load. Reads the disk."""
        if disk.is_directory(model_id):
            return disk.find_directory(model_id)
        found = self._cache.find(model_id, revision)
        if revision is None and (found is None or not found.complete):
            return disk.find_packaged(model_id) or found
        return found

    async def _views(self, ids: Sequence[str]) -> Sequence[ModelView]:
        """What the disk says of these models, and then what we know of them now."""
        wanted = {model_id: self._revision_of(model_id, None) for model_id in ids}
        found = await asyncio.to_thread(lambda: [self._look_up(*each) for each in wanted.items()])
        users = self._users()
        return [self._view(model_id, on_disk, users.get(model_id, ())) for model_id, on_disk in found]

    def _look_up(self, model_id: str, revision: str | None) -> tuple[str, OnDisk]:
        snapshot = self._find(model_id, revision)
        if snapshot is None:
            return model_id, OnDisk()
        others = tuple(self._cache.snapshots(model_id)) if snapshot.commit else ()
        return model_id, OnDisk(snapshot=snapshot, metadata=snapshot.metadata(), commits=others)

    def _view(self, model_id: str, on_disk: OnDisk, users: Sequence[str]) -> ModelView:
        work = self._works.of(model_id)
        return ModelView(
            model_id=model_id,
            facts=self._remembered.of(model_id),
            started_at=self._started_at,
            on_disk=on_disk,
            busy=work.status if work else None,
            progress=work.progress.value if work and work.progress else None,
            download_error=self._works.failure_of(model_id),
            used_by=tuple(users),
        )

    def _users(self) -> Mapping[str, Sequence[str]]:
        """The names of the instances that want a model, by its id."""
        users = defaultdict(set)
        for view in self._instances():
            users[view.spec.model_id].add(view.spec.name)
        return {model_id: sorted(names) for model_id, names in users.items()}

    def _revision_of(self, model_id: str, asked: str | None) -> str | None:
        return asked or self._remembered.of(model_id).revision


def _instance(model_id: str, wish: TrialWish) -> InstanceSpec:
    return InstanceSpec(
        name=TRIAL_NAME,
        model_id=model_id,
        gpu_id=wish.gpu_id,
        dtype=wish.dtype,
        trust_remote_code=wish.trust_remote_code,
    )


def _check_id(model_id: str) -> None:
    """Imports the hub's library when it must, which takes a moment.

    Raises:
        ValidationError: it is neither a directory's path nor an id that the hub could have.
    """
    if disk.is_directory(model_id):
        return
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is exported lazily

    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise ValidationError(f"model_id: {error}") from error


def _fetched_facts(model_id: str, fetched: Fetched, download: Download) -> dict[str, Any]:
    return {"model": model_id, "commit": fetched.commit, "received_bytes": download.received_bytes}
