"""Whether an instance may come into being, and with which ports. Nothing here waits, so the answer cannot be outrun."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from teimgr import hub
from teimgr.config.extra_args import parse
from teimgr.config.schema import Fault
from teimgr.config.settings import SPEC_RULES, Settings
from teimgr.errors import (
    InstanceExists,
    InvalidConfig,
    MaxInstancesReached,
    ModelLoadFailed,
    ModelNotFound,
    TeimgrError,
    ValidationError,
)
from teimgr.model_files import read_layout
from teimgr.placement.ports import Ports
from teimgr.spec import SPEC_WORDS, InstanceSpec, WorkerSpec, check_name

log = logging.getLogger(__name__)


def check_model(told: WorkerSpec) -> None:
    """Read the files that a worker with these orders would read, as far as they lie here. Blocking; no network.

    What is not here yet is judged by the worker, once it has fetched it.

    Raises:
        InvalidConfig: the model is of a kind that is not served, or not as the orders have it; the message says why.
    """
    try:
        path = _local_files(told)
        if path is not None:
            read_layout(path, told.pooling, kind=told.kind, trust_remote_code=told.trust_remote_code, render=False)
    except ModelNotFound as error:
        log.info("%s is judged by its worker: %s", told.model_id, error.message)
    except ModelLoadFailed as error:
        raise InvalidConfig(f"model_id: {told.model_id} cannot be served: {error.message}") from error


def _local_files(told: WorkerSpec) -> Path | None:
    folder = Path(told.model_id).expanduser()
    if folder.is_dir():
        return folder
    cached = hub.find_cached(told.model_id, told.revision)
    return cached.path if cached else None


class InstanceValidator:
    """The rules of the settings, and the cursors of the port ranges."""

    def __init__(self, settings: Settings) -> None:
        self._max_instances = settings.max_instances
        reserved = {settings.api_port: "the API port"}
        if settings.grpc_enabled:
            reserved[settings.grpc_port] = "the gRPC port"
        self._ports = Ports(
            settings.instance_host,
            settings.instance_port_start,
            settings.instance_port_end,
            reserved,
            settings.prometheus_port_start,
        )

    def admit(self, request: InstanceSpec, present: Sequence[InstanceSpec]) -> InstanceSpec:
        """The request as a user made it now, with its ports resolved, beside the instances there are.

        Raises:
            InvalidInstanceName, ValidationError, InvalidConfig, InvalidPort: it is wrong in itself.
            InstanceExists, PortConflict, MaxInstancesReached, PortAllocationFailed: there is no room for it.
        """
        check_fields(request)
        self._check_room(request, present)
        port = self._ports.check(request.port, _holders(present)) if request.port else None
        return self._with_ports(replace(request, port=port or 0), present)

    def readmit(self, spec: InstanceSpec, present: Sequence[InstanceSpec]) -> InstanceSpec:
        """As `admit`, for what was wanted before this start: its port may be held by its own worker, still alive.

        Raises:
            TeimgrError: as `admit`.
        """
        check_fields(spec)
        self._check_room(spec, present)
        self._ports.check_holders(spec.port, _holders(present))
        return self._with_ports(spec, present)

    def _check_room(self, spec: InstanceSpec, present: Sequence[InstanceSpec]) -> None:
        if any(other.name == spec.name for other in present):
            raise InstanceExists(spec.name)
        if self._max_instances is not None and len(present) >= self._max_instances:
            raise MaxInstancesReached(self._max_instances)

    def _with_ports(self, spec: InstanceSpec, present: Sequence[InstanceSpec]) -> InstanceSpec:
        taken = {other.port for other in present}
        taken |= {other.prometheus_port for other in present if other.prometheus_port}
        if spec.prometheus_port:
            taken.add(spec.prometheus_port)
        port = spec.port or self._ports.allocate(taken)
        prometheus = spec.prometheus_port
        if prometheus is None:
            prometheus = self._ports.allocate_prometheus(taken | {port})
        return replace(spec, port=port, prometheus_port=prometheus)


def check_fields(spec: InstanceSpec) -> None:
    """Refuse what can be seen to be wrong without looking at anything else.

    Raises:
        InvalidInstanceName, ValidationError, InvalidConfig.
    """
    check_name(spec.name)
    if not spec.model_id:
        raise ValidationError("model_id cannot be empty")
    for key, allowed in SPEC_WORDS.items():
        if (value := getattr(spec, key)) is not None and value not in allowed:
            raise ValidationError(f"{key}: must be one of {', '.join(allowed)} (got {value!r})")
    if spec.replicas == "per-gpu" and spec.gpu_id is not None:
        raise ValidationError("replicas: 'per-gpu' and a gpu_id exclude each other")
    for name, rule in SPEC_RULES.items():
        try:
            rule.check(getattr(spec, name), name)
        except InvalidConfig as error:
            raise ValidationError(error.message) from error
    parse(spec.extra_args)


def seed_faults(settings: Settings) -> Iterator[Fault]:
    """What is wrong with the seeds as a create would judge them, before anything of them is stored."""
    for index, seed in enumerate(settings.instances):
        try:
            check_fields(seed)
        except TeimgrError as error:
            yield Fault(f"instances[{index}]", error.message)
    most = settings.max_instances
    if most is not None and len(settings.instances) > most:
        yield Fault("instances", f"{len(settings.instances)} seeds, but max_instances is {most}")


def _holders(present: Sequence[InstanceSpec]) -> dict[int, str]:
    return {other.port: other.name for other in present}
