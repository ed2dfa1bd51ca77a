"""The model registry: list, add, download, try and delete the models of this host."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from teimgr.config.instance_keys import check_allowed, key_faults
from teimgr.config.settings import Settings
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.ledger.admission import Admission
from teimgr.control.placement.hosts import Gpu, GpuInventory
from teimgr.control.placement.planner import device_kind, place, usable_cores, worker_spec
from teimgr.control.registry import cache as disk
from teimgr.control.registry.cache import HubCache, Snapshot
from teimgr.control.registry.fetcher import FetchRequest
from teimgr.control.registry.records import (
    DownloadProgress,
    ModelRecords,
    ModelStatus,
    ModelView,
    known_values,
    records_path,
)
from teimgr.control.registry.tasks import Download, ModelTask, ModelTasks, Observable
from teimgr.control.registry.trial import TrialFailed, run_trial
from teimgr.errors import (
    InvalidConfig,
    ModelInUse,
    ModelLoadFailed,
    ModelNotFound,
    OutOfDeviceMemory,
    Unavailable,
    ValidationError,
)
from teimgr.http.turns import LISTING
from teimgr.models import hub
from teimgr.models.directory import broken_file, missing_file
from teimgr.models.source import WrongSourceError, decide, revision_problem
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import TRIAL_NAME, InstanceSpec, InstanceView, State, WorkerSpec, now_rfc3339

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """Where and how to run a trial: on the CPU, on one GPU, or by default where an instance would run."""

    gpu_id: int | None = None
    on_cpu: bool = False
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    code_revision: str | None = None


_OnDisk = tuple[Snapshot | None, tuple[Snapshot, ...], dict[str, Any] | None]


class Registry:
    """The models of this host. Files are read from disk each time; results of trials and downloads are recorded.

    Trials wait for `booted`, since the boot ends all workers without an instance. A trial's worker reserves memory in
    `memory` on `host`, the name of this host in the fleet.
    """

    def __init__(
        self,
        settings: Settings,
        launcher: LocalLauncher,
        gpus: GpuInventory,
        metrics: DaemonMetrics,
        instances: Callable[[], Sequence[InstanceView]],
        cache: HubCache | None = None,
        environ: Mapping[str, str] = os.environ,
        booted: asyncio.Event | None = None,
        memory: Admission | None = None,
        host: str = "",
    ) -> None:
        self._settings = settings
        self._launcher = launcher
        self._gpus = gpus
        self._metrics = metrics
        self._instances = instances
        self._given_cache = cache
        self._environ = environ
        self._booted = booted
        self._memory = memory
        self._host = host
        self._records = ModelRecords(records_path(settings.state_file))
        self._tasks = ModelTasks()
        self._started_at = now_rfc3339()
        self._download_slots = asyncio.Semaphore(settings.model_downloads)
        self._trial_lock = asyncio.Lock()

    async def start(self) -> None:
        """Read the records. Never raises."""
        await self._records.load()
        known = await asyncio.to_thread(self._cache.model_ids)
        log.info("model registry", extra={"cache": str(self._cache.folder), "cached": len(known)})

    async def close(self) -> None:
        """Cancel downloads and trials; received bytes are kept. Requests that wait for a task get Unavailable."""
        await self._tasks.close()

    def alarms(self) -> Sequence[str]:
        return self._records.alarms()

    # REST

    async def list(self) -> Sequence[ModelView]:
        """All models: those in the cache, in the configuration, of the instances, and those that users added."""
        cached = await asyncio.to_thread(self._cache.model_ids)
        wanted = [view.spec.model_id for view in self._instances()]
        return await self._views(sorted({*cached, *self._records, *self._settings.models, *wanted, *self._tasks}))

    async def get(self, model_id: str) -> ModelView:
        """One model as it is now.

        Raises:
            ModelNotFound: it is not in the registry.
        """
        wanted = (view.spec.model_id for view in self._instances())
        if model_id not in (*self._records, *self._tasks, *self._settings.models, *wanted):
            is_directory = disk.is_directory(model_id)  # a directory must have been added
            if is_directory or not await asyncio.to_thread(self._cache.has_folder, model_id):
                raise ModelNotFound(f"Model '{model_id}' not found")
        [view] = await self._views([model_id])
        return view

    async def add(self, model_id: str, revision: str | None = None) -> tuple[ModelView, bool]:
        """Record a model; also whether it is new.

        Raises:
            ValidationError: not a possible model id.
        """
        await asyncio.to_thread(_check_id, model_id, revision)
        try:
            return await self.get(model_id), False
        except ModelNotFound:
            self._records.note(model_id, revision=revision)
            await self._records.save()
            return await self.get(model_id), True

    async def download(
        self, model_id: str, revision: str | None = None, *, update: bool = False, code_revision: str | None = None
    ) -> ModelTask:
        """Begin to download a model, unless it is here already; `update` and `code_revision`, of the code of other
        repositories that it names, look on the hub in any case.

        Raises:
            ValidationError: not a possible model id, or a `code_revision` where code of models is off.
            ModelBusy: it is being downloaded or tried.
        """
        await asyncio.to_thread(_check_id, model_id, revision)
        self._check_code(model_id, code_revision)
        progress = Observable(DownloadProgress(phase="waiting", bytes_done=0, files_done=0))
        return self._tasks.begin(
            model_id,
            ModelTask(ModelStatus.DOWNLOADING, progress),
            lambda: self._download(model_id, revision, update or code_revision is not None, code_revision, progress),
        )

    async def try_out(self, model_id: str, options: TrialOptions) -> ModelTask:
        """Begin a trial of a downloaded model: load it in a worker and measure it. Its outcome is recorded.

        Raises:
            ModelNotFound: it is not in the registry.
            ModelBusy: it is being downloaded or tried.
            ModelLoadFailed: its files are not here.
            InvalidGpuId: there is no such GPU.
        """
        await self.get(model_id)
        instance = InstanceSpec(
            name=TRIAL_NAME,
            model_id=model_id,
            gpu_id=options.gpu_id,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
            code_revision=options.code_revision,
            revision=options.revision,
        )
        for fault in key_faults(instance):
            raise ValidationError(str(fault))
        check_allowed(instance, self._settings)
        gpu = None if options.on_cpu else place(instance, await self._gpus.read())
        snapshot = await asyncio.to_thread(self._find, model_id, self._revision_of(model_id, options.revision))
        self._tasks.check_idle(model_id)
        if snapshot is None or not snapshot.complete:
            raise ModelLoadFailed(f"Model '{model_id}' failed to load: {_how_to_get(model_id, snapshot)}")
        alive = sum(view.state in (State.STARTING, State.RUNNING) for view in self._instances())
        threads = max(1, usable_cores() // (alive + 1))
        on_disk = replace(instance, model_id=str(snapshot.path))
        spec = worker_spec(on_disk, self._settings, gpu.uuid if gpu else None, threads)
        roots = None if spec.model_roots is None else (*spec.model_roots, str(snapshot.path))
        spec = replace(spec, instance_host=LOOPBACK, model_roots=roots)  # used only by the trial
        return self._tasks.begin(
            model_id,
            ModelTask(ModelStatus.LOADING),
            lambda: self._try_out(model_id, snapshot, spec, gpu),
        )

    async def delete(self, model_id: str) -> ModelView:
        """Remove a model from the cache and its record; the result is how it was.

        Raises:
            ModelNotFound: it is not in the registry.
            ModelInUse: instances use it.
            ModelBusy: it is being downloaded or tried.
            ValidationError: it is a directory of the user's; one that cannot be read is removed from the list alone.
        """
        view = await self.get(model_id)
        if users := self._users().get(model_id):
            raise ModelInUse(model_id, sorted(users))
        self._tasks.check_idle(model_id)
        if view.snapshot is not None and view.snapshot.fault is None and disk.is_directory(model_id):
            raise ValidationError(f"'{model_id}' is a directory: only models in the hub's cache can be deleted")
        if await asyncio.to_thread(self._cache.has_folder, model_id):
            await self._tasks.begin(model_id, ModelTask(None), lambda: self._remove(model_id)).finished()
        self._records.forget(model_id)
        await self._records.save()
        return view

    def task(self, model_id: str) -> ModelTask | None:
        return self._tasks.of(model_id)

    # Tasks

    async def _download(
        self,
        model_id: str,
        revision: str | None,
        update: bool,
        code_revision: str | None,
        progress: Observable[DownloadProgress],
    ) -> None:
        is_new = model_id not in self._records
        self._records.note(model_id)
        try:
            here = await asyncio.to_thread(self._find, model_id, self._revision_of(model_id, revision))
            if disk.is_directory(model_id):
                if here is None:
                    raise ModelNotFound(f"Model directory '{model_id}' does not exist, or holds no model")
            elif here is None or not here.complete or update:
                await self._fetch(model_id, revision, code_revision, progress)
            elif revision is not None:
                self._records.note(model_id, revision=revision)
        except ModelNotFound:  # probably a misspelt id: keep no record
            if is_new:
                self._records.forget(model_id)
            raise
        finally:
            await self._records.save()

    async def _fetch(
        self, model_id: str, revision: str | None, code_revision: str | None, progress: Observable[DownloadProgress]
    ) -> None:
        wanted = self._revision_of(model_id, revision)
        async with self._download_slots:
            order = FetchRequest(model_id, wanted, self._settings.allow_remote_code, code_revision)
            download = Download(order, self._cache.folder, progress, self._environ)
            outcome = "failed"
            try:
                fetched = await download.run()
                outcome = "done"
            finally:
                self._metrics.count(catalogue.DOWNLOADS, outcome)
                self._metrics.count(catalogue.DOWNLOAD_BYTES, by=download.received_bytes)
        self._records.note(model_id, revision=wanted, gated=fetched.gated or None)
        fields = {"model": model_id, "commit": fetched.commit, "received_bytes": download.received_bytes}
        log.info("model fetched", extra=fields)

    async def _try_out(self, model_id: str, snapshot: Snapshot, spec: WorkerSpec, gpu: Gpu | None) -> None:
        if self._booted is not None:
            await self._booted.wait()
        try:
            async with self._trial_lock, self._reserved(model_id, spec, gpu):
                gpu_id = gpu.index if gpu else None
                found = await run_trial(self._launcher, spec, gpu_id, self._settings.startup_timeout_secs)
        except TrialFailed as error:
            log.warning("model failed its trial", extra={"model": model_id, "reason": str(error)})
            change: dict[str, Any] = {"verification_error": str(error), "trial": {}}
        else:
            measured = known_values(found)
            log.info("model passed its trial", extra={"model": model_id, **measured})
            change = {"verification_error": None, "last_verified": now_rfc3339(), "trial": measured}
        self._metrics.count(catalogue.TRIALS, "failed" if change["verification_error"] else "verified")
        self._records.note(model_id, tried_commit=snapshot.commit, **change)
        await self._records.save()

    @asynccontextmanager
    async def _reserved(self, model_id: str, spec: WorkerSpec, gpu: Gpu | None) -> AsyncIterator[None]:
        """Have the memory of a trial's worker, which the kernel would else take from one that serves.

        Raises:
            OutOfDeviceMemory: it does not fit; the model may be good.
        """
        if self._memory is None:
            yield
            return
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._memory.held_for(replace(spec, host=self._host), device_kind(gpu)))
            except OutOfDeviceMemory as error:
                raise OutOfDeviceMemory(f"The trial of '{model_id}' does not fit: it {error.message}") from None
            yield

    def _check_code(self, model_id: str, revision: str | None) -> None:
        """Raise ValidationError where no code can be fetched at a revision."""
        if revision is None:
            return
        if problem := revision_problem(revision):
            raise ValidationError(f"code_revision: {problem}")
        if not self._settings.allow_remote_code:
            raise ValidationError(
                "code_revision: code of models is disabled; the setting allow_remote_code = true enables it"
            )
        if disk.is_directory(model_id):
            raise ValidationError(
                "code_revision: not allowed for a directory, whose code is fetched when an instance starts"
            )

    async def _remove(self, model_id: str) -> None:
        try:
            await asyncio.to_thread(self._cache.delete, model_id)
        except OSError as error:
            raise Unavailable(f"Model '{model_id}' cannot be deleted completely: {error}") from error

    # Views

    @property
    def _cache(self) -> HubCache:
        if self._given_cache is None:
            self._given_cache = HubCache(hub.default_cache_folder())
        return self._given_cache

    def _find(self, model_id: str, revision: str | None) -> Snapshot | None:
        """Return what a worker would load. Reads the disk."""
        if disk.is_directory(model_id):
            return disk.find_directory(model_id)
        found = self._cache.find(model_id, revision)
        if revision is None and (found is None or not found.complete):
            package = hub.find_packaged(model_id)  # used instead of the hub
            return (disk.find_directory(str(package.path)) if package else None) or found
        return found

    async def _views(self, ids: Sequence[str]) -> Sequence[ModelView]:
        """Views of these models: their files as of a moment ago, then the tasks and records of now."""
        wanted = {model_id: self._revision_of(model_id, None) for model_id in ids}
        found = await asyncio.to_thread(lambda: [self._on_disk(*each) for each in wanted.items()])
        users = self._users()

        def view(model_id: str, on_disk: _OnDisk) -> ModelView:
            snapshot, commits, metadata = on_disk
            task = self._tasks.of(model_id)
            return ModelView(
                model_id=model_id,
                record=self._records.of(model_id),
                started_at=self._started_at,
                snapshot=snapshot,
                metadata=metadata,
                commits=commits,
                busy=task.status if task else None,
                progress=task.progress.value if task and task.progress else None,
                download_error=self._tasks.download_error(model_id),
                used_by=tuple(sorted(users.get(model_id, ()))),
            )

        return await LISTING.listed(map(view, wanted, found))

    def _on_disk(self, model_id: str, revision: str | None) -> _OnDisk:
        """Return what a worker would load, all cached commits, and the metadata. Reads the disk."""
        snapshot = self._find(model_id, revision)
        if snapshot is None:
            return None, (), None
        return snapshot, tuple(self._cache.snapshots(model_id)) if snapshot.commit else (), snapshot.metadata()

    def _users(self) -> Mapping[str, set[str]]:
        users = defaultdict(set)
        for view in self._instances():
            users[view.spec.model_id].add(view.spec.name)
        return users

    def _revision_of(self, model_id: str, given: str | None) -> str | None:
        return given or self._records.of(model_id).revision


def _how_to_get(model_id: str, snapshot: Snapshot | None) -> str:
    """Say what a model that cannot be loaded lacks, and how to fix it."""
    fault = None if snapshot is None else _fault(snapshot)
    if disk.is_directory(model_id):
        if snapshot is None:
            return f"no such directory, or neither config.json nor modules.json in it{hub.nearest_here(model_id)}"
        return fault or str(snapshot.path)
    download = "Use POST /models/{model_id}/download first."
    return f"Model not downloaded whole: {fault}. {download}" if fault else f"Model not downloaded. {download}"


def _fault(snapshot: Snapshot) -> str:
    """Why a model that is here cannot be loaded."""
    if snapshot.fault is not None:
        return snapshot.fault
    try:
        lacking = missing_file(snapshot.path)
    except ModelLoadFailed as error:
        return error.message
    if broken := broken_file(snapshot.path):
        return f"{snapshot.path / broken}"
    return f"{snapshot.path} has no {lacking}" if lacking else "files of the repository are missing"


def _check_id(model_id: str, revision: str | None = None) -> None:
    """Check a model id. Reads the disk.

    Raises:
        ValidationError: neither a directory's path nor an id that the hub accepts, or no revision.
    """
    try:
        hub.check_directory(model_id)
        decide(model_id, revision)
    except (ModelNotFound, InvalidConfig) as error:
        raise ValidationError(f"model_id: {error.message}") from error
    except WrongSourceError as error:
        raise ValidationError(f"{error.key}: {error.problem}") from error
