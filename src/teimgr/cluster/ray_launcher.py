"""Launchers of a cluster, of workers and of the muxes of other hosts: a named actor of Ray owns each process.

The actor is detached, on the host of its process. Its name is the mutex of a replica: another starter of the same one,
such as a second daemon, finds it taken. A replica has two names, because in an update the new worker starts beside the
old one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from teimgr.cluster.actor_process import LOST, NO_ANSWER, ActorProcess, described, end, launch, names, place
from teimgr.cluster.agent import mux_spec
from teimgr.cluster.bridge import Bridge
from teimgr.cluster.head import ClusterHead, Member
from teimgr.cluster.host_facts import own_versions
from teimgr.cluster.messages import HeldWorker, exit_from_dict
from teimgr.config.mux import MuxConfig
from teimgr.config.sections import address_on_host
from teimgr.control.launch.control_link import ControlLink, MuxLink, WorkerStatus, open_control_link, open_mux_link
from teimgr.control.launch.launcher import Adopted, EndedWorker, FoundWorkers, LocalLauncher, WorkerHandle
from teimgr.control.launch.mux_launcher import MuxHandle, config_hash
from teimgr.control.launch.nursery_link import FORK_LIMIT_S, IMPORT_LIMIT_S
from teimgr.control.launch.strays import Stray
from teimgr.errors import Unavailable
from teimgr.http.auth.tls_files import TlsFiles
from teimgr.spec import WorkerEndpoint, WorkerSpec
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.remote_frames import RemoteAddress

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
        """Start the launcher of this host and the head, once. Ray starts in the background."""
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
        present = await names(self._head.bridge, _PREFIX)
        found = await asyncio.gather(*(described(self._head.bridge, name) for name in present))
        alive: list[WorkerHandle] = []
        ended: list[EndedWorker] = []
        for name, answer in zip(present, found, strict=True):
            if answer is None:  # the sweep looks again
                continue
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
        """Like `close`, but Ray keeps running."""
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


_MUX_PREFIX = "mux/"
_LAUNCH_LIMIT_S = 20.0
_LEFTOVER_GRACE_S = 1.0


class RayMux(ActorProcess):
    """`MuxHandle` of a mux on another host, by its actor `name`."""

    def __init__(self, head: ClusterHead, name: str, host: str, held: HeldWorker, *, is_current: bool) -> None:
        super().__init__(head.bridge, name, host, held)
        self.is_current = is_current
        self._identity = head.enrolment.identity
        self._address = RemoteAddress.parse(held.address, host, held.incarnation)

    async def connect(self, limit_s: float) -> MuxLink:
        return await open_mux_link(self._address, self._identity, limit_s)


class RayMuxLauncher:
    """`MuxLauncher` of the mux `number` on a host; `config` is that of the head's, `tls` has its files."""

    def __init__(
        self,
        head: ClusterHead,
        host: str,
        number: int,
        config: MuxConfig,
        tls: TlsFiles | None,
        placement_limit_s: float,
    ) -> None:
        self.name = f"{host}/mux-{number}"
        self.number = number
        self.host = host
        self.log_name = f"_mux-{number}.log on host {host}"
        self.tls = tls
        self._head = head
        self._placement_limit_s = placement_limit_s
        self._replica = f"{_MUX_PREFIX}{host}/{number}"
        self._spec = mux_spec(f"mux-{number}", config_hash(config), config)

    async def adopt(self) -> RayMux | None:
        """As the protocol. Of two, the younger one is the successor of the other, which is ended.

        Raises:
            Unavailable: Ray or an actor does not answer.
        """
        await self._head.connected()
        present = await names(self._head.bridge, self._replica + "/")
        found: list[RayMux] = []
        for name in present:
            answer = await described(self._head.bridge, name)
            if answer is None:
                raise Unavailable(f"the actor {name!r} does not answer")
            if answer and answer["exit"] is None:
                held = HeldWorker.from_dict(answer["worker"])
                found.append(self._mux(name, held, is_current=held.spec == self._spec))
            else:
                with suppress(*LOST, *NO_ANSWER):
                    await end(self._head, name)
        found.sort(key=lambda each: each.started_at)
        for old in found[:-1]:
            await old.stop(_LEFTOVER_GRACE_S)
        return found[-1] if found else None

    async def launch(self, *, beside: bool = False) -> RayMux:
        name = await place(self._head, self._replica, self.host, self._placement_limit_s)
        op = "launch mux beside" if beside else "launch mux"
        held = await launch(self._head, name, self.host, [self._spec, op], _LAUNCH_LIMIT_S)
        return self._mux(name, held, is_current=True)

    def record(self, mux: MuxHandle) -> None:
        """Do nothing: the actors are the record of the muxes."""

    def clean_up(self) -> None:
        """Do nothing: the agent of its host removes the files."""

    def _mux(self, name: str, held: HeldWorker, *, is_current: bool) -> RayMux:
        own = self._head.by_own_clock(self.host, held)
        return RayMux(self._head, name, self.host, own, is_current=is_current)


class RayMuxHosts:
    """Which muxes there shall be on other hosts: `configs` on each, or none. They are those of the head's muxes."""

    def __init__(
        self, head: ClusterHead, configs: Sequence[MuxConfig], tls: TlsFiles | None, placement_limit_s: float
    ) -> None:
        self._head = head
        self._configs = configs
        self._tls = tls
        self._placement_limit_s = placement_limit_s
        self._launchers: dict[tuple[str, str], list[RayMuxLauncher]] = {}

    def wanted(self) -> Mapping[str, RayMuxLauncher]:
        """By name; a host is among them until it leaves or is lost, also while its agent is restarted."""
        members = [each for each in self._head.members.values() if self._may_have(each)]
        self._launchers = {
            (each.name, each.address): self._launchers.get((each.name, each.address)) or self._launchers_of(each)
            for each in members
        }
        return {each.name: each for those in self._launchers.values() for each in those}

    async def changed(self) -> None:
        """Return when the list of hosts was read again."""
        await self._head.refreshed()

    async def end_surplus(self) -> None:
        """End muxes of an earlier daemon with more of them. Raises Unavailable: Ray does not answer."""
        await self._head.connected()
        wanted = {each._replica for each in self.wanted().values()}
        for name in await self._head.bridge.call("names", prefix=_MUX_PREFIX):
            host = name.removeprefix(_MUX_PREFIX).partition("/")[0]
            is_of_config = int(name.split("/")[2]) < len(self._configs)
            if name.rpartition("/")[0] not in wanted and not (is_of_config and host not in self._head.members):
                with suppress(*LOST, *NO_ANSWER):
                    await end(self._head, name)

    def _may_have(self, member: Member) -> bool:
        facts = member.facts
        if facts is None or facts.draining or member.name == self._head.host.name:
            return False
        return not facts.versions.differences(own_versions())

    def _launchers_of(self, member: Member) -> list[RayMuxLauncher]:
        return [
            RayMuxLauncher(
                self._head,
                member.name,
                number,
                remote_config(config, self._head.address, member.address),
                self._tls,
                self._placement_limit_s,
            )
            for number, config in enumerate(self._configs)
        ]


def remote_config(config: MuxConfig, head: str, address: str) -> MuxConfig:
    """The configuration of the head's mux for a host with an address in the fleet, without what is of the host.

    It listens on the same port, at the address that `address_on_host` names.
    """
    return replace(
        config,
        host=address_on_host(config.host, head, address),
        control_socket="",
        run_dir="",
        tls=None,
        tls_from_daemon=config.tls is not None,
        socket="",
        node="",
        identity_dir="",
    )
