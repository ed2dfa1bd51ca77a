"""The head of a cluster, in the daemon: Ray on this host, the agent of its workers, the bridge, the list of hosts, and
their enrolment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from teimgr.cluster.agent import Agent
from teimgr.cluster.bridge import AnswerLate, Bridge
from teimgr.cluster.enrolment_server import EnrolmentServer
from teimgr.cluster.host_facts import HostDescription, own_versions
from teimgr.cluster.host_link import HostAddress, HostServices
from teimgr.cluster.host_models import HostModels
from teimgr.cluster.host_service import HostListener, HostService, RemoteLogs
from teimgr.cluster.messages import FleetFacts, HeldWorker, NodeFacts
from teimgr.cluster.ray_process import UNRESTRICTED, RayHost, RayProcess, ensure_token, library, ray_folder
from teimgr.config.sections import address_on_host
from teimgr.config.settings import Settings
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.placement.hosts import Gpu, GpuInventory, Host, Inventory, LeavingHosts
from teimgr.control.placement.planner import usable_cores
from teimgr.errors import InvalidConfig, Unavailable
from teimgr.observability.log_source import LocalLogs, LogSource

CONNECT_LIMIT_S = 180.0
"""Time limit for Ray at the start of the daemon. It takes some ten seconds, a minute on an overloaded machine."""
PREPARE_LIMIT_S = 60.0
WATCH_INTERVAL_S = 1.0
_ANY_PORT = 9
MISSES_ALLOWED = 3
"""A host keeps its state for this many readings without an answer of its agent, which may be slow under load."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One host of the cluster. `ray_id` is Ray's id of it, `problem` why it takes no workers, empty where it does."""

    name: str
    ray_id: str
    address: str
    facts: NodeFacts | None = None
    problem: str = ""
    misses: int = 0
    """Consecutive readings without an answer of its agent."""
    clock_ahead_s: float | None = None


class ClusterHead:
    """Starts Ray's head on this host and keeps the list of hosts. `launcher` is the one of this host.

    Hosts that are about to leave, or were removed and still exist, are reported to `leaving`.
    """

    def __init__(self, settings: Settings, launcher: LocalLauncher, cards: GpuInventory, leaving: LeavingHosts) -> None:
        own_versions()  # raises InvalidConfig if Ray is not installed
        cluster = settings.cluster
        self.members: Mapping[str, Member] = {}
        """The hosts by name, without those that Ray has lost."""
        self.services = HostServices()
        """Those of the other hosts, except hosts that have one instance port with this one."""
        self._leaving = leaving
        self.address = cluster.host
        self.host = HostDescription(cluster.node, cluster.labels, cards, (settings.run_dir, settings.log_dir))
        self._settings = settings
        self._launcher = launcher
        token_file = cluster.token_file or settings.state_file.parent / "ray-token"
        folder = settings.state_file.absolute().parent / "fleet"
        self.enrolment = EnrolmentServer(folder, self.host.name, own_versions(), token_file.read_text)
        identity_dir = self.enrolment.node_identity.folder
        self.agent = Agent(launcher, settings.run_dir, self.own_facts, cluster.host, identity_dir)
        self._ray_host = RayHost(
            node_ip=cluster.host,
            ray_dir=ray_folder(cluster.ray_dir, settings.run_dir),
            token_file=token_file,
            agent_socket=self.agent.socket,
            cores=usable_cores(),
            ports=cluster.ray_ports,
        )
        self.bridge = Bridge(
            cluster.address, cluster.host, self._ray_host.environ(), settings.run_dir.absolute() / "bridge.log"
        )
        models = HostModels(lambda: self.agent.models_bytes_per_s)
        logs = LocalLogs(settings.log_dir.absolute(), self.host.name)
        self._service = HostService(logs, models, self.agent.port_of)
        self._listener: HostListener | None = None
        self._ray: RayProcess | None = None
        self._changed = asyncio.Event()
        self._refreshed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._unwatched = ""  # the last unexpected error while reading the hosts
        self._doubles: dict[str, Member] = {}  # hosts with the name of another, by Ray's id

    async def prepare(self) -> None:
        """Connect to Ray while the previous daemon still serves, so that its workers are found at once.

        Raises:
            Unavailable: Ray does not answer.
        """
        self.bridge.start()
        try:
            async with asyncio.timeout(PREPARE_LIMIT_S):
                await self.bridge.connected.wait()
        except TimeoutError:
            reason = f"Ray does not answer at {self._settings.cluster.address}: {self.bridge.problem}"
            raise Unavailable(reason) from None

    async def start(self) -> None:
        """Start everything; does not wait for Ray, which takes seconds. `launcher` is started before.

        Raises:
            InvalidConfig: the token's file, the folder or the address cannot be used.
            PortConflict: the port of enrolment is taken.
        """
        settings, cluster, host = self._settings, self._settings.cluster, self._ray_host
        ensure_token(host.token_file)
        run_dir = settings.run_dir.absolute()
        store_dir = settings.state_file.absolute().parent / "ray-store"
        command = host.head_command(cluster, store_dir)
        log_path = run_dir / "ray.log"
        self._ray = RayProcess(command, host.environ(), run_dir, host.ray_dir, log_path, cluster.address)
        try:
            await self.agent.start()
            await self.enrolment.start(cluster.host, cluster.enrolment)
            self._listener = HostListener(self._service, self.enrolment.node_identity, cluster.host)
            self._listener.start()
            await self._ray.start()
        except (OSError, LaunchFailed, Unavailable) as error:
            raise InvalidConfig(f"cluster: {error}") from error
        self.bridge.start()
        self._watch = asyncio.create_task(self._keep_watching(), name="hosts of the cluster")

    async def close(self) -> None:
        """End Ray's head on this host. The other hosts wait for the next head."""
        await self.release()
        if self._ray is not None:
            await self._ray.stop()

    async def release(self) -> None:
        """Release Ray, the actors and the workers. They keep running, and the next daemon finds them."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        if self._listener is not None:
            await self._listener.close()
        await self.enrolment.close()
        await self.bridge.close()
        if self._ray is not None:
            await self._ray.release()
        await self.agent.close()

    async def connected(self, limit_s: float = CONNECT_LIMIT_S) -> None:
        """Return when Ray answers and this host is in its list.

        Raises:
            Unavailable: that takes longer than `limit_s`.
        """
        try:
            async with asyncio.timeout(limit_s):
                while self.host.name not in self.members:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            address = self._settings.cluster.address
            raise Unavailable(f"Ray does not answer at {address} for {limit_s:g} s: {self._disconnection}") from None

    async def refreshed(self) -> None:
        """Wait until the list of hosts was read again."""
        await self._refreshed.wait()

    def alarms(self) -> list[str]:
        """Hosts that take no workers, the lack of a connection or of a watch, and that Ray listens on all addresses."""
        if not self.bridge.connected.is_set():
            return [f"cluster: no connection to Ray: {self._disconnection}"]
        found = [f"cluster: the hosts are not watched: {self._unwatched}"] if self._unwatched else []
        found += [f"cluster: host {each.name}: {each.problem}" for each in self.members.values() if each.problem]
        twice = "cluster: two hosts are named {}: the one at {} gets no workers"
        found += [twice.format(each.name, each.address) for each in self._doubles.values()]
        return found if library() else [f"cluster: {UNRESTRICTED}", *found]

    @property
    def _disconnection(self) -> str:
        return (self._ray.problem if self._ray else "") or self.bridge.problem

    async def refresh(self) -> None:
        """Read the list of hosts again. Raises Unavailable, AnswerLate."""
        found = await self.bridge.call("hosts", fleet=self._fleet().to_dict())
        known = {member.ray_id: member for member in self.members.values()} | self._doubles
        before, self.members = self.members, self._admitted([_member(each, known) for each in found])
        for name in before.keys() ^ self.members.keys():
            log.info("host %s", "joined" if name in self.members else "lost", extra={"node": name})
        for name, member in self.members.items():
            if member.problem and (name not in before or before[name].problem != member.problem):
                log.warning("host takes no workers", extra={"node": name, "reason": member.problem})
        services = {name: address_of(each) for name, each in self.members.items() if self._has_own_ports(each)}
        self.services.set(services)
        self._changed.set()
        refreshed, self._refreshed = self._refreshed, asyncio.Event()
        refreshed.set()
        for name, member in self.members.items():
            if not self.enrolment.is_member(name):
                self._leaving.report(name, was_removed=True)
            elif member.facts is not None and member.facts.draining:
                self._leaving.report(name)

    def _has_own_ports(self, member: Member) -> bool:
        """True if a host other than this one can be reached, and its instance ports are not those of this one: hosts on
        one machine have the same, unless each has its own address.
        """
        if member.name == self.host.name or member.facts is None or not member.facts.service:
            return False
        here = self._settings.instance_host
        return address_on_host(here, self.address, member.address) != here or not _is_here(member.address)

    def _fleet(self) -> FleetFacts:
        """For all hosts. Those of a moment ago, of which some may be gone."""
        cluster = self._settings.cluster
        hosts = [each for each in self.members.values() if each.facts and self.enrolment.is_member(each.name)]
        return FleetFacts(
            removed=self.enrolment.enrolment.removed,
            services=[(each.name, each.facts.service) for each in hosts if each.facts and each.facts.service] or None,
            models_from=cluster.models_from,
            models_mb_per_sec=cluster.models_mb_per_sec,
        )

    def _place_of(self, member: Member) -> tuple[bool, bool, str]:
        """This host first; of a host that Ray lists twice, since its Ray was started again, the one with facts."""
        return member.address != self._ray_host.node_ip, member.misses > 0, member.ray_id

    def _admitted(self, members: list[Member]) -> dict[str, Member]:
        """The hosts by name, this one first; those that may not take workers have the reason."""
        admitted: dict[str, Member] = {}
        before, self._doubles = self._doubles, {}
        for member in sorted(members, key=self._place_of):
            if member.name in admitted:
                self._doubles[member.ray_id] = member
                if member.ray_id not in before:
                    log.warning("two hosts have one name", extra={"node": member.name, "address": member.address})
                continue
            if not self.enrolment.is_member(member.name):
                member = replace(member, problem="it was removed from the fleet")
            admitted[member.name] = member
        return admitted

    async def _keep_watching(self) -> None:
        while True:
            await self.bridge.connected.wait()
            try:
                await self.refresh()
                self._unwatched = ""
            except (Unavailable, AnswerLate):
                pass
            except Exception as error:  # an unexpected error must not end the watch
                if (problem := repr(error)) != self._unwatched:
                    log.exception("the hosts of the cluster are not watched")
                self._unwatched = problem
            await asyncio.sleep(WATCH_INTERVAL_S)

    def by_own_clock(self, host: str, held: HeldWorker) -> HeldWorker:
        """A process of a host with the time of its start by the clock of this host, as far as the other is known."""
        member = self.members.get(host)
        ahead_s = member.clock_ahead_s if member else None
        return replace(held, started_at=held.started_at - ahead_s) if ahead_s else held

    async def own_facts(self) -> NodeFacts:
        return await self.host.facts(
            self.agent.workers, draining=False, service=self._listener.address if self._listener else ""
        )

    def other_logs(self) -> list[LogSource]:
        """The logs of the other hosts, including hosts that do not answer now."""
        others = [each for each in self.members.values() if each.name != self.host.name]
        return [
            RemoteLogs(address_of(each), self.enrolment.identity, "" if each.facts else each.problem) for each in others
        ]


def address_of(member: Member) -> HostAddress:
    """The address of its service."""
    return HostAddress(member.name, member.facts.service if member.facts else "")


def _is_here(address: str) -> bool:
    """True if an address is one of this machine; a name, which Ray may have in place of one, counts as another's."""
    try:
        if ipaddress.ip_address(address).is_loopback:
            return True
    except ValueError:
        return False
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))  # sends nothing
        except OSError:
            return False
        return str(probe.getsockname()[0]) == address


def _member(found: Mapping[str, Any], known: Mapping[str, Member]) -> Member:
    """A host as the bridge has read it; one that does not answer stays for a while as it was, by its id in Ray."""
    ray_id, address = str(found["id"]), str(found["address"])
    before = known.get(ray_id) or Member(name=address, ray_id=ray_id, address=address, misses=MISSES_ALLOWED)
    name = before.name
    if "facts" not in found:
        late = before.misses >= MISSES_ALLOWED
        problem = str(found.get("error", "no answer")) if late else before.problem
        return replace(before, problem=problem, misses=before.misses + 1)
    try:
        facts = NodeFacts.from_dict(found["facts"])
    except (TypeError, KeyError):
        return Member(name=name, ray_id=ray_id, address=address, problem="its teimgr is of another version")
    return Member(
        name=facts.name,
        ray_id=ray_id,
        address=address,
        facts=facts,
        problem=_problem(facts),
        clock_ahead_s=found.get("clock_ahead_s"),
    )


def _problem(facts: NodeFacts) -> str:
    """Return why a host takes no workers; empty if it does."""
    if different := facts.versions.differences(own_versions()):
        return f"versions differ: {different}"
    return "it is leaving" if facts.draining else facts.problem


class ClusterInventory:
    """`InventorySource` of what the head's watch has read last. This host is in it before Ray answers."""

    def __init__(self, head: ClusterHead) -> None:
        self._head = head

    async def read(self) -> Inventory:
        members = dict(self._head.members)
        own = self._head.host.name
        if own not in members:
            facts = await self._head.own_facts()
            members = {own: Member(name=own, ray_id="", address=self._head.address, facts=facts), **members}
        gpus = tuple(
            card for each in members.values() if each.facts and not each.problem for card in _cards(each.facts)
        )
        reasons = [f"{each.name}: {_no_cards(each)}" for each in members.values()]
        return Inventory(gpus, "" if gpus else "; ".join(reasons), tuple(map(_host, members.values())))


def _host(member: Member) -> Host:
    facts = member.facts
    if facts is None:
        return Host(name=member.name, address=member.address, problem=member.problem)
    return Host(
        name=member.name,
        address=member.address,
        cores=max(1, facts.cores),
        memory_total_bytes=facts.memory_total_bytes,
        memory_free_bytes=facts.memory_free_bytes,
        labels=facts.labels,
        versions=asdict(facts.versions),
        disk_free_bytes=facts.disk_free_bytes,
        clock_ahead_s=member.clock_ahead_s,
        problem=member.problem,
    )


def _cards(facts: NodeFacts) -> list[Gpu]:
    return [_card(values, facts.name) for values in facts.cards]


def _card(values: Mapping[str, Any], node: str) -> Gpu:
    """A card whose values have been JSON: without tuples, and with text for the keys of tables."""
    capability = values["compute_capability"]
    memory_of = {int(pid): size for pid, size in values["memory_of"].items()}
    changed = {"compute_capability": tuple(capability) if capability else None, "memory_of": memory_of, "node": node}
    return Gpu(**{**values, **changed})


def _no_cards(member: Member) -> str:
    return member.problem or (member.facts.no_cards_reason if member.facts else "unknown")
