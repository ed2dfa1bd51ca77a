"""Router: finds the instance that a call targets, and leases its least busy replica."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, KeysView, Sequence
from dataclasses import asdict
from itertools import islice
from types import TracebackType
from typing import Any, Protocol

from teimgr.errors import (
    AmbiguousInstance,
    Code,
    FailedToLoad,
    Forbidden,
    InstanceNotFound,
    InvalidInput,
    ModelNotFound,
    NotLoaded,
    Overloaded,
    Returning,
    Stopped,
    TeimgrError,
    Unavailable,
    error_from_code,
)
from teimgr.http.auth.policy import Caller
from teimgr.http.byte_budget import ByteBudget
from teimgr.observability.request_context import current_tenant
from teimgr.spec import RouteEntry, RoutingSnapshot, State, WorkerEndpoint, is_same_space, may_serve
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.frames import Flag, Method, Payload
from teimgr.wire.protobuf import Target
from teimgr.wire.routing.links import ConnectionLost, LinkLimits, LinkStats, PendingCall, Refusal, Replica, WorkerReply
from teimgr.wire.routing.remote_links import MeteredReplica, RemoteReplica
from teimgr.wire.spaces import Marks, check_expected, meets
from teimgr.wire.tenants.remote import Meters

# A refusal is remembered for this part of the worker's retry time, if that has at least the minimum.
_REFUSAL_SHARE = 0.1
_MIN_RETRY_AFTER_S = 1.0
# The most instance names in an error text: clients limit its length.
_MAX_NAMES = 20
_OTHER_SPACES = "; other instances of the model have another space of vectors, and are called by their names"
_UNSET = Target()


class Lease:
    """One call's or stream's use of a replica; a context manager. All calls on a lease go to the same worker.

    If that worker refuses a call before it starts, or cannot be reached, the lease moves once to another replica.
    `candidates` are the replicas that the target allows, with the names of their instances.
    """

    __slots__ = ("_candidates", "_replica", "instance")

    def __init__(self, instance: str, replica: Replica, candidates: Sequence[tuple[str, Replica]] = ()) -> None:
        self.instance = instance
        self._replica = replica
        self._candidates = candidates

    @property
    def is_over(self) -> bool:
        """True if the worker takes no more calls; lease again."""
        return not self._replica.usable

    async def start(
        self, method: Method, payload: Payload, *, flags: int = Flag.NONE, before: bytes = b""
    ) -> PendingCall:
        """Send `before` and `payload` as one request; returns once it is queued on the link. Raises as `Replica.start`.

        A large payload is not copied.
        """
        try:
            return await self._replica.start(method, payload, flags, None, before)
        except Unavailable:
            if not self._move():
                raise
        return await self._replica.start(method, payload, flags, None, before)

    async def call(
        self, method: Method, payload: Payload, *, flags: int = Flag.NONE, timeout_s: float | None = None
    ) -> WorkerReply:
        """Send a request and wait for the reply. Cancelling the await cancels the work.

        Raises:
            Unavailable: the worker cannot be reached, or its connection was lost.
            Overloaded: the call was not sent, or the worker refused it.
            TooLarge: the call was not sent.
            DeadlineExceeded: `timeout_s` passed.
            TeimgrError: the worker's own error.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        # The tenant is in the key, because each waits for its own share of the queue. HTTP bodies are excluded: equal
        # sizes differ in cost, for instance a text and an image.
        call_class = None if method is Method.HTTP else (method, flags, current_tenant())
        if call_class is not None:
            self._check_refusals(call_class, len(payload), timeout_s)
        try:
            return await self._call(method, payload, flags, timeout_s)
        except Overloaded as refusal:
            if call_class is not None:
                self._keep_refusal(call_class, len(payload), timeout_s, refusal.retry_after_s or 0)
            raise
        except ConnectionLost:  # no retry elsewhere: this call may have killed the worker
            raise
        except Unavailable:
            if not self._move():
                raise
        return await self._call(method, payload, flags, None if deadline is None else deadline - loop.time())

    def _check_refusals(self, call_class: object, size: int, timeout_s: float | None) -> None:
        """Raise Overloaded, with the rest of the worker's retry time, if the worker has just refused a call of this
        class that was at most as large and had at least as much time."""
        refusal, now = self._replica.refusals.get(call_class), asyncio.get_running_loop().time()
        if refusal is not None and now < refusal.until and refusal.holds_for(size, timeout_s):
            raise Overloaded(retry_after_s=refusal.again_at - now)

    def _keep_refusal(self, call_class: object, size: int, timeout_s: float | None, retry_after_s: float) -> None:
        """Remember a refusal for part of the wait that the worker named, so that it need not read calls to refuse
        them."""
        if retry_after_s >= _MIN_RETRY_AFTER_S:
            now, kept_s = asyncio.get_running_loop().time(), retry_after_s * _REFUSAL_SHARE
            self._replica.refusals[call_class] = Refusal(size, timeout_s, now + kept_s, now + retry_after_s)

    async def _call(self, method: Method, payload: Payload, flags: int, timeout_s: float | None) -> WorkerReply:
        call = await self._replica.start(method, payload, flags, timeout_s)
        try:
            return await call.answer
        finally:
            call.cancel()
            # Breaks the cycle of future, error and this frame, which would keep the payload.
            del call

    @property
    def marks(self) -> Marks:
        """Return the space of the leased worker's vectors, as metadata of a reply."""
        return self._replica.marks

    def expect(self, expected: str | None) -> None:
        """Answer the calls of this lease only by workers of the expected space, moving it to such a worker if there is
        one.

        An instance may have workers of two spaces during an update.

        Raises:
            InvalidInput: `expected` is not a fingerprint.
            SpaceDiffers: no worker that the target allows has it.
        """
        if expected is None:
            return
        fitting = [
            each for each in self._candidates if meets(expected, each[1].endpoint.space, each[1].endpoint.precision)
        ]
        self._candidates, at = fitting, self._replica.endpoint
        if not meets(expected, at.space, at.precision) and not self._move():
            check_expected(expected, at.space, at.precision, self.instance)

    def _move(self) -> bool:
        """Move to the least busy other replica that takes calls; False without one."""
        others = [each for each in self._candidates if each[1] is not self._replica and each[1].usable]
        if not others:
            return False
        self._replica.lease_ended()
        self.instance, self._replica = min(others, key=_load)
        self._replica.lease_began()
        self._candidates = ()
        return True

    def __enter__(self) -> Lease:
        self._replica.lease_began()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._replica.lease_ended()


# Restricted callers for whom the list of their instances is kept: some tens of KiB if there are thousands.
_MAX_COVERED = 64


class RouterView(Protocol):
    """The router as one caller may use it: `Router` itself, or a restricted view of it."""

    @property
    def limits(self) -> LinkLimits:
        """Bounds of every link."""

    @property
    def snapshot(self) -> RoutingSnapshot:
        """The visible instances."""

    def find(self, name: str) -> RouteEntry | None:
        """Return the visible instance of this name, or None."""

    def of_model(self, model_id: str) -> list[RouteEntry]:
        """Return the visible instances of a model id."""

    def lease(self, target: Target) -> Lease:
        """Like `Router.lease`."""

    def unnamed(self, kinds: Sequence[str] = ()) -> Target:
        """Like `Router.unnamed`."""

    @property
    def may_load(self) -> Callable[[str], bool]:
        """Return a function that is True for the ids of models without an instance that the caller may load."""


def not_loaded(entry: RouteEntry) -> NotLoaded:
    reason = f": {entry.reason}" if entry.reason else ""
    return NotLoaded(f"Instance '{entry.name}' is not running (status: {entry.state.value}){reason}", entry.name)


def _is_same_model(one: RouteEntry, other: RouteEntry) -> bool:
    """True if two entries have the same model, with the same settings of its space of vectors."""
    return (one.model_id, one.space_settings) == (other.model_id, other.space_settings)


class _Instance:
    """A directory entry with its replicas and their spaces, or the spaces that its last replicas with these settings
    had."""

    __slots__ = ("entry", "replicas", "spaces")

    def __init__(self, entry: RouteEntry, replicas: tuple[Replica, ...], before: _Instance | None = None) -> None:
        self.entry = entry
        self.replicas = replicas
        self.spaces = {endpoint.space for endpoint in entry.endpoints} - {""}
        if not self.spaces and before is not None and _is_same_model(before.entry, entry):
            self.spaces = before.spaces

    @property
    def may_serve(self) -> bool:
        """True if it runs, or would be started or loaded for a call."""
        return may_serve(self.entry.state, on_demand=self.entry.on_demand)

    def has_space_of(self, other: _Instance) -> bool:
        """True if vectors of two instances of one model id can be compared."""
        return is_same_space(self.spaces, other.spaces, self.entry.space_settings, other.entry.space_settings)

    def usable(self) -> list[Replica]:
        """The replicas that take calls.

        Raises:
            Unavailable: the instance is not running, or every worker of it was lost.
        """
        entry = self.entry
        if entry.state is not State.RUNNING:
            if entry.asks_owner:
                raise not_loaded(entry)
            if entry.returns:
                raise Returning(not_loaded(entry).message, entry.name)
            reason = f": {entry.reason}" if entry.reason else ""
            error_type = {State.STOPPED: Stopped, State.FAILED: FailedToLoad}.get(entry.state, Unavailable)
            raise error_type(f"Instance '{entry.name}' is not running (status: {entry.state.value}){reason}")
        usable = [replica for replica in self.replicas if replica.usable]
        if not usable:
            why = "its worker is gone" if self.replicas else "its worker does not pass its health probes"
            raise Returning(f"Instance '{entry.name}' is not running (status: restarting): {why}", entry.name)
        return usable


class Router:
    """The data plane's view of the fleet: the last snapshot and a `Replica` per worker in it.

    For one event loop; independent of gRPC and HTTP. `update` and `apply` may be called at any time. In a fleet of
    several hosts, `identity` is that of this node: workers of other nodes are then reached over mutual TLS, and
    `meters` charge and count their calls, and those of this node's workers if it has no table for them.
    """

    def __init__(
        self,
        limits: LinkLimits | None = None,
        identity: FleetIdentity | None = None,
        may_load: Callable[[str], bool] = lambda model_id: False,
        meters: Meters | None = None,
    ) -> None:
        self.limits = limits or LinkLimits()
        self._meters = meters
        self.may_load = may_load
        """Returns whether a call may load the model with this id, which no instance has."""
        self._identity = identity
        self._node = identity.node if identity else ""
        self._snapshot: RoutingSnapshot | None = None  # made on demand
        self._covered: dict[tuple[str, ...], RoutingSnapshot] = {}  # parts of it, by the instances of callers
        self._by_name: dict[str, _Instance] = {}
        self._by_model: defaultdict[str, dict[str, None]] = defaultdict(dict)  # model id to names
        self._stats: dict[str, LinkStats] = {}
        self._retired: set[Replica] = set()
        self._waiting = ByteBudget(self.limits.max_waiting_bytes)
        self._watchers: dict[str, set[asyncio.Future[None]]] = {}

    def update(self, snapshot: RoutingSnapshot) -> None:
        """Route by `snapshot` from now on. Workers missing in it finish the calls in flight, then lose their links."""
        for name in self._by_name.keys() - {entry.name for entry in snapshot.entries}:
            self.apply(name, None)
        for entry in snapshot.entries:
            self.apply(entry.name, entry)
        for entry in snapshot.entries:  # in the snapshot's order
            self._by_name[entry.name] = self._by_name.pop(entry.name)
            of_model = self._by_model[entry.model_id]
            of_model[entry.name] = of_model.pop(entry.name)

    def apply(self, name: str, entry: RouteEntry | None) -> None:
        """Route one instance by its new entry from now on; None removes it."""
        before = self._by_name.get(name)
        present = {replica.endpoint: replica for replica in before.replicas} if before else {}
        if before is not None and (entry is None or entry.model_id != before.entry.model_id):
            self._by_model[before.entry.model_id].pop(name, None)
            if not self._by_model[before.entry.model_id]:
                del self._by_model[before.entry.model_id]
        if entry is None:
            self._by_name.pop(name, None)
            self._stats.pop(name, None)
        else:
            self._by_name[name] = _Instance(entry, self._replicas(entry, present), before)
            self._by_model[entry.model_id][name] = None
            for replica in self._by_name[name].replicas:
                replica.reconnect_if_lost()  # the daemon still lists it
        self._retired = {replica for replica in self._retired if not replica.is_closed}
        for replica in present.values():
            replica.retire()
            self._retired.add(replica)
        self._snapshot = None
        self._covered.clear()
        for watcher in self._watchers.get(name, ()):
            if not watcher.done():
                watcher.set_result(None)

    async def changed(self, name: str) -> None:
        """Return when the entry of an instance changes next."""
        watcher = asyncio.get_running_loop().create_future()
        watchers = self._watchers.setdefault(name, set())
        watchers.add(watcher)
        try:
            await watcher
        finally:
            watchers.discard(watcher)
            if not watchers:
                self._watchers.pop(name, None)

    def problem(self, name: str) -> Unavailable | None:
        """Return why an instance takes no calls now; None if it takes them or does not exist."""
        instance = self._by_name.get(name)
        try:
            if instance is not None:
                instance.usable()
        except Unavailable as error:
            return error
        return None

    @property
    def instances(self) -> KeysView[str]:
        """The names of all instances, a live view."""
        return self._by_name.keys()

    @property
    def snapshot(self) -> RoutingSnapshot:
        """All instances, in their order."""
        if self._snapshot is None:
            self._snapshot = RoutingSnapshot(tuple(instance.entry for instance in self._by_name.values()))
        return self._snapshot

    def covered(self, caller: Caller) -> RoutingSnapshot:
        """The instances that a caller covers; kept for `_MAX_COVERED` callers until a route changes."""
        if caller.instances is None:
            return self.snapshot
        found = self._covered.get(caller.instances)
        if found is None:
            if len(self._covered) >= _MAX_COVERED:
                self._covered.clear()
            found = RoutingSnapshot(tuple(entry for entry in self.snapshot.entries if caller.covers(entry.name)))
            self._covered[caller.instances] = found
        return found

    def find(self, name: str) -> RouteEntry | None:
        instance = self._by_name.get(name)
        return instance.entry if instance else None

    def of_model(self, model_id: str) -> list[RouteEntry]:
        return [instance.entry for instance in self._instances_of(model_id)]

    def _instances_of(self, model_id: str) -> list[_Instance]:
        return [self._by_name[name] for name in self._by_model.get(model_id, ())]

    def lease(self, target: Target, covers: Callable[[str], bool] = lambda name: True) -> Lease:
        """Lease the replica with the fewest bytes under way, among those that the target allows.

        Instances of a model are considered only if `covers` accepts their name and if their vectors are in the model
        id's space: the space of its first instance, in order of creation, that runs or should run.

        Raises:
            InvalidInput: empty target.
            InstanceNotFound, ModelNotFound: nothing matches the target.
            NotLoaded: the instance is loaded on demand and is not loaded now.
            Unavailable: the instance does not run.
        """
        check_target(target)
        if target.instance_name is not None:
            instance = self._by_name.get(target.instance_name)
            if instance is None:
                raise InstanceNotFound(target.instance_name)
        elif target.model_id is not None:
            return self._lease_by_model(target.model_id, covers)
        else:
            index = target.instance_index or 0
            if index >= len(self._by_name):
                raise _no_such_index(index, len(self._by_name))
            instance = next(islice(self._by_name.values(), index, None))
        return _least_busy([(instance.entry.name, replica) for replica in instance.usable()])

    def _lease_by_model(self, model_id: str, covers: Callable[[str], bool]) -> Lease:
        allowed = [instance for instance in self._instances_of(model_id) if covers(instance.entry.name)]
        meant = next((instance for instance in allowed if instance.may_serve), None)
        fitting = [each for each in allowed if meant is None or each is meant or each.has_space_of(meant)]
        found = [
            (instance.entry.name, replica)
            for instance in fitting
            if instance.entry.state is State.RUNNING
            for replica in instance.replicas
            if replica.usable
        ]
        if not found:
            known = self.of_model(model_id)
            mine = [instance.entry for instance in fitting]
            for entry in mine:
                if entry.asks_owner:
                    raise not_loaded(entry)
            for entry in mine:
                if isinstance(error := self.problem(entry.name), Returning):
                    raise error
            if meant is not None and len(fitting) < len(allowed) and (error := self.problem(meant.entry.name)):
                error.reword(error.message + _OTHER_SPACES)
                raise error
            # Not loaded again if only other keys may use the existing instances of the model.
            if (mine or not known) and covers(model_id) and self.may_load(model_id):
                raise NotLoaded(f"No instance of model '{model_id}' is loaded", model_id)
            raise ModelNotFound(f"No running instance of model '{model_id}' found")
        return _least_busy(found)

    def link_stats(self) -> list[dict[str, Any]]:
        """Return per instance the counters of its links and the calls and bytes in flight, for JSON.

        Calls are counted until they end, even on workers that have left the directory. Instances that have had no link
        yet are left out: most of thousands that are declared.
        """
        replicas = {
            name: list(instance.replicas)
            for name, instance in self._by_name.items()
            if instance.replicas or self._stats[name].connects
        }
        for replica in self._retired:
            if replica.instance in replicas:
                replicas[replica.instance].append(replica)
        return [
            {
                "instance": name,
                "in_flight": sum(replica.outstanding_calls for replica in those),
                "in_flight_bytes": sum(replica.outstanding_bytes for replica in those),
                **asdict(self._stats[name]),
            }
            for name, those in replicas.items()
        ]

    def unnamed(self, kinds: Sequence[str] = ()) -> Target:
        """Return the target of a call that names no instance.

        Takes the first of `kinds` that an instance serves: the default instance for this kind, else the only instance,
        else the only one that runs. Without kinds, the only instance of all.

        Raises:
            AmbiguousInstance: several or none fit; the text names those that do.
        """
        return _unnamed(self.snapshot.entries, kinds)

    async def close(self) -> None:
        """Close every link at once; calls in flight fail as unavailable."""
        self.update(RoutingSnapshot())
        await asyncio.gather(*(replica.close() for replica in self._retired))

    def _replicas(self, entry: RouteEntry, present: dict[WorkerEndpoint, Replica]) -> tuple[Replica, ...]:
        """Return the entry's replicas; those that exist already are removed from `present`."""
        stats = self._stats.setdefault(entry.name, LinkStats())
        return tuple(
            present.pop(endpoint) if endpoint in present else self._replica(entry, endpoint, stats)
            for endpoint in entry.endpoints
        )

    def _replica(self, entry: RouteEntry, endpoint: WorkerEndpoint, stats: LinkStats) -> Replica:
        common = entry.name, endpoint, self.limits, stats, self._waiting
        if not endpoint.is_on(self._node):
            return RemoteReplica(*common, self._identity, self._meters, entry.model_id)
        if self._meters is None or self._meters.has_table:
            return Replica(*common)
        return MeteredReplica(*common, self._meters, entry.model_id)


class _RestrictedRouter:
    """A view of the router with the instances that a restricted caller may use. Only operators see the reasons of
    failures, which contain paths of the host."""

    def __init__(self, caller: Caller, router: Router) -> None:
        self._caller = caller
        self._router = router
        self.limits = router.limits

    @property
    def snapshot(self) -> RoutingSnapshot:
        return self._router.covered(self._caller)

    def find(self, name: str) -> RouteEntry | None:
        return self._router.find(name) if self._caller.covers(name) else None

    def of_model(self, model_id: str) -> list[RouteEntry]:
        return [entry for entry in self._router.of_model(model_id) if self._caller.covers(entry.name)]

    def lease(self, target: Target) -> Lease:
        """Like `Router.lease`.

        Raises:
            Forbidden: the caller's key does not cover the instance, or no running instance of the model. Whether there
                is such an instance is not revealed.
        """
        check_target(target)
        if target.instance_name is not None:
            self._caller.require_instance(target.instance_name)
        elif target.model_id is None and self._caller.is_restricted:
            target = self._by_index(target.instance_index or 0)
        try:
            return self._router.lease(target, self._caller.covers)
        except ModelNotFound as error:
            if not self._caller.is_restricted:
                raise
            raise Forbidden(
                f"The key '{self._caller.name}' is for no running instance of model '{target.model_id}'"
            ) from error
        except Unavailable as error:
            entry = None if target.instance_name is None else self._router.find(target.instance_name)
            if entry is not None and entry.reason and not self._caller.is_operator:
                error.reword(error.message.removesuffix(f": {entry.reason}"))
            raise

    def _by_index(self, index: int) -> Target:
        """Return the caller's instance at `index` among its own; a fleet-wide position would reveal other instances."""
        entries = self.snapshot.entries
        if index >= len(entries):
            raise _no_such_index(index, len(entries))
        return Target(instance_name=entries[index].name)

    def unnamed(self, kinds: Sequence[str] = ()) -> Target:
        return _unnamed(self.snapshot.entries, kinds)

    @property
    def may_load(self) -> Callable[[str], bool]:
        return lambda model_id: self._caller.covers(model_id) and self._router.may_load(model_id)


def router_view(caller: Caller, router: Router) -> RouterView:
    return router if caller.is_operator and not caller.is_restricted else _RestrictedRouter(caller, router)


def check_target(target: Target) -> None:
    """Check that the target is set, before anything is looked up.

    Raises:
        InvalidInput: it is unset or empty.
    """
    if target == _UNSET:
        raise InvalidInput("No routing specified")
    if target.instance_name == "":
        raise InvalidInput("Instance name cannot be empty")
    if target.model_id == "":
        raise InvalidInput("Model id cannot be empty")


def _no_such_index(index: int, count: int) -> TeimgrError:
    return error_from_code(Code.INSTANCE_NOT_FOUND, f"Instance index {index} not found: there are {count} instances")


def _unnamed(entries: Sequence[RouteEntry], kinds: Sequence[str]) -> Target:
    for kind in kinds:
        for entry in entries:
            if kind in entry.default_for:
                return Target(instance_name=entry.name)
        if (found := _only([entry for entry in entries if kind in entry.serves])) is not None:
            return found
    if not kinds:
        if (found := _only(entries)) is not None:
            return found
    # The kind of an instance that was never loaded is unknown, so it may fit.
    elif (found := _only([entry for entry in entries if not entry.serves])) is not None:
        return found
    fitting = [entry for entry in entries if not kinds or set(kinds) & set(entry.serves)]  # includes stopped ones
    running = [entry for entry in entries if entry.state is State.RUNNING]  # a single one answers why it does not fit
    for few in (fitting, running):
        if len(few) == 1:
            return Target(instance_name=few[0].name)
    raise AmbiguousInstance(f"no instance is of kind {kinds[0]}" if kinds and entries else "no instance is running")


def _only(entries: Sequence[RouteEntry]) -> Target | None:
    """Return the only instance that runs; if none runs, the only one that should run, whose lease raises the reason.

    None if there is no such instance.

    Raises:
        AmbiguousInstance: there are several; the text names them.
    """
    awake = [entry for entry in entries if entry.state is not State.STOPPED]
    running = [entry.name for entry in awake if entry.state is State.RUNNING or entry.is_loadable]
    names = running or [entry.name for entry in awake]
    if len(names) > 1:
        choices = ", ".join(f"'{name}'" for name in names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")
        raise AmbiguousInstance(f"the running ones are {choices}" if running else f"there are {choices}; none runs")
    return Target(instance_name=names[0]) if names else None


def _least_busy(candidates: Sequence[tuple[str, Replica]]) -> Lease:
    return Lease(*min(candidates, key=_load), candidates)


def _load(candidate: tuple[str, Replica]) -> tuple[bool, int, bool, int, int]:
    """Sort key of replicas: healthy first, then fewest bytes in flight, those of this host, fewest open leases, and
    fewest calls served, so that idle replicas alternate.
    """
    replica = candidate[1]
    return replica.suspended, replica.outstanding_bytes, replica.is_remote, replica.leases, replica.calls
