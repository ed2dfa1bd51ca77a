"""Validation of instances: keys, model files, unique names and ports. No await between a check and its decision."""

from __future__ import annotations

import logging
import socket
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from teimgr.config.instance_keys import check_allowed, check_instance
from teimgr.config.settings import Settings
from teimgr.errors import (
    InstanceExists,
    InvalidConfig,
    InvalidPort,
    MaxInstancesReached,
    ModelLoadFailed,
    ModelNotFound,
    PortAllocationFailed,
    PortConflict,
)
from teimgr.models import hub
from teimgr.models.directory import check_safetensors
from teimgr.models.reading import read_layout
from teimgr.spec import LAST_PORT, UNPRIVILEGED_PORT, InstanceSpec, WorkerSpec

_PROMETHEUS_TRIES = 1000


def with_changes(spec: InstanceSpec, changes: Mapping[str, Any]) -> InstanceSpec:
    """Return `spec` with some fields changed; None resets a field to its default."""
    defaults = InstanceSpec(name=spec.name, model_id=spec.model_id)
    values = {key: getattr(defaults, key) if value is None else value for key, value in changes.items()}
    return replace(spec, **values)


class Ports:
    """Allocates ports from `[start, end)` on `host`, and metrics ports from `prometheus_start` upwards.

    `reserved` are the daemon's own ports: number → description.
    """

    def __init__(
        self, host: str, start: int, end: int, reserved: Mapping[int, str], prometheus_start: int = 9100
    ) -> None:
        self._host = host
        self._range = range(start, end)
        self._reserved = reserved
        self._next = start
        self._prometheus_start = self._next_prometheus = prometheus_start

    def allocate(self, taken: Container[int], own: int | None = None) -> int:
        """Return a free port of the range that is not in `taken`, and not `own`.

        The search continues after the last result, so that a released port is not reused at once.

        Raises:
            PortAllocationFailed: no port is free.
        """
        start, size = self._range.start, len(self._range)
        for step in range(size):
            port = start + (self._next - start + step) % size
            if self._may_be_had(port, taken, own):
                self._next = port + 1
                return port
        raise PortAllocationFailed(
            f"Could not find free port in range [{start}, {self._range.stop}). Delete an instance, or widen "
            f"instance_port_start and instance_port_end"
        )

    def check(self, port: int, holders: Mapping[int, str]) -> int:
        """Return `port` if an instance may have it; `holders` are the instances' ports: number → name.

        Raises:
            InvalidPort: it is not a port number, or a privileged one.
            PortConflict: an instance, the daemon or another process has it.
        """
        if not UNPRIVILEGED_PORT <= port <= LAST_PORT:
            raise InvalidPort(f"Invalid port {port}: must be between {UNPRIVILEGED_PORT} and {LAST_PORT}")
        self.check_holders(port, holders)
        if not is_free(self._host, port):
            raise PortConflict(port, "another process")
        return port

    def check_holders(self, port: int, holders: Mapping[int, str]) -> None:
        """Check `port` against instances and the daemon, whether or not it is bound.

        Raises:
            PortConflict: one of them has it.
        """
        if port in holders:
            raise PortConflict(port, f"instance '{holders[port]}'")
        if port in self._reserved:
            raise PortConflict(port, self._reserved[port])

    def _may_be_had(self, port: int, taken: Container[int], own: int | None) -> bool:
        return port not in taken and port != own and port not in self._reserved and is_free(self._host, port)

    def allocate_prometheus(self, taken: Container[int], own: int | None = None) -> int:
        """Return a free port from `prometheus_start` upwards; after the last port the search continues at the first.

        Raises:
            PortAllocationFailed: none of the next thousand is free.
        """
        size = LAST_PORT + 1 - self._prometheus_start
        begin = self._next_prometheus - self._prometheus_start
        tries = (self._prometheus_start + step % size for step in range(begin, begin + min(size, _PROMETHEUS_TRIES)))
        first = port = self._prometheus_start + begin % size
        for port in tries:
            if self._may_be_had(port, taken, own):
                self._next_prometheus = port + 1
                return port
        raise PortAllocationFailed(f"Could not find free port in range {first}-{port}")


def is_free(host: str, port: int) -> bool:
    """True if a listener could bind now; connections in TIME_WAIT do not prevent it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


log = logging.getLogger(__name__)


def check_model(worker: WorkerSpec) -> None:
    """Read the model files that this worker would read, as far as they are on this host. Blocking; no network.

    Files that are absent are left to the worker, which fetches them.

    Raises:
        InvalidConfig: There is no such directory, or the model cannot be served, or not with these options.
    """
    try:
        hub.check_directory(worker.model_id)
    except ModelNotFound as error:
        raise InvalidConfig(f"model_id: {error.message}") from error
    try:
        found = hub.find_here(worker.model_id, worker.revision, worker.model_roots)
        if found is not None:
            layout = read_layout(
                found.path,
                worker.pooling,
                kind=worker.kind,
                trust_remote_code=worker.trust_remote_code,
                render=False,
                strict=worker.strict_model_files,
            )
            if worker.safetensors_only:
                check_safetensors(layout.root, layout.weights)
    except ModelNotFound as error:
        raise InvalidConfig(f"model_id: {error.message}") from error
    except OSError as error:  # such as a name longer than the file system allows
        raise InvalidConfig(f"model_id: cannot be read: {error.strerror}") from error
    except ModelLoadFailed as error:
        raise InvalidConfig(f"model_id: {worker.model_id} cannot be served: {error.message}") from error


class Present:
    """The names and ports of the existing instances, for the validation of a new one."""

    def __init__(self, specs: Iterable[InstanceSpec] = ()) -> None:
        self.names: set[str] = set()
        self.holders: dict[int, str] = {}
        for spec in specs:
            self.add(spec)

    def add(self, spec: InstanceSpec) -> None:
        """Add an instance."""
        self.names.add(spec.name)
        self.holders |= {port: spec.name for port in (spec.port, spec.prometheus_port) if port}


class InstanceValidator:
    """Validates new instances by the settings, and holds the cursors of the port ranges."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._max_instances = settings.max_instances
        self._ports = Ports(
            settings.instance_host,
            settings.instance_port_start,
            settings.instance_port_end,
            _own_ports(settings),
            settings.prometheus_port_start,
        )

    def admit(self, request: InstanceSpec, present: Present) -> InstanceSpec:
        """Return a new request with its ports resolved, validated against the present instances.

        Raises:
            InvalidInstanceName, ValidationError, InvalidConfig, InvalidPort: It is invalid in itself.
            InstanceExists, PortConflict, MaxInstancesReached, PortAllocationFailed: It does not fit.
        """
        self.check_admission(request, present)
        return self._with_ports(request, present)

    def check_admission(self, request: InstanceSpec, present: Present, own: Container[int | None] = ()) -> None:
        """Like `admit`, without taking ports; `own` are the ports of the instance that it replaces.

        Raises:
            As `admit`, but PortAllocationFailed.
        """
        self._check(request, present)
        for port in filter(None, (request.port, request.prometheus_port)):
            if port in own:
                self._ports.check_holders(port, present.holders)
            else:
                self._ports.check(port, present.holders)
        if request.prometheus_port and request.prometheus_port == request.port:
            raise PortConflict(request.prometheus_port, "its own port")

    def readmit(self, spec: InstanceSpec, present: Present) -> InstanceSpec:
        """Like `admit`, for an instance from an earlier start: its own live worker may hold its port."""
        self._check(spec, present)
        for port in filter(None, (spec.port, spec.prometheus_port)):
            self._ports.check_holders(port, present.holders)
        return self._with_ports(spec, present)

    def _check(self, spec: InstanceSpec, present: Present) -> None:
        check_instance(spec)
        check_allowed(spec, self._settings)
        if spec.name in present.names:
            raise InstanceExists(spec.name)
        if self._max_instances is not None and len(present.names) >= self._max_instances:
            raise MaxInstancesReached(self._max_instances)

    def _with_ports(self, spec: InstanceSpec, present: Present) -> InstanceSpec:
        prometheus = spec.prometheus_port
        port = spec.port or self._ports.allocate(present.holders, prometheus)
        if prometheus is None:
            prometheus = self._ports.allocate_prometheus(present.holders, port)
        return replace(spec, port=port, prometheus_port=prometheus)


def _own_ports(settings: Settings) -> dict[int, str]:
    """Return the daemon's own ports, with a description of each."""
    own = {listener.port: f"the {listener.noun} port" for listener in settings.listeners()}
    if settings.cluster.address:
        own |= dict.fromkeys(settings.cluster.ray_ports, "Ray")
        own |= {settings.cluster.port: "Ray's head", settings.cluster.enrolment: "enrolment"}
    return own
