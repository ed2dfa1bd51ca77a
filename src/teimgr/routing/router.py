"""From a target to a worker: which replica a call goes to, and the lease it holds on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

from teimgr.auth.policy import Caller
from teimgr.directory import RouteEntry, RoutingSnapshot, WorkerEndpoint
from teimgr.errors import (
    AmbiguousInstance,
    Code,
    Forbidden,
    InstanceNotFound,
    InvalidInput,
    ModelNotFound,
    TeimgrError,
    Unavailable,
    error_from_code,
)
from teimgr.routing.links import LinkLimits, LinkStats, PendingCall, WorkerReply
from teimgr.routing.replica import Replica
from teimgr.spec import State
from teimgr.wire.frames import Flag, Method
from teimgr.wire.protobuf import Target
from teimgr.wire.stream import Payload

# Names in an error's text, which clients bound.
_NAMED = 20


class Lease:
    """One call's use of a replica, or one stream's; a context manager.

    All calls on a lease go to the same worker. `is_over` says that this worker takes no more: lease anew.
    """

    __slots__ = ("_replica", "instance")

    def __init__(self, instance: str, replica: Replica) -> None:
        self.instance = instance
        self._replica = replica

    @property
    def is_over(self) -> bool:
        """Whether the worker is gone or about to go."""
        return not self._replica.usable

    async def start(
        self, method: Method, payload: Payload, *, flags: Flag = Flag.NONE, timeout_s: float | None = None
    ) -> PendingCall:
        """Put a request on its way; returns as soon as it is on the link. Errors as `call`, less the worker's own."""
        return await self._replica.start(method, payload, flags, timeout_s)

    async def call(
        self, method: Method, payload: Payload, *, flags: Flag = Flag.NONE, timeout_s: float | None = None
    ) -> WorkerReply:
        """The worker's answer. Cancelling the await cancels the work.

        Raises:
            Unavailable: the worker cannot be reached, or went away.
            Overloaded, TooLarge: the call was not sent.
            DeadlineExceeded: `timeout_s` passed.
            TeimgrError: what the worker said.
        """
        call = await self._replica.start(method, payload, flags, timeout_s)
        try:
            return await call.answer
        finally:
            call.cancel()

    def __enter__(self) -> Lease:
        self._replica.leases += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._replica.leases -= 1


class _Instance:
    """An entry of the directory with its replicas."""

    __slots__ = ("entry", "replicas")

    def __init__(self, entry: RouteEntry, replicas: tuple[Replica, ...]) -> None:
        self.entry = entry
        self.replicas = replicas

    def usable(self) -> list[Replica]:
        """The replicas that take calls.

        Raises:
            Unavailable: the instance is not running, or every worker of it was lost.
        """
        entry = self.entry
        if entry.state is not State.RUNNING:
            reason = f": {entry.reason}" if entry.reason else ""
            raise Unavailable(f"Instance '{entry.name}' is not running (status: {entry.state.value}){reason}")
        usable = [replica for replica in self.replicas if replica.usable]
        if not usable:
            raise Unavailable(f"Instance '{entry.name}' is not running (status: restarting): its worker is gone")
        return usable


class Router:
    """The data plane's view of the fleet: the last snapshot, and the replicas in it.

    For one event loop; knows nothing of gRPC or HTTP. `update` may be called with any snapshot at any time.
    """

    def __init__(self, limits: LinkLimits | None = None) -> None:
        self.limits = limits or LinkLimits()
        self.snapshot = RoutingSnapshot()
        self._by_name: dict[str, _Instance] = {}
        self._in_order: list[_Instance] = []
        self._retired: set[Replica] = set()
        self._traffic: dict[str, LinkStats] = {}

    def update(self, snapshot: RoutingSnapshot) -> None:
        """Take `snapshot` for the truth. Workers not in it answer what is in flight, then lose their links."""
        known = {replica.endpoint: replica for instance in self._in_order for replica in instance.replicas}
        self._in_order = [_Instance(entry, self._replicas(entry, known)) for entry in snapshot.entries]
        self._by_name = {instance.entry.name: instance for instance in self._in_order}
        self._traffic = {name: traffic for name, traffic in self._traffic.items() if name in self._by_name}
        self.snapshot = snapshot
        self._retired = {replica for replica in self._retired if not replica.is_closed}
        for instance in self._in_order:
            for replica in instance.replicas:
                replica.look_again()  # the control plane still believes in it
        for replica in known.values():
            replica.retire()
            self._retired.add(replica)

    def lease(self, target: Target, covers: Callable[[str], bool] = lambda name: True) -> Lease:
        """A lease on the replica with the fewest bytes under way, among those the target allows.

        Of the instances of a model only those are taken whose name `covers` says yes to.

        Raises:
            InvalidInput: the target says nothing.
            InstanceNotFound, ModelNotFound: it names what is not there.
            Unavailable: it names what does not run.
        """
        check_target(target)
        if target.instance_name is not None:
            instance = self._named(target.instance_name)
        elif target.model_id is not None:
            return _least_busy(self._with_model(target.model_id, covers))
        else:
            instance = self._at(target.instance_index or 0)
        return _least_busy((instance.entry.name, replica) for replica in instance.usable())

    def link_stats(self) -> list[dict[str, Any]]:
        """What went over the links of each instance and what is under way, for JSON."""
        return [
            {
                "instance": name,
                "in_flight": sum(replica.outstanding_calls for replica in instance.replicas),
                "in_flight_bytes": sum(replica.outstanding_bytes for replica in instance.replicas),
                **self._traffic[name].to_dict(),
            }
            for name, instance in self._by_name.items()
        ]

    def only_running(self) -> Target:
        """Whom a call is for that does not say: the one instance that runs.

        Raises:
            AmbiguousInstance: none runs, or several do; the text names them.
        """
        return only_running(self.snapshot)

    async def close(self) -> None:
        """Close every link at once; calls in flight fail as unavailable."""
        self.update(RoutingSnapshot())
        await asyncio.gather(*(replica.close() for replica in self._retired))

    def _replicas(self, entry: RouteEntry, known: dict[WorkerEndpoint, Replica]) -> tuple[Replica, ...]:
        """The entry's replicas; those already there are taken out of `known`."""
        traffic = self._traffic.setdefault(entry.name, LinkStats())
        return tuple(
            known.pop(endpoint) if endpoint in known else Replica(entry.name, endpoint, self.limits, traffic)
            for endpoint in entry.endpoints
        )

    def _named(self, name: str) -> _Instance:
        instance = self._by_name.get(name)
        if instance is None:
            raise InstanceNotFound(name)
        return instance

    def _at(self, index: int) -> _Instance:
        if index >= len(self._in_order):
            raise _not_found(f"Instance index {index} not found: there are {len(self._in_order)} instances")
        return self._in_order[index]

    def _with_model(self, model_id: str, covers: Callable[[str], bool]) -> list[tuple[str, Replica]]:
        found = [
            (instance.entry.name, replica)
            for instance in self._in_order
            if instance.entry.model_id == model_id
            and instance.entry.state is State.RUNNING
            and covers(instance.entry.name)
            for replica in instance.replicas
            if replica.usable
        ]
        if not found:
            raise ModelNotFound(f"No running instance of model '{model_id}' found")
        return found


def only_running(snapshot: RoutingSnapshot) -> Target:
    """As `Router.only_running`, of any snapshot."""
    names = [entry.name for entry in snapshot.entries if entry.state is State.RUNNING]
    if len(names) == 1:
        return Target(instance_name=names[0])
    choices = ", ".join(f"'{name}'" for name in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
    raise AmbiguousInstance(f"the running ones are {choices}" if names else "no instance is running")


def check_target(target: Target) -> None:
    """Whether the target says anything at all, before anything is looked up.

    Raises:
        InvalidInput: it does not.
    """
    if target == _UNSET:
        raise InvalidInput("No routing specified")
    if target.instance_name == "":
        raise InvalidInput("Instance name cannot be empty")
    if target.model_id == "":
        raise InvalidInput("Model id cannot be empty")


_UNSET = Target()


def _least_busy(candidates: Iterable[tuple[str, Replica]]) -> Lease:
    return Lease(*min(candidates, key=_business))


def _business(candidate: tuple[str, Replica]) -> tuple[int, int, int]:
    """Bytes under way, then idle streams, then who has served least: replicas at rest take turns."""
    replica = candidate[1]
    return replica.outstanding_bytes, replica.leases, replica.calls


def _not_found(message: str) -> TeimgrError:
    return error_from_code(Code.INSTANCE_NOT_FOUND, message)


class RouterView(Protocol):
    """What a call needs of a router, be it whole or a part."""

    @property
    def limits(self) -> LinkLimits:
        """Bounds of every link."""

    @property
    def snapshot(self) -> RoutingSnapshot:
        """The instances there are."""

    def lease(self, target: Target) -> Lease:
        """As `Router.lease`."""

    def only_running(self) -> Target:
        """As `Router.only_running`."""


def router_view(caller: Caller, router: Router) -> RouterView:
    """`router` as `caller` may use it."""
    return _Part(caller, router) if caller.is_restricted else router


class _Part:
    """The part of a router that a restricted caller is for."""

    def __init__(self, caller: Caller, router: Router) -> None:
        self._caller = caller
        self._router = router

    @property
    def limits(self) -> LinkLimits:
        return self._router.limits

    @property
    def snapshot(self) -> RoutingSnapshot:
        return RoutingSnapshot(
            tuple(entry for entry in self._router.snapshot.entries if self._caller.covers(entry.name))
        )

    def lease(self, target: Target) -> Lease:
        """As `Router.lease`.

        Raises:
            Forbidden: the target is an instance that the caller's key is not for, or a model that no instance runs
                which it is for. Whether there is such an instance is not told.
        """
        check_target(target)
        if target.instance_name is not None:
            self._caller.require_instance(target.instance_name)
        elif target.model_id is None:
            entries = self._router.snapshot.entries
            if (index := target.instance_index or 0) < len(entries):
                self._caller.require_instance(entries[index].name)
        try:
            return self._router.lease(target, self._caller.covers)
        except ModelNotFound as error:
            raise Forbidden(
                f"The key '{self._caller.name}' is for no running instance of model '{target.model_id}'"
            ) from error

    def only_running(self) -> Target:
        """As `Router.only_running`, of the instances that the caller's key is for."""
        return only_running(self.snapshot)
