"""Launcher of a cluster: each worker is owned by a detached, named actor of Ray on the host that it was placed on.

The name of the actor is the mutex of a replica: another starter of the same one, such as a second daemon, finds it
taken. A replica has two names, because in an update the new worker starts beside the old one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from teimgr.cluster.actor_process import LOST, NO_ANSWER, ActorProcess, described, end, launch, place
from teimgr.cluster.bridge import Bridge
from teimgr.cluster.head import ClusterHead
from teimgr.cluster.messages import HeldWorker, exit_from_dict
from teimgr.control.launch.control_link import ControlLink, WorkerStatus
from teimgr.control.launch.launcher import Adopted, EndedWorker, FoundWorkers, LocalLauncher, WorkerHandle
from teimgr.control.launch.nursery_link import FORK_LIMIT_S, IMPORT_LIMIT_S
from teimgr.control.launch.remote_control import open_control_link
from teimgr.control.launch.strays import Stray
from teimgr.spec import WorkerEndpoint, WorkerSpec
from teimgr.wire.fleet_tls import FleetIdentity

_PREFIX = "worker/"


class RayWorker(ActorProcess):
    """`WorkerHandle` of a worker on some host of the cluster, by its actor `name`. `identity` is the daemon's."""

    def __init__(self, bridge: Bridge, identity: FleetIdentity, name: str, spec: WorkerSpec, held: HeldWorker) -> None:
        super().__init__(bridge, name, spec.host, held)
        self.spec = spec
        self.socket = Path(held.socket)
        self._identity = identity
        self._endpoint = WorkerEndpoint(held.socket, held.incarnation, spec.host, spec.link_address or "")

    async def connect(self, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> ControlLink:
        return await open_control_link(self._endpoint, self._identity, on_status, on_lost)


class RayLauncher:
    """`Launcher` for all hosts of a cluster. `local` is the one of the head's host, which its agent uses."""

    def __init__(self, head: ClusterHead, local: LocalLauncher, placement_limit_s: float) -> None:
        self._head = head
        self._local = local
        self._placement_limit_s = placement_limit_s
        self._workers: dict[str, RayWorker] = {}
        self._launching: Counter[str] = Counter()

    async def start(self) -> None:
        """Start the launcher of this host, and the head, once; Ray comes up in the background."""
        await self._local.start()
        await self._head.start()

    async def launch(self, spec: WorkerSpec) -> RayWorker:
        """Have Ray place an actor on the host `spec.host`, and that one fork the worker.

        Raises:
            NoHost: the host is not in the cluster or takes no workers, or Ray did not place the actor in time.
            Unavailable: Ray is not connected.
            LaunchFailed: the worker could not be started there.
        """
        replica = f"{_PREFIX}{spec.name}/{spec.replica}"
        self._launching[replica] += 1
        try:
            name = await place(self._head, replica, spec.host, self._placement_limit_s)
            held = await launch(self._head, name, spec.host, [spec.to_json()], IMPORT_LIMIT_S + FORK_LIMIT_S)
            return self._worker(name, self._head.by_own_clock(spec.host, held))
        finally:
            self._launching[replica] -= 1

    async def find(self) -> FoundWorkers:
        """As the protocol; waits until Ray answers.

        Raises:
            Unavailable: Ray does not answer in time.
        """
        await self._head.connected()
        names = await self._head.bridge.call("names", prefix=_PREFIX)
        found = await asyncio.gather(*(described(self._head, name) for name in names))
        alive: list[WorkerHandle] = []
        ended: list[EndedWorker] = []
        for name, answer in zip(names, found, strict=True):
            held = HeldWorker.from_dict(answer["worker"]) if answer else None
            if held is None or answer["exit"] is not None:
                with suppress(*LOST, *NO_ANSWER):
                    await end(self._head, name)
            if held is None:
                continue
            spec = _spec_of(held)
            held = self._head.by_own_clock(spec.host, held)
            if answer["exit"] is None:
                alive.append(self._worker(name, held))
            else:
                exit = exit_from_dict(answer["exit"])
                ended.append(EndedWorker(spec.name, spec, held.pid, held.started_at, exit))
        return FoundWorkers(alive, ended)

    async def adopt(self, workers: Sequence[WorkerHandle], accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        return await self._local.adopt(workers, accepts)

    async def strays(self, owned: Collection[str]) -> list[Stray]:
        """As the protocol: workers with a handle, and actors without one that no launch has asked for."""
        found = [
            Stray(worker.incarnation, worker.spec.name, worker.pid, partial(worker.stop, 0))
            for worker in self._workers.values()
            if worker.incarnation not in owned and not self._local.is_ending(worker)
        ]
        kept = {worker.name for worker in self._workers.values()}
        for name in await self._head.bridge.call("names", prefix=_PREFIX):
            replica = name.rpartition("/")[0]
            if name not in kept and not self._launching[replica]:
                instance = replica.removeprefix(_PREFIX).rpartition("/")[0]
                found.append(Stray(name, instance, 0, partial(self._end_actor, name)))
        return found

    async def _end_actor(self, name: str) -> None:
        with suppress(*LOST, *NO_ANSWER):  # its agent ends a worker whose actor is gone
            await end(self._head, name)

    def spec_of(self, incarnation: str) -> WorkerSpec | None:
        """The spec of a live worker of any host."""
        worker = self._workers.get(incarnation)
        return worker.spec if worker else None

    async def close(self) -> None:
        """Release the workers, end Ray's head, close the launcher of this host."""
        await self.release()
        await self._head.close()

    async def release(self) -> None:
        """Like `close`, but Ray goes on."""
        for worker in tuple(self._workers.values()):
            await worker.release()
        self._workers.clear()
        await self._head.release()
        await self._local.close()

    def _worker(self, name: str, held: HeldWorker) -> RayWorker:
        worker = RayWorker(self._head.bridge, self._head.enrolment.identity, name, _spec_of(held), held)
        self._workers[worker.incarnation] = worker
        worker.on_gone(self._forget)
        return worker

    def _forget(self, worker: RayWorker) -> None:
        self._workers.pop(worker.incarnation, None)


def _spec_of(held: HeldWorker) -> WorkerSpec:
    """The spec; one of another version of teimgr becomes one that nothing accepts."""
    try:
        return WorkerSpec.from_json(held.spec)
    except (ValueError, TypeError):
        return WorkerSpec(name="", model_id="")
