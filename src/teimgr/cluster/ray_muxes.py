"""Muxes on the hosts of a cluster besides the head: each is owned by a named actor of Ray on its host, as a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from teimgr.cluster.actor_process import LOST, NO_ANSWER, SLOTS, ActorProcess, described, end, launch, place
from teimgr.cluster.head import ClusterHead, Member
from teimgr.cluster.host_facts import own_versions
from teimgr.cluster.messages import HeldWorker
from teimgr.cluster.node_muxes import mux_spec
from teimgr.config.cluster import address_on_host
from teimgr.config.mux import MuxConfig
from teimgr.control.launch.control_link import MuxLink
from teimgr.control.launch.mux_launcher import MuxHandle, config_hash
from teimgr.control.launch.remote_control import open_mux_link
from teimgr.http.auth.tls_files import TlsFiles
from teimgr.wire.remote_frames import RemoteAddress

_PREFIX = "mux/"
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
        self._replica = f"{_PREFIX}{host}/{number}"
        self._spec = mux_spec(f"mux-{number}", config_hash(config), config)

    async def adopt(self) -> RayMux | None:
        """As the protocol. Of two, the younger one is the successor of the other, which is ended."""
        await self._head.connected()
        names = [f"{self._replica}/{slot}" for slot in SLOTS]
        present = await self._head.bridge.call("names", prefix=self._replica + "/")
        found: list[RayMux] = []
        for name in names:
            answer = await described(self._head, name) if name in present else {}
            if answer and answer["exit"] is None:
                held = HeldWorker.from_dict(answer["worker"])
                found.append(self._mux(name, held, is_current=held.spec == self._spec))
            elif name in present:
                with suppress(*LOST, *NO_ANSWER):
                    await end(self._head, name)
        found.sort(key=lambda each: each.started_at)
        for old in found[:-1]:
            await old.stop(_LEFTOVER_GRACE_S)
        return found[-1] if found else None

    async def launch(self, *, beside: bool = False) -> RayMux:
        name = await place(self._head, self._replica, self.host, self._placement_limit_s)
        held = await launch(self._head, name, self.host, [self._spec, "launch mux"], _LAUNCH_LIMIT_S)
        return self._mux(name, held, is_current=True)

    def may_overlap(self) -> bool:
        return False  # the actor of the present one has the name

    def record(self, mux: MuxHandle) -> None:
        """The actors are the record."""

    def clean_up(self) -> None:
        """Its host's agent removes the files."""

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
        for name in await self._head.bridge.call("names", prefix=_PREFIX):
            host = name.removeprefix(_PREFIX).partition("/")[0]
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
